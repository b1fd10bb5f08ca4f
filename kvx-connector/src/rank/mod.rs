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

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::TransferBackend;
use kvx_core::card::{Address, Card, EngineName};
use kvx_core::facts::Facts;
use kvx_core::id::Incarnation;
use kvx_core::layout::RankLayout;
use kvx_core::memory::Region;
use kvx_core::plan::SegmentList;
use kvx_core::port::Port;
use kvx_core::{Error, Result};
use tracing::Span;

use crate::protocol::owner::{self, Owner};
use crate::protocol::peers::{
    self, Choosing, Connection, Local, LocalRank, OwnCards, PeerStatus, Peers, Place, Remote,
    SessionId, Setup, WantId,
};
use crate::protocol::user::{self, User};
use crate::protocol::{
    Access, LeaseName, Part, Reason, RequestNumber, StageNumber, TransferKey, TransferNumber,
};
use crate::ticket::Table;

mod channel;
mod digests;
mod explain;
mod fabrics;
mod fetch;
mod frame;
mod orders;
mod reach;
mod seen;
mod turn;
mod watch;

pub use channel::{Channel, ChannelEvent};
pub use digests::DigestJob;
pub use orders::{
    FetchOptions, FetchOrder, FetchReport, FillOrder, GrantOrder, RankEvent, StageOf,
};

use digests::Comparing;
use fabrics::{Fabrics, Found};
use fetch::{Fetch, Stage};
use reach::Reaching;
use watch::{Granted, Watch};

/// How often a rank looks where only polling brings something forward.
const NAP: Duration = Duration::from_millis(1);

/// Numbers from here on are of requests that are over for the engine, and whose lease is still to be released.
const GHOST: u64 = 1 << 63;

const fn is_ghost(request: RequestNumber) -> bool {
    request.0 >= GHOST
}

/// What a rank is made of.
#[derive(Debug)]
#[non_exhaustive]
pub struct RankSetup {
    /// The engine.
    pub engine: EngineName,
    /// This life of the rank: what its control channel says, too.
    pub incarnation: Incarnation,
    /// The life of the engine, drawn by its scheduler: the same for all ranks.
    pub life: Incarnation,
    /// Where this rank's control channel listens.
    pub control: Address,
    /// What must be equal on both sides.
    pub facts: Facts,
    /// This rank's layout.
    pub layout: RankLayout,
    /// The layouts of all ranks of its replica, in order, this one's included.
    pub replica: Vec<RankLayout>,
    /// Its memory, in the layout's order.
    pub regions: Vec<Region>,
    /// The backends to be used.
    pub backends: Vec<Arc<dyn TransferBackend>>,
    /// Which of them for whom.
    pub choosing: Box<dyn Choosing>,
    /// Bounds of the machine that knows peers.
    pub peers: peers::Limits,
    /// Bounds of the machine that grants.
    pub owner: owner::Config,
    /// Bounds of the machine that uses leases.
    pub user: user::Config,
    /// Where chance begins: drawn at random, but for simulations.
    pub seed: u64,
    /// A fault of the machines of leases: to show that it would be found.
    #[cfg(feature = "sim")]
    pub plant: Option<crate::protocol::Plant>,
}

impl RankSetup {
    /// A rank with the usual bounds, that reaches others by the given backends.
    #[must_use]
    pub fn new(
        (engine, incarnation, life): (EngineName, Incarnation, Incarnation),
        control: Address,
        facts: Facts,
        (layout, regions): (RankLayout, Vec<Region>),
        backends: Vec<Arc<dyn TransferBackend>>,
        choosing: Box<dyn Choosing>,
        seed: u64,
    ) -> Self {
        Self {
            engine,
            incarnation,
            life,
            control,
            facts,
            replica: vec![layout.clone()],
            layout,
            regions,
            backends,
            choosing,
            peers: peers::Limits::default(),
            owner: owner::Config::new(life),
            user: user::Config::default(),
            seed,
            #[cfg(feature = "sim")]
            plant: None,
        }
    }

    /// With the layouts of all ranks of the replica.
    #[must_use]
    pub fn with_replica(mut self, layouts: Vec<RankLayout>) -> Self {
        self.replica = layouts;
        self
    }
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

