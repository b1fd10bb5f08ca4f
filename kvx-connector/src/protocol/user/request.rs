//! One request, and its sources.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvx_core::id::Incarnation;

use super::{Ask, Prove, Unproven, Why};
use crate::protocol::id::{Fingerprint, LeaseName, Nonce, Part, Reader, TransferKey};
use crate::protocol::terms::{Access, Ranks, RequestNumber, StageNumber, TransferNumber};

/// A request of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Request {
    pub(super) number: RequestNumber,
    pub(super) key: TransferKey,
    pub(super) lease: LeaseName,
    pub(super) access: Access,
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) reader: Reader,
    pub(super) prove: Prove,
    pub(super) before: u8,
    pub(super) after: u8,
    pub(super) deadline_at: Duration,
    /// From one heartbeat to the next.
    pub(super) hold_every: Duration,
    /// Whether a failure leaves the lease held.
    pub(super) keeps: bool,
    pub(super) state: State,
    pub(super) sources: Vec<Source>,
    /// Stages that run.
    pub(super) staging: usize,
    /// Its place in the user's list of what is due.
    pub(super) due: Option<Duration>,
}

/// See the [documentation of users](super).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum State {
    Holding,
    Active,
    Ending { how: How, until: Duration, severed: bool },
    Quarantined,
}

/// How a request ends that is not ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum How {
    Failed(Why),
    Aborted,
}

/// One rank of the owner, for one request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Source {
    pub(super) peer: Incarnation,
    pub(super) set: Ranks,
    pub(super) data: bool,
    /// Whether its peer can be reached.
    pub(super) linked: bool,
    pub(super) phase: Phase,
    /// Boxed: a node of the tree has room for eleven, and there is one, nearly always.
    pub(super) parts: BTreeMap<u32, Box<Piece>>,
    pub(super) total: Option<u32>,
    /// Parts of which nothing was begun.
    pub(super) unbegun: Vec<u32>,
    /// Parts to be posted, by when.
    pub(super) queue: BTreeSet<(Duration, u32)>,
    /// Transfers that have not settled.
    pub(super) flying: usize,
    /// Parts whose bytes are there.
    pub(super) settled: u32,
    /// Parts that have passed their stages, too.
    pub(super) here: u32,
    /// Parts settled since the last nonce was drawn, if parts are proven one by one.
    pub(super) fresh: Vec<u32>,
    /// Whether the owner has answered: a writer writes only then.
    pub(super) admitted: bool,
    pub(super) hold_at: Duration,
    pub(super) holds: u32,
    /// Whether its release was sent, or need not be.
    pub(super) released: bool,
}

/// Where a source stands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    /// Parts are transferred; perhaps a confirm of some is out.
    Open { asking: Option<Asking> },
    /// All has settled, and the last confirm is out.
    Closing { asking: Asking },
    /// The lease held after the last byte.
    Proven,
    /// It gives nothing more.
    Failed(Why),
}

/// A confirm that waits for its verdict.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Asking {
    pub(super) nonce: Nonce,
    /// How many parts it covers without a gap.
    pub(super) covers: u32,
    /// Which parts it proves, if parts are proven one by one.
    pub(super) parts: Vec<u32>,
    pub(super) sent: u32,
    pub(super) next: Duration,
}

/// A part at one source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Piece {
    pub(super) part: Part,
    pub(super) work: Work,
    pub(super) proven: bool,
    pub(super) tries: u8,
}

/// What is done with a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Work {
    /// Nothing yet.
    Known,
    /// A stage runs, before it is posted.
    Before { stage: StageNumber, which: u8 },
    /// It waits to be posted.
    Queued,
    /// It is posted.
    Flying { transfer: TransferNumber },
    /// Its bytes are there, and a stage runs.
    After { stage: StageNumber, which: u8 },
    /// It is there.
    Here,
    /// It failed, or was given up.
    Lost,
}

