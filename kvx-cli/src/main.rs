//! The program `kvx`.

use std::process::ExitCode;

/// Levels of UCX's log of which it prints some before anybody can listen.
const LOUD: &[&str] = &["debug", "trace", "req", "data", "async", "func", "poll"];

/// Does nothing: that is enough for the system not to end this process.
const extern "C" fn go_on(_: libc::c_int) {}

/// How this process takes signals, whatever its starter does with them: that is handed on.
fn take_signals() {
    let go_on: extern "C" fn(libc::c_int) = go_on;
    // Where it is ignored, nobody can wait for a child: the system forgets it as soon as it ends.
    // SAFETY: it is the system's own way of taking it, and nobody waits for a child yet.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    // A file that gets too large (`ulimit -f`) is an error of whoever writes it. It is not ignored: children would inherit that.
    // SAFETY: what is called does nothing, which is allowed at any moment.
    unsafe { libc::signal(libc::SIGXFSZ, go_on as libc::sighandler_t) };
}

fn main() -> ExitCode {
    take_signals();
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
