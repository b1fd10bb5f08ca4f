//! Peers: how connections begin, what comes over them, and how they end.
//!
//! The life of a peer: *open* from the first message of the handshake; *closing* from the moment in which either side ends it,
//! or it is found dead; *down* once nothing of it is in flight and the event is queued; gone when that event is polled. Its
//! incarnation is free for another connection as soon as it is not open.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use kvx_core::backend::Event;
use kvx_core::id::{PeerId, RemoteRegionId};
use kvx_core::wire::Text;
use kvx_core::Error;

use crate::core::Core;
use crate::error::{down, transfer};
use crate::flight::Stop;
use crate::ask::Offer;
use crate::contact::{Contact, Way};
use crate::message::{Header, Kind, MOST_NUMBERS, Range, Refusal, numbers, read_numbers};
use crate::probe::{IN_FLIGHT, NOTES};
use crate::reach::{Networks, of_the_two};
use crate::sys::{Batch, HEADER, Status};
use crate::tags::{Tags, space};

pub(crate) struct Peer {
    pub(crate) incarnation: [u8; 16],
    /// Of its worker.
    pub(crate) address: Arc<[u8]>,
    /// The version of its UCX.
    pub(crate) library: Text<32>,
    pub(crate) networks: Networks,
    /// This side's word for the connection, and the peer's once it is known.
    pub(crate) word: u64,
    pub(crate) their_word: Option<u64>,
    /// Whether the handshake allows posting.
    pub(crate) ready: bool,
    pub(crate) phase: Phase,
    /// Why the connection is over, for those who wait for it.
    pub(crate) why: Option<Error>,
    pub(crate) way: Option<Way>,
    /// Tokens of its batches of which not all was posted, oldest first.
    pub(crate) queue: VecDeque<u64>,
    /// Tokens of what has not settled.
    pub(crate) flights: BTreeSet<u64>,
    /// Transfers whose settled event was not polled.
    pub(crate) in_flight: u32,
    /// Notifications from this peer that were not polled.
    pub(crate) notes: usize,
    /// Numbers of notifications that are to be acknowledged, and of those for which there was no room.
    pub(crate) owed: Vec<u64>,
    pub(crate) withheld: VecDeque<u64>,
    pub(crate) keys: BTreeSet<RemoteRegionId>,
    pub(crate) tags: Tags,
    /// Lists that went ahead of a write's data, and were not answered: by their first tag. And how many ranges they have.
    pub(crate) offers: HashMap<u64, Offer>,
    pub(crate) offered: u32,
    /// Lists of the peer's that came before there was a connection, and how many ranges they have.
    pub(crate) early: Vec<(Kind, std::ops::Range<u64>, Vec<Range>)>,
    pub(crate) early_ranges: u32,
}

pub(crate) enum Phase {
    Open,
    /// Over: why, unless this side ended it.
    Closing(Option<Error>),
    Down,
}

impl Peer {
    pub(crate) fn new(
        incarnation: [u8; 16],
        address: Arc<[u8]>,
        (library, networks): (Text<32>, Networks),
        word: u64,
    ) -> Self {
        Self {
            incarnation,
            address,
            library,
            networks,
            word,
            their_word: None,
            ready: false,
            phase: Phase::Open,
            why: None,
            way: None,
            queue: VecDeque::new(),
            flights: BTreeSet::new(),
            in_flight: 0,
            notes: 0,
            owed: Vec::new(),
            withheld: VecDeque::new(),
            keys: BTreeSet::new(),
            tags: Tags::default(),
            offers: HashMap::new(),
            offered: 0,
            early: Vec::new(),
            early_ranges: 0,
        }
    }

    /// What is said to whoever uses a connection that is over: why it is.
    pub(crate) fn over(&self, operation: &'static str) -> Error {
        self.why.as_ref().map_or_else(|| down(operation, "the connection is over"), Error::again)
    }

    pub(crate) const fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open)
    }
}

impl Core {
    /// An endpoint failed.
    pub(crate) fn lost(&mut self, token: u64, status: Status) {
        self.linger_no_more(token);
        let Some(peer) = self.ways.get(&token).copied() else { return };
        if let Some(Way { contact, .. }) =
            self.peers.get_mut(peer).and_then(|known| known.way.as_mut())
            && let Contact::Trying(batch, _) = std::mem::replace(contact, Contact::Broken)
        {
            self.mail.push((peer, batch));
        }
        self.broken(peer, "the connection broke", status);
    }

    pub(crate) fn broken(&mut self, peer: PeerId, what: &'static str, status: Status) {
        self.spoiled = true;
        let words = self.library.words(status.0);
        let error = down("connection", format!("{what}: {words}"))
            .with_native(status.0.into())
            .with_context("peer", peer);
        self.end(peer, Some(error));
    }

    /// Peers that took too long to be connected are given up. When the next will have.
    pub(crate) fn give_up(&mut self, now: Instant) -> Option<Instant> {
        let bound = self.options.connect_bound();
        let mut next = self.expire(now);
        for peer in self.trying.iter().copied().collect::<Vec<_>>() {
            let way = self.peers.get(peer).and_then(|known| known.way.as_ref());
            let Some(Way { contact: Contact::Trying(_, since), .. }) = way else {
                self.trying.remove(&peer);
                continue;
            };
            let until = *since + bound;
            if until > now {
                next = Some(next.map_or(until, |next| next.min(until)));
                continue;
            }
            let mut error = down("connect", "the peer cannot be reached in time")
                .with_context("milliseconds", bound.as_millis())
                .with_remedy("see that both sides' interfaces reach each other, or choose them: devices=...");
            if let Some(known) = self.peers.get(peer) {
                error = of_the_two(error, self.library, &self.options, &self.networks, known);
            }
            self.end(peer, Some(error));
        }
        next
    }

