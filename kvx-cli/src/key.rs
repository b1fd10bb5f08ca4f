//! `kvx key`: a new key for the control channels of a deployment.

use kvx_connector::control::Key;
use serde_json::json;

use crate::args::KeyArgs;
use crate::failure::Failure;
use crate::output::{self, Output};

/// Runs `kvx key`.
///
/// # Errors
///
/// Those of [`Key::write_new`]: the file is there already, or cannot be written.
pub(crate) fn run(args: &KeyArgs, out: &mut Output) -> Result<(), Failure> {
    output::refuse_dash("FILE", &args.file)?;
    Key::generate()?.write_new(&args.file)?;
    let file = args.file.display();
    out.document(&json!({ "file": args.file, "mode": "0600" }))?;
    out.line(format!("{file}: a new key, which nobody but you can read (mode 0600)"))?;
    out.line("")?;
    out.line("Give every engine of the deployment a copy, by a way that strangers cannot read:")?;
    out.line("  on a host    a file of the engine's user, mode 0600 or 0400")?;
    out.line(format!(
        "  Kubernetes   kubectl create secret generic kvx-key --from-file=key={file}, mounted with"
    ))?;
    out.line(
        "               defaultMode 0400, or 0440 and --key-of-group where it does not run as root",
    )?;
    out.line(format!("then: kvx serve --role producer --key {file} --listen HOST:PORT"))?;
    out.line(
        "Whoever has it is trusted as an engine. It is never printed, and never overwritten.",
    )?;
    Ok(())
}
