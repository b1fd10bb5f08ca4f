//! Transfers in flight: what is left to be posted, and what comes when all of it was.

use kvx_core::backend::Outcome;
use kvx_core::id::{PeerId, TransferId};
use kvx_core::transfer::Mode;

use crate::core::Core;
use crate::error::malformed;
use crate::message::{Header, Kind, Refusal};
use crate::contact::{Contact, Way};
use crate::peer::{broke, by_itself};
use crate::sys::{Batch, Endpoint, Part};

/// A transfer that has not settled.
pub(crate) struct Flight {
    pub(crate) id: TransferId,
    pub(crate) peer: PeerId,
    pub(crate) mode: Mode,
    pub(crate) batch: Batch,
    pub(crate) parts: Vec<Part>,
    /// How many of them were posted.
    pub(crate) next: usize,
    pub(crate) manner: Manner,
    /// Lists that went ahead of its data, and were not answered.
    pub(crate) offers: u32,
    /// A write's data was followed by a flush.
    pub(crate) flushed: bool,
    /// What the peer is to be told once all data is there; `None` also once it was told.
    pub(crate) note: Option<Vec<u8>>,
    pub(crate) told: bool,
    /// The peer has the notification.
    pub(crate) taken: bool,
    pub(crate) stop: Option<Stop>,
}

/// How its data is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// What its connection can do is not known yet.
    Unknown,
    /// By UCX's reads and writes.
    Direct,
    /// By what the [peer sends, or waits for](crate::ask), under tags.
    Asked,
}

/// Why nothing more of it is posted.
#[derive(Clone, Debug)]
pub(crate) enum Stop {
    Cancelled,
    Refused(Refusal),
    /// The connection broke: why, and the code.
    Failed(String, Option<i64>),
}

impl Flight {
    /// Whether more of it is posted where there is room.
    pub(crate) fn goes_on(&self) -> bool {
        self.stop.is_none() && self.batch.failure().is_none()
    }

    fn post(&mut self, endpoint: &Endpoint, window: u32) {
        while self.goes_on()
            && endpoint.load() < window
            && let Some(part) = self.parts.get(self.next)
        {
            self.batch.transfer(endpoint, self.mode, part);
            self.next += 1;
        }
    }
}

impl Core {
    /// Posts what there is room for to a peer.
    pub(crate) fn pump(&mut self, peer: PeerId) {
        while let (Some(known), Some(worker)) = (self.peers.get_mut(peer), &self.worker)
            && let (Some(way), Some(token)) = (&known.way, known.queue.front().copied())
        {
            // What the connection uses is known once there is one, and may be refused.
            let Contact::Made(_, reach) = way.contact else { return };
            let Some(flight) = self.flights.get_mut(&token) else {
                known.queue.pop_front();
                continue;
            };
            if flight.manner == Manner::Unknown {
                flight.decide(reach);
            }
            let before = flight.next;
            if flight.manner == Manner::Asked {
                known.ask(token, flight, worker, self.options.window, &mut self.counters);
            } else {
                flight.post(&way.endpoint, self.options.window);
            }
            self.touched |= flight.next != before;
            if flight.goes_on() && flight.next < flight.parts.len() {
                return;
            }
            known.queue.pop_front();
            self.step(token);
        }
        self.waiting.remove(&peer);
    }

    /// Takes a transfer as far as it comes.
    pub(crate) fn step(&mut self, token: u64) {
        if let Some(outcome) = self.advance(token) {
            self.settled(token, outcome);
        } else if let Some(flight) = self.flights.get(&token)
            && flight.manner == Manner::Asked
            && let Some(status) = flight.batch.failure()
        {
            // What the peer has of it will never be as was said, and the rest of it may never end.
            let (peer, error) = (flight.peer, by_itself(self, status));
            self.end(peer, Some(error));
        }
    }

    /// How it ended, once it has.
    fn advance(&mut self, token: u64) -> Option<Outcome> {
        let flight = self.flights.get_mut(&token)?;
        let known = self.peers.get(flight.peer);
        let way = known.and_then(|known| known.way.as_ref());
        let posted = flight.next == flight.parts.len();
        let failing = flight.stop.is_some() || flight.batch.failure().is_some();
        if posted
            && !failing
            && !flight.flushed
            && flight.mode == Mode::Write
            && flight.manner == Manner::Direct
            && !flight.parts.is_empty()
            && let Some(Way { endpoint, .. }) = way
        {
            flight.flushed = true;
            flight.batch.flush(endpoint);
        }
        if flight.batch.is_pending() || flight.offers > 0 {
            return None;
        }
        let failure = flight.batch.failure();
        if let (Some(Stop::Cancelled), None) = (&flight.stop, failure)
            && posted
            && flight.note.is_none()
            && (flight.flushed || flight.mode == Mode::Read || flight.manner == Manner::Asked)
            && !flight.told
        {
            return Some(Outcome::done());
        }
        if let Some(stop) = &flight.stop {
            return Some(match stop {
                Stop::Cancelled => Outcome::Cancelled,
                Stop::Refused(refusal) => Outcome::Failed(malformed("transfer", refusal.words())),
                Stop::Failed(reason, native) => Outcome::Failed(broke(reason, *native)),
            });
        }
        if let Some(status) = failure {
            let error = by_itself(self, status);
            return Some(Outcome::Failed(error));
        }
        if !posted {
            return None;
        }
        if let Some(note) = flight.note.take() {
            let words = known.and_then(|known| Some((known.their_word?, known.word)));
            let (Some((word, from)), Some(Way { endpoint, .. })) = (words, way) else {
                flight.note = Some(note);
                return None;
            };
            self.counters.count(Kind::Note, note.len());
            flight.told = true;
            self.touched = true;
            let header = Header { kind: Kind::Note, word, from, number: token };
            flight.batch.send(endpoint, header.encode(), note);
            if flight.batch.is_pending() {
                return None;
            }
            if let Some(status) = flight.batch.failure() {
                return Some(Outcome::Failed(by_itself(self, status)));
            }
        }
        (!flight.told || flight.taken).then_some(Outcome::done())
    }
}
