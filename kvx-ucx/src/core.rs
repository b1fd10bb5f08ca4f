//! What one engine knows: its regions, its peers, what is in flight, what is to be told, and its worker. Under one lock, which
//! is also UCX's: whoever holds it may call the worker.
//!
//! Every call that may have given UCX something to do ends in [`Core::settle`], which acts on what callbacks said until they say
//! no more, and then looks whether the progress thread can sleep.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::Waker;
use std::time::{Duration, Instant};

use kvx_core::Result;
use kvx_core::backend::{Event, Outcome};
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::slots::Slots;

use crate::config::Options;
use crate::door::Door;
use crate::error::stale;
use crate::flight::Flight;
use crate::lanes::Taken;
use crate::parting::Lingering;
use crate::peer::{Peer, Phase};
use crate::reach::{Barred, Networks, networks};
use crate::serve::Service;
use crate::shared::Counters;
use crate::sys::{Batch, Endpoint, Fact, Key, Library, Memory, Worker};
use crate::tags::space;

/// Who polls at least this often, this many times on end, is left to make progress alone.
const POLL_GAP: Duration = Duration::from_micros(50);
const POLL_STREAK: u32 = 32;

/// How long the thread leaves a program alone that polls without pause, before it looks whether that still does; and how long at
/// most, once it has done so for long. To look costs: in a virtual machine a timer may take tens of microseconds.
pub(crate) const WATCH: Duration = Duration::from_micros(250);
pub(crate) const LONG_WATCH: Duration = Duration::from_millis(4);

pub(crate) struct Core {
    pub(crate) regions: Slots<RegionId, Arc<Memory>>,
    pub(crate) keys: Slots<RemoteRegionId, Imported>,
    pub(crate) peers: Slots<PeerId, Peer>,
    /// Peers that are open, by incarnation, and by the [space](crate::tags::space) of this side's word for the connection.
    pub(crate) open: HashMap<[u8; 16], PeerId>,
    pub(crate) words: HashMap<u32, PeerId>,
    /// What has not settled, by token.
    pub(crate) flights: HashMap<u64, Flight>,
    /// What has not settled, or whose settled event was not polled: whose it is, and its token until it settles.
    pub(crate) ids: HashMap<TransferId, (PeerId, Option<u64>)>,
    pub(crate) events: VecDeque<Event>,
    /// Whether the descriptor is readable.
    pub(crate) signalled: bool,
    /// Those who wait for a connection, or for the end.
    pub(crate) wakers: Vec<Waker>,
    /// They are to be woken.
    pub(crate) stirred: bool,
    /// Peers with batches of which not all was posted, and those to which acknowledgements are owed.
    pub(crate) waiting: BTreeSet<PeerId>,
    pub(crate) owing: BTreeSet<PeerId>,
    /// Peers that are being connected, whose time is bounded.
    pub(crate) trying: BTreeSet<PeerId>,
    /// Peers by their endpoints' tokens, and endpoints that are being closed.
    pub(crate) ways: HashMap<u64, PeerId>,
    pub(crate) closing: HashMap<u64, Endpoint>,
    /// Endpoints that are to be closed once their last messages were sent.
    pub(crate) lingering: HashMap<u64, Lingering>,
    /// Messages that belong to no transfer, and whose they are.
    pub(crate) mail: Vec<(PeerId, Batch)>,
    /// What is moved for peers that asked for it, by token.
    pub(crate) services: HashMap<u64, Service>,
    next_token: u64,
    pub(crate) offered: bool,
    pub(crate) closed: bool,
    /// All is over: the thread ends.
    pub(crate) finished: bool,
    /// An endpoint ended that was not connected, or broke.
    pub(crate) spoiled: bool,
    /// Whether UCX may have something to do of which its descriptor does not tell.
    pub(crate) touched: bool,
    /// Whether the thread sleeps, and must be woken for that.
    pub(crate) asleep: bool,
    /// There is a time for it of which it does not know.
    pub(crate) timed: bool,
    polled: Option<Instant>,
    streak: u32,
    pub(crate) door: Door,
    pub(crate) attention: Arc<Attention>,
    pub(crate) options: Options,
    pub(crate) taken: Taken,
    /// What reaches other hosts here, and peers' addresses that nothing reaches.
    pub(crate) networks: Networks,
    pub(crate) barred: Barred,
    pub(crate) counters: Counters,
    pub(crate) library: &'static Library,
    /// The last field: whatever belongs to it is dropped before it.
    pub(crate) worker: Option<Worker>,
}

/// When a program that polls without pause did so last: the progress thread looks at it without taking the lock.
pub(crate) struct Attention {
    since: Instant,
    /// Nanoseconds.
    last: AtomicU64,
}

impl Default for Attention {
    fn default() -> Self {
        Self { since: Instant::now(), last: AtomicU64::new(0) }
    }
}

impl Attention {
    fn note(&self, now: Instant) {
        let nanos = now.saturating_duration_since(self.since).as_nanos();
        self.last.store(u64::try_from(nanos).unwrap_or(u64::MAX), Relaxed);
    }

    /// When it polled last.
    pub(crate) fn last(&self) -> u64 {
        self.last.load(Relaxed)
    }

    /// Whether it has polled just now.
    pub(crate) fn is_paid(&self) -> bool {
        self.since.elapsed().saturating_sub(Duration::from_nanos(self.last())) < WATCH
    }
}

/// An imported key.
pub(crate) struct Imported {
    pub(crate) peer: PeerId,
    pub(crate) key: Arc<Key>,
}

