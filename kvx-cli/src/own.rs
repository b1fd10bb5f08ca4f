//! This program's own file.

use std::path::{Path, PathBuf};

use kvx_core::{Error, ErrorKind, Result};

/// What is to be started where another process of this program is. Where its file was deleted or replaced, as by an upgrade, it is what
/// runs here: two versions may not understand each other.
///
/// # Errors
///
/// The system does not say where it is.
pub(crate) fn program() -> Result<PathBuf> {
    let file = std::env::current_exe().map_err(|source| {
        Error::new(ErrorKind::Resources, "remote", "this program's file cannot be found")
            .with_source(source)
            .with_remedy("mount /proc, which says where it is")
    })?;
    let running = Path::new("/proc/self/exe");
    Ok(if file.exists() || !running.exists() { file } else { running.to_owned() })
}
