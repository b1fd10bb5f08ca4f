//! The program finds the backend by name, moves a cache with it, and says why where it cannot.

use std::io;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longer than a step of the program may take, and far shorter than for ever.
const BOUND: Duration = Duration::from_secs(40);

/// Whether it succeeded, and what it printed and complained of.
fn two_engines(
    name: Option<&str>,
    environment: &[(&str, &str)],
) -> io::Result<(bool, String, String)> {
    let mut program = Command::new(env!("CARGO_BIN_EXE_two-engines"));
    program.env_remove("KVX_BACKEND").env_remove("KVX_BACKEND_OPTIONS");
    let output = program.args(name).envs(environment.iter().copied()).output()?;
    let [out, err] = [&output.stdout, &output.stderr].map(|b| String::from_utf8_lossy(b).into());
    Ok((output.status.success(), out, err))
}

#[test]
fn a_cache_is_moved_between_two_processes_however_the_backend_was_chosen() {
    let by_environment = [("KVX_BACKEND", "plain-tcp")];
    for (name, environment, reason) in [
        (Some("plain-tcp"), &by_environment[..0], "asked for by name"),
        (None, &by_environment[..], "named by KVX_BACKEND"),
        (None, &[], "the only one that can be used"),
    ] {
        let (success, out, err) = two_engines(name, environment).unwrap();
        assert!(success, "{out}{err}");
        assert!(out.contains(&format!("backend plain-tcp: {reason}")), "{out}");
        // 4 layers of keys and values, 4 heads of 64 elements of 2 bytes, 200 tokens.
        for line in ["transport tcp", "moved 819200 bytes", "checked 409600 elements"] {
            assert!(out.contains(line), "{out}");
        }
    }
}

#[test]
fn an_unknown_name_lists_what_there_is() {
    let (success, _, err) = two_engines(Some("plain-udp"), &[]).unwrap();
    assert!(!success);
    assert!(err.contains("\"plain-udp\"") && err.contains("registered=plain-tcp"), "{err}");
}

#[test]
fn what_cannot_be_used_says_why_and_what_to_do() {
    // TEST-NET-1 (RFC 5737): no host has this address.
    for (options, why) in [
        ("address=192.0.2.1", "it cannot listen at 192.0.2.1"),
        ("address=0.0.0.0", "no peer can dial this address"),
        ("adress=127.0.0.1", "unknown option \"adress\""),
    ] {
        let environment = [("KVX_BACKEND", "plain-tcp"), ("KVX_BACKEND_OPTIONS", options)];
        let (success, _, err) = two_engines(None, &environment).unwrap();
        assert!(!success);
        assert!(err.contains(why) && err.contains("address"), "{err}");
    }
}

#[test]
fn it_says_how_it_is_used() {
    for option in ["--help", "-h"] {
        let (success, out, _) = two_engines(Some(option), &[]).unwrap();
        assert!(success && out.contains("usage: two-engines [BACKEND]"), "{out}");
    }
    let (success, out, err) = two_engines(Some("--backend"), &[]).unwrap();
    assert!(!success && out.is_empty(), "{out}");
    assert!(err.contains("--backend") && err.contains("two-engines --help"), "{err}");
}

fn start(arguments: &[&str]) -> io::Result<Child> {
    let mut program = Command::new(env!("CARGO_BIN_EXE_two-engines"));
    program.env_remove("KVX_BACKEND").env_remove("KVX_BACKEND_OPTIONS").args(arguments);
    let program = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    program.spawn()
}

/// What came of a process that must end within the bound.
fn ended(mut child: Child) -> io::Result<Output> {
    let begun = Instant::now();
    while child.try_wait()?.is_none() {
        if begun.elapsed() > BOUND {
            child.kill()?;
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it did not end"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output()
}

#[test]
fn a_prefill_engine_that_nobody_answers_ends() {
    let mut child = start(&["--prefill", "plain-tcp"]).unwrap();
    // Held open: the other engine is there, and says nothing.
    let silent = child.stdin.take();
    let output = ended(child).unwrap();
    drop(silent);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("does not answer"), "{said}");
}

/// The prefill engine that a process has started, once it is a program of its own.
#[cfg(target_os = "linux")]
fn prefill_of(process: u32) -> Option<u32> {
    let path = format!("/proc/{process}/task/{process}/children");
    let child = std::fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()?;
    let command = std::fs::read_to_string(format!("/proc/{child}/cmdline")).ok()?;
    command.contains("--prefill").then_some(child)
}

#[cfg(target_os = "linux")]
#[test]
fn a_decode_engine_ends_though_the_prefill_engine_was_stopped() {
    // The stop may come too late: then the cache was moved, and there is nothing to be seen.
    for _ in 0..20 {
        let mut decode = start(&["plain-tcp"]).unwrap();
        let prefill = loop {
            if let Some(prefill) = prefill_of(decode.id()) {
                break Some(prefill);
            }
            if decode.try_wait().unwrap().is_some() {
                break None;
            }
        };
        let Some(prefill) = prefill else { continue };
        let stopped = Command::new("kill").args(["-STOP", &prefill.to_string()]).status().unwrap();
        let output = ended(decode).unwrap();
        if output.status.success() {
            continue;
        }
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(stopped.success() && !said.is_empty(), "{said}");
        let left = std::fs::read_to_string(format!("/proc/{prefill}/cmdline")).unwrap_or_default();
        assert!(!left.contains("two-engines"), "the stopped process is still there");
        return;
    }
    panic!("no stop came in time");
}
