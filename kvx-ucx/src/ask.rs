//! Transfers where UCX has no way of its own to the peer's memory, as over TCP.
//!
//! UCX would carry them out in the peer's process, by messages of its own, and end that process when it cannot send an answer because
//! this side is gone. So the peer's backend does it, by requests of its own, which fail where UCX's would be fatal: it is sent
//! a list of ranges, and to read, it sends what is there, under the list's tags; to write, it waits for what this side sends under
//! them. The data is copied from the registered memory to the registered memory, and travels in no message of the backend's.

use std::collections::VecDeque;

use kvx_core::id::PeerId;
use kvx_core::transfer::Mode;

use crate::core::Core;
use crate::flight::{Flight, Manner, Stop};
use crate::lanes::Reach;
use crate::message::{Header, Kind, MOST_RANGES, RANGE, Range, Refusal};
use crate::peer::Peer;
use crate::shared::Counters;
use crate::sys::{Part, Worker};

/// Most ranges that one side may have asked for, or announced, at a time.
pub(crate) const MOST_ASKED: u32 = 1024;

/// A range is of at most this many bytes: notifications and other transfers need not wait for long.
const PIECE: u64 = 1 << 20;

/// A list that went ahead of a write's data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// The transfer.
    token: u64,
    ranges: u32,
}

impl Flight {
    /// Chooses how its data is moved, by what of the peer's memory UCX reaches. Of a device's memory it is always UCX that does it.
    pub(crate) fn decide(&mut self, reach: Reach) {
        if reach.is_direct(self.mode, self.batch.domains()) || !self.batch.is_of_host() {
            self.manner = Manner::Direct;
            return;
        }
        self.manner = Manner::Asked;
        if self.parts.iter().any(|part| part.bytes > PIECE) {
            let mut parts = Vec::with_capacity(self.parts.len() * 2);
            let mut left: VecDeque<Part> = std::mem::take(&mut self.parts).into();
            while let Some(part) = left.pop_front() {
                let bytes = part.bytes.min(PIECE);
                parts.push(Part { bytes, ..part });
                if bytes < part.bytes {
                    let (local, remote) = (part.local + bytes, part.remote + bytes);
                    left.push_front(Part { local, remote, bytes: part.bytes - bytes, ..part });
                }
            }
            self.parts = parts;
        }
    }
}

impl Peer {
    /// Asks for, or announces and sends, as much of a transfer as there is room for.
    pub(crate) fn ask(&mut self, token: u64, flight: &mut Flight, worker: &Worker, window: u32, counters: &mut Counters) {
        let (Some(way), Some(theirs)) = (&self.way, self.their_word) else { return };
        let (window, endpoint) = (window.min(MOST_ASKED), &way.endpoint);
        while flight.goes_on() && flight.next < flight.parts.len() {
            let left = u32::try_from(flight.parts.len() - flight.next).unwrap_or(u32::MAX);
            let under_way = endpoint.load().max(self.offered);
            let room = window.saturating_sub(under_way).min(left).min(MOST_RANGES);
            // Few lists of many ranges, rather than many of few.
            if room == 0 || (under_way > 0 && room < left.min(window / 8)) {
                return;
            }
            let (kind, tags) = match flight.mode {
                Mode::Read => (Kind::Ask, self.tags.ask(self.word, room)),
                Mode::Write => (Kind::Offer, self.tags.announce(theirs, room)),
            };
            let parts = flight.parts[flight.next..].iter().take(room as usize);
            let mut list = Vec::with_capacity(room as usize * RANGE);
            for (part, tag) in parts.clone().zip(tags.clone()) {
                let region = flight.batch.region(part.key).unwrap_or_default();
                Range { region, offset: part.remote, bytes: part.bytes }.encode(&mut list);
                if flight.mode == Mode::Read {
                    flight.batch.catch(worker, tag, part.memory, part.local, part.bytes);
                }
            }
            let header = Header { kind, word: theirs, from: self.word, number: tags.start };
            counters.count(kind, list.len());
            flight.batch.send(endpoint, header.encode(), list);
            if flight.mode == Mode::Write {
                for (part, tag) in parts.zip(tags.clone()) {
                    flight.batch.dispatch(endpoint, tag, part.memory, part.local, part.bytes);
                }
                self.offers.insert(tags.start, Offer { token, ranges: room });
                self.offered += room;
                flight.offers += 1;
            }
            flight.next += room as usize;
        }
    }
}

impl Core {
    /// The peer has answered a list: all of it landed, or nothing comes of it.
    pub(crate) fn answered(&mut self, peer: PeerId, first: u64, refused: Option<(Refusal, u64)>) {
        let Some(known) = self.peers.get_mut(peer) else { return };
        let offer = known.offers.remove(&first);
        if let Some(offer) = &offer {
            known.offered = known.offered.saturating_sub(offer.ranges);
            if !known.queue.is_empty() {
                self.waiting.insert(peer);
            }
        }
        let of = |flight: &Flight| offer.is_none() && flight.batch.awaits(first);
        let token = offer.map(|offer| offer.token).or_else(|| {
            let mut tokens = known.flights.iter().copied();
            tokens.find(|token| self.flights.get(token).is_some_and(of))
        });
        let Some((token, flight)) = token.and_then(|token| Some((token, self.flights.get_mut(&token)?))) else {
            return;
        };
        if offer.is_some() {
            flight.offers = flight.offers.saturating_sub(1);
        }
        if let Some((refusal, count)) = refused {
            flight.stop.get_or_insert(Stop::Refused(refusal));
            if let Some(worker) = &self.worker {
                flight.batch.abandon(worker, first..first.saturating_add(count));
            }
        }
        self.step(token);
    }
}
