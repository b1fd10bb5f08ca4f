//! Loads that fail and are tried again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvx_connector::control::Key;
use kvx_connector::scheduler::{FinishStatus, SchedulerConfig};

use crate::kit::{Engine, Shape, both_idle, until};

/// A producer whose copies to its host's buffer end when they are told to, and a consumer whose loads may take so long, and are tried
/// again so often.
fn engines(
    shapes: (&Shape, &Shape),
    deadline: Duration,
    retries: (u32, Duration),
) -> (Engine, Engine) {
    with_key(&Key::generate().unwrap(), shapes, deadline, retries)
}

fn with_key(
    key: &Key,
    (from, to): (&Shape, &Shape),
    deadline: Duration,
    (retries, backoff): (u32, Duration),
) -> (Engine, Engine) {
    let from = Shape { host: true, ..from.clone() };
    from.faults.set_later();
    let impatient = |config: &mut SchedulerConfig| {
        (config.deadline, config.retries, config.backoff) = (deadline, retries, backoff);
    };
    (Engine::new("prefill", &from, key, |_| {}), Engine::new("decode", to, key, impatient))
}

const SHORT: Duration = Duration::from_millis(400);
const SOON: (u32, Duration) = (1000, Duration::from_millis(10));

/// Known failures 48, 50 and 120 (vllm PR#56104, vllm PR#50754, vllm PR#40344): of two ranks that a rank reads from, one gives all and is
/// done, the other is late. It is tried again, from the second only; the producer's lease is done at both, and not expired.
#[test]
fn a_rank_tries_again_where_not_everything_is_there() {
    let shapes = (&Shape::new(2, 1, 16), &Shape::new(1, 1, 16));
    let (mut p, mut d) = engines(shapes, SHORT, SOON);
    let params = p.prefill("p", 40, 40, 7);
    d.arrive("d", 40, &params, 7);
    d.admit("d", 0);
    let faults = Arc::clone(&p.faults);
    assert_eq!(faults.end(&p.seats[0]), 1);
    until(&mut p, &mut d, "tried again", |_, d| d.c.stats().retries > 0);
    assert_eq!(faults.end(&p.seats[1]), 1);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 39);
    both_idle(&mut p, &mut d);
    assert_eq!((p.c.stats().sent, p.c.stats().expired), (1, 0));
    let stats = d.seats[0].worker.stats();
    // Half of it from each, once.
    let whole = 4 * 2 * 4 * 8 * 2 * 40;
    assert!(stats.bytes <= whole + whole / 5, "{} of {whole}", stats.bytes);
}

/// One of the consumer's ranks has all, the other is late: the first has nothing to do again, and says so.
#[test]
fn a_rank_that_has_everything_reads_nothing_again() {
    let shapes = (&Shape::new(1, 2, 16), &Shape::new(1, 2, 16));
    let (mut p, mut d) = engines(shapes, SHORT, SOON);
    let params = p.prefill("p", 40, 40, 7);
    d.arrive("d", 40, &params, 7);
    d.admit("d", 0);
    let faults = Arc::clone(&p.faults);
    assert_eq!(faults.end(&p.seats[0]), 1);
    until(&mut p, &mut d, "tried again", |_, d| d.c.stats().retries > 0);
    let before = d.seats[0].worker.stats().bytes;
    assert_eq!(faults.end(&p.seats[1]), 1);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 39);
    assert_eq!((d.seats[0].worker.stats().bytes, before > 0), (before, true));
    both_idle(&mut p, &mut d);
    assert_eq!((p.c.stats().sent, p.c.stats().expired), (1, 0));
}

