//! A recorder that keeps what it is given.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use kvx_connector::observe::Kind;
use metrics::{
    Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};

/// The one of this process. Tests tell theirs by the names of their engines.
pub(crate) fn installed() -> Record {
    static INSTALLED: OnceLock<Record> = OnceLock::new();
    let record = INSTALLED.get_or_init(|| {
        let record = Record::default();
        metrics::set_global_recorder(record.clone()).unwrap();
        record
    });
    record.clone()
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Record(Arc<Mutex<Inside>>);

#[derive(Debug, Default)]
struct Inside {
    counters: BTreeMap<Key, Arc<AtomicU64>>,
    gauges: BTreeMap<Key, Arc<AtomicU64>>,
    histograms: BTreeMap<Key, Arc<Values>>,
    described: BTreeMap<String, (Unit, String)>,
}

#[derive(Debug, Default)]
struct Values(Mutex<Vec<f64>>);

impl HistogramFn for Values {
    fn record(&self, value: f64) {
        self.0.lock().unwrap().push(value);
    }
}

impl Record {
    fn describe(&self, key: &KeyName, unit: Option<Unit>, text: SharedString) {
        let mut inside = self.0.lock().unwrap();
        let said = (unit.unwrap(), text.into_owned());
        let before = inside.described.insert(key.as_str().to_owned(), said.clone());
        assert!(before.is_none_or(|before| before == said));
    }

    /// What a counter or gauge of a rank is: `name{label="value"}`, with its own labels.
    pub(crate) fn value(&self, engine: &str, rank: u32, series: &str) -> f64 {
        let inside = self.0.lock().unwrap();
        let counters = inside.counters.iter();
        let whole = counters.map(|(key, value)| (key, whole(value.load(Ordering::Relaxed))));
        let gauges = inside.gauges.iter();
        let broken =
            gauges.map(|(key, value)| (key, f64::from_bits(value.load(Ordering::Relaxed))));
        let mut found = whole.chain(broken).filter(|(key, _)| is(key, engine, rank, series));
        let value = found.next().unwrap_or_else(|| panic!("{series} is not recorded")).1;
        assert!(found.next().is_none(), "{series} twice");
        value
    }

    /// The sum of all series of a counter.
    pub(crate) fn sum(&self, engine: &str, rank: u32, name: &str) -> f64 {
        let inside = self.0.lock().unwrap();
        let mine = |key: &Key| key.name() == name && is(key, engine, rank, &series(key));
        let counters = inside.counters.iter().filter(|(key, _)| mine(key));
        counters.map(|(_, value)| whole(value.load(Ordering::Relaxed))).sum()
    }

    /// What a histogram was given.
    pub(crate) fn values(&self, engine: &str, rank: u32, series: &str) -> Vec<f64> {
        let inside = self.0.lock().unwrap();
        let mut found = inside.histograms.iter().filter(|(key, _)| is(key, engine, rank, series));
        found.next().unwrap().1.0.lock().unwrap().clone()
    }

    /// All metrics, with their kinds and the names of their labels, sorted.
    pub(crate) fn recorded(&self) -> BTreeMap<String, (Kind, BTreeSet<Vec<String>>)> {
        let inside = self.0.lock().unwrap();
        let counters = inside.counters.keys().map(|key| (key, Kind::Counter));
        let gauges = inside.gauges.keys().map(|key| (key, Kind::Gauge));
        let histograms = inside.histograms.keys().map(|key| (key, Kind::Histogram));
        let mut recorded = BTreeMap::new();
        for (key, kind) in counters.chain(gauges).chain(histograms) {
            let mut labels: Vec<_> = key.labels().map(|label| label.key().to_owned()).collect();
            labels.sort();
            let entry =
                recorded.entry(key.name().to_owned()).or_insert_with(|| (kind, BTreeSet::new()));
            assert_eq!(entry.0, kind, "{}", key.name());
            entry.1.insert(labels);
        }
        recorded
    }

    pub(crate) fn described(&self) -> BTreeMap<String, (Unit, String)> {
        self.0.lock().unwrap().described.clone()
    }

    /// In how many series of an engine a text is part of a label's value.
    pub(crate) fn mentions(&self, engine: &str, text: &str) -> usize {
        let inside = self.0.lock().unwrap();
        let keys =
            inside.counters.keys().chain(inside.gauges.keys()).chain(inside.histograms.keys());
        keys.filter(|key| label(key, "engine") == engine)
            .filter(|key| key.labels().any(|label| label.value().contains(text)))
            .count()
    }
}

fn label<'a>(key: &'a Key, name: &str) -> &'a str {
    key.labels().find(|label| label.key() == name).map_or("", |label| label.value())
}

/// A series' name, without the labels that all have.
fn series(key: &Key) -> String {
    let own = key.labels().filter(|label| !["engine", "replica", "rank"].contains(&label.key()));
    let own: Vec<_> = own.map(|label| format!("{}={:?}", label.key(), label.value())).collect();
    match own.is_empty() {
        true => key.name().to_owned(),
        false => format!("{}{{{}}}", key.name(), own.join(",")),
    }
}

fn is(key: &Key, engine: &str, rank: u32, wanted: &str) -> bool {
    label(key, "engine") == engine
        && label(key, "rank") == rank.to_string()
        && series(key) == wanted
}

fn whole(count: u64) -> f64 {
    f64::from(u32::try_from(count).unwrap())
}

impl Recorder for Record {
    fn describe_counter(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.describe(&key, unit, description);
    }

    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.describe(&key, unit, description);
    }

    fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.describe(&key, unit, description);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let mut inside = self.0.lock().unwrap();
        Counter::from_arc(Arc::clone(inside.counters.entry(key.clone()).or_default()))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        let mut inside = self.0.lock().unwrap();
        Gauge::from_arc(Arc::clone(inside.gauges.entry(key.clone()).or_default()))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        let mut inside = self.0.lock().unwrap();
        Histogram::from_arc(Arc::clone(inside.histograms.entry(key.clone()).or_default()))
    }
}
