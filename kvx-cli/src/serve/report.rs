//! What `kvx serve` says at its end.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use kvx_connector::rank::FetchReport;
use kvx_core::card::Address;
use serde::Serialize;

use super::Side;
use crate::engine::live::{Live, Traffic};
use crate::output::{self, Output};
use crate::size;

/// Most requests that have a line of their own.
const MAX_ROWS: usize = 32;
/// Most errors that are told apart.
const MAX_TOLD: usize = 8;

/// What a producer did.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Served {
    role: &'static str,
    engine: String,
    model: String,
    shape: String,
    /// Where requests were asked for, and where its cards are.
    address: String,
    cards: String,
    /// Sessions of consumers, over all.
    pub(super) consumers: u64,
    /// Requests that were leased.
    pub(super) requests: u64,
    /// Of these, those that a consumer found good, those in which it found something wrong, and those that it could not fetch.
    pub(super) good: u64,
    pub(super) wrong: u64,
    pub(super) failed: u64,
    /// Those whose consumer went without a word on them.
    pub(super) untold: u64,
    /// Connections to the port for requests that did not have the key, or were no kvx.
    pub(super) strangers: u64,
    /// Times that there was no room.
    pub(super) busy: u64,
    /// Leases, by why they ended.
    pub(super) leases: BTreeMap<String, u64>,
    pub(super) fill_seconds: f64,
    /// Why it ended.
    pub(super) ended: String,
}

impl Served {
    pub(super) fn new(side: &Side, address: &Address, cards: &str) -> Self {
        Self {
            role: "producer",
            engine: side.name.to_string(),
            model: side.model.clone(),
            shape: side.shape.to_string(),
            address: address.to_string(),
            cards: cards.to_owned(),
            consumers: 0,
            requests: 0,
            good: 0,
            wrong: 0,
            failed: 0,
            untold: 0,
            strangers: 0,
            busy: 0,
            leases: BTreeMap::new(),
            fill_seconds: 0.0,
            ended: String::new(),
        }
    }

    /// Whether no consumer said that something was wrong.
    pub(super) const fn is_good(&self) -> bool {
        self.wrong == 0
    }

    pub(super) fn print(&self, out: &mut Output) -> io::Result<()> {
        let leases: Vec<String> = self
            .leases
            .iter()
            .map(|(why, count)| format!("{} {why}", size::count(*count)))
            .collect();
        let leases = if leases.is_empty() { "none".to_owned() } else { leases.join(", ") };
        out.line(format!(
            "{}: {}, {} leased to {}; found good {}, wrong {}, not fetched {}, not told {}; leases that ended: {leases}",
            self.engine,
            self.ended,
            size::of_many(self.requests, "request"),
            size::of_many(self.consumers, "consumer"),
            size::count(self.good),
            size::count(self.wrong),
            size::count(self.failed),
            size::count(self.untold),
        ))?;
        match self.strangers {
            0 => Ok(()),
            some => out.line(format!(
                "{}: {} without the key refused at {}",
                self.engine,
                size::of_many(some, "connection"),
                self.address
            )),
        }
    }
}

/// One request that was asked for.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    request: u64,
    tokens: u64,
    bytes: u64,
    segments: u64,
    /// Backends and transports.
    transports: BTreeSet<String>,
    /// From asking for it until it was ready, or failed.
    milliseconds: f64,
    /// Of these, until the producer's ranks were connected, at the slowest rank.
    routing_milliseconds: f64,
    /// Elements compared, and those that were wrong.
    pub(super) elements: u64,
    pub(super) wrong: u64,
    /// Why it is not good, if it is not.
    pub(super) error: Option<String>,
}

impl Row {
    pub(super) fn new(
        request: u64,
        tokens: u64,
        elapsed: Duration,
        reports: &[FetchReport],
    ) -> Self {
        let routing = reports.iter().map(|report| report.routing).max().unwrap_or_default();
        Self {
            request,
            tokens,
            bytes: reports.iter().map(|report| report.bytes).sum(),
            segments: reports.iter().map(|report| report.segments).sum(),
            transports: reports.iter().flat_map(|report| report.transports.clone()).collect(),
            milliseconds: elapsed.as_secs_f64() * 1e3,
            routing_milliseconds: routing.as_secs_f64() * 1e3,
            elements: 0,
            wrong: 0,
            error: None,
        }
    }
}

