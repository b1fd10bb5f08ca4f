//! One rank of an engine: the state machines of [`protocol`](crate::protocol), joined with backends, memory and a control
//! channel.
//!
//! A [`Rank`] does what its machines say, and tells them what came of it. It has no threads and no clock of its own:
//! [`step`](Rank::step) is told the time, does whatever can be done without waiting, and says when it wants to be called again at
//! the latest. A thread calls it in a program ([`Worker`](crate::worker)), a loop in a simulation.
//!
//! # One step
//!
//! ```text
//!   channel ──▶ frames ──▶ Peers ──▶ dial, send, steps of handshakes ──▶ ports, channel
//!                 │          │ routes
//!                 │          ▼
//!   engine ───────┼──▶ User ──▶ segments of a part ──▶ ports
//!                 │      ▲                               │ settled, notified, down
//!                 └──▶ Owner ◀───────────────────────────┘
//!                        │
//!   engine ◀── events ───┘
//! ```
//!
//! # Invariants
//!
//! 1. A machine hears of a transfer's end once, when it has settled, and of a connection's end after the last of its transfers.
//! 2. Whatever a machine says is carried out in the order in which it was said.
//! 3. A message of a lease is taken only from the life that its session, or its connection, has proven.
//! 4. A request is over for the engine exactly once, and a lease is freed exactly once.
//! 5. Nothing waits: not for the network, not for a peer, not for a lock that is held while waiting.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::Result;
use kvx_core::card::{Address, Card, EngineName};
use kvx_core::id::Incarnation;
use kvx_core::layout::RankLayout;
use kvx_core::memory::Region;
use kvx_core::plan::SegmentList;
use kvx_core::port::Port;
use tracing::Span;

use crate::protocol::owner::{self, Owner};
use crate::protocol::peers::{
    self, Connection, Local, LocalRank, OwnCards, PeerStatus, Peers, Place, Remote, SessionId,
    Setup, WantId,
};
use crate::protocol::user::{self, User};
use crate::protocol::{LeaseName, Part, RequestNumber, TransferNumber};

mod calls;
mod channel;
mod digests;
mod explain;
mod fabrics;
mod fetch;
mod frame;
mod moving;
mod orders;
mod reach;
mod said;
mod seen;
mod setup;
mod turn;
mod watch;

pub use channel::{Channel, ChannelEvent};
pub use digests::DigestJob;
pub use orders::{
    FetchOptions, FetchOrder, FetchReport, FillOrder, GrantOrder, Kept, RankEvent, StageOf,
};

pub use setup::RankSetup;

use digests::Comparing;
use fabrics::{Fabrics, Found};
use fetch::Fetch;
use reach::Reaching;
use setup::check_regions;
use watch::{Granted, Watch};

/// How often a rank looks where only polling brings something forward.
const NAP: Duration = Duration::from_millis(1);

/// Numbers from here on are of requests that are over for the engine, and whose lease is still to be released.
const GHOST: u64 = 1 << 63;

const fn is_ghost(request: RequestNumber) -> bool {
    request.0 >= GHOST
}

/// One rank. See the [module's documentation](self).
pub struct Rank<C> {
    channel: C,
    fabrics: Fabrics,
    peers: Peers,
    owner: Owner,
    user: User,
    layout: RankLayout,
    regions: Vec<Region>,
    card: Arc<[u8]>,
    engine: EngineName,
    address: Address,
    place: Place,
    sessions: BTreeMap<SessionId, Remote>,
    connections: BTreeMap<Connection, Incarnation>,
    grants: BTreeMap<LeaseName, Granted>,
    /// Boxed, so that none is moved about in the tree as others come and go.
    fetches: BTreeMap<RequestNumber, Box<Fetch>>,
    wants: BTreeMap<WantId, RequestNumber>,
    next_want: u64,
    reaching: Reaching,
    /// Whose each transfer is that has not settled.
    flying: BTreeMap<TransferNumber, Flying>,
    comparing: Comparing,
    todo: VecDeque<Todo>,
    list: SegmentList,
    events: VecDeque<RankEvent>,
    found: Vec<Found>,
    heard: Vec<ChannelEvent>,
    said: Said,
    now: Duration,
    counts: RankCounts,
    watch: Watch,
}

/// Whose a transfer is.
#[derive(Clone, Debug)]
struct Flying {
    request: RequestNumber,
    source: u16,
    part: Part,
    span: Span,
}

/// Buffers for what machines say.
#[derive(Debug, Default)]
struct Said {
    peers: Vec<peers::Output>,
    owner: Vec<owner::Output>,
    user: Vec<user::Output>,
}

/// What a machine is to be told.
#[derive(Debug)]
enum Todo {
    Peers(peers::Input),
    Owner(owner::Input),
    User(user::Input),
}

/// What a rank has counted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct RankCounts {
    /// Frames that could not be read. Their session was closed.
    pub bad_frames: u64,
    /// Frames of a kind that this version does not know, passed over.
    pub unknown_frames: u64,
    /// Messages for which there was no session, or no room. They are asked for again.
    pub unsent: u64,
    /// Messages that went with the data.
    pub by_fabric: u64,
    /// Messages that went by the control channel.
    pub by_channel: u64,
    /// Digests compared that were equal.
    pub digests_equal: u64,
    /// Digests compared that were not.
    pub digests_differing: u64,
}