    /// Ends a connection, if it is open: `error` says why, unless this side wants it so.
    pub(crate) fn end(&mut self, peer: PeerId, error: Option<Error>) {
        let Some(known) = self.peers.get_mut(peer).filter(|known| known.is_open()) else { return };
        self.open.remove(&known.incarnation);
        self.words.remove(&space(known.word));
        self.waiting.remove(&peer);
        self.owing.remove(&peer);
        self.trying.remove(&peer);
        self.touched = true;
        known.queue.clear();
        known.owed.clear();
        known.withheld.clear();
        known.early.clear();
        known.offers.clear();
        let stop = error.as_ref().map_or(Stop::Cancelled, |error| {
            Stop::Failed(error.message().to_owned(), error.native())
        });
        // Where the other side, or nobody, is to blame, it knows, or cannot be told.
        let words = error.is_none().then_some(known.their_word).flatten().map(|theirs| (theirs, known.word));
        known.why = error.as_ref().map(Error::again);
        known.phase = Phase::Closing(error);
        if let Some(way) = known.way.take() {
            self.part(peer, way, words);
        }
        let Some(known) = self.peers.get_mut(peer) else { return };
        for token in known.flights.iter().copied().collect::<Vec<_>>() {
            if let Some(flight) = self.flights.get_mut(&token) {
                flight.stop.get_or_insert_with(|| stop.clone());
                // Whatever still comes is written nowhere.
                flight.offers = 0;
                self.worker.iter().for_each(|worker| flight.batch.abandon(worker, 0..u64::MAX));
            }
            self.step(token);
        }
        self.serve_no_more(peer);
        self.quiet(peer);
        self.stirred = true;
    }

    /// Sends a message that belongs to no transfer.
    pub(crate) fn send(&mut self, peer: PeerId, kind: Kind, number: u64, payload: Vec<u8>) {
        let Some(known) = self.peers.get(peer) else { return };
        let Some(word) = known.their_word else { return };
        let header = Header { kind, word, from: known.word, number };
        let (Some(way), Some(worker)) = (&known.way, &self.worker) else { return };
        let mut batch = Batch::new(worker, &way.endpoint.load, 0, Vec::new(), Vec::new());
        self.counters.count(kind, payload.len());
        batch.send(&way.endpoint, header.encode(), payload);
        self.touched = true;
        self.mail.push((peer, batch));
    }

    /// A message came.
    pub(crate) fn hear(&mut self, header: &[u8; HEADER], payload: Vec<u8>) {
        let Some(header) = Header::decode(header) else { return };
        // Of a connection that is over, or of a stranger.
        let Some(peer) = self.by_word(header.word) else { return };
        if let Some(known) = self.peers.get_mut(peer) {
            known.their_word.get_or_insert(header.from);
        }
        match header.kind {
            Kind::Note => self.noted(peer, header.number, payload),
            Kind::Taken => {
                for number in read_numbers(&payload) {
                    if let Some(flight) = self.flights.get_mut(&number).filter(|f| f.peer == peer) {
                        flight.taken = true;
                        self.step(number);
                    }
                }
            }
            Kind::Hello => {}
            Kind::Ask | Kind::Offer => self.listed(peer, header.kind, header.number, &payload),
            Kind::Landed => self.answered(peer, header.number, None),
            Kind::Refused => self.answered(peer, header.number, Some(Refusal::decode(&payload))),
            Kind::Bye => self.end(peer, Some(down("connection", "the peer ended the connection"))),
        }
    }

    fn noted(&mut self, peer: PeerId, number: u64, payload: Vec<u8>) {
        let Some(known) = self.peers.get_mut(peer) else { return };
        // A peer has no more than that many transfers whose notification was not acknowledged.
        if known.owed.len() + known.withheld.len() >= IN_FLIGHT as usize {
            let error = down("connection", "the peer sent more notifications than there was room for")
                .with_context("limit", IN_FLIGHT);
            return self.end(peer, Some(error));
        }
        known.notes += 1;
        if known.notes <= NOTES {
            known.owed.push(number);
            self.owing.insert(peer);
        } else {
            known.withheld.push_back(number);
        }
        self.events.push_back(Event::Notified { peer, payload });
    }

    /// A notification was polled: there may be room for one that waits.
    pub(crate) fn note_taken(&mut self, peer: PeerId) {
        let Some(known) = self.peers.get_mut(peer) else { return };
        known.notes = known.notes.saturating_sub(1);
        if known.notes < NOTES
            && let Some(number) = known.withheld.pop_front()
        {
            known.owed.push(number);
            self.owing.insert(peer);
        }
    }

    /// Acknowledges notifications, several at a time where the peer is slow to listen.
    pub(crate) fn acknowledge(&mut self, peer: PeerId) {
        if self.way("acknowledge", peer).is_err() {
            return;
        }
        let under_way = self.mail.iter().filter(|(whose, batch)| *whose == peer && batch.is_pending());
        if under_way.count() >= 8 {
            self.owing.insert(peer);
            return;
        }
        let Some(known) = self.peers.get_mut(peer) else { return };
        let count = known.owed.len().min(MOST_NUMBERS);
        let taken: Vec<u64> = known.owed.drain(..count).collect();
        if !taken.is_empty() {
            self.send(peer, Kind::Taken, 0, numbers(&taken));
        }
    }
}

/// What a transfer of a connection that broke failed with.
pub(crate) fn broke(reason: &str, native: Option<i64>) -> Error {
    let error = down("transfer", reason.to_owned());
    match native {
        Some(code) => error.with_native(code),
        None => error,
    }
}

/// What a transfer failed with, by itself.
pub(crate) fn by_itself(core: &Core, status: Status) -> Error {
    transfer(core.library, status)
}
