//! The program `kvx`.

use std::process::ExitCode;

/// Levels of UCX's log of which it prints some before anybody can listen.
const LOUD: &[&str] = &["debug", "trace", "req", "data", "async", "func", "poll"];

fn main() -> ExitCode {
    let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let loud =
        set("UCX_LOG_LEVEL").is_some_and(|level| LOUD.contains(&&*level.to_ascii_lowercase()));
    // UCX prints such things to the standard output by itself, where others read what this program prints.
    if (loud || set("UCX_PROTO_INFO").is_some()) && set("UCX_LOG_FILE").is_none() {
        // SAFETY: this is the only thread.
        unsafe { std::env::set_var("UCX_LOG_FILE", "stderr") };
    }
    kvx_cli::main()
}