    /// Says that a lease will be granted: what is said of it before is remembered until it is, or is
    /// [withdrawn](Self::withdraw).
    pub fn expect(&mut self, lease: LeaseName, key: TransferKey) {
        self.todo.push_back(Todo::Owner(owner::Input::Expect { lease, key }));
    }

    /// Grants a lease on this rank's blocks. [`RankEvent::Freed`] follows.
    pub fn grant(&mut self, order: GrantOrder) {
        let lease = order.lease;
        let grant = owner::Grant {
            lease: order.lease,
            key: order.key.clone(),
            access: order.access,
            ttl: order.ttl,
            hard: order.hard,
            parts: order.parts.clone(),
            total: order.total,
            stages: order.stages,
        };
        // One that is known is ignored by the machine, too.
        if let Entry::Vacant(entry) = self.grants.entry(order.lease) {
            entry.insert(self.watch.granted(order, self.now));
        }
        self.todo.push_back(Todo::Owner(owner::Input::Grant(grant)));
        self.answer_early_digests(lease);
    }

    /// Publishes more parts of a lease.
    pub fn publish(&mut self, lease: LeaseName, parts: Vec<Part>, total: Option<u32>) {
        if let Some(granted) = self.grants.get(&lease) {
            Watch::published(granted, parts.len(), total);
        }
        self.todo.push_back(Todo::Owner(owner::Input::Publish { lease, parts, total }));
    }

    /// Takes a lease back: its users are told at once.
    pub fn withdraw(&mut self, lease: LeaseName, why: Reason) {
        self.todo.push_back(Todo::Owner(owner::Input::Withdraw { lease, why }));
    }

    /// Moves a request. [`RankEvent::Ready`], [`RankEvent::Failed`] or [`RankEvent::Aborted`] follows, once.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): a request of this number is not over, or the number is 2⁶³ or more.
    /// Nothing follows.
    pub fn fetch(&mut self, now: Duration, order: FetchOrder) -> Result<()> {
        self.enter(now, order, Watch::asked)
    }

    /// Enters an order, under the span that `say` gives.
    fn enter(
        &mut self,
        now: Duration,
        order: FetchOrder,
        say: impl FnOnce(&mut Watch, &FetchOrder) -> Span,
    ) -> Result<()> {
        self.now = now.max(self.now);
        if is_ghost(order.request) {
            return Err(Error::misuse("fetch", "the numbers of requests are below 2^63"));
        }
        if self.fetches.contains_key(&order.request) {
            return Err(Error::misuse("fetch", "a request of this number is not over")
                .with_context("request", order.request.0));
        }
        let id = self.want(&order, order.deadline);
        let span = say(&mut self.watch, &order);
        let fetch = Fetch::new(order, id, self.now, span);
        self.fetches.insert(fetch.order.request, Box::new(fetch));
        Ok(())
    }

    /// Asks for the other engine's ranks, for so long.
    fn want(&mut self, order: &FetchOrder, patience: Duration) -> WantId {
        let id = WantId(self.next_want);
        self.next_want += 1;
        let want = peers::Want {
            id,
            engine: order.engine.clone(),
            replica: order.replica,
            address: order.address.clone(),
            life: Some(order.lease.owner),
            role: match order.access {
                Access::Read => peers::Role::Consumer,
                Access::Write => peers::Role::Producer,
            },
            until: self.now + patience,
        };
        self.wants.insert(id, order.request);
        self.todo.push_back(Todo::Peers(peers::Input::Want(want)));
        id
    }

    /// Says what a request that was held without that is to move, and until when: before it begins.
    pub fn fill(&mut self, now: Duration, request: RequestNumber, fill: FillOrder) {
        self.now = now.max(self.now);
        let Some(fetch) = self.fetches.get_mut(&request) else { return };
        let order = &mut fetch.order;
        order.deadline = self.now.saturating_sub(fetch.begun) + fill.deadline;
        (order.tokens, order.range) = (fill.tokens, fill.range);
        (order.theirs, order.ours) = (fill.theirs, fill.ours);
        (order.parts, order.total) = (fill.parts, fill.total);
        order.options.without = fill.without;
        match &fetch.stage {
            Stage::Routing { want, begin } => {
                let (before, begin, order) = (*want, *begin, order.clone());
                self.wants.remove(&before);
                self.todo.push_back(Todo::Peers(peers::Input::Unwant(before)));
                let want = self.want(&order, fill.deadline);
                if let Some(fetch) = self.fetches.get_mut(&request) {
                    fetch.stage = Stage::Routing { want, begin };
                }
            }
            Stage::Asked { .. } => {
                let deadline = fill.deadline;
                let (parts, total) = (order.parts.clone(), order.total);
                self.todo.push_back(Todo::User(user::Input::Until { request, deadline }));
                if total.is_some() {
                    let publish = user::Input::Publish { request, parts, total };
                    self.todo.push_back(Todo::User(publish));
                }
            }
            Stage::Quarantined => {}
        }
    }

