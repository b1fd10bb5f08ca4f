use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvx_core::ErrorKind;
use kvx_core::transfer::Mode;
use metrics::{
    Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};

use super::{Gauges, Meters, Moved, Outcome, Tally};
use crate::protocol::peers::Place;
use crate::protocol::user::Why;
use crate::protocol::{Access, Reason, owner, user};

/// Counters and gauges, by the text of their keys.
#[derive(Default)]
struct Numbers(Mutex<BTreeMap<String, Arc<AtomicU64>>>);

impl Numbers {
    fn number(&self, key: &Key) -> Arc<AtomicU64> {
        Arc::clone(self.0.lock().unwrap().entry(key.to_string()).or_default())
    }

    fn of(&self, parts: &[&str]) -> Vec<u64> {
        let numbers = self.0.lock().unwrap();
        let mine = numbers.iter().filter(|(key, _)| parts.iter().all(|part| key.contains(part)));
        mine.map(|(_, number)| number.load(Ordering::Relaxed)).collect()
    }
}

struct Sum(Arc<AtomicU64>);

impl HistogramFn for Sum {
    fn record(&self, _: f64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Recorder for Numbers {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.number(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.number(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(Sum(self.number(key))))
    }
}

fn meters(engine: &str) -> Meters {
    Meters::new(engine, Place { replica: 1, rank: 2 })
}

fn moved(transport: &str) -> Moved<'_> {
    let (bytes, segments, elapsed) = (1 << 20, 4, Duration::from_micros(50));
    let (backend, route, mode) = ("shm", Some("mapped"), Mode::Read);
    Moved { backend, transport, route, mode, bytes, segments, elapsed }
}

#[test]
fn what_has_grown_is_handed_on_once() {
    let numbers = Numbers::default();
    metrics::with_local_recorder(&numbers, || {
        let mut meters = meters("a");
        let mut tally = Tally::default();
        tally.asked(Access::Read);
        tally.ended(Outcome::Failed(Why::Stale(None)), true);
        tally.ended(Outcome::Unrouted(ErrorKind::Config), false);
        tally.lease_ended(Reason::Expired);
        meters.tally(&tally);
        meters.tally(&tally);
        assert_eq!(numbers.of(&["requests_asked", "read"]), [1]);
        assert_eq!(numbers.of(&["requests_failed", "stale"]), [1]);
        assert_eq!(numbers.of(&["requests_failed", "route_config"]), [1]);
        assert_eq!(numbers.of(&["leases_ended", "expired", "engine = a", "rank = 2"]), [1]);
        assert_eq!(numbers.of(&["quarantines", "of = request"]), [1]);
        assert_eq!(numbers.of(&["requests_failed"]).iter().sum::<u64>(), 2);
        assert_eq!(meters.counters()["kvx_requests_failed_total{reason=\"stale\"}"], 1);
    });
}

#[test]
fn what_is_gone_is_not_shown_as_there() {
    let numbers = Numbers::default();
    metrics::with_local_recorder(&numbers, || {
        let mut meters = meters("a");
        let gauges = Gauges { leases_held: 3, peers_known: 2, ..Gauges::default() };
        meters.now(&gauges);
        let held = || numbers.of(&["kvx_leases", "state = held"]);
        assert_eq!(held(), [3.0_f64.to_bits()]);
        drop(meters);
        assert_eq!(held(), [0]);
    });
}

#[test]
fn transports_are_bounded_whatever_a_library_calls_them() {
    let numbers = Numbers::default();
    metrics::with_local_recorder(&numbers, || {
        let mut meters = meters("a");
        for number in 0..1_000 {
            let name = format!("lane-{number}");
            meters.moved(moved(&name));
            meters.moved(moved(&name));
        }
        let series = numbers.of(&["kvx_transfers_total"]);
        assert_eq!(series.len(), 32);
        assert_eq!(series.iter().sum::<u64>(), 2_000);
        assert_eq!(numbers.of(&["kvx_transfers_total", "lane-7/mapped"]), [2]);
        assert_eq!(numbers.of(&["kvx_transfers_total", "transport = other"]), [2 * (1_000 - 31)]);
        let counters = meters.counters();
        assert_eq!(counters.keys().filter(|key| key.contains("transfers_total{")).count(), 32);
    });
}

/// What a request costs here, over six steps of its rank. The bound is far above: machines are slow and busy.
#[test]
fn a_request_costs_little() {
    let cost = |meters: &mut Meters| {
        let mut tally = Tally::default();
        let (owner, mut user) = (owner::Counts::default(), user::Counts::default());
        let mut gauges = Gauges::default();
        let requests = 20_000_u32;
        let begun = Instant::now();
        for _ in 0..requests {
            for step in 0..6 {
                match step {
                    0 => {
                        tally.asked(Access::Read);
                        gauges.requests_active += 1;
                    }
                    1 => {
                        user.posted += 1;
                        gauges.transfers_in_flight += 1;
                        meters.routed(Duration::ZERO);
                    }
                    2 => {
                        meters.moved(moved("shm"));
                        user.confirms += 1;
                        gauges.transfers_in_flight -= 1;
                    }
                    3 => {
                        tally.ended(Outcome::Ready, false);
                        gauges.requests_active -= 1;
                        meters.ended(Outcome::Ready, Duration::ZERO);
                        meters.ready(1 << 20, Duration::ZERO);
                    }
                    _ => {}
                }
                meters.now(&gauges);
                meters.tally(&tally);
                meters.leases(&owner, &user);
            }
        }
        begun.elapsed() / requests
    };
    let without = cost(&mut meters("nobody"));
    let numbers = Numbers::default();
    let with = metrics::with_local_recorder(&numbers, || cost(&mut meters("a")));
    println!("a request: {without:?} without a recorder, {with:?} with one");
    assert!(without < Duration::from_micros(20) && with < Duration::from_micros(40));
}
