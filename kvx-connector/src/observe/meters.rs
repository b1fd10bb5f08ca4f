//! Handing on what was counted to the program's recorder.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_core::transfer::Mode;
use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, with_recorder};

use super::catalogue::{self as all, COMMON, Metric};
use super::rows::{self, Family, Row};
use super::tally::{Gauges, Moved, Outcome, Tally};
use crate::control::ControlStats;
use crate::protocol::peers::{PeersStats, Place};
use crate::protocol::{owner, user};
use crate::rank::RankCounts;

/// Most pairs of backend and transport that are counted by name. What a library calls its transports is its own choice.
const TRANSPORTS: usize = 32;

/// Who all is counted of, as labels.
#[derive(Clone, Debug)]
struct Whose([Label; 3]);

impl Whose {
    /// The key of one series.
    fn key(&self, metric: &Metric, values: &[&str]) -> Key {
        let mut labels = self.0.to_vec();
        let own = metric.labels.iter().zip(values);
        labels.extend(own.map(|(name, value)| Label::new(*name, (*value).to_owned())));
        Key::from_parts(metric.name, labels)
    }

    fn counter(&self, metric: &Metric, values: &[&str]) -> Counter {
        with_recorder(|recorder| recorder.register_counter(&self.key(metric, values), &METADATA))
    }

    fn gauge(&self, metric: &Metric, values: &[&str]) -> Gauge {
        with_recorder(|recorder| recorder.register_gauge(&self.key(metric, values), &METADATA))
    }

    fn histogram(&self, metric: &Metric, values: &[&str]) -> Histogram {
        with_recorder(|recorder| recorder.register_histogram(&self.key(metric, values), &METADATA))
    }
}

static METADATA: Metadata<'static> =
    Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

/// Counters that follow the numbers of one structure.
#[derive(Debug)]
struct Follow<T: 'static> {
    last: T,
    rows: &'static [Row<T>],
    families: &'static [Family<T>],
    handles: Vec<Counter>,
}

impl<T: Copy + Default + PartialEq> Follow<T> {
    fn new(whose: &Whose, rows: &'static [Row<T>], families: &'static [Family<T>]) -> Self {
        let mut handles = Vec::new();
        handles.extend(rows.iter().map(|(metric, value, _)| whose.counter(metric, &[value])));
        for (metric, values, _) in families {
            handles.extend(values.iter().map(|value| whose.counter(metric, &[value])));
        }
        Self { last: T::default(), rows, families, handles }
    }

    fn publish(&mut self, now: &T) {
        if *now == self.last {
            return;
        }
        let grow = |handle: &Counter, now: u64, last: u64| {
            if now > last {
                handle.increment(now - last);
            }
        };
        let (rows, mut rest) = self.handles.split_at(self.rows.len());
        for ((_, _, of), handle) in self.rows.iter().zip(rows) {
            grow(handle, of(now), of(&self.last));
        }
        for (_, values, of) in self.families {
            let (mine, others) = rest.split_at(values.len());
            rest = others;
            let (now, last) = (of(now), of(&self.last));
            // Most are as they were.
            if now != last {
                for ((now, last), handle) in now.iter().zip(last).zip(mine) {
                    grow(handle, *now, *last);
                }
            }
        }
        self.last = *now;
    }

    /// All counts, by the names and labels of their metrics.
    fn list(&self, into: &mut BTreeMap<String, u64>) {
        for (metric, value, of) in self.rows {
            into.insert(series(metric, &[value]), of(&self.last));
        }
        for (metric, values, of) in self.families {
            for (value, count) in values.iter().zip(of(&self.last)) {
                into.insert(series(metric, &[value]), *count);
            }
        }
    }
}

/// Gauges that follow the numbers of one structure.
#[derive(Debug)]
struct Show<T: 'static> {
    last: T,
    rows: &'static [Row<T>],
    handles: Vec<Gauge>,
}

