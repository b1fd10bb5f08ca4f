//! Prints the names of the backends in this program, one a line: as an engine's binary would find them.

#![expect(clippy::print_stdout, reason = "it is what this program is for")]

fn main() -> kvx_core::Result<()> {
    for backend in kvx_connector::backends()? {
        println!("{}", backend.name);
    }
    Ok(())
}
