//! What an owner is told, and what it says.

use std::time::Duration;

use kvx_core::id::Incarnation;

use crate::protocol::id::{Fingerprint, LeaseName, Part, Reader, TransferKey};
use crate::protocol::message::{ToOwner, ToUser};
use crate::protocol::terms::{Access, Reason, StageNumber};

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Input {
    /// The engine will grant a lease: what is said of it before is remembered, however long that takes, until it is granted or
    /// withdrawn.
    Expect {
        /// Which lease.
        lease: LeaseName,
        /// The engine's name for the request.
        key: TransferKey,
    },
    /// The engine grants a lease.
    Grant(Grant),
    /// The engine publishes more parts of a lease.
    Publish {
        /// Which lease.
        lease: LeaseName,
        /// The parts: numbers from 0 on, none twice.
        parts: Vec<Part>,
        /// How many there will be in all, with the last.
        total: Option<u32>,
    },
    /// The engine takes a lease back, granted or only expected: users are told at once.
    Withdraw {
        /// Which lease.
        lease: LeaseName,
        /// Why: [`Aborted`](Reason::Aborted), [`Preempted`](Reason::Preempted) or [`Failed`](Reason::Failed).
        why: Reason,
    },
    /// A message came from a peer, over a session that proved who it is.
    Message {
        /// The rank that sent it.
        peer: Incarnation,
        /// What it said.
        message: ToOwner,
    },
    /// A stage is over.
    StageDone {
        /// The number from [`Output::RunStage`].
        stage: StageNumber,
        /// Whether it did what it should.
        ok: bool,
    },
    /// A peer's life is over: it will never send anything again. This says nothing on what it has under way.
    PeerGone {
        /// Which.
        peer: Incarnation,
    },
    /// Nothing that a peer has posted until now can still move: its access was revoked, or it was shown in another way.
    Quiescent {
        /// Which.
        peer: Incarnation,
    },
    /// Time has passed: see `Owner::wake`.
    Tick,
}

/// A lease that the engine grants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// Its name.
    pub lease: LeaseName,
    /// The engine's name for the request.
    pub key: TransferKey,
    /// What it allows.
    pub access: Access,
    /// What is granted, as the ticket says it. `None`: it is not compared with what users say.
    pub fingerprint: Option<Fingerprint>,
    /// For how long it holds without a heartbeat.
    pub ttl: Duration,
    /// For how long it holds at most, however often it is extended.
    pub hard: Duration,
    /// Parts that are published already. For writing: that may be written.
    pub parts: Vec<Part>,
    /// How many there will be in all, if that is known. 0: there is nothing to transfer, and the lease ends at once.
    pub total: Option<u32>,
    /// How many stages each part passes: before it is published (to read), or after it was written (to write).
    pub stages: u8,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Output {
    /// Send a message, if the peer can be reached: it is asked for again where it is lost.
    Send {
        /// To whom.
        peer: Incarnation,
        /// What.
        message: ToUser,
    },
    /// Run a stage, and say [`Input::StageDone`] when it no longer touches the blocks.
    RunStage {
        /// Its number.
        stage: StageNumber,
        /// Of which lease.
        lease: LeaseName,
        /// On which part.
        part: Part,
        /// Which of the lease's stages, from 0 on.
        which: u8,
    },
    /// End a peer's access to this rank's memory, then say [`Input::Quiescent`].
    Revoke {
        /// Whose.
        peer: Incarnation,
    },
    /// A writer says, and in time, that parts are written.
    Written {
        /// Under which lease.
        lease: LeaseName,
        /// Who wrote.
        reader: Reader,
        /// How many parts from the first on.
        parts: u32,
        /// Whether these are all.
        last: bool,
    },
    /// The epoch has ended: from now on no reader is told that the lease held. Once per lease.
    Over {
        /// Which lease.
        lease: LeaseName,
        /// Why.
        why: Reason,
    },
    /// The blocks may be reused. Once per lease, after `Over`.
    Free {
        /// Which lease.
        lease: LeaseName,
        /// Why it ended. [`Done`](Reason::Done), for writing: everything has been written.
        why: Reason,
    },
    /// A bound has passed, and it is not known that nothing moves in the blocks: the request is over, the blocks are kept until
    /// `Free`, which comes once that is known. At most once per lease.
    Quarantined {
        /// Which lease.
        lease: LeaseName,
        /// Why it ended.
        why: Reason,
    },
}

