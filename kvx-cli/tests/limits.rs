//! Limits of the process that are too low: the one that was met is named, with what lifts it.

use std::process::Command;

/// Runs a program's command under a limit of the shell's.
fn under(limit: &str, arguments: &str) -> (Option<i32>, String) {
    let mut shell = Command::new("bash");
    // What this process has inherited would count, too.
    let alone =
        "for fd in /proc/self/fd/*; do fd=${fd##*/}; [ $fd -le 2 ] || eval \"exec $fd>&-\"; done";
    shell.args(["-c", &format!("{alone}; ulimit {limit}; exec \"$0\" {arguments}")]);
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
        ("-d 20000", "ulimit -d"),
        ("-d 80000", "ulimit -d"),
    ] {
        let (code, said) = under(limit, DEMO);
        assert_eq!(code, Some(3), "{limit}: {said}");
        assert!(said.contains(named), "{limit}: {said}");
        for other in ["-f", "-n", "-v", "-d", "-u", "control group", "seccomp"] {
            let told = said.contains(&format!("ulimit {other}"))
                || said.contains(other) && !other.starts_with('-');
            assert!(!told || named.ends_with(other), "{limit} is no matter of {other}: {said}");
        }
    }
}

/// Descriptors run out at one call or another on the way to a connection, of either process.
#[test]
fn descriptors_that_run_out_on_the_way_to_a_connection_are_named_at_once() {
    let one = "--producer regions=single --consumer regions=single";
    let two = "--producer tp=2,layout=hnd,block=16,regions=single --consumer tp=4,layout=nhd,block=32,regions=single";
    let bare = format!("bench --backend shm --tokens 16 --rounds 1 --small 2 {one}");
    let connector = "bench --backend shm --connector --small 5".to_owned();
    let demo = format!("demo --backend shm --requests 2 --max-tokens 200 {two}");
    let bare_demo = format!("demo --bare --backend shm --requests 2 --max-tokens 200 {two}");
    let cases: [(String, &[u32]); 4] = [
        (bare, &[20, 21, 22, 23, 24, 25]),
        (connector, &[27, 31, 33]),
        (bare_demo, &[42, 44, 48]),
        (demo, &[87, 89, 92]),
    ];
    for (command, limits) in cases {
        for limit in limits {
            let begun = std::time::Instant::now();
            let (code, said) = under(&format!("-n {limit}"), &command);
            let took = begun.elapsed();
            println!("{limit}: {took:?} {code:?} {said}");
            assert!(took.as_secs() < 20, "{limit}: {command}: {took:?}: {said}");
            if code != Some(0) {
                assert_eq!(code, Some(3), "{limit}: {command}: {said}");
                assert!(said.contains("ulimit -n"), "{limit}: {command}: {said}");
            }
        }
    }
}

/// A host without a loopback interface that is up, as a container may be: nothing that waits helps.
#[cfg(target_os = "linux")]
#[test]
fn a_loopback_that_is_down_is_said_at_once() {
    let apart = ["--user", "--map-root-user", "--net"];
    let allowed = Command::new("unshare").args(apart).arg("true").status();
    if !allowed.is_ok_and(|status| status.success()) {
        println!("skipped: this user may not make a network namespace");
        return;
    }
    let begun = std::time::Instant::now();
    let mut demo = Command::new("unshare");
    demo.args(apart).arg(env!("CARGO_BIN_EXE_kvx")).args(DEMO.split(' '));
    demo.env_remove("KVX_BACKEND").env_remove("KVX_BACKEND_OPTIONS");
    let output = demo.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("ip link set lo up"), "{said}");
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{said}");
}

/// Where nobody says how much memory it may use, it uses no more than it may have.
#[test]
fn a_demo_fits_into_the_address_space_that_it_has() {
    let (code, said) = under("-v 2500000", DEMO);
    assert_eq!(code, Some(0), "{said}");
}
