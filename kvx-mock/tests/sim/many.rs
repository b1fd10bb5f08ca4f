//! Whatever the seed, nothing is broken.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use kvx_mock::What;
use kvx_mock::sim::{Exchange, seeds};

/// Seeds that are run when nothing is said.
const COUNT: u64 = if cfg!(debug_assertions) { 400 } else { 10_000 };

/// Every seed is a run of its own, so they may be shared out among threads.
#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "each seed is run by one thread, from beginning to end"
)]
fn nothing_is_broken() {
    let seeds = seeds(COUNT);
    assert!(!seeds.is_empty(), "no seed was run");
    let (next, done) = (AtomicU64::new(seeds.start), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let report = Exchange::new(seed).run().unwrap_or_else(|it| panic!("{it}"));
                    done.fetch_add(report.done, Ordering::Relaxed);
                }
            });
        }
    });
    let (count, done) = (seeds.end - seeds.start, done.into_inner());
    println!("{count} seeds, {done} transfers done");
    assert!(done >= count * 5, "hardly anything is ever done: {done} in {count} seeds");
}

/// Every fault that there is comes up, and everything that an engine can do.
#[test]
fn everything_comes_up() {
    let mut found = BTreeSet::new();
    for seed in 0..150 {
        let report = Exchange::new(seed).run().unwrap_or_else(|it| panic!("{it}"));
        let words = report.fabric.log().into_iter().map(|entry| match entry.what {
            What::Ruled { kind, verdict, .. } => {
                let verdict = format!("{verdict:?}");
                let verdict = verdict.split('(').next().unwrap_or_default();
                format!("{verdict} {kind:?}")
            }
            what => {
                let what = format!("{what:?}");
                what.split([' ', '(']).next().unwrap_or_default().to_owned()
            }
        });
        found.extend(words);
    }
    let events = "Opened Registered Deregistered Met Ready Submitted Full Moved NoRoom Cancelled Settled Notified Lost \
                  Severed Revoked Told Silent Broken PeerDown Closed Killed Stopped Resumed Cut Healed Suppressed";
    let mut wanted: BTreeSet<String> = events.split_whitespace().map(str::to_owned).collect();
    for way in ["Data", "Completion", "Notification"] {
        let verdicts = ["Drop", "Delay", "Double", "Reorder", "Hold"];
        wanted.extend(verdicts.map(|verdict| format!("{verdict} {way}")));
    }
    let failing = ["Register", "Handshake", "Post", "Data", "Completion"];
    wanted.extend(failing.map(|kind| format!("Fail {kind}")));
    wanted.insert("Full Post".into());
    let missing: Vec<_> = wanted.difference(&found).collect();
    assert!(missing.is_empty(), "never came up: {missing:?}");
}

/// A run can be seen again: its log is the same.
#[test]
fn a_seed_is_one_run() {
    let digest = |seed| {
        let report = Exchange::new(seed).run().unwrap_or_else(|it| panic!("{it}"));
        (report.fabric.digest(), report.posted, report.done)
    };
    let digests: BTreeSet<_> = (0..20).map(|seed| (seed, digest(seed))).collect();
    assert!(digests.iter().all(|(seed, before)| digest(*seed) == *before));
    let different: BTreeSet<_> = digests.iter().map(|(_, (digest, ..))| digest).collect();
    assert_eq!(different.len(), 20);
}
