//! What one engine knows: its regions, its peers, what is in flight, and what is to be told. Under one lock.
//!
//! The life of a peer: *open* from the first message of the handshake; *closing* from the moment in which either side ends
//! it, or it is found dead; *down* once nothing of this side copies from it any more and it copies nothing of this side, all
//! transfers are settled and the event is queued; gone when that event is polled. Its incarnation is free for another
//! connection as soon as it is not open.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::time::Instant;

use kvx_core::slots::Slots;
use kvx_core::{Error, Result};
use kvx_core::backend::{Event, Outcome};
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::Region;

use crate::crew::Crew;
use crate::ending::Why;
use crate::error::{down, stale};
use crate::host::Host;
use crate::link::{Link, Mine};
use crate::message::Message;
use crate::record::{self, Reply, Write};
use crate::route::Route;
use crate::segment::Segment;
use crate::sys::memfd::Foreign;
use crate::sys::socket::Inbox;
use crate::work::{Read, Serve};

#[derive(Default)]
pub(crate) struct State {
    /// A descriptor to be given up for one at the door, where there is no other left.
    pub(crate) spare: Option<OwnedFd>,
    /// Since when those at the door are left alone, as none of them could be taken.
    pub(crate) deaf: Option<Instant>,
    /// Since when nobody at the door could be taken, and the system's number for why.
    pub(crate) none_taken: Option<(Instant, i32)>,
    /// When that was said last.
    pub(crate) deaf_told: Option<Instant>,
    pub(crate) regions: Slots<RegionId, Registered>,
    pub(crate) keys: Slots<RemoteRegionId, Key>,
    pub(crate) peers: Slots<PeerId, Peer>,
    /// Peers that are open.
    pub(crate) open: HashMap<[u8; 16], PeerId>,
    pub(crate) flights: HashMap<TransferId, Flight>,
    pub(crate) events: VecDeque<Event>,
    /// Whether the descriptor is readable.
    pub(crate) signalled: bool,
    /// Polls in a row that found nothing.
    pub(crate) empty: u32,
    /// How many regions and transfers use this side's memory that has a descriptor, by its number.
    pub(crate) segments: HashMap<u64, usize>,
    /// Lanes whose first job can be taken.
    pub(crate) runnable: VecDeque<(PeerId, Lanes)>,
    /// Large jobs that are being carried out, and with which further threads may help.
    pub(crate) crews: Vec<Arc<Crew>>,
    /// Threads that copy and have nothing to do.
    pub(crate) idle: usize,
    /// Connections whose first message has not come.
    pub(crate) early: HashMap<u64, Early>,
    /// What the kernel's events are about.
    pub(crate) sources: HashMap<u64, Source>,
    pub(crate) next_token: u64,
    pub(crate) closing: BTreeSet<PeerId>,
    /// Why the last connections ended, by this side's word: the last message of their handshakes may come after that.
    pub(crate) ended: VecDeque<(u64, Why)>,
    /// Those who wait for a connection, or for the end.
    pub(crate) wakers: Vec<Waker>,
    /// Where records are taken to be looked at.
    pub(crate) record: Vec<u8>,
    /// When the program polled last, where it is asked to spin.
    pub(crate) polled: Option<Instant>,
    /// The program polls without sleeping, so nobody need wake it.
    pub(crate) spins: bool,
    pub(crate) offered: bool,
    pub(crate) closed: bool,
    /// All is over: threads end.
    pub(crate) finished: bool,
}

/// A registration.
pub(crate) struct Registered {
    pub(crate) region: Region,
    pub(crate) secret: u64,
    /// Where it lies in memory that has a descriptor, if it does.
    pub(crate) shared: Option<(Arc<Segment>, u64)>,
}

/// An imported key.
pub(crate) struct Key {
    pub(crate) peer: PeerId,
    pub(crate) imported: Arc<Imported>,
}

/// A peer's region, as its key says, and where the peer says that it is.
#[derive(Debug)]
pub(crate) struct Imported {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
    pub(crate) secret: u64,
    pub(crate) bytes: u64,
    /// Unset until the peer has answered. An error says why the region cannot be read.
    pub(crate) place: OnceLock<Result<Place, String>>,
}