impl<C: Channel> Rank<C> {
    /// A rank: its memory is registered with all its backends.
    ///
    /// # Errors
    ///
    /// Those of [`Port::register`] and of [`Card::new`], and [`ErrorKind::Config`](kvx_core::ErrorKind::Config) where regions and
    /// layout do not fit together.
    pub fn new(setup: RankSetup, channel: C) -> Result<Self> {
        let RankSetup { engine, incarnation, life, control, facts, layout, replica, .. } = setup;
        check_regions(&layout, &setup.regions)?;
        let fabrics = Fabrics::new(setup.backends, &setup.regions)?;
        let (name, address) = (engine.clone(), control.clone());
        let mut card =
            Card::new(engine.clone(), incarnation, control, facts.clone(), layout.clone())?;
        for offer in fabrics.offers()? {
            card = card.with_offer(offer)?;
        }
        let card: Arc<[u8]> = card.encode()?.into();
        let place = Place::from(layout.coords());
        let watch = Watch::new(name.as_str(), place);
        let local = Local {
            engine,
            incarnation,
            life,
            facts,
            rank: Some(LocalRank {
                coords: *layout.coords(),
                layouts: replica,
                backends: fabrics.names(),
                card: Some(Arc::clone(&card)),
            }),
        };
        let mut peers = Setup::new(local, setup.choosing, setup.seed);
        peers.limits = setup.peers;
        let reaching = Reaching::new(setup.user.release_for);
        let (owner, user) = (Owner::new(setup.owner), User::new(setup.user, setup.seed));
        #[cfg(feature = "sim")]
        let (owner, user) = match setup.plant {
            Some(plant) => (owner.with_fault(plant), user.with_fault(plant)),
            None => (owner, user),
        };
        Ok(Self {
            channel,
            fabrics,
            peers: Peers::new(peers),
            owner,
            user,
            layout,
            regions: setup.regions,
            card,
            engine: name,
            address,
            place,
            sessions: BTreeMap::new(),
            connections: BTreeMap::new(),
            grants: BTreeMap::new(),
            fetches: BTreeMap::new(),
            wants: BTreeMap::new(),
            next_want: 1,
            reaching,
            flying: BTreeMap::new(),
            comparing: Comparing::default(),
            todo: VecDeque::new(),
            list: SegmentList::new(),
            events: VecDeque::new(),
            found: Vec::new(),
            heard: Vec::new(),
            said: Said::default(),
            now: Duration::ZERO,
            counts: RankCounts::default(),
            watch,
        })
    }

    /// The rank's card, encoded: for whoever serves the engine's cards.
    pub fn card(&self) -> Arc<[u8]> {
        Arc::clone(&self.card)
    }

    /// The rank's number in its replica.
    pub const fn place(&self) -> Place {
        self.place
    }

    /// The control channel.
    pub const fn channel(&self) -> &C {
        &self.channel
    }

    /// The ports, for whoever waits on them. They must not be polled elsewhere.
    pub fn ports(&self) -> impl Iterator<Item = &Port> {
        self.fabrics.ports()
    }

    /// Serves these cards, of all ranks of the engine, to whoever asks.
    ///
    /// # Errors
    ///
    /// Those of [`OwnCards::new`]: a card of another engine, or two of one rank.
    pub fn serve(&mut self, cards: Vec<Arc<[u8]>>) -> Result<()> {
        let cards = OwnCards::new(&self.engine, cards)?;
        self.todo.push_back(Todo::Peers(peers::Input::Serve(cards)));
        Ok(())
    }

    /// Says the layouts of all ranks of its replica, in order, where [`RankSetup`] did not: before anything is fetched.
    pub fn set_replica(&mut self, layouts: Vec<RankLayout>) {
        self.peers.set_replica(layouts);
    }

    /// Tells all peers goodbye.
    pub fn close(&mut self) {
        self.todo.push_back(Todo::Peers(peers::Input::Close));
    }

    /// Whether it was told something that no step has looked at.
    pub fn has_orders(&self) -> bool {
        !self.todo.is_empty()
    }

    /// Whether nobody is there who would be told goodbye.
    pub fn is_alone(&self) -> bool {
        self.connections.is_empty() && self.sessions.is_empty()
    }

    /// Where its control channel listens.
    pub const fn address(&self) -> &Address {
        &self.address
    }

    /// The next thing that the engine is told.
    pub fn next_event(&mut self) -> Option<RankEvent> {
        self.events.pop_front()
    }

    /// All peers, as they are now.
    pub fn peers(&self) -> Vec<PeerStatus> {
        self.peers.status()
    }

    /// What was counted.
    pub const fn counts(&self) -> RankCounts {
        self.counts
    }

    /// Leases that are not freed, and requests that are not over or whose blocks are kept.
    pub fn open(&self) -> (usize, usize) {
        (self.owner.live(), self.fetches.len())
    }
}

impl<C: fmt::Debug> fmt::Debug for Rank<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rank")
            .field("place", &self.place)
            .field("channel", &self.channel)
            .field("fabrics", &self.fabrics)
            .field("sessions", &self.sessions.len())
            .field("grants", &self.grants.len())
            .field("fetches", &self.fetches.len())
            .finish_non_exhaustive()
    }
}
