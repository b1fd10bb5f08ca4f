//! How the program ends: exit codes, and what is said about an error.

use std::io;

use kvx_core::{Error, ErrorKind};
use serde_json::{Value, json};

use crate::output;

/// All went well.
pub(crate) const OK: u8 = 0;
/// Something failed: a transfer, a verification, a file that cannot be written.
pub(crate) const FAILED: u8 = 1;
/// The command line, a trace, a `config.json`, a key or a shape is wrong; a key's file is there already.
pub(crate) const USAGE: u8 = 2;
/// What was asked for is not available here: a backend, a mode, memory.
pub(crate) const UNAVAILABLE: u8 = 3;
/// The two shapes cannot be mapped onto each other.
pub(crate) const MISMATCH: u8 = 4;

/// What `--help` says about exit codes.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0  all went well
  1  something failed: a transfer, a verification, a file that cannot be written
  2  the command line, a trace, a config.json, a key or a shape is wrong; a key's file is there already
  3  not available here: a backend, a mode, memory
  4  the two shapes cannot be mapped onto each other";

/// Why a command gave up.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An error, to be printed.
    Error(Error),
    /// Standard output cannot be written.
    Output(io::Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// The exit code that an error asks for.
#[must_use]
pub(crate) fn exit_code(error: &Error) -> u8 {
    if error.as_mismatch().is_some() {
        return MISMATCH;
    }
    match error.kind() {
        ErrorKind::Config => USAGE,
        ErrorKind::Unsupported | ErrorKind::Resources => UNAVAILABLE,
        _ => FAILED,
    }
}

/// An error as one line of text: the message with its causes.
#[must_use]
pub(crate) fn line(error: &Error) -> String {
    let mut text = error.in_full();
    if error.as_mismatch().is_some() && error.remedy().is_none() {
        text.push_str("; configure both engines alike in this field");
    }
    text
}

/// Ends the program with an error, whatever its other threads are busy with; does nothing where its result was printed.
pub(crate) fn end(error: &Error) {
    let exit = || std::process::exit(exit_code(error).into());
    output::last_words(&format!("error: {}", line(error)), &document(error), exit);
}

/// An error as the one document of a command that was asked for JSON.
#[must_use]
pub(crate) fn document(error: &Error) -> Value {
    let mut fields = json!({
        "kind": if error.as_mismatch().is_some() { "mismatch" } else { error.kind().as_str() },
        "message": line(error),
        "operation": error.operation(),
        "exit_code": exit_code(error),
    });
    if let Some(mismatch) = error.as_mismatch() {
        fields["field"] = json!(mismatch.field);
        fields[&*mismatch.left.0] = json!(mismatch.left.1);
        fields[&*mismatch.right.0] = json!(mismatch.right.1);
    }
    if let Some(remedy) = error.remedy() {
        fields["remedy"] = json!(remedy);
    }
    json!({ "error": fields })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_has_its_exit_code() {
        assert_eq!(exit_code(&Error::config("a", "b")), USAGE);
        assert_eq!(exit_code(&Error::unsupported("a", "b")), UNAVAILABLE);
        assert_eq!(exit_code(&Error::mismatch("a", "dtype", "bf16", "f16")), MISMATCH);
        assert_eq!(exit_code(&Error::misuse("a", "b")), FAILED);
        assert_eq!(exit_code(&Error::peer("a", "b")), FAILED);
    }

    #[test]
    fn an_error_is_one_line_with_its_causes() {
        let error = Error::config("trace", "unreadable").with_source(io::Error::other("no\nluck"));
        assert_eq!(line(&error), "trace: unreadable: no luck");
    }

    #[test]
    fn a_mismatch_names_the_field_and_both_values() {
        let value = document(&Error::mismatch("plan", "dtype", "bf16", "f16"));
        assert_eq!(value["error"]["kind"], "mismatch");
        assert_eq!(value["error"]["field"], "dtype");
        assert_eq!(value["error"]["producer"], "bf16");
        assert_eq!(value["error"]["consumer"], "f16");
        assert_eq!(value["error"]["exit_code"], 4);
    }
}