/// Where bytes of a peer are.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// In memory that is mapped here, from an offset on.
    Shared(Arc<Foreign>, u64),
    /// In the peer's process, from an address on.
    Process(u64),
}

#[derive(Debug)]
pub(crate) struct Early {
    pub(crate) socket: OwnedFd,
    pub(crate) inbox: Inbox,
    pub(crate) since: Instant,
}

/// What an event of the kernel's is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Early,
    /// The socket of a connection.
    Peer(PeerId),
    /// A peer's process.
    Process(PeerId),
    /// The end of the door that a peer has.
    Door(PeerId),
}

/// Which of a peer's lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lanes {
    /// This side's reads of the peer's memory.
    Reads,
    /// The peer's writes into this side's memory.
    Serves,
}

/// Jobs of one kind, one after the other.
pub(crate) struct Lane<T> {
    pub(crate) jobs: VecDeque<T>,
    /// One is being carried out, or about to be, by however many threads.
    pub(crate) busy: bool,
}

impl<T> Default for Lane<T> {
    fn default() -> Self {
        Self { jobs: VecDeque::new(), busy: false }
    }
}

pub(crate) struct Peer {
    pub(crate) incarnation: [u8; 16],
    pub(crate) host: Host,
    /// This side's word for the connection, and the peer's once it is known.
    pub(crate) word: u64,
    pub(crate) their_word: Option<u64>,
    /// Since when the handshake has allowed posting.
    pub(crate) ready: Option<Instant>,
    pub(crate) phase: Phase,
    pub(crate) dialing: Option<Dialing>,
    /// When this side dialled last.
    pub(crate) dialled: Option<Instant>,
    pub(crate) link: Option<Arc<Link>>,
    /// How many of the peer's knocks at this side's door were heeded.
    pub(crate) heeded: u32,
    pub(crate) inbox: Inbox,
    pub(crate) tokens: Vec<u64>,
    /// The peer's memory that is mapped here, by its numbers.
    pub(crate) foreign: HashMap<u64, Arc<Foreign>>,
    /// Numbers of this side's memory that the peer has been sent.
    pub(crate) sent: HashSet<u64>,
    /// Messages for which the socket had no room.
    pub(crate) unsent: VecDeque<(Message, Option<Arc<Segment>>)>,
    /// Records for which the ring had no room, or that wait for the connection.
    pub(crate) out: VecDeque<Outgoing>,
    /// Questions that the peer has not answered.
    pub(crate) locating: BTreeMap<u64, Arc<Imported>>,
    pub(crate) questions: u64,
    pub(crate) keys: HashSet<RemoteRegionId>,
    pub(crate) reads: Lane<Read>,
    pub(crate) serves: Lane<Serve>,
    /// Writes that have not settled, by sequence.
    pub(crate) writes: BTreeMap<u64, TransferId>,
    pub(crate) sequence: u64,
    /// Transfers whose settled event was not polled.
    pub(crate) in_flight: u32,
    /// Notifications from this peer that were not polled, and their bytes.
    pub(crate) notes: usize,
    pub(crate) note_bytes: usize,
    /// Its ring is left alone until some of them are.
    pub(crate) stalled: bool,
    /// By which ways the bytes of this side's transfers have gone.
    pub(crate) used: Route,
}

/// Connecting: the peer's first message is awaited.
pub(crate) struct Dialing {
    pub(crate) socket: OwnedFd,
    pub(crate) mine: Mine,
    /// The peer's, where this side can see it.
    pub(crate) process: Option<OwnedFd>,
    pub(crate) token: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Open,
    /// Over: why, unless this side ended it, and until when its last reader is waited for.
    Closing(Option<Why>, Instant),
    /// Over, and nothing of it moves: why, unless this side ended it.
    Down(Option<Why>),
}