impl Request {
    pub(super) fn new(ask: Ask, now: Duration, hold_every: Duration) -> Self {
        let state = if ask.begin { State::Active } else { State::Holding };
        let sources = ask.sources.into_iter().map(|source| Source {
            peer: source.peer,
            set: source.set,
            data: source.data,
            linked: false,
            phase: Phase::Open { asking: None },
            parts: BTreeMap::new(),
            total: None,
            unbegun: Vec::new(),
            queue: BTreeSet::new(),
            flying: 0,
            settled: 0,
            here: 0,
            fresh: Vec::new(),
            admitted: false,
            hold_at: now,
            holds: 0,
            released: false,
        });
        Self {
            number: ask.request,
            key: ask.key,
            lease: ask.lease,
            access: ask.access,
            fingerprint: ask.fingerprint,
            reader: ask.reader,
            prove: ask.prove,
            before: ask.before,
            after: ask.after,
            deadline_at: now + ask.deadline,
            hold_every,
            keeps: ask.keeping.after_failure,
            state,
            sources: sources.collect(),
            staging: 0,
            due: None,
        }
    }

    /// Whether it is neither over nor ending.
    pub(super) const fn is_alive(&self) -> bool {
        matches!(self.state, State::Holding | State::Active)
    }

    /// Whether nothing of it can still touch its blocks.
    pub(super) fn is_quiet(&self) -> bool {
        self.staging == 0 && self.sources.iter().all(|source| source.flying == 0)
    }

    /// Everything that is not proven good.
    pub(super) fn unproven(&self) -> Vec<Unproven> {
        let lacking = |(index, source): (usize, &Source)| {
            if source.is_good() {
                return None;
            }
            let pieces = || source.parts.values().map(AsRef::as_ref);
            let good = |piece: &&Piece| piece.proven && piece.work == Work::Here;
            let proven: Vec<u32> = pieces().filter(good).map(|piece| piece.part.number).collect();
            let told = !proven.is_empty();
            let known = u32::try_from(source.parts.len()).unwrap_or(u32::MAX);
            Some(Unproven {
                source: u16::try_from(index).unwrap_or(u16::MAX),
                proven,
                parts: pieces().filter(|_| told).map(|piece| piece.part.clone()).collect(),
                complete: source.total == Some(known),
            })
        };
        self.sources.iter().enumerate().filter_map(lacking).collect()
    }

    /// When something is due.
    pub(super) fn next(&self, window: usize) -> Option<Duration> {
        match self.state {
            State::Holding | State::Active => {
                let active = self.state == State::Active;
                let sources = self.sources.iter();
                let next =
                    sources.filter_map(|source| source.next(active, self.access, window)).min();
                Some(next.map_or(self.deadline_at, |next| next.min(self.deadline_at)))
            }
            State::Ending { until, .. } => Some(until),
            State::Quarantined => None,
        }
    }
}

impl Source {
    /// Whether all its bytes are there.
    pub(super) fn is_settled(&self) -> bool {
        !self.data || self.total == Some(self.settled)
    }

    /// Whether it is proven, and all its parts have passed their stages.
    pub(super) fn is_good(&self) -> bool {
        self.phase == Phase::Proven && self.here == self.settled
    }

    /// Number of the first part that it does not know.
    pub(super) fn have(&self) -> u32 {
        let gap = self.parts.keys().zip(0..).find(|(number, place)| *number != place);
        gap.map_or_else(|| u32::try_from(self.parts.len()).unwrap_or(u32::MAX), |(_, place)| place)
    }

    /// How many parts from the first on have settled without a gap.
    pub(super) fn covered(&self) -> u32 {
        if self.is_settled() {
            return self.settled;
        }
        let settled = |piece: &Piece| matches!(piece.work, Work::After { .. } | Work::Here);
        let gap = self
            .parts
            .iter()
            .zip(0..)
            .find(|((number, piece), place)| *number != place || !settled(piece));
        gap.map_or(self.settled, |(_, place)| place)
    }

    /// Whether its transfers may be posted.
    pub(super) fn may_post(&self, active: bool, access: Access) -> bool {
        let asked = access == Access::Read || self.admitted;
        active && self.linked && asked && matches!(self.phase, Phase::Open { .. })
    }

    fn next(&self, active: bool, access: Access, window: usize) -> Option<Duration> {
        if !self.linked {
            return None;
        }
        let (hold, ask) = match &self.phase {
            Phase::Open { asking } => (Some(self.hold_at), asking.as_ref().map(|ask| ask.next)),
            Phase::Closing { asking } => (None, Some(asking.next)),
            Phase::Proven | Phase::Failed(_) => (None, None),
        };
        let room = self.may_post(active, access) && self.flying < window;
        let post = self.queue.first().filter(|_| room).map(|(at, _)| *at);
        [hold, ask, post].into_iter().flatten().min()
    }
}