/// Bounds of an owner. A later version may have more.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Config {
    /// The life of the engine that grants: leases of any other are refused.
    pub life: Incarnation,
    /// Most leases that are not free, and most that are expected. 65,536.
    pub max_leases: usize,
    /// Most leases that are remembered after they were freed; the one that is due first is forgotten first. 65,536.
    pub max_ended: usize,
    /// Most leases of which only why they ended is remembered after that; those with the lowest numbers are forgotten first.
    /// 65,536, of some 40 bytes.
    pub max_past: usize,
    /// Most attempts of one lease. 16.
    pub max_attempts: usize,
    /// Most parts of one lease. 65,536.
    pub max_parts: u32,
    /// Most messages that are remembered for leases not yet granted. 16,384.
    pub max_early: usize,
    /// Most of these from one peer. 1,024.
    pub max_early_per_peer: usize,
    /// For how long they are remembered, of leases that are not expected. 10 s.
    pub early_for: Duration,
    /// For how long, at least, a lease is remembered after its end. 10 s.
    pub keep_for: Duration,
    /// For how long, at most, where a reader said that it may ask for longer. 15 min.
    pub keep_at_most: Duration,
    /// After how long peers that still may write are revoked once a lease has ended; `None`: they never are. 1 s.
    pub revoke_after: Option<Duration>,
    /// After how long the blocks of a lease that has ended are quarantined. 5 s.
    pub quarantine_after: Duration,
}

impl Config {
    /// The defaults, for this life of an engine.
    #[must_use]
    pub const fn new(life: Incarnation) -> Self {
        Self {
            life,
            max_leases: 65_536,
            max_ended: 65_536,
            max_past: 65_536,
            max_attempts: 16,
            max_parts: 65_536,
            max_early: 16_384,
            max_early_per_peer: 1_024,
            early_for: Duration::from_secs(10),
            keep_for: Duration::from_secs(10),
            keep_at_most: Duration::from_secs(15 * 60),
            revoke_after: Some(Duration::from_secs(1)),
            quarantine_after: Duration::from_secs(5),
        }
    }
}

/// What an owner has counted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Counts {
    /// Leases granted.
    pub granted: u64,
    /// Leases that ended because one attempt's whole set had confirmed.
    pub done: u64,
    /// Leases that users gave up.
    pub released: u64,
    /// Leases that expired.
    pub expired: u64,
    /// Leases that the engine withdrew, or that ended for any other reason.
    pub withdrawn: u64,
    /// Leases freed.
    pub freed: u64,
    /// Leases quarantined; those freed since are counted in `freed`, too.
    pub quarantined: u64,
    /// Messages remembered for leases not yet granted.
    pub early: u64,
    /// Messages for leases not yet granted for which there was no room.
    pub early_refused: u64,
    /// Messages whose lease was not granted in time.
    pub early_lapsed: u64,
    /// Messages for a lease that had ended.
    pub late: u64,
    /// Of these, heartbeats.
    pub late_holds: u64,
    /// Messages for a lease of another life of the engine.
    pub other_life: u64,
    /// Messages that contradict earlier ones, or what the lease allows.
    pub contradictions: u64,
    /// Grants, parts and attempts for which there was no room.
    pub full: u64,
    /// Inputs of the engine's own side that mean nothing: an unknown lease, a part twice.
    pub ignored: u64,
    /// Leases forgotten before they were due.
    pub forgotten: u64,
    /// Verdicts that the lease did not hold.
    pub stale: u64,
}