impl Phase {
    /// What to say to whoever uses a connection that is over.
    pub(crate) fn over(&self, operation: &'static str) -> Error {
        match self {
            Self::Closing(Some(why), _) | Self::Down(Some(why)) => why.over(operation),
            _ => down(operation, "the connection is over"),
        }
    }
}

/// A record that is to go into the ring.
pub(crate) struct Outgoing {
    pub(crate) record: Vec<u8>,
    /// The peer's thread is to look at it, and not only the peer's program, which may be away.
    pub(crate) for_thread: bool,
    /// The peer's program is to look at it. A program that polls all the time sees to all of it, as its thread would.
    pub(crate) for_program: bool,
    /// What settles once it is there.
    pub(crate) settles: Option<TransferId>,
    /// The write that it is.
    pub(crate) sequence: Option<u64>,
}

impl Outgoing {
    /// A notification, which is for the peer's program: it may wait in the ring until that polls.
    pub(crate) fn note(payload: &[u8], settles: TransferId) -> Self {
        let record = record::note(payload);
        Self { record, for_thread: false, for_program: true, settles: Some(settles), sequence: None }
    }

    /// A write, which the peer's thread has carried out.
    pub(crate) fn write(write: &Write) -> Self {
        let (record, sequence) = (write.encode(), Some(write.sequence));
        Self { record, for_thread: true, for_program: false, settles: None, sequence }
    }

    /// An answer to a write. Reads that were posted after it may wait for it, so the peer's thread is to know.
    pub(crate) fn reply(sequence: u64, reply: Reply) -> Self {
        let record = record::reply(sequence, reply);
        Self { record, for_thread: true, for_program: true, settles: None, sequence: None }
    }
}

/// A transfer whose settled event was not polled.
pub(crate) struct Flight {
    pub(crate) peer: PeerId,
    pub(crate) over: bool,
    pub(crate) stop: Arc<AtomicBool>,
    /// Of a write: what the peer is reading.
    pub(crate) hold: Vec<Region>,
    /// Numbers of this side's memory that it uses.
    pub(crate) segments: Vec<u64>,
    /// Of a write.
    pub(crate) sequence: Option<u64>,
    /// By which ways its bytes went, once they did.
    pub(crate) route: Route,
}

impl State {
    /// The open peer of an incarnation.
    pub(crate) fn known(&self, incarnation: &[u8; 16]) -> Option<PeerId> {
        self.open.get(incarnation).copied()
    }

    /// Why the connection ended for which this side had this word.
    pub(crate) fn why_ended(&self, word: u64) -> Option<&Why> {
        self.ended.iter().rev().find(|(ended, _)| *ended == word).map(|(_, why)| why)
    }

    /// A peer whose *peer down* was not polled.
    pub(crate) fn peer(&self, operation: &'static str, peer: PeerId) -> Result<&Peer> {
        self.peers.get(peer).ok_or_else(|| stale(operation, "peer", peer))
    }

    /// Somebody waits.
    pub(crate) fn wakes(&mut self, waker: &Waker) {
        if !self.wakers.iter().any(|known| known.will_wake(waker)) {
            self.wakers.push(waker.clone());
        }
    }

    pub(crate) fn token(&mut self, source: Source) -> u64 {
        self.next_token += 1;
        self.sources.insert(self.next_token, source);
        self.next_token
    }

    /// One more use of memory with a descriptor.
    pub(crate) fn uses(&mut self, segment: &Arc<Segment>) {
        *self.segments.entry(segment.number).or_insert(0) += 1;
    }

    /// One use less. Peers forget memory that is not used any more.
    pub(crate) fn uses_no_more(&mut self, number: u64) {
        let Some(used) = self.segments.get_mut(&number) else { return };
        *used -= 1;
        if *used > 0 {
            return;
        }
        self.segments.remove(&number);
        let peers: Vec<_> = self.peers.handles().collect();
        for peer in peers {
            if let Some(known) = self.peers.get_mut(peer)
                && known.sent.remove(&number)
            {
                known.unsent.push_back((Message::Forget { segment: number }, None));
            }
        }
    }

