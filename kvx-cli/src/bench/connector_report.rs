//! What `kvx bench --connector` says.

use std::time::Duration;

use serde::Serialize;

use super::stats::Quantiles;
use crate::args::BenchArgs;
use crate::engine::live::Traffic;
use crate::fabric::Fabric;
use crate::output::{self, Output};
use crate::size;

/// Processor time of both processes together, all threads, in microseconds per request of 64 blocks.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Costs {
    /// The lease, and its ticket as bytes.
    pub(super) publish: f64,
    /// The fetch, from the ticket to the end of the lease, with many under way.
    pub(super) fetch: f64,
    /// The same, one after the other: threads go to sleep and are woken in between.
    pub(super) fetch_one_by_one: f64,
    /// The same segments over a bare port, with a notification, with many under way: what moving them costs, whoever asks for it.
    pub(super) bare: f64,
    /// The same, one after the other.
    pub(super) bare_one_by_one: f64,
}

/// Times of one block, in microseconds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Latencies {
    /// From the ticket until it is confirmed, one after the other.
    connector: Option<Quantiles>,
    /// The same segments over a bare port, until they have settled.
    bare: Option<Quantiles>,
    /// What is added to the bare port's time: each beside the one that came after it.
    added: Option<Quantiles>,
    /// The least that two sleeping processes take to wake each other: two counters (`eventfd`).
    raw_rtt: Option<Quantiles>,
}

impl Latencies {
    pub(super) fn new(
        connector: Vec<Duration>,
        bare: Vec<Duration>,
        raw_rtt: Option<Quantiles>,
    ) -> Self {
        let added = Quantiles::of_differences(&connector, &bare);
        Self { connector: Quantiles::of(connector), bare: Quantiles::of(bare), added, raw_rtt }
    }
}

/// What `kvx bench --connector --json` prints.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    backend: &'static str,
    transport: String,
    /// Requests whose time was taken.
    requests: u32,
    cpu_us_per_request: Costs,
    /// Tiny requests a second from their leases to the end of these, both processes on one core.
    requests_per_second: f64,
    latency_us: Latencies,
    /// Of the consumer's messages about leases: those that went with the data, and by the control channel.
    messages_with_data: u64,
    messages_by_channel: u64,
    /// Every element had its value.
    verified: bool,
}

impl Report {
    pub(super) fn new(
        fabric: &Fabric,
        transport: String,
        args: &BenchArgs,
        (costs, rate, latencies): (Costs, f64, Latencies),
        traffic: Traffic,
        wrong: u64,
    ) -> Self {
        Self {
            backend: fabric.name(),
            transport,
            requests: args.small,
            cpu_us_per_request: costs,
            requests_per_second: rate,
            latency_us: latencies,
            messages_with_data: traffic.by_fabric,
            messages_by_channel: traffic.by_channel,
            verified: wrong == 0,
        }
    }

    pub(super) fn print(&self, out: &mut Output) -> std::io::Result<()> {
        if out.is_json() {
            return Ok(());
        }
        out.line(format!(
            "the connector between two processes, over {} ({}), {}",
            self.backend,
            self.transport,
            size::of_many(self.requests.into(), "request"),
        ))?;
        out.line("")?;
        let costs = &self.cpu_us_per_request;
        let mut table = output::table(&["processor time of both sides, 64 blocks", "µs"], 1);
        for (what, micros) in [
            ("lease, and its ticket", costs.publish),
            ("fetch to the end of the lease, many at a time", costs.fetch),
            ("fetch to the end of the lease, one by one", costs.fetch_one_by_one),
            ("bare port, with a notification, many at a time", costs.bare),
            ("bare port, with a notification, one by one", costs.bare_one_by_one),
        ] {
            table.add_row([what.to_owned(), format!("{micros:.1}")]);
        }
        out.table(&table)?;
        out.line("")?;
        let mut table = output::table(&["one block, one by one", "p50 µs", "p99 µs"], 1);
        let times = &self.latency_us;
        for (what, times) in [
            ("fetched and confirmed", &times.connector),
            ("bare port", &times.bare),
            ("added", &times.added),
            ("two counters, there and back", &times.raw_rtt),
        ] {
            if let Some(Quantiles { p50, p99 }) = times {
                table.add_row([what.to_owned(), format!("{p50:.1}"), format!("{p99:.1}")]);
            }
        }
        out.table(&table)?;
        out.line("")?;
        out.line(format!(
            "{:.0} tiny requests a second on one core; {} messages with the data, {} by the control channel; {}",
            self.requests_per_second,
            size::count(self.messages_with_data),
            size::count(self.messages_by_channel),
            if self.verified { "verified" } else { "FAILED" },
        ))
    }
}
