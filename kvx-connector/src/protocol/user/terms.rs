//! What a user is told, and what it says.

use std::time::Duration;

use kvx_core::id::Incarnation;

use crate::protocol::id::{Fingerprint, LeaseName, Part, Reader, TransferKey};
use crate::protocol::message::{ToOwner, ToUser};
use crate::protocol::terms::{Access, Ranks, Reason, RequestNumber, StageNumber, TransferNumber};

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Input {
    /// The engine asks for a request.
    Ask(Ask),
    /// A request that was asked for without `begin` is admitted: its blocks are there.
    Begin {
        /// Which.
        request: RequestNumber,
    },
    /// A producer that writes has more parts.
    Publish {
        /// Which request.
        request: RequestNumber,
        /// The parts: numbers from 0 on, none twice.
        parts: Vec<Part>,
        /// How many there will be in all, with the last.
        total: Option<u32>,
    },
    /// A request has another deadline: so long from now.
    Until {
        /// Which.
        request: RequestNumber,
        /// How long.
        deadline: Duration,
    },
    /// The engine gives a request up: aborted, rejected before it was admitted, preempted.
    Abort {
        /// Which.
        request: RequestNumber,
    },
    /// A peer can be sent to and transferred with.
    PeerReady {
        /// Which.
        peer: Incarnation,
    },
    /// A peer that was needed cannot be had.
    PeerFailed {
        /// Which.
        peer: Incarnation,
    },
    /// The connection to a peer has ended, after the last of its transfers settled; its life may go on.
    PeerDown {
        /// Which.
        peer: Incarnation,
    },
    /// A peer's life is over, after the last of its transfers settled.
    PeerGone {
        /// Which.
        peer: Incarnation,
    },
    /// A message came from a peer, over a session that proved who it is.
    Message {
        /// The rank that sent it.
        peer: Incarnation,
        /// What it said.
        message: ToUser,
    },
    /// A transfer is over: nothing of it moves any more.
    Settled {
        /// The number from [`Output::Post`].
        transfer: TransferNumber,
        /// How it ended.
        outcome: Outcome,
    },
    /// A stage is over.
    StageDone {
        /// The number from [`Output::RunStage`].
        stage: StageNumber,
        /// Whether it did what it should.
        ok: bool,
    },
    /// Time has passed: see `User::wake`.
    Tick,
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// Every byte is there.
    Done,
    /// It failed.
    Failed {
        /// Whether the same may work later: not where it was refused.
        retry: bool,
    },
    /// It was cancelled.
    Cancelled,
    /// It was never posted, for want of room. This is no failure: it is posted again.
    Busy,
}

/// A request for what an owner's engine leases.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ask {
    /// Its number here.
    pub request: RequestNumber,
    /// The engine's name for it.
    pub key: TransferKey,
    /// The lease.
    pub lease: LeaseName,
    /// What is to be done under it.
    pub access: Access,
    /// To what, as its ticket says. `None`: the owner is not told, and compares nothing.
    pub fingerprint: Option<Fingerprint>,
    /// This rank, in this attempt.
    pub reader: Reader,
    /// The owner's ranks: all to which this rank confirms.
    pub sources: Vec<Source>,
    /// Within which time from now it must end.
    pub deadline: Duration,
    /// Whether it is admitted. If not, the lease is held, and nothing is posted, until [`Input::Begin`].
    pub begin: bool,
    /// When parts are proven.
    pub prove: Prove,
    /// How many stages each part passes before it is posted.
    pub before: u8,
    /// How many stages each part passes after it has settled.
    pub after: u8,
    /// How the lease is kept alive.
    pub keeping: Keeping,
}

/// How a lease is kept alive that a request uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Keeping {
    /// From one heartbeat to the next at most; never more than [`Config::hold_every`](super::Config::hold_every). `None`: that.
    pub every: Option<Duration>,
    /// Whether nothing is released when the request fails, because whoever asked goes on as the same reader, or releases by a
    /// request of its own. What is quarantined is released all the same: nothing can go on from that.
    pub after_failure: bool,
}

