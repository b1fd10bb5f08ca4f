//! Runs the program as a user does.

use std::process::{Command, Output};

use serde_json::Value;

/// What a run of `kvx` gave.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// `kvx` with `arguments`, separated by blanks, to be run.
pub(crate) fn command(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.args(arguments.split_whitespace());
    command.env_remove("KVX_BACKEND").env_remove("KVX_BACKEND_OPTIONS");
    command
}

/// Runs `kvx` with `arguments`, separated by blanks.
pub(crate) fn kvx(arguments: &str) -> Run {
    let Output { status, stdout, stderr } = command(arguments).output().unwrap();
    Run {
        code: status.code().unwrap_or(-1),
        stdout: String::from_utf8(stdout).unwrap(),
        stderr: String::from_utf8(stderr).unwrap(),
    }
}

/// Runs `kvx --json` with `arguments`, which must end with `code`, and reads the one document that it prints.
pub(crate) fn json(arguments: &str, code: i32) -> Value {
    let run = kvx(&format!("--json {arguments}"));
    assert_eq!(run.code, code, "kvx {arguments}: {run:#?}");
    serde_json::from_str(&run.stdout).unwrap_or_else(|error| panic!("{error}: {run:#?}"))
}
