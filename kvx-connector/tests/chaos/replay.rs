//! A trace of requests is replayed between engines in processes of their own, while these are killed, stopped and started
//! again, and the network between them fails.
//!
//! After each replay: every request has ended in time, and once; every lease was freed once; what was reported as ready is right,
//! byte by byte, and nothing else was written, not then and not later; engines that lived on hold what they held before; and all
//! serve the next request.
//!
//! Known failures 37 and 40 (aborts that leak or end twice), 54 (blocks that are written after they were given to the next), 55
//! (the other side is not told), 68, 69, 70, 72 and 75 (what restarts at the same address, with another number of blocks), 73
//! (what is held of the dead), 88 (a message that is lost), 95 (a double free) and 114 (an abort at any time).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use kvx_connector::protocol::Plant;
use kvx_core::config::BackendConfig;
use kvx_core::registry::Probe;

use crate::fault::{ALL, PROCESSES};
use crate::filter;
use crate::ledger::Tally;
use crate::world::{Setting, World};

/// Whether long tests are wanted.
fn long() -> bool {
    std::env::var("KVX_LONG").is_ok_and(|it| it == "1")
}

/// Replays so many seeds, and gives what came of all.
#[expect(clippy::print_stdout, reason = "each seed is printed, to be run again")]
fn replays(first: u64, count: u64, setting: &Setting) -> Tally {
    let (first, count) = match std::env::var("KVX_SEED") {
        Ok(seed) => (seed.parse().expect("KVX_SEED is a number"), 1),
        Err(_) => (first, count),
    };
    let (next, all) = (AtomicU64::new(first), Mutex::new((Tally::default(), Vec::new())));
    std::thread::scope(|scope| {
        // One at a time where packets are dropped: they share what drops them.
        for _ in 0..if setting.filtered { 1 } else { 2 } {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        return;
                    }
                    let result = World::run(seed, setting);
                    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                    match result {
                        Ok((tally, what)) => {
                            println!("{what}: {tally:?}");
                            all.0 += tally;
                        }
                        Err(wrong) => {
                            println!("{wrong}\nKVX_SEED={seed} runs it again");
                            all.1.push(seed);
                        }
                    }
                }
            });
        }
    });
    let (tally, failed) = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("{count} replays over {}: {tally:?}", setting.backend);
    assert!(failed.is_empty(), "seeds that failed: {failed:?}");
    // Otherwise it has shown nothing: each replay ends with requests that must be ready, and has some before.
    assert!(tally.ready > tally.attempts / 10, "{tally:?}");
    tally
}

#[test]
fn no_fault_leaves_a_request_open_a_lease_held_or_a_byte_wrong() {
    let count = if long() { 200 } else { 10 };
    let setting = Setting::new("shm", &ALL);
    let tally = replays(0, count, &setting);
    if count > 1 && std::env::var_os("KVX_SEED").is_none() {
        assert!(tally.failed > 0 && tally.aborted > 0 && tally.died > 0, "{tally:?}");
        // What fails of one producer is no concern of another: known failure 67.
        assert!(tally.others.0 > tally.others.1, "{tally:?}");
    }
}

#[test]
fn nor_over_ucx() {
    let registration = kvx_core::registry::find("ucx").unwrap();
    let options = BackendConfig::new().with("tls", "tcp");
    if let Probe::Unavailable { reason, .. } = (registration.probe)(&options) {
        let required = std::env::var("KVX_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|it| it == "ucx"), "KVX_REQUIRE names ucx: {reason}");
        return println!("skipped: {reason}");
    }
    let mut setting = Setting::new("ucx", &ALL);
    setting.options.push(("tls".to_owned(), "tcp".to_owned()));
    replays(1000, if long() { 20 } else { 2 }, &setting);
}

#[test]
fn nor_where_packets_are_dropped() {
    if std::env::var_os(filter::INSIDE).is_some() {
        println!("dropped by {:?}", filter::Filter::new());
        let mut setting = Setting::new("shm", &PROCESSES);
        setting.filtered = true;
        replays(2000, if long() { 20 } else { 2 }, &setting);
        return;
    }
    if let Some(why) = filter::missing() {
        return println!("skipped: no network namespace of its own: {why}");
    }
    let (passed, said) = filter::inside("replay::nor_where_packets_are_dropped");
    println!("{said}");
    assert!(passed);
}

/// Replays find what they look for: an engine that does not wait for the confirmation reports what is wrong as ready, and one that
/// gives blocks back too early has them written into.
#[test]
fn faults_of_the_protocol_are_found() {
    let planted = [(Plant::ClocksCompared, "ready and wrong"), (Plant::AbortUnpinsEarly, "Spoilt")];
    std::thread::scope(|scope| {
        for (plant, what) in planted {
            scope.spawn(move || {
                let mut setting = Setting::new("shm", &ALL);
                setting.plant = Some(plant);
                let finds = |seed: &u64| {
                    let wrong = World::run(*seed, &setting).err();
                    wrong.is_some_and(|wrong| wrong.contains(what))
                };
                let seed = (5..40).find(finds);
                println!("{plant:?}: seed {seed:?}");
                assert!(seed.is_some(), "{plant:?} was not found");
            });
        }
    });
}