/// One rank of the owner: read from, or written to, or only told.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Which.
    pub peer: Incarnation,
    /// All ranks of this attempt that confirm there, this one among them.
    pub set: Ranks,
    /// Whether anything is transferred. If not (a replica that is not read), it is only confirmed.
    pub data: bool,
    /// Parts known to be published.
    pub parts: Vec<Part>,
    /// How many there are in all, if that is known.
    pub total: Option<u32>,
}

/// When parts are proven.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Prove {
    /// All at once, after the last byte.
    #[default]
    Whole,
    /// As they settle, so that each may be used as soon as that is known. Costs messages.
    EachPart,
}

/// Which way a message may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Route {
    /// The control channel.
    Control,
    /// The control channel, or with the data where that is faster.
    WithData,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Output {
    /// A peer is needed. Answered by [`Input::PeerReady`] or [`Input::PeerFailed`], in time.
    NeedPeer {
        /// Which.
        peer: Incarnation,
    },
    /// Send a message, if the peer can be reached: it is sent again where no answer comes.
    Send {
        /// To whom.
        peer: Incarnation,
        /// What.
        message: ToOwner,
        /// Which way.
        route: Route,
    },
    /// Post the transfer of one part, all that this rank and that one share of it. Answered by [`Input::Settled`], also when
    /// it was refused, or when there is nothing to move.
    Post {
        /// Its number.
        transfer: TransferNumber,
        /// Of which request.
        request: RequestNumber,
        /// Which of the request's sources, from 0 on.
        source: u16,
        /// Which part.
        part: Part,
    },
    /// Give a transfer up. It must still settle.
    Cancel {
        /// Which.
        transfer: TransferNumber,
    },
    /// End all transfers to a peer, which did not settle though cancelled.
    Sever {
        /// Which.
        peer: Incarnation,
    },
    /// Run a stage, and say [`Input::StageDone`] when it no longer touches the blocks.
    RunStage {
        /// Its number.
        stage: StageNumber,
        /// Of which request.
        request: RequestNumber,
        /// Which of the request's sources, from 0 on.
        source: u16,
        /// Which part.
        part: Part,
        /// Which stage, from 0 on; those after the transfer follow those before it.
        which: u8,
    },
    /// A part is proven, with [`Prove::EachPart`], and has passed its stages.
    PartProven {
        /// Of which request.
        request: RequestNumber,
        /// Which of the request's sources, from 0 on.
        source: u16,
        /// Which part.
        part: u32,
    },
    /// Everything is there and proven. The request is over.
    Ready {
        /// Which.
        request: RequestNumber,
    },
    /// It failed. The request is over.
    Failed {
        /// Which.
        request: RequestNumber,
        /// What came first.
        why: Why,
        /// Everything that is not proven good.
        unproven: Vec<Unproven>,
        /// Whether its blocks must be kept until [`Output::Unquarantined`]: something in them may still move.
        quarantined: bool,
    },
    /// It was aborted, and is over.
    Aborted {
        /// Which.
        request: RequestNumber,
        /// Whether its blocks must be kept until [`Output::Unquarantined`]: something in them may still move.
        quarantined: bool,
    },
    /// Nothing moves any more in the blocks of a request that ended quarantined.
    Unquarantined {
        /// Which.
        request: RequestNumber,
    },
    /// It was not taken: there is no room, or it contradicts itself. Nothing of it was done.
    Refused {
        /// Which.
        request: RequestNumber,
    },
}

/// What is not proven good of one source: everything but these parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Unproven {
    /// Which of the request's sources, from 0 on.
    pub source: u16,
    /// Numbers of the parts that are good, in order.
    pub proven: Vec<u32>,
    /// All parts that are known, in order, where some are good: what the numbers mean.
    pub parts: Vec<Part>,
    /// Whether these are all that there are.
    pub complete: bool,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Why {
    /// The owner says that the lease has ended.
    Ended(Reason),
    /// The owner says that the lease did not hold any more when the last byte had arrived, and why, unless it is of an earlier
    /// version: what was read may be anything.
    Stale(Option<Reason>),
    /// A peer could not be reached.
    PeerFailed,
    /// The connection to a peer to which it wrote has ended.
    PeerDown,
    /// A peer is gone.
    PeerGone,
    /// A transfer failed, as often as it was tried.
    Transfer,
    /// A stage failed.
    Stage,
    /// What the owner published contradicts itself, or is over a limit.
    Contradiction,
    /// Its time was over.
    Deadline,
}
