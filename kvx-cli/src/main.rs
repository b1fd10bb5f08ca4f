//! The program `kvx`.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvx_cli::main()
}
