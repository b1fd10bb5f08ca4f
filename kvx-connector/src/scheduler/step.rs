//! What the scheduler tells the workers in each step.

use std::ops::Range;
use std::time::Duration;

use kvx_core::card::{Address, EngineName};
use kvx_core::id::Incarnation;
use kvx_core::{Error, Result, wire};
use serde::Serialize;

use super::request::RequestId;
use crate::form::{self, LeaseForm, List, Maybe, Millis, Parsed, Span, named_fields};
use crate::protocol::{Fingerprint, LeaseName, Reason, TransferKey};
use crate::ticket::{Table, Ticket, TicketGroup};

/// What the scheduler tells every worker of its engine in one step: the same bytes to all.
///
/// A worker does what is in it in the order of the fields. Each thing is said once; a step that is lost is lost, and the
/// engine with it, as its scheduler and workers live and die together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StepMetadata {
    /// This life of the engine: leases that it grants and attempts that it makes are of this life.
    pub engine: Incarnation,
    /// The step's number, from 1 on, with none left out.
    pub step: u64,
    /// Leases that will be granted: what a peer says of them before they are is to be remembered.
    pub expects: Vec<Expect>,
    /// Blocks to be copied into the host's buffer.
    pub saves: Vec<Save>,
    /// Leases that begin.
    pub grants: Vec<Grant>,
    /// Leases that end at once, because their requests were aborted or preempted, with what was granted or expected under
    /// them.
    pub withdrawals: Vec<Withdrawal>,
    /// Loads that end: nothing more is posted, and the lease is released once nothing is in flight. Each rank reports its end,
    /// unless it has reported one already.
    pub aborts: Vec<u64>,
    /// Leases of which a load will come: to be extended by heartbeat from now until it does, or until they are released.
    pub holds: Vec<Hold>,
    /// Loads to begin. Their leases are extended until they have ended.
    pub loads: Vec<Load>,
    /// Leases that will not be used, or not any more.
    pub releases: Vec<Release>,
}

/// A lease that will be granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Expect {
    /// Its name.
    #[serde(serialize_with = "form::lease")]
    pub lease: LeaseName,
    /// The transfer.
    pub key: TransferKey,
}

/// Blocks to be copied into the host's buffer, from where they are read: one part of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Save {
    /// The lease under which they will be granted.
    #[serde(serialize_with = "form::lease")]
    pub lease: LeaseName,
    /// The part's number, from 0 on.
    pub part: u32,
    /// Tokens of the request that are new in it.
    #[serde(serialize_with = "form::span")]
    pub tokens: Range<u64>,
    /// The blocks that hold them, one table for each of the engine's cache groups.
    pub tables: Vec<Table>,
}

/// A lease that begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Grant {
    /// Its name.
    #[serde(serialize_with = "form::lease")]
    pub lease: LeaseName,
    /// The transfer.
    pub key: TransferKey,
    /// The engine's own name of the request, for logs.
    pub request: RequestId,
    /// How many tokens' cache is leased.
    pub tokens: u64,
    /// How long it runs unless it is extended.
    #[serde(serialize_with = "form::millis")]
    pub ttl: Duration,
    /// How long it runs at most, however often it is extended.
    #[serde(serialize_with = "form::millis")]
    pub hard: Duration,
    /// That of its ticket.
    pub fingerprint: Fingerprint,
    /// How many parts there were, where they went through the host's buffer; else 1.
    pub parts: u32,
    /// The blocks, one table for each of the engine's cache groups.
    pub tables: Vec<Table>,
}

/// A lease that ends at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Withdrawal {
    /// Its name.
    #[serde(serialize_with = "form::lease")]
    pub lease: LeaseName,
    /// Why: [`Aborted`](Reason::Aborted), [`Preempted`](Reason::Preempted) or [`Failed`](Reason::Failed).
    pub why: Reason,
}

/// Where a lease is, and how to get there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Source {
    /// The producer's engine.
    #[serde(serialize_with = "form::text")]
    pub engine: EngineName,
    /// Where it serves its cards, as a stranger said: see [`Ticket`].
    #[serde(serialize_with = "form::text")]
    pub cards: Address,
    /// Its data parallel replica.
    pub replica: u32,
    /// The lease.
    #[serde(serialize_with = "form::lease")]
    pub lease: LeaseName,
    /// The transfer.
    pub key: TransferKey,
    /// How long the lease runs unless it is extended.
    #[serde(serialize_with = "form::millis")]
    pub ttl: Duration,
    /// That of the ticket: it is of the whole, also where less is loaded.
    pub fingerprint: Fingerprint,
}

/// A lease to be extended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Hold {
    /// The attempt for which.
    pub attempt: u64,
    /// For how long from now at most.
    #[serde(serialize_with = "form::millis")]
    pub deadline: Duration,
    /// The lease.
    pub source: Source,
}

/// A load to begin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Number of the attempt: the same for all ranks.
    pub attempt: u64,
    /// Number of the attempt that failed before it, which it takes the place of.
    pub replaces: Option<u64>,
    /// The engine's own name of the request, for logs.
    pub request: RequestId,
    /// The lease.
    pub source: Source,
    /// Within which time from now it must end.
    #[serde(serialize_with = "form::millis")]
    pub deadline: Duration,
    /// Whether the cache comes in parts, which the producer's ranks announce.
    pub announced: bool,
    /// Tokens to load: those from the consumer's own prefix to the last that is wanted.
    #[serde(serialize_with = "form::span")]
    pub tokens: Range<u64>,
    /// The consumer's blocks, one table for each of its cache groups; empty for a group of which nothing is loaded.
    pub local: Vec<Table>,
    /// The producer's, one for each of its groups. The two sides' groups need not be the same.
    pub remote: Vec<TicketGroup>,
}

