//! What the kernel does not allow, for real: other users, processes that hide their memory, other namespaces, huge pages.
//!
//! Most of it needs root. What cannot be done is said, and not done.

#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

#[cfg(test)]
mod checks;
#[cfg(test)]
mod pages;
#[cfg(test)]
mod party;

use std::time::{Duration, Instant};

use kvx_core::transfer::Mode;

use checks::{borrowed_memory_is_refused, shared_memory_works, two};
use party::{BORROWED, SHARED, Start, serve_if_asked};

/// Two users that own nothing.
const USER: &str = "setpriv --reuid 65534 --regid 65534 --clear-groups --";
const OTHER_USER: &str = "setpriv --reuid 65533 --regid 65533 --clear-groups --";

#[test]
fn memory_of_a_process_that_is_not_dumpable_is_refused_and_all_else_works() {
    const TEST: &str = "memory_of_a_process_that_is_not_dumpable_is_refused_and_all_else_works";
    if serve_if_asked() {
        return;
    }
    let user = Start { by: USER, ..Start::default() };
    let Some([mut one, mut hidden]) = two(TEST, user, Start { hidden: true, ..user }) else {
        return;
    };
    one.meet(&mut hidden).unwrap();
    shared_memory_works(&mut one, &mut hidden);
    borrowed_memory_is_refused(&mut one, &mut hidden, &["not dumpable"]);
    // It can read what others let it.
    assert_eq!(hidden.go(Mode::Read, BORROWED, BORROWED).as_deref(), Ok("process_vm"));
    assert_eq!(one.go(Mode::Write, BORROWED, BORROWED).as_deref(), Ok("process_vm"));
    shared_memory_works(&mut hidden, &mut one);
}

#[test]
fn a_process_of_another_user_is_refused_unless_the_policy_lets_it_in() {
    const TEST: &str = "a_process_of_another_user_is_refused_unless_the_policy_lets_it_in";
    if serve_if_asked() {
        return;
    }
    for (options, other_options) in [("", ""), ("users=any", ""), ("", "users=65534")] {
        let user = Start { by: USER, options, ..Start::default() };
        let other = Start { by: OTHER_USER, options: other_options, ..Start::default() };
        let Some([mut one, mut other]) = two(TEST, user, other) else { return };
        let begun = Instant::now();
        // Either the handshake says so, or the first transfer.
        let refused = match one.meet(&mut other) {
            Ok(()) => one.go(Mode::Read, SHARED, SHARED).unwrap_err(),
            Err(why) => why,
        };
        // It does not change by itself. What was under way fails with the connection.
        let kinds = ["config: ", "peer: "];
        assert!(kinds.iter().any(|kind| refused.starts_with(kind)), "{refused}");
        // Whichever of the two refuses, and whichever has connected: both are told, and soon.
        assert!(refused.contains("user that may not connect"), "{refused}");
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    }
    for (options, other_options) in [("users=any", "users=any"), ("users=65533", "users=65534")] {
        let user = Start { by: USER, options, ..Start::default() };
        let other = Start { by: OTHER_USER, options: other_options, ..Start::default() };
        let Some([mut one, mut other]) = two(TEST, user, other) else { return };
        one.meet(&mut other).unwrap();
        shared_memory_works(&mut one, &mut other);
        borrowed_memory_is_refused(&mut one, &mut other, &["another user's process"]);
    }
}

#[test]
fn another_network_namespace_is_refused_with_both_names() {
    const TEST: &str = "another_network_namespace_is_refused_with_both_names";
    if serve_if_asked() {
        return;
    }
    let apart = Start { by: "unshare --net --", ..Start::default() };
    let Some([mut one, mut other]) = two(TEST, Start { by: "env", ..apart }, apart) else { return };
    let mine = std::fs::read_link("/proc/self/ns/net").unwrap();
    let mine = mine.to_str().unwrap().trim_start_matches("net:[").trim_end_matches(']').to_owned();
    let why = one.meet(&mut other).unwrap_err();
    for word in [
        "unsupported: ",
        "different network namespaces",
        &mine,
        "run both in one network namespace",
    ] {
        assert!(why.contains(word), "{word}: {why}");
    }
}

#[test]
fn in_another_pid_namespace_shared_memory_works_and_borrowed_memory_is_refused() {
    const TEST: &str =
        "in_another_pid_namespace_shared_memory_works_and_borrowed_memory_is_refused";
    if serve_if_asked() {
        return;
    }
    let apart = Start { by: "unshare --pid --fork --kill-child --", ..Start::default() };
    let Some([mut one, mut other]) = two(TEST, Start { by: "env", ..apart }, apart) else { return };
    one.meet(&mut other).unwrap();
    shared_memory_works(&mut one, &mut other);
    borrowed_memory_is_refused(&mut one, &mut other, &["different PID namespaces"]);
    borrowed_memory_is_refused(&mut other, &mut one, &["different PID namespaces"]);
    shared_memory_works(&mut other, &mut one);
}
