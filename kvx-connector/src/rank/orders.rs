//! What an engine tells a rank, and what it hears.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::Error;
use kvx_core::card::{Address, EngineName};
use kvx_core::id::Incarnation;
use serde::Serialize;

use crate::protocol::user::Prove;
use crate::ticket::Table;

use crate::protocol::{
    Access, Attempt, Fingerprint, LeaseName, Part, Reason, RequestNumber, StageNumber, TransferKey,
};

/// Something that is kept until nothing moves in the blocks of an order any more, and then let go of: by the last rank that has it.
#[derive(Clone, Default)]
pub struct Kept(Option<Arc<dyn Any + Send + Sync>>);

impl Kept {
    /// Keeps this.
    pub fn new(what: impl Any + Send + Sync) -> Self {
        Self(Some(Arc::new(what)))
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Kept(something)" } else { "Kept(nothing)" })
    }
}

impl PartialEq for Kept {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        }
    }
}

impl Eq for Kept {}

/// A lease that this rank's engine grants on its blocks.
#[derive(Clone, Debug)]
pub struct GrantOrder {
    /// Its name: the same at every rank of the engine.
    pub lease: LeaseName,
    /// The request.
    pub key: TransferKey,
    /// What it allows.
    pub access: Access,
    /// The request's blocks, one table per cache group.
    pub tables: Vec<Table>,
    /// [That of the ticket](crate::ticket::Ticket::fingerprint): whoever says another is refused.
    pub fingerprint: Option<Fingerprint>,
    /// For how long it holds without a heartbeat.
    pub ttl: Duration,
    /// For how long it holds at most.
    pub hard: Duration,
    /// What is published already.
    pub parts: Vec<Part>,
    /// How many parts there will be, if that is known.
    pub total: Option<u32>,
    /// Stages that each part passes before it is published, or after it was written.
    pub stages: u8,
    /// Kept until the blocks are free.
    pub kept: Kept,
}

/// A request that this rank is to move: read what another engine leases to it, or write into what it leases.
#[derive(Clone, Debug)]
pub struct FetchOrder {
    /// Its number: chosen by the caller, unique among those not yet over.
    pub request: RequestNumber,
    /// The engine's name for it.
    pub key: TransferKey,
    /// The other engine.
    pub engine: EngineName,
    /// Where that engine's cards are served.
    pub address: Address,
    /// Which of its replicas.
    pub replica: u32,
    /// Its lease.
    pub lease: LeaseName,
    /// To read or to write.
    pub access: Access,
    /// This engine's attempt: the same at all its ranks.
    pub attempt: Attempt,
    /// Tokens that the request has in its cache.
    pub tokens: u64,
    /// Which of them to move.
    pub range: Range<u64>,
    /// The other engine's blocks, one table per cache group.
    pub theirs: Vec<Table>,
    /// This engine's blocks, one table per cache group.
    pub ours: Vec<Table>,
    /// Parts known to be published.
    pub parts: Vec<Part>,
    /// How many there are, if that is known.
    pub total: Option<u32>,
    /// Within which time it must end.
    pub deadline: Duration,
    /// Whether it is admitted. If not, the lease is held and nothing moves until it [begins](super::Rank::begin).
    pub begin: bool,
    /// When parts are proven.
    pub prove: Prove,
    /// Whether digests are compared before it is confirmed.
    pub digests: bool,
    /// Stages of the engine's own that each part passes before the transfer, and after it.
    pub stages: (u8, u8),
    /// What few requests say.
    pub options: FetchOptions,
}

/// What few requests say: the default says nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetchOptions {
    /// For how long the lease holds without a heartbeat, as its ticket says: one is sent thrice in that time at least.
    pub ttl: Option<Duration>,
    /// [That of its ticket](crate::ticket::Ticket::fingerprint), which the owner compares with what it granted.
    pub fingerprint: Option<Fingerprint>,
    /// Whether the lease stays held when the request fails, because whoever ordered it will order it again as the same reader,
    /// or [release](super::Rank::release) it. Not where it fails quarantined: then it is released.
    pub keep: bool,
    /// Ranks of the other engine from which this reader has everything already, and has confirmed it: see
    /// [`RankEvent::Failed`].
    pub proven: BTreeSet<Incarnation>,
    /// This engine's cache groups of which nothing is moved: their tables are empty.
    pub without: Vec<u16>,
    /// Kept until it has ended, and its blocks are not in quarantine.
    pub kept: Kept,
}

