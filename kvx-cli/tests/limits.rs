//! Limits of the process that are too low: the one that was met is named, with what lifts it.

use std::process::Command;

/// Runs a program's command under a limit of the shell's.
fn under(limit: &str, arguments: &str) -> (Option<i32>, String) {
    let mut shell = Command::new("bash");
    shell.args(["-c", &format!("ulimit {limit}; exec \"$0\" {arguments}")]);
    shell.arg(env!("CARGO_BIN_EXE_kvx"));
    shell.env_remove("KVX_BACKEND").env_remove("KVX_BACKEND_OPTIONS");
    let output = shell.output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

const DEMO: &str = "demo --backend shm --requests 2 --max-tokens 300";

#[test]
fn the_limit_that_is_too_low_is_named() {
    for (limit, named) in [
        ("-f 0", "ulimit -f"),
        ("-f 1", "ulimit -f"),
        // Memory for the probe, but not for a connection's ring.
        ("-f 100", "ulimit -f"),
        ("-n 12", "ulimit -n"),
        // Too little for caches beside what a process takes.
        ("-v 40000", "ulimit -v"),
        ("-v 1000000", "ulimit -v"),
    ] {
        let (code, said) = under(limit, DEMO);
        assert_eq!(code, Some(3), "{limit}: {said}");
        assert!(said.contains(named), "{limit}: {said}");
        for other in ["-f", "-n", "-v", "-u", "control group", "seccomp"] {
            let told = said.contains(&format!("ulimit {other}"))
                || said.contains(other) && !other.starts_with('-');
            assert!(!told || named.ends_with(other), "{limit} is no matter of {other}: {said}");
        }
    }
}

/// Where nobody says how much memory it may use, it uses no more than it may have.
#[test]
fn a_demo_fits_into_the_address_space_that_it_has() {
    let (code, said) = under("-v 2500000", DEMO);
    assert_eq!(code, Some(0), "{said}");
}
