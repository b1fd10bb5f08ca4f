//! What `kvx demo` says.

use kvx_core::transfer::Mode;
use serde::Serialize;

use super::replay::Through;
use super::scale::Scale;
use crate::engine::watch::Changed;
use crate::engine::work::Wrong;
use crate::output::{self, Output};
use crate::shape::Shape;
use crate::size;

/// What `kvx demo --json` prints.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// Requests whose cache was moved.
    pub(crate) requests: u64,
    /// Bytes moved.
    pub(crate) bytes: u64,
    /// Segments posted.
    pub(crate) segments: u64,
    /// Bytes of a segment, at the mean: the shorter they are, the fewer GB/s.
    pub(crate) mean_segment: u64,
    pub(crate) backend: &'static str,
    pub(crate) transport: String,
    /// Time in which at least one transfer was under way, the listing of its segments included.
    pub(crate) seconds: f64,
    /// `bytes` in that time, in 10^9 bytes per second.
    pub(crate) gbps: f64,
    /// Every element was compared and had its value, and no watched block changed.
    pub(crate) verified: bool,
    /// Elements compared, over all consumer ranks.
    pub(crate) elements: u64,
    /// Elements that were wrong.
    pub(crate) wrong: u64,
    /// The first of these.
    pub(crate) mismatches: Vec<Misplaced>,
    /// Blocks of other requests, free blocks and the null block that were watched for change.
    pub(crate) watched: u64,
    /// Those that changed.
    pub(crate) changed: Vec<Overwritten>,
    /// Tokens of all prompts.
    pub(crate) tokens: u64,
    /// Tokens of these that were moved.
    pub(crate) tokens_moved: u64,
    /// Tokens of these that the consumer held already.
    pub(crate) tokens_reused: u64,
    /// By which way caches were moved.
    pub(crate) through: Through,
    /// Whether digests were compared before requests were confirmed; how many were, over all ranks.
    pub(crate) integrity: bool,
    pub(crate) digests: u64,
    /// Messages about leases that went with the data, and by the control channel.
    pub(crate) messages_with_data: u64,
    pub(crate) messages_by_channel: u64,
    /// Times that a rank was told that a request had been moved: by a notification, or by the end of a lease.
    pub(crate) notifications: u64,
    /// Both engines in this process.
    pub(crate) in_process: bool,
    pub(crate) model: String,
    pub(crate) scale: Scale,
    pub(crate) producer: Shape,
    pub(crate) consumer: Shape,
    pub(crate) mode: Mode,
    /// The engine that starts transfers.
    pub(crate) initiator: &'static str,
    pub(crate) seed: u64,
    /// Where the trace is from.
    pub(crate) trace: String,
    /// What is so without being asked for.
    pub(crate) remarks: Vec<String>,
    /// Time of filling caches, of checking them, and in all.
    pub(crate) fill_seconds: f64,
    pub(crate) check_seconds: f64,
    pub(crate) total_seconds: f64,
}

/// A wrong element, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Misplaced {
    /// Number of the request in the trace, from 0.
    pub(crate) request: u64,
    /// Number of the consumer rank, over all replicas.
    pub(crate) rank: usize,
    #[serde(flatten)]
    pub(crate) wrong: Wrong,
}

/// A block that a transfer should have left alone, and did not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Overwritten {
    pub(crate) rank: usize,
    #[serde(flatten)]
    pub(crate) block: Changed,
}

impl Report {
    /// Prints it for people.
    pub(crate) fn print(&self, out: &mut Output) -> std::io::Result<()> {
        if out.is_json() {
            return Ok(());
        }
        for found in &self.mismatches {
            let Wrong { layer, role, block, token, head, dim, expected, found: value } =
                &found.wrong;
            let token = token.map_or_else(|| "–".to_owned(), |token| token.to_string());
            out.line(format!(
                "WRONG request {} rank {}: (layer {layer}, {role}, block {block}, token {token}, \
                 head {head}) dim {dim}: expected {expected}, found {value}",
                found.request, found.rank
            ))?;
        }
        let told = self.mismatches.len() as u64;
        if self.wrong > told {
            out.line(format!("and {} more wrong elements", size::count(self.wrong - told)))?;
        }
        for changed in &self.changed {
            let Changed { layer, role, block } = &changed.block;
            out.line(format!(
                "OVERWRITTEN rank {}: (layer {layer}, {role}, block {block}) is not of these requests",
                changed.rank
            ))?;
        }
        out.line("")?;
        let heads = [
            "backend",
            "transport",
            "requests",
            "bytes",
            "segments",
            "mean",
            "time",
            "GB/s",
            "result",
        ];
        let mut table = output::table(&heads, 2);
        table.add_row([
            self.backend.to_owned(),
            self.transport.clone(),
            size::count(self.requests),
            size::bytes(self.bytes),
            size::count(self.segments),
            size::bytes(self.mean_segment),
            format!("{:.2} s", self.seconds),
            format!("{:.2}", self.gbps),
            if self.verified { "verified" } else { "FAILED" }.to_owned(),
        ]);
        out.table(&table)?;
        out.line("")?;
        out.line(format!(
            "{} tokens, of which the consumer held {} already; {} elements compared, {} blocks watched",
            size::count(self.tokens),
            size::count(self.tokens_reused),
            size::count(self.elements),
            size::count(self.watched),
        ))?;
        if self.through == Through::Connector {
            out.line(format!(
                "{} of leases heard of, {} of digests; messages: {} with the data, {} by the control channel",
                size::of_many(self.notifications, "end"),
                size::of_many(self.digests, "comparison"),
                size::count(self.messages_with_data),
                size::count(self.messages_by_channel),
            ))?;
        }
        out.line(format!(
            "{:.1} s in all: {:.1} s filling caches, {:.1} s moving, {:.1} s checking",
            self.total_seconds, self.fill_seconds, self.seconds, self.check_seconds
        ))?;
        self.remarks.iter().try_for_each(|remark| out.line(format!("Note: {remark}")))
    }
}