/// What a consumer did.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Fetched {
    role: &'static str,
    engine: String,
    model: String,
    shape: String,
    producer: String,
    producer_engine: String,
    producer_model: String,
    producer_shape: String,
    /// Whether digests were compared.
    integrity: bool,
    /// All were fetched, and every element had its value.
    pub(super) verified: bool,
    /// Requests that were wanted, and that were good.
    requests: usize,
    good: usize,
    bytes: u64,
    seconds: f64,
    /// `bytes` in `seconds`, filling and checking included, in 10^9 bytes per second.
    gbps: f64,
    /// How the producer's ranks were reached, and why so.
    choices: Vec<String>,
    traffic: Traffic,
    pub(super) rows: Vec<Row>,
}

impl Fetched {
    pub(super) fn new(
        side: &Side,
        producer: &Address,
        (engine, model, shape): (String, String, String),
        integrity: bool,
    ) -> Self {
        Self {
            role: "consumer",
            engine: side.name.to_string(),
            model: side.model.clone(),
            shape: side.shape.to_string(),
            producer: producer.to_string(),
            producer_engine: engine,
            producer_model: model,
            producer_shape: shape,
            integrity,
            verified: false,
            requests: 0,
            good: 0,
            bytes: 0,
            seconds: 0.0,
            gbps: 0.0,
            choices: Vec::new(),
            traffic: Traffic::default(),
            rows: Vec::new(),
        }
    }

    /// Enters what it came to.
    pub(super) fn ended(&mut self, elapsed: Duration, requests: usize, live: &Live) {
        self.rows.sort_by_key(|row| row.request);
        self.requests = requests;
        self.good = self.rows.iter().filter(|row| row.error.is_none()).count();
        self.verified = self.good == requests;
        self.bytes = self.rows.iter().map(|row| row.bytes).sum();
        self.seconds = elapsed.as_secs_f64();
        self.gbps = rate(self.bytes, elapsed);
        self.choices = live.choices();
        self.traffic = live.traffic();
    }

    pub(super) fn print(&self, out: &mut Output) -> io::Result<()> {
        if out.is_json() {
            return Ok(());
        }
        let heads = ["request", "tokens", "bytes", "segments", "ms", "over", "result"];
        let mut table = output::table(&heads, 0);
        for row in self.rows.iter().take(MAX_ROWS) {
            let over: Vec<&str> = row.transports.iter().map(String::as_str).collect();
            table.add_row([
                row.request.to_string(),
                size::count(row.tokens),
                size::bytes(row.bytes),
                size::count(row.segments),
                format!("{:.1}", row.milliseconds),
                over.join(", "),
                if row.error.is_none() { "verified" } else { "FAILED" }.to_owned(),
            ]);
        }
        out.table(&table)?;
        if self.rows.len() > MAX_ROWS {
            out.line(format!(
                " and {}",
                size::of_many((self.rows.len() - MAX_ROWS) as u64, "other")
            ))?;
        }
        out.line("")?;
        let errors: BTreeSet<&str> =
            self.rows.iter().filter_map(|row| row.error.as_deref()).collect();
        for error in errors.iter().take(MAX_TOLD) {
            out.line(format!("FAILED: {error}"))?;
        }
        for choice in &self.choices {
            out.line(format!("over {choice}"))?;
        }
        let digests = match (self.integrity, self.traffic.digests_equal) {
            (true, equal) => format!("{} of digests", size::of_many(equal, "comparison")),
            (false, _) => "no digests".to_owned(),
        };
        out.line(format!(
            "{} of {} verified: {} in {:.2} s ({:.2} GB/s, filling and checking included), {digests}",
            size::count(self.good as u64),
            size::of_many(self.requests as u64, "request"),
            size::bytes(self.bytes),
            self.seconds,
            self.gbps,
        ))
    }
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn rate(bytes: u64, elapsed: Duration) -> f64 {
    let seconds = elapsed.as_secs_f64();
    if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 }
}
