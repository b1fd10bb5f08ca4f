//! What a [`Peers`](super::Peers) is told, and what it says is to be done.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::Error;
use kvx_core::backend::PeerInfo;
use kvx_core::card::{Address, EngineName};
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::{Incarnation, PeerId};
use kvx_core::layout::RankCoords;
use kvx_core::memory::KeyBlob;
use serde::Serialize;

use super::route::{Role, Route};
use super::serve::OwnCards;

/// A session of the control channel, as whoever runs the channel numbers it. Never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// A [`Want`], as its caller numbers it. Never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WantId(pub u64);

/// A step of a backend, numbered by [`Peers`](super::Peers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepId(pub u64);

/// A connection of one of this rank's backends to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Connection {
    /// The backend, as this rank named it in [`LocalRank::backends`](super::LocalRank::backends).
    pub backend: &'static str,
    /// The peer, as this backend's port numbers it.
    pub peer: PeerId,
}

/// Who is at the other end of a session, as the control channel has authenticated it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Remote {
    /// The engine.
    pub engine: EngineName,
    /// This life: of the rank, or of the process that only serves cards.
    pub incarnation: Incarnation,
    /// Which rank; `None` of a process that only serves cards.
    pub rank: Option<Place>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Remote({self})")
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "{} {rank} ({})", self.engine, self.incarnation),
            None => write!(f, "{} ({})", self.engine, self.incarnation),
        }
    }
}

/// A rank's number in its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Place {
    /// The data parallel replica.
    pub replica: u32,
    /// Its number in the replica, as in [`RankCoords::replica_index`].
    pub rank: u32,
}

impl From<&RankCoords> for Place {
    fn from(coords: &RankCoords) -> Self {
        Self { replica: coords.dp, rank: coords.replica_index() }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "replica {} rank {}", self.replica, self.rank)
    }
}

/// Somebody needs an engine: exactly one [`Output::Ready`] or [`Output::Failed`] follows, by [`until`](Self::until).
#[derive(Clone, Debug)]
pub struct Want {
    /// The caller's number for it.
    pub id: WantId,
    /// The engine, as the request names it.
    pub engine: EngineName,
    /// Which of its data parallel replicas.
    pub replica: u32,
    /// Where its cards are served, as the request names it.
    pub address: Address,
    /// The life of the engine ([`LeaseName::owner`](crate::protocol::LeaseName::owner)) that the request speaks of: any other one is
    /// refused. `None` where it does not say: then it is the one that is there now.
    pub life: Option<Incarnation>,
    /// What this engine is for it.
    pub role: Role,
    /// When to give up.
    pub until: Duration,
}

/// What happened.
#[derive(Debug)]
#[non_exhaustive]
pub enum Input {
    /// A caller needs an engine.
    Want(Want),
    /// A caller needs it no longer. Nothing follows.
    Unwant(WantId),
    /// The cards of this engine that are to be served from now on, in place of those before.
    Serve(OwnCards),
    /// A session is up and authenticated.
    SessionUp {
        /// Its number.
        session: SessionId,
        /// Who is there.
        remote: Remote,
        /// The address that was dialled; `None` where the other side dialled.
        dialled: Option<Address>,
    },
    /// What [`Output::Dial`] asked for came to nothing.
    DialFailed {
        /// The address.
        address: Address,
        /// Why.
        error: Error,
    },
    /// A session is over: closed, lost, or nothing was heard for too long. Never told twice, nor of one that
    /// [`Output::CloseSession`] named.
    SessionDown {
        /// Its number.
        session: SessionId,
        /// Why, where it was not in order.
        error: Option<Error>,
    },
    /// A message that is for this machine came.
    Message {
        /// By which session.
        session: SessionId,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// What became of a step. Each [`Output::Step`] is answered once.
    Stepped {
        /// The step.
        step: StepId,
        /// What became of it.
        result: Stepped,
    },
    /// A port says that a connection is over.
    PeerDown {
        /// The connection.
        connection: Connection,
        /// Why, where this side did not end it.
        error: Option<Error>,
    },
    /// An engine is no longer needed: its peers are told, and everything of it is given up.
    Forget(EngineName),
    /// Everything is given up: all peers are told.
    Close,
    /// Nothing; it is time.
    Tick,
}

/// What became of a step of a backend.
#[derive(Debug)]
#[non_exhaustive]
pub enum Stepped {
    /// [`Step::Offer`].
    Offered(HandshakeBytes),
    /// [`Step::Accept`]: the peer, and what to answer.
    Accepted(PeerId, HandshakeBytes),
    /// [`Step::Complete`]: the peer, and what to tell it.
    Completed(PeerId, HandshakeBytes),
    /// [`Step::Finish`]: the peer, and over what it is reached.
    Finished(PeerId, PeerInfo),
    /// [`Step::AddRegions`]: over what the peer is reached.
    Added(PeerInfo),
    /// Any of them failed.
    Failed(Error),
}

impl Stepped {
    /// What was done, in a word or two.
    pub(super) const fn words(&self) -> &'static str {
        match self {
            Self::Offered(_) => "offered",
            Self::Accepted(..) => "accepted",
            Self::Completed(..) => "completed",
            Self::Finished(..) => "finished",
            Self::Added(_) => "added regions",
            Self::Failed(_) => "failed",
        }
    }
}

