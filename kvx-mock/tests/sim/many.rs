//! Whatever the seed, nothing is broken.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use kvx_mock::What;
use kvx_mock::sim::seeds;

use crate::run;

/// Seeds that are run when nothing is said.
const COUNT: u64 = if cfg!(debug_assertions) { 400 } else { 10_000 };

/// With fewer seeds nothing is said about how much gets done: one alone may do hardly anything.
const MANY: u64 = 100;

/// No seed takes as long: it then hangs in one call, where nothing else can say which seed it is.
const HANGS: Duration = Duration::from_secs(60);

/// Every seed is a run of its own, so they may be shared out among threads.
#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "each seed is run by one thread, from beginning to end; another watches"
)]
fn nothing_is_broken() {
    let seeds = seeds(COUNT).unwrap_or_else(|error| panic!("{error}"));
    assert!(!seeds.is_empty(), "no seed was run: KVX_SEEDS is 0");
    let (next, done) = (AtomicU64::new(seeds.start), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let running: Vec<AtomicU64> = (0..threads).map(|_| AtomicU64::new(NONE)).collect();
    let (end, ended) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let watched = &running;
        scope.spawn(move || watch(watched, &ended));
        // Dropped when all workers are done, whether or not they panic.
        let end = Arc::new(end);
        for mine in &running {
            let (end, next, done, last) = (Arc::clone(&end), &next, &done, seeds.end);
            scope.spawn(move || {
                let _end = end;
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    mine.store(if seed < last { seed } else { NONE }, Ordering::Relaxed);
                    if seed >= last {
                        return;
                    }
                    done.fetch_add(run(seed).done, Ordering::Relaxed);
                }
            });
        }
    });
    let (count, done) = (seeds.end - seeds.start, done.into_inner());
    println!("{count} seeds, {done} transfers done");
    let enough = count < MANY || done >= count * 5;
    assert!(enough, "hardly anything is ever done: {done} in {count} seeds");
}

/// What a worker that runs no seed says.
const NONE: u64 = u64::MAX;

/// Ends the process when a worker stays with one seed, and says which.
#[expect(clippy::disallowed_methods, reason = "what hangs does so in real time")]
fn watch(running: &[AtomicU64], ended: &mpsc::Receiver<()>) {
    let look = || running.iter().map(|seed| seed.load(Ordering::Relaxed)).collect::<Vec<_>>();
    let mut before = vec![NONE; running.len()];
    while ended.recv_timeout(HANGS) == Err(mpsc::RecvTimeoutError::Timeout) {
        let now = look();
        let mut both = now.iter().zip(&before);
        if let Some((seed, _)) = both.find(|(now, old)| now == old && **now != NONE) {
            eprintln!("seed {seed} hangs; KVX_SEED={seed} runs it again");
            std::process::abort();
        }
        before = now;
    }
}

/// Every fault that there is comes up, and everything that an engine can do.
#[test]
fn everything_comes_up() {
    let mut found = BTreeSet::new();
    for seed in 0..150 {
        let report = run(seed);
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
        let report = run(seed);
        (report.fabric.digest(), report.posted, report.done)
    };
    let digests: BTreeSet<_> = (0..20).map(|seed| (seed, digest(seed))).collect();
    assert!(digests.iter().all(|(seed, before)| digest(*seed) == *before));
    let different: BTreeSet<_> = digests.iter().map(|(_, (digest, ..))| digest).collect();
    assert_eq!(different.len(), 20);
}