impl<T: Copy + Default + PartialEq> Show<T> {
    fn new(whose: &Whose, rows: &'static [Row<T>]) -> Self {
        let handles = rows.iter().map(|(metric, value, _)| whose.gauge(metric, &[value]));
        let shown = Self { last: T::default(), rows, handles: handles.collect() };
        shown.handles.iter().for_each(|handle| handle.set(0.0));
        shown
    }

    fn publish(&mut self, now: &T) {
        if *now == self.last {
            return;
        }
        for ((_, _, of), handle) in self.rows.iter().zip(&self.handles) {
            let value = of(now);
            if value != of(&self.last) {
                handle.set(float(value));
            }
        }
        self.last = *now;
    }
}

/// What goes over one transport.
#[derive(Debug)]
struct Transport {
    backend: &'static str,
    /// As the backend calls it, with the way that the bytes took where there are several.
    name: String,
    mode: Mode,
    moved: [u64; 3],
    handles: [Counter; 3],
    elapsed: Histogram,
}

/// All metrics of one rank. Made when the rank starts: handles are looked up once.
#[derive(Debug)]
pub(crate) struct Meters {
    whose: Whose,
    tally: Follow<Tally>,
    owner: Follow<owner::Counts>,
    user: Follow<user::Counts>,
    peers: Follow<PeersStats>,
    rank: Follow<RankCounts>,
    control: Follow<ControlStats>,
    now: Show<Gauges>,
    control_now: Show<ControlStats>,
    transports: Vec<Transport>,
    routing: Histogram,
    confirming: Histogram,
    bytes: Histogram,
    held: Histogram,
    /// Ready, failed, aborted.
    elapsed: [Histogram; 3],
}

impl Meters {
    pub(crate) fn new(engine: &str, place: Place) -> Self {
        all::describe();
        let values = [engine.to_owned(), place.replica.to_string(), place.rank.to_string()];
        let mut values = values.into_iter();
        let whose = Whose(COMMON.map(|name| Label::new(name, values.next().unwrap_or_default())));
        Self {
            tally: Follow::new(&whose, rows::TALLY, rows::TALLIES),
            owner: Follow::new(&whose, rows::OWNER, &[]),
            user: Follow::new(&whose, rows::USER, &[]),
            peers: Follow::new(&whose, rows::PEERS, rows::PEERS_FAMILIES),
            rank: Follow::new(&whose, rows::RANK, &[]),
            control: Follow::new(&whose, rows::CONTROL, &[]),
            now: Show::new(&whose, rows::NOW),
            control_now: Show::new(&whose, rows::CONTROL_NOW),
            transports: Vec::new(),
            routing: whose.histogram(&all::REQUEST_ROUTING, &[]),
            confirming: whose.histogram(&all::REQUEST_CONFIRM, &[]),
            bytes: whose.histogram(&all::REQUEST_BYTES, &[]),
            held: whose.histogram(&all::LEASE_HELD, &[]),
            elapsed: ["ready", "failed", "aborted"]
                .map(|outcome| whose.histogram(&all::REQUEST_ELAPSED, &[outcome])),
            whose,
        }
    }

    pub(crate) fn tally(&mut self, tally: &Tally) {
        self.tally.publish(tally);
    }

    pub(crate) fn leases(&mut self, owner: &owner::Counts, user: &user::Counts) {
        self.owner.publish(owner);
        self.user.publish(user);
    }

    pub(crate) fn rank(&mut self, peers: &PeersStats, rank: &RankCounts) {
        self.peers.publish(peers);
        self.rank.publish(rank);
    }

    pub(crate) fn control(&mut self, stats: &ControlStats) {
        self.control.publish(stats);
        self.control_now.publish(stats);
    }

    pub(crate) fn now(&mut self, now: &Gauges) {
        self.now.publish(now);
    }

    pub(crate) fn routed(&self, took: Duration) {
        self.routing.record(took);
    }

    pub(crate) fn held(&self, took: Duration) {
        self.held.record(took);
    }