/// A step of a backend that is to be done, in any order among those of different peers.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// [`Port::offer`](kvx_core::port::Port::offer).
    Offer {
        /// Of which backend.
        backend: &'static str,
    },
    /// [`Port::accept`](kvx_core::port::Port::accept).
    Accept {
        /// Of which backend.
        backend: &'static str,
        /// The peer's offer.
        offer: HandshakeBytes,
    },
    /// [`Port::complete`](kvx_core::port::Port::complete).
    Complete {
        /// Of which backend.
        backend: &'static str,
        /// The peer's answer.
        reply: HandshakeBytes,
    },
    /// [`Port::finish`](kvx_core::port::Port::finish), then [`Port::peer_info`](kvx_core::port::Port::peer_info).
    Finish {
        /// Of which backend.
        backend: &'static str,
        /// What the peer told.
        completion: HandshakeBytes,
    },
    /// [`Port::add_regions`](kvx_core::port::Port::add_regions), then [`Port::connect`](kvx_core::port::Port::connect) and
    /// [`Port::peer_info`](kvx_core::port::Port::peer_info).
    AddRegions {
        /// To whom.
        connection: Connection,
        /// Keys and sizes, in the order of the peer's layout.
        regions: Vec<(KeyBlob, u64)>,
    },
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Offer { backend } => write!(f, "Offer({backend})"),
            Self::Accept { backend, .. } => write!(f, "Accept({backend})"),
            Self::Complete { backend, .. } => write!(f, "Complete({backend})"),
            Self::Finish { backend, .. } => write!(f, "Finish({backend})"),
            Self::AddRegions { connection, regions } => {
                write!(f, "AddRegions({connection:?}, {} regions)", regions.len())
            }
        }
    }
}

/// What is to be done, in this order.
#[derive(Debug)]
#[non_exhaustive]
pub enum Output {
    /// Dial an address, and answer with [`Input::SessionUp`] or [`Input::DialFailed`]. Not asked for again before that.
    Dial(Address),
    /// Close a session. Nothing more is to be told of it.
    CloseSession(SessionId),
    /// Send a message.
    Send {
        /// By which session.
        session: SessionId,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// Do a step, and answer with [`Input::Stepped`].
    Step {
        /// Its number.
        id: StepId,
        /// What to do.
        step: Step,
    },
    /// End a connection once what was begun has settled ([`Port::disconnect`](kvx_core::port::Port::disconnect)).
    /// [`Input::PeerDown`] follows.
    Disconnect(Connection),
    /// End a connection at once ([`Port::sever`](kvx_core::port::Port::sever)): the peer is gone, or what was begun takes too
    /// long. [`Input::PeerDown`] follows.
    Sever(Connection),
    /// What was wanted can be used.
    Ready {
        /// Who wanted it.
        want: WantId,
        /// Whom to read from or write to, how, and whom to tell.
        route: Arc<Route>,
    },
    /// What was wanted cannot be used. The error says who is to blame and whether another attempt may help.
    Failed {
        /// Who wanted it.
        want: WantId,
        /// Why.
        error: Arc<Error>,
    },
    /// A peer is connected, whichever side began.
    Met {
        /// Who it is.
        remote: Remote,
        /// The connection.
        connection: Connection,
    },
    /// A peer is gone: what was based on it is over, routes with it included. Nothing more is said of this connection.
    Gone {
        /// Who it was.
        remote: Remote,
        /// The connection, if it was [`Met`](Self::Met).
        connection: Option<Connection>,
        /// Why.
        reason: GoneReason,
    },
}

/// Why a peer is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GoneReason {
    /// It was not heard of, by session or connection, for too long.
    Lost,
    /// Its connection broke.
    Down,
    /// It said that it goes, or that its side of the connection is over.
    Bye,
    /// Another life of the same rank has taken its place: it was heard of by a session.
    Superseded,
    /// The cards of its engine have another life in its place. They may be older than it.
    Unlisted,
    /// Its card is another one now.
    Changed,
    /// This side's policy does not allow what it is connected by.
    Refused,
    /// This side was told to forget it, or closes.
    Forgotten,
}

impl fmt::Display for GoneReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lost => "not heard of for too long",
            Self::Down => "its connection broke",
            Self::Bye => "it said goodbye",
            Self::Superseded => "another life took its place",
            Self::Unlisted => "its engine's cards have another life in its place",
            Self::Changed => "its card has changed",
            Self::Refused => "the policy does not allow its transport",
            Self::Forgotten => "forgotten on this side",
        })
    }
}