impl Core {
    pub(crate) fn new(options: Options, library: &'static Library, worker: Worker, door: Door) -> Self {
        Self {
            regions: Slots::default(),
            keys: Slots::default(),
            peers: Slots::default(),
            open: HashMap::new(),
            words: HashMap::new(),
            flights: HashMap::new(),
            ids: HashMap::new(),
            events: VecDeque::new(),
            signalled: false,
            wakers: Vec::new(),
            stirred: false,
            waiting: BTreeSet::new(),
            owing: BTreeSet::new(),
            trying: BTreeSet::new(),
            ways: HashMap::new(),
            closing: HashMap::new(),
            lingering: HashMap::new(),
            mail: Vec::new(),
            services: HashMap::new(),
            next_token: 0,
            offered: false,
            closed: false,
            finished: false,
            spoiled: false,
            touched: true,
            asleep: false,
            timed: false,
            polled: None,
            streak: 0,
            door,
            attention: Arc::default(),
            networks: networks(&worker.resources()),
            barred: Barred::default(),
            taken: Taken::by(library, &options),
            options,
            counters: Counters::default(),
            library,
            worker: Some(worker),
        }
    }

    /// A number that was never used.
    pub(crate) fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
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

    /// Makes some progress, and acts on what comes of it. Whether there was any.
    pub(crate) fn progress(&mut self) -> bool {
        let Some(worker) = &mut self.worker else { return false };
        let any = worker.progress() > 0;
        self.touched |= any;
        self.settle();
        if any {
            self.discard();
        }
        any
    }

    /// Throws away what came for connections that are over, or for what nobody waits for any more.
    fn discard(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        let (words, peers) = (&self.words, &self.peers);
        worker.discard(|tag| {
            let known = words.get(&space(tag)).and_then(|peer| peers.get(*peer));
            known.is_some_and(|known| known.tags.may_be_announced(tag))
        });
    }

    /// An open peer, by this side's word for the connection.
    pub(crate) fn by_word(&self, word: u64) -> Option<PeerId> {
        let peer = self.words.get(&space(word)).copied();
        peer.filter(|peer| self.peers.get(*peer).is_some_and(|known| known.word == word))
    }

    /// Acts on what callbacks said, until they say no more.
    pub(crate) fn settle(&mut self) {
        if !self.lingering.is_empty() {
            self.expire(Instant::now());
        }
        loop {
            while let Some(fact) = self.worker.as_ref().and_then(|worker| worker.inbox().pop()) {
                match fact {
                    Fact::Over(token) => self.over(token),
                    Fact::Failed(token, status) => self.lost(token, status),
                    Fact::Closed(token) => drop(self.closing.remove(&token)),
                    Fact::Message(header, payload) => self.hear(&header, payload),
                }
            }
            for peer in self.waiting.iter().copied().collect::<Vec<_>>() {
                self.pump(peer);
            }
            for peer in std::mem::take(&mut self.owing) {
                self.acknowledge(peer);
            }
            if self.worker.as_ref().is_none_or(|worker| worker.inbox().is_empty()) {
                break;
            }
        }
        self.mail.retain(|(_, batch)| batch.is_pending());
    }

    /// A batch is out of UCX's hands.
    fn over(&mut self, token: u64) {
        if self.lingering.contains_key(&token) {
            self.parted(token);
        } else if self.flights.contains_key(&token) {
            self.step(token);
        } else if self.services.contains_key(&token) {
            self.served(token);
        } else if let Some(peer) = self.ways.get(&token).copied() {
            self.contacted(peer);
        }
    }

    /// A transfer is over.
    pub(crate) fn settled(&mut self, token: u64, outcome: Outcome) {
        let Some(mut flight) = self.flights.remove(&token) else { return };
        // Before anybody is told: then the memory is its owner's again.
        flight.batch.release();
        if let Some(entry) = self.ids.get_mut(&flight.id) {
            entry.1 = None;
        }
        let peer = flight.peer;
        self.events.push_back(Event::Settled { id: flight.id, outcome });
        if let Some(known) = self.peers.get_mut(peer) {
            known.flights.remove(&token);
        }
        self.quiet(peer);
    }

    /// A peer whose connection is over is down once nothing of it is in flight.
    pub(crate) fn quiet(&mut self, peer: PeerId) {
        let Some(known) = self.peers.get_mut(peer) else { return };
        if known.flights.is_empty()
            && let Phase::Closing(_) = known.phase
            && let Phase::Closing(error) = std::mem::replace(&mut known.phase, Phase::Down)
        {
            self.events.push_back(Event::PeerDown { peer, error });
        }
    }

    /// Notes that the program polls, and whether it was quick to come. Whether it does so without pause is seen from that.
    pub(crate) fn polls(&mut self, now: Instant) {
        let near = self.polled.is_some_and(|before| now.duration_since(before) < POLL_GAP);
        self.streak = if near { self.streak.saturating_add(1) } else { 0 };
        self.has_polled(now);
        self.door.answered(now);
    }

    /// When the program polled last.
    pub(crate) const fn polled(&self) -> Option<Instant> {
        self.polled
    }

    /// A call of the program's ends. What time it took, making progress, is no pause between its polls.
    pub(crate) fn leaves(&mut self, entered: Instant) {
        if self.polled.is_some_and(|before| entered.saturating_duration_since(before) < POLL_GAP) {
            self.has_polled(Instant::now());
        }
    }

    fn has_polled(&mut self, now: Instant) {
        self.polled = Some(now);
        self.attention.note(now);
    }

    /// Whether a program that polls without pause makes all the progress that there is to be made.
    pub(crate) fn is_attended(&self) -> bool {
        self.streak >= POLL_STREAK && self.polled.is_some_and(|polled| polled.elapsed() < WATCH)
    }

    /// Whether the descriptor tells of all that UCX will have to do.
    pub(crate) fn arm(&mut self) -> bool {
        let armed = self.worker.as_mut().is_none_or(Worker::arm);
        self.touched = !armed;
        armed
    }
}
