//! The program finds the backend by name, moves a cache with it, and says why where it cannot.

use std::process::Command;

/// Whether it succeeded, and what it printed and complained of.
fn two_engines(
    name: Option<&str>,
    environment: &[(&str, &str)],
) -> std::io::Result<(bool, String, String)> {
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
