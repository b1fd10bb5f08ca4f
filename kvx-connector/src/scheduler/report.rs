//! What each worker tells the scheduler after a step.

use kvx_core::id::Incarnation;
use kvx_core::wire::{Text, printable};
use kvx_core::{Error, Result};
use serde::{Deserialize, Serialize, Serializer};

use super::step;
use crate::form::{self, LeaseForm, List, named_fields, own_form};
use crate::protocol::{LeaseName, Reason};

/// What one rank's worker has to tell the scheduler.
///
/// Every lease that was granted and every load that was begun has exactly one end at each rank. A report that is delivered
/// twice does no harm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerReport {
    /// The life of the engine, as its steps say.
    pub engine: Incarnation,
    /// Number of the report at this rank, from 1 on.
    pub number: u64,
    /// Leases whose epoch has ended at this rank, and whose blocks may be reused there: no reader can be told any more that what
    /// it read is good, and nobody writes.
    pub ended: Vec<LeaseEnd>,
    /// Loads that have ended at this rank: nothing is written there any more.
    pub loads: Vec<LoadEnd>,
    /// Numbers of attempts that ended with blocks in quarantine, in which nothing moves any more.
    pub quiet: Vec<u64>,
    /// What the worker has done since it was started.
    pub stats: WorkerStats,
}

/// A lease whose epoch has ended at a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LeaseEnd {
    /// The lease.
    #[serde(serialize_with = "form::lease")]
    pub lease: LeaseName,
    /// Why.
    pub why: Reason,
}

/// A load that has ended at a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LoadEnd {
    /// Number of the attempt.
    pub attempt: u64,
    /// How it ended.
    pub outcome: LoadOutcome,
    /// What is not proven good, as (cache group, logical block). Of a load that was not loaded, none means all of its blocks.
    pub blocks: Vec<(u16, u32)>,
    /// Which of its blocks somebody may still write, for all that the rank knows: not to be used before the rank says that they
    /// are quiet.
    pub quarantined: Vec<(u16, u32)>,
    /// What went wrong, for logs.
    #[serde(serialize_with = "write_reason")]
    pub reason: String,
}

/// How a load ended at a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LoadOutcome {
    /// All that this rank needs is there, and the lease confirmed.
    Loaded,
    /// It failed, and may be tried again. Its lease is extended until another load replaces it, or it is released.
    Retry,
    /// It failed for good. Its lease will be released.
    Failed,
    /// It was aborted, and the lease released.
    Aborted,
}

/// What a worker has done since it was started. Of one rank: a request that is loaded by four ranks is counted by each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkerStats {
    /// Loads that ended as loaded.
    pub loads: u64,
    /// Loads that ended otherwise.
    pub failed_loads: u64,
    /// Bytes that this rank read or wrote in peers' memory.
    pub bytes: u64,
    /// Segments that this took.
    pub segments: u64,
    /// Microseconds from the first batch's post to the last one's settling, summed over loads.
    pub transfer_us: u64,
    /// Blocks in quarantine now.
    pub quarantined: u64,
}

named_fields!(WorkerReport {
    engine: Incarnation,
    number: u64,
    ended: List<LeaseEnd, { WorkerReport::MAX_ITEMS }> = Vec::new(),
    loads: List<LoadEnd, { WorkerReport::MAX_ITEMS }> = Vec::new(),
    quiet: List<u64, { WorkerReport::MAX_ITEMS }> = Vec::new(),
    stats: WorkerStats = WorkerStats::default(),
});
named_fields!(LeaseEnd { lease: LeaseForm, why: Reason });
named_fields!(LoadEnd {
    attempt: u64,
    outcome: LoadOutcome,
    blocks: List<GroupBlock, { WorkerReport::MAX_BLOCKS }> = Vec::new(),
    quarantined: List<GroupBlock, { WorkerReport::MAX_BLOCKS }> = Vec::new(),
    reason: Words = String::new(),
});
named_fields!(WorkerStats {
    loads: u64 = 0,
    failed_loads: u64 = 0,
    bytes: u64 = 0,
    segments: u64 = 0,
    transfer_us: u64 = 0,
    quarantined: u64 = 0,
});

type GroupBlock = (u16, u32);
type Words = Text<{ LoadEnd::MAX_REASON }>;

own_form!(GroupBlock, Reason, LoadOutcome);

/// Writes a reason as [`Words`] reads it: without control characters, and cut where it is long.
fn write_reason<S: Serializer>(reason: &str, serializer: S) -> Result<S::Ok, S::Error> {
    let mut reason = printable(reason);
    while reason.len() > LoadEnd::MAX_REASON {
        reason.pop();
    }
    serializer.serialize_str(&reason)
}

impl LoadEnd {
    /// Most bytes of a reason.
    pub const MAX_REASON: usize = 512;

    /// A load that ended with this outcome, for this reason.
    #[must_use]
    pub fn new(attempt: u64, outcome: LoadOutcome, reason: impl Into<String>) -> Self {
        let (blocks, quarantined) = (Vec::new(), Vec::new());
        Self { attempt, outcome, blocks, quarantined, reason: reason.into() }
    }
}

impl WorkerReport {
    /// Most leases and most loads in one report. What is over goes into the next.
    pub const MAX_ITEMS: usize = 4096;
    /// Most blocks of one load.
    pub const MAX_BLOCKS: usize = 1 << 20;
    /// Most bytes of a report.
    pub const MAX_BYTES: usize = 64 << 20;

    /// A report of nothing.
    #[must_use]
    pub fn new(engine: Incarnation, number: u64) -> Self {
        let stats = WorkerStats::default();
        Self { engine, number, ended: Vec::new(), loads: Vec::new(), quiet: Vec::new(), stats }
    }

    /// As bytes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): more than a scheduler would read.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let counts = [("ended", self.ended.len()), ("loads", self.loads.len())];
        for (name, count) in counts.into_iter().chain([("quiet", self.quiet.len())]) {
            if count > Self::MAX_ITEMS {
                return Err(Error::misuse("report", format!("{name}: too many"))
                    .with_context("count", count)
                    .with_context("limit", Self::MAX_ITEMS));
            }
        }
        step::encode("report", self, Self::MAX_BYTES)
    }

    /// The report that these bytes are.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Peer`](kvx_core::ErrorKind::Peer), naming the field: too long, of another version, malformed, or over a
    /// limit.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        step::decode("report", "the report", bytes, Self::MAX_BYTES)
    }
}