    /// A transfer's bytes have been copied, by these ways.
    pub(crate) fn went(&mut self, id: TransferId, route: Route) {
        let Some(flight) = self.flights.get_mut(&id) else { return };
        flight.route = route;
        if let Some(known) = self.peers.get_mut(flight.peer) {
            known.used = known.used | route;
        }
    }

    /// A transfer is over, if it was not. One that is done says by which ways its bytes [went](Self::went).
    pub(crate) fn settle(&mut self, id: TransferId, outcome: Outcome) {
        let Some(flight) = self.flights.get_mut(&id).filter(|flight| !flight.over) else { return };
        flight.over = true;
        // Before anybody is told: then the memory is its owner's again.
        flight.hold.clear();
        let outcome = match outcome {
            Outcome::Done { .. } => Outcome::Done { route: flight.route.name() },
            other => other,
        };
        let segments = std::mem::take(&mut flight.segments);
        segments.into_iter().for_each(|number| self.uses_no_more(number));
        self.events.push_back(Event::Settled { id, outcome });
    }

    /// A transfer is done, and its poster is told so at once: nothing is left of it.
    pub(crate) fn never_settles(&mut self, id: TransferId) {
        let peer = self.flights.remove(&id).map(|flight| flight.peer);
        if let Some(known) = peer.and_then(|peer| self.peers.get_mut(peer)) {
            known.in_flight = known.in_flight.saturating_sub(1);
        }
    }

    /// A lane's first job may be one that can be carried out now.
    pub(crate) fn kick(&mut self, peer: PeerId) {
        let Some(known) = self.peers.get_mut(peer).filter(|known| known.phase == Phase::Open) else {
            return;
        };
        if known.link.is_none() {
            return;
        }
        if !known.reads.busy && known.read_is_due() {
            known.reads.busy = true;
            self.runnable.push_back((peer, Lanes::Reads));
        }
        if !known.serves.busy && !known.serves.jobs.is_empty() {
            known.serves.busy = true;
            self.runnable.push_back((peer, Lanes::Serves));
        }
    }
}

impl Peer {
    pub(crate) fn new(incarnation: [u8; 16], host: Host, word: u64) -> Self {
        Self {
            incarnation,
            host,
            word,
            their_word: None,
            ready: None,
            phase: Phase::Open,
            dialing: None,
            dialled: None,
            link: None,
            heeded: 0,
            inbox: Inbox::default(),
            tokens: Vec::new(),
            foreign: HashMap::new(),
            sent: HashSet::new(),
            unsent: VecDeque::new(),
            out: VecDeque::new(),
            locating: BTreeMap::new(),
            questions: 0,
            keys: HashSet::new(),
            reads: Lane::default(),
            serves: Lane::default(),
            writes: BTreeMap::new(),
            sequence: 0,
            in_flight: 0,
            notes: 0,
            note_bytes: 0,
            stalled: false,
            used: Route::default(),
        }
    }

    /// Whether the first read can be carried out: every region's place is known, and writes that were posted before it are
    /// done.
    pub(crate) fn read_is_due(&self) -> bool {
        self.reads.jobs.front().is_some_and(|read| self.can_read(read))
    }

    pub(crate) fn can_read(&self, read: &Read) -> bool {
        read.keys.iter().all(|key| key.place.get().is_some())
            && self.writes.range(..=read.after).next().is_none()
    }

    /// The peer is to be told that memory exists, if it was not.
    pub(crate) fn send_segment(&mut self, segment: &Arc<Segment>) {
        if self.sent.insert(segment.number) {
            let message = Message::Segment { segment: segment.number };
            self.unsent.push_back((message, Some(Arc::clone(segment))));
        }
    }

    /// Asks where a region is.
    pub(crate) fn locate(&mut self, imported: &Arc<Imported>) {
        self.questions += 1;
        let token = self.questions;
        let Imported { slot, generation, secret, .. } = **imported;
        self.unsent.push_back((Message::Locate { token, slot, generation, secret }, None));
        self.locating.insert(token, Arc::clone(imported));
    }
}