/// Known failures 41 and 54 (vllm-ascend#16662, sglang#32564): aborted between two tries: the lease that was kept for the second is given
/// back, at every rank, long before it would expire.
#[test]
fn aborted_between_two_tries() {
    for to in [Shape::new(1, 1, 16), Shape::new(2, 1, 16)] {
        let far = (5, Duration::from_secs(3600));
        let (mut p, mut d) = engines((&Shape::new(1, 1, 16), &to), SHORT, far);
        let params = p.prefill("p", 40, 40, 7);
        d.arrive("d", 40, &params, 7);
        d.admit("d", 0);
        until(&mut p, &mut d, "tried again", |_, d| d.c.stats().retries > 0);
        assert!(!d.finish("d", FinishStatus::Aborted).hold);
        let begun = Instant::now();
        // The producer's stage ends only when its copy does.
        assert_eq!(Arc::clone(&p.faults).end(&p.seats[0]), 1);
        both_idle(&mut p, &mut d);
        assert!(begun.elapsed() < p.c.config().lease, "{:?}", begun.elapsed());
        assert_eq!(p.c.stats().expired, 0);
    }
}

/// Known failures 43, 68 and 69 (vllm#35943, vllm#49238, smg#2382): the producer is gone in mid-load. The load fails with its blocks, is
/// tried again, fails for good; and the next producer of this name, elsewhere, serves.
#[test]
fn a_producer_that_is_gone_in_mid_load() {
    let shape = Shape::new(2, 1, 16);
    let deadline = Duration::from_secs(2);
    let again = (1, Duration::from_millis(10));
    let key = Key::generate().unwrap();
    let (mut p, mut d) = with_key(&key, (&Shape::new(1, 1, 16), &shape), deadline, again);
    let params = p.prefill("p", 40, 40, 7);
    d.arrive("d", 40, &params, 7);
    d.admit("d", 0);
    let loading = |d: &Engine| d.seats.iter().all(|seat| !seat.worker.peers().is_empty());
    until(&mut p, &mut d, "loading", |_, d| d.c.tables().loads == 1 && loading(d));
    for seat in std::mem::take(&mut p.seats) {
        seat.worker.shutdown();
    }
    until(&mut p, &mut d, "failed", |_, d| d.failed.contains_key("d"));
    let failed = d.failed.remove("d").unwrap();
    let blocks: Vec<(u16, u32)> = d.live["d"].tables[0].ids.iter().map(|id| (0, *id)).collect();
    assert_eq!(failed.blocks, blocks.into_iter().collect(), "{}", failed.reason);
    assert_eq!((d.c.stats().retries, failed.computed), (1, 0));
    for seat in &d.seats {
        assert_eq!(seat.worker.failed_blocks(), failed.blocks);
        assert!(seat.worker.failed_blocks().is_empty());
    }
    assert!(!d.finish("d", FinishStatus::Failed).hold);
    until(&mut p, &mut d, "let go", |_, d| d.is_quiet());
    let mut next = Engine::new("prefill", &shape, &key, |_| {});
    let params = next.prefill("p", 40, 40, 8);
    d.arrive("d-2", 40, &params, 8);
    d.admit("d-2", 0);
    until(&mut next, &mut d, "received", |_, d| {
        // Until it is known that the first is gone for good, the second may be taken for it.
        d.received.contains_key("d-2")
    });
    d.decoded("d-2", 39);
    both_idle(&mut next, &mut d);
}

/// What cannot be copied at one of two ranks is copied there again; the other has it.
#[test]
fn one_rank_copies_again() {
    let key = Key::generate().unwrap();
    let mut p = Engine::new("prefill", &Shape::new(1, 1, 16), &key, |_| {});
    let to = Shape { host: true, ..Shape::new(2, 1, 16) };
    to.faults.from_host.store(1, Ordering::Relaxed);
    let mut d = Engine::new("decode", &to, &key, |_| {});
    let params = p.prefill("p", 40, 40, 7);
    d.arrive("d", 40, &params, 7);
    d.admit("d", 0);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 39);
    both_idle(&mut p, &mut d);
    let loads: Vec<_> = d.c.rank_stats().map(|(_, it)| it.failed_loads).collect();
    assert_eq!((loads.iter().sum::<u64>(), d.c.stats().retries), (1, 1));
}
