//! Whatever the seed, nothing is broken.

use kvx_connector::protocol::sim::{Leases, Report};
use kvx_mock::sim::seeds;
use kvx_tests::sweep;

/// Seeds that are run when nothing is said.
const COUNT: u64 = if cfg!(debug_assertions) { 2_000 } else { 50_000 };

#[test]
fn nothing_is_broken() {
    let seeds = seeds(COUNT).unwrap_or_else(|error| panic!("{error}"));
    let add = |sum: &mut Report, one: Report| {
        sum.events += one.events;
        sum.ready += one.ready;
        sum.failed += one.failed;
        sum.aborted += one.aborted;
        sum.stale += one.stale;
        sum.quarantined += one.quarantined;
    };
    let sum = sweep(seeds.clone(), |seed| Leases::new(seed).run(), add);
    let count = seeds.end - seeds.start;
    println!("{count} seeds: {sum:?}");
    if count >= 200 {
        let all = [sum.ready, sum.failed, sum.aborted, sum.stale, sum.quarantined];
        assert!(all.iter().all(|it| *it > 0), "something never happens");
        assert!(sum.ready > count, "hardly anything is ever ready");
    }
}