    /// Releases a lease that `order` says how to find: what its reader was to move is not wanted, or not any more. Nothing
    /// follows.
    ///
    /// # Errors
    ///
    /// Those of [`fetch`](Self::fetch).
    pub fn release(&mut self, now: Duration, order: FetchOrder) -> Result<()> {
        let request = order.request;
        // It is no request: none is counted, and none ends.
        self.enter(now, FetchOrder { begin: false, ..order }, |_, _| Span::none())?;
        self.release_once_routed(request);
        Ok(())
    }

    /// A request that was held is admitted: its blocks are there.
    pub fn begin(&mut self, request: RequestNumber) {
        match self.fetches.get_mut(&request).map(|fetch| &mut fetch.stage) {
            Some(Stage::Routing { begin, .. }) => *begin = true,
            Some(Stage::Asked { .. }) => {
                self.todo.push_back(Todo::User(user::Input::Begin { request }));
            }
            Some(Stage::Quarantined) | None => {}
        }
    }

    /// Gives the blocks of a request that was held without any: before it begins.
    pub fn assign(&mut self, request: RequestNumber, ours: Vec<Table>) {
        if let Some(fetch) = self.fetches.get_mut(&request) {
            fetch.order.ours = ours;
        }
    }

    /// Gives a request up. Its blocks are in use until [`RankEvent::Aborted`].
    pub fn abort(&mut self, request: RequestNumber) {
        let Some(fetch) = self.fetches.get_mut(&request) else { return };
        match fetch.stage {
            Stage::Routing { .. } => {
                self.watch.aborted(fetch, false);
                self.events.push_back(RankEvent::Aborted { request, quarantined: false });
                self.release_once_routed(request);
            }
            Stage::Asked { .. } => {
                self.todo.push_back(Todo::User(user::Input::Abort { request }));
            }
            Stage::Quarantined => {}
        }
    }

    /// A request that is over for the engine before the owner's ranks are known: its lease is released once they are, or ends by
    /// itself where they cannot be reached.
    fn release_once_routed(&mut self, request: RequestNumber) {
        let Some(mut fetch) = self.fetches.remove(&request) else { return };
        let Stage::Routing { want, begin } = &mut fetch.stage else { return };
        let ghost = RequestNumber(GHOST | self.next_want);
        self.next_want += 1;
        *begin = false;
        self.wants.insert(*want, ghost);
        self.fetches.insert(ghost, fetch);
    }

    /// A stage of the engine's is over: it no longer touches the blocks.
    pub fn stage_done(&mut self, of: StageOf, stage: StageNumber, ok: bool) {
        self.todo.push_back(match of {
            StageOf::Lease(_) => Todo::Owner(owner::Input::StageDone { stage, ok }),
            StageOf::Request(..) => Todo::User(user::Input::StageDone { stage, ok }),
        });
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

fn check_regions(layout: &RankLayout, regions: &[Region]) -> Result<()> {
    if layout.regions().len() != regions.len() {
        return Err(Error::config("rank", "the layout has another number of regions")
            .with_context("layout", layout.regions().len())
            .with_context("regions", regions.len()));
    }
    for (index, (spec, region)) in layout.regions().iter().zip(regions).enumerate() {
        if region.bytes() < spec.bytes || region.kind() != spec.memory {
            return Err(Error::config(
                "rank",
                "a region is smaller than its layout says, or of another kind",
            )
            .with_context("region", index)
            .with_context("layout", format!("{} bytes of {:?}", spec.bytes, spec.memory))
            .with_context("memory", format!("{} bytes of {:?}", region.bytes(), region.kind())));
        }
    }
    Ok(())
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
