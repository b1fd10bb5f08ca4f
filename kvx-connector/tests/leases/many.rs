//! Whatever the seed, nothing is broken.

use std::sync::atomic::{AtomicU64, Ordering};

use kvx_connector::protocol::sim::Leases;
use kvx_mock::sim::seeds;

/// Seeds that are run when nothing is said.
const COUNT: u64 = if cfg!(debug_assertions) { 2_000 } else { 50_000 };

#[test]
fn nothing_is_broken() {
    let seeds = seeds(COUNT).unwrap_or_else(|error| panic!("{error}"));
    assert!(!seeds.is_empty(), "no seed was run: KVX_SEEDS is 0");
    let next = AtomicU64::new(seeds.start);
    let totals: [AtomicU64; 6] = std::array::from_fn(|_| AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let run = || Leases::new(seed).run();
                    let report = std::panic::catch_unwind(run).unwrap_or_else(|panic| {
                        eprintln!("seed {seed} panicked; KVX_SEED={seed} runs it again");
                        std::panic::resume_unwind(panic)
                    });
                    let report = report.unwrap_or_else(|failure| panic!("{failure}"));
                    let counts = [
                        report.events,
                        report.ready,
                        report.failed,
                        report.aborted,
                        report.stale,
                        report.quarantined,
                    ];
                    for (total, count) in totals.iter().zip(counts) {
                        total.fetch_add(count, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let [events, ready, failed, aborted, stale, quarantined] = totals.map(AtomicU64::into_inner);
    let count = seeds.end - seeds.start;
    println!(
        "{count} seeds: {events} events, {ready} ready, {failed} failed, {aborted} aborted, \
         {stale} stale, {quarantined} quarantined"
    );
    if count >= 200 {
        let all = [ready, failed, aborted, stale, quarantined];
        assert!(all.iter().all(|it| *it > 0), "something never happens");
        assert!(ready > count, "hardly anything is ever ready");
    }
}