/// A lease that will not be used, or not any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Release {
    /// The attempt that gives it up.
    pub attempt: u64,
    /// The lease.
    pub source: Source,
}

named_fields!(StepMetadata {
    engine: Incarnation,
    step: u64,
    withdrawals: List<Withdrawal, { StepMetadata::MAX_ITEMS }> = Vec::new(),
    expects: List<Expect, { StepMetadata::MAX_ITEMS }> = Vec::new(),
    saves: List<Save, { StepMetadata::MAX_ITEMS }> = Vec::new(),
    grants: List<Grant, { StepMetadata::MAX_ITEMS }> = Vec::new(),
    aborts: List<u64, { StepMetadata::MAX_ITEMS }> = Vec::new(),
    holds: List<Hold, { StepMetadata::MAX_ITEMS }> = Vec::new(),
    loads: List<Load, { StepMetadata::MAX_ITEMS }> = Vec::new(),
    releases: List<Release, { StepMetadata::MAX_ITEMS }> = Vec::new(),
});
named_fields!(Expect { lease: LeaseForm, key: TransferKey });
named_fields!(Save {
    lease: LeaseForm,
    part: u32,
    tokens: Span,
    tables: List<Table, { Ticket::MAX_GROUPS }>,
});
named_fields!(Grant {
    lease: LeaseForm,
    key: TransferKey,
    request: RequestId,
    tokens: u64,
    ttl: Millis,
    hard: Millis,
    fingerprint: Fingerprint,
    parts: u32,
    tables: List<Table, { Ticket::MAX_GROUPS }>,
});
named_fields!(Source {
    engine: Parsed<EngineName, { EngineName::MAX_BYTES }>,
    cards: Parsed<Address, { Address::MAX_BYTES }>,
    replica: u32,
    lease: LeaseForm,
    key: TransferKey,
    ttl: Millis,
    fingerprint: Fingerprint,
});
named_fields!(Hold { attempt: u64, deadline: Millis, source: Source });
named_fields!(Withdrawal { lease: LeaseForm, why: Reason });
named_fields!(Load {
    attempt: u64,
    replaces: Maybe<u64> = None,
    request: RequestId,
    source: Source,
    deadline: Millis,
    announced: bool,
    tokens: Span,
    local: List<Table, { Ticket::MAX_GROUPS }>,
    remote: List<TicketGroup, { Ticket::MAX_GROUPS }>,
});
named_fields!(Release { attempt: u64, source: Source });

impl StepMetadata {
    /// Most things of each kind in one step. What is over goes into the next.
    pub const MAX_ITEMS: usize = 4096;
    /// Most bytes of a step.
    pub const MAX_BYTES: usize = 128 << 20;

    /// A step in which there is nothing to do.
    #[must_use]
    pub const fn new(engine: Incarnation, step: u64) -> Self {
        Self {
            engine,
            step,
            withdrawals: Vec::new(),
            expects: Vec::new(),
            saves: Vec::new(),
            grants: Vec::new(),
            aborts: Vec::new(),
            holds: Vec::new(),
            loads: Vec::new(),
            releases: Vec::new(),
        }
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.withdrawals.is_empty()
            && self.expects.is_empty()
            && self.saves.is_empty()
            && self.grants.is_empty()
            && self.aborts.is_empty()
            && self.holds.is_empty()
            && self.loads.is_empty()
            && self.releases.is_empty()
    }

    /// As bytes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): longer than a worker would read. Never of a step that a
    /// [`SchedulerConnector`](super::SchedulerConnector) built.
    pub fn encode(&self) -> Result<Vec<u8>> {
        encode("step", self, Self::MAX_BYTES)
    }

    /// The step that these bytes are.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Peer`](kvx_core::ErrorKind::Peer), naming the field: too long, of another version, malformed, or over a
    /// limit.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        decode("step", "the step", bytes, Self::MAX_BYTES)
    }
}

/// Version of what an engine's scheduler and workers tell each other. They are of one version, or do not talk.
const VERSION: u16 = 1;

pub(super) fn encode<T: Serialize>(what: &'static str, value: &T, max: usize) -> Result<Vec<u8>> {
    let mut bytes = VERSION.to_le_bytes().to_vec();
    bytes.extend_from_slice(&wire::to_bytes(what, value)?);
    if bytes.len() > max {
        return Err(Error::misuse(what, "too long")
            .with_context("bytes", bytes.len())
            .with_context("limit", max));
    }
    Ok(bytes)
}

pub(super) fn decode<T: serde::de::DeserializeOwned>(
    what: &'static str,
    name: &'static str,
    bytes: &[u8],
    max: usize,
) -> Result<T> {
    if bytes.len() > max {
        return Err(Error::peer(what, format!("{name} is too long"))
            .with_context("bytes", bytes.len())
            .with_context("limit", max));
    }
    let Some((version, body)) = bytes.split_first_chunk::<2>() else {
        return Err(Error::peer(what, format!("{name} is cut short")));
    };
    let version = u16::from_le_bytes(*version);
    if version != VERSION {
        return Err(Error::mismatch_between(
            what,
            "version",
            ("this process", VERSION),
            ("the other", version),
        )
        .with_remedy("run the same version of kvx in all processes of an engine"));
    }
    wire::from_bytes(what, name, body)
}