/// What a request is to move that was held before that was known.
#[derive(Clone, Debug)]
pub struct FillOrder {
    /// Tokens that the request has in its cache.
    pub tokens: u64,
    /// Which of them to move.
    pub range: Range<u64>,
    /// The other engine's blocks, one table per cache group.
    pub theirs: Vec<Table>,
    /// This engine's blocks, one table per cache group.
    pub ours: Vec<Table>,
    /// Parts known to be published.
    pub parts: Vec<Part>,
    /// How many there are in all, if that is known.
    pub total: Option<u32>,
    /// This engine's cache groups of which nothing is moved.
    pub without: Vec<u16>,
    /// Within which time from now it must end.
    pub deadline: Duration,
}

/// What a request that was moved was.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FetchReport {
    /// Bytes moved by this rank.
    pub bytes: u64,
    /// Segments posted.
    pub segments: u64,
    /// Transfers done.
    pub transfers: u64,
    /// Backends and transports used, as `backend/transport`.
    pub transports: BTreeSet<String>,
    /// From the order until the other engine's ranks were connected.
    pub routing: Duration,
    /// From the first transfer's post until the last one had settled.
    pub moving: Duration,
    /// From the order until its end.
    pub elapsed: Duration,
}

/// What a rank tells its engine.
#[derive(Debug)]
#[non_exhaustive]
pub enum RankEvent {
    /// A lease is over and its blocks may be reused. Once per lease.
    Freed {
        /// Which.
        lease: LeaseName,
        /// Why it ended.
        why: Reason,
    },
    /// A lease is over, and something may still be written into its blocks: they are kept until [`Freed`](Self::Freed).
    LeaseQuarantined {
        /// Which.
        lease: LeaseName,
        /// Why it ended.
        why: Reason,
    },
    /// Everything of a request is there and proven.
    Ready {
        /// Which.
        request: RequestNumber,
        /// What was moved.
        report: FetchReport,
    },
    /// A request failed.
    Failed {
        /// Which.
        request: RequestNumber,
        /// Why, and whether it may be worth trying again.
        error: Arc<Error>,
        /// Why the lease ended, or was refused by its owner, where that is why.
        reason: Option<Reason>,
        /// Every one of this engine's blocks that is not proven good, as (group, id).
        blocks: BTreeSet<(u16, u32)>,
        /// Whether they must be kept until [`Unquarantined`](Self::Unquarantined).
        quarantined: bool,
        /// Ranks of the other engine from which everything is there and proven all the same.
        proven: BTreeSet<Incarnation>,
        /// What was moved.
        report: FetchReport,
    },
    /// A request that was aborted is over: nothing moves any more, unless it is quarantined.
    Aborted {
        /// Which.
        request: RequestNumber,
        /// Whether its blocks must be kept until [`Unquarantined`](Self::Unquarantined).
        quarantined: bool,
    },
    /// Nothing moves any more in the blocks of a request that ended quarantined.
    Unquarantined {
        /// Which.
        request: RequestNumber,
    },
    /// A part is proven ([`Prove::EachPart`]) on this rank, from all its sources.
    PartReady {
        /// Of which request.
        request: RequestNumber,
        /// Which part.
        part: u32,
    },
    /// A stage of the engine's is to be run, and answered by [`stage_done`](super::Rank::stage_done) when it no longer touches
    /// the blocks.
    Stage {
        /// Its number.
        stage: StageNumber,
        /// Of what.
        of: StageOf,
        /// On which part.
        part: Part,
        /// Which of the stages that were ordered, from 0 on; those after the transfer follow those before.
        which: u8,
    },
}

/// What a stage belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageOf {
    /// A lease of this engine's.
    Lease(LeaseName),
    /// A request, and which of its sources.
    Request(RequestNumber, u16),
}