    pub(crate) fn ended(&self, outcome: Outcome, elapsed: Duration) {
        let [ready, failed, aborted] = &self.elapsed;
        match outcome {
            Outcome::Ready => ready,
            Outcome::Failed(_) | Outcome::Unrouted(_) => failed,
            Outcome::Aborted => aborted,
        }
        .record(elapsed);
    }

    /// A request was ready: what it moved, and what its confirmation took.
    pub(crate) fn ready(&self, bytes: u64, confirming: Duration) {
        self.bytes.record(float(bytes));
        self.confirming.record(confirming);
    }

    pub(crate) fn moved(&mut self, moved: Moved<'_>) {
        let transport = self.transport(&moved);
        for ((handle, sum), count) in
            transport.handles.iter().zip(&mut transport.moved).zip([1, moved.bytes, moved.segments])
        {
            handle.increment(count);
            *sum += count;
        }
        transport.elapsed.record(moved.elapsed);
    }

    fn transport(&mut self, moved: &Moved<'_>) -> &mut Transport {
        let same = |known: &Transport| {
            let named = match moved.route {
                None => known.name == moved.transport,
                Some(route) => known
                    .name
                    .strip_prefix(moved.transport)
                    .and_then(|rest| rest.strip_prefix('/'))
                    .is_some_and(|rest| rest == route),
            };
            named && known.backend == moved.backend && known.mode == moved.mode
        };
        let full = self.transports.len() >= TRANSPORTS;
        let place = self.transports.iter().position(same);
        let place = match place {
            Some(place) => place,
            // The last is for all that come when there are as many as there may be.
            None if full => self.transports.len() - 1,
            None => {
                let name = match moved.route {
                    _ if self.transports.len() + 1 == TRANSPORTS => "other".to_owned(),
                    Some(route) => format!("{}/{route}", moved.transport),
                    None => moved.transport.to_owned(),
                };
                let labels = [moved.backend, &name, mode(moved.mode)];
                let metrics = [all::TRANSFERS, all::TRANSFER_BYTES, all::TRANSFER_SEGMENTS];
                let handles = metrics.map(|metric| self.whose.counter(&metric, &labels));
                let elapsed = self.whose.histogram(&all::TRANSFER_SECONDS, &labels);
                let (backend, mode) = (moved.backend, moved.mode);
                let moved = [0; 3];
                self.transports.push(Transport { backend, name, mode, moved, handles, elapsed });
                self.transports.len() - 1
            }
        };
        &mut self.transports[place]
    }

    /// All counters of the rank, by the names and labels of their metrics.
    pub(crate) fn counters(&self) -> BTreeMap<String, u64> {
        let mut counters = BTreeMap::new();
        self.tally.list(&mut counters);
        self.owner.list(&mut counters);
        self.user.list(&mut counters);
        self.peers.list(&mut counters);
        self.rank.list(&mut counters);
        self.control.list(&mut counters);
        for transport in &self.transports {
            let labels = [transport.backend, &transport.name, mode(transport.mode)];
            let metrics = [all::TRANSFERS, all::TRANSFER_BYTES, all::TRANSFER_SEGMENTS];
            for (metric, count) in metrics.iter().zip(transport.moved) {
                counters.insert(series(metric, &labels), count);
            }
        }
        counters
    }
}

/// What is gone is not shown as there.
impl Drop for Meters {
    fn drop(&mut self) {
        self.now.publish(&Gauges::default());
        self.control_now.publish(&ControlStats::default());
    }
}

/// A series' name as Prometheus writes it, without the labels that all have.
fn series(metric: &Metric, values: &[&str]) -> String {
    let labels = metric.labels.iter().zip(values);
    let labels: Vec<String> = labels.map(|(label, value)| format!("{label}={value:?}")).collect();
    match labels.is_empty() {
        true => metric.name.to_owned(),
        false => format!("{}{{{}}}", metric.name, labels.join(",")),
    }
}

const fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Read => "read",
        Mode::Write => "write",
    }
}

/// As recorders want it. Exact below 2⁵³.
#[expect(clippy::cast_precision_loss, reason = "counts and bytes of one request are below 2^53")]
const fn float(value: u64) -> f64 {
    value as f64
}
