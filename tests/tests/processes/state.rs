//! The state of one backend, under one lock.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvx_core::backend::{Event, Outcome};
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::Region;
use kvx_core::transfer::PostedSegment;
use kvx_core::{Error, Retry};

use crate::message::{Key, Piece, Request};

pub(crate) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) regions: BTreeMap<RegionId, (Region, u64)>,
    pub(crate) keys: BTreeMap<RemoteRegionId, (PeerId, Key)>,
    pub(crate) peers: BTreeMap<PeerId, Peer>,
    pub(crate) in_flight: BTreeMap<TransferId, Flight>,
    pub(crate) events: VecDeque<Event>,
    /// Handles are never used again: the slot is always fresh.
    handles: u32,
    pub(crate) offered: bool,
    pub(crate) closed: bool,
}

pub(crate) struct Peer {
    pub(crate) incarnation: [u8; 16],
    pub(crate) address: std::net::SocketAddr,
    /// What it must say when it dials this side, and this side when it dials it.
    pub(crate) word: u64,
    pub(crate) their_word: u64,
    /// To it: what this side asks, and its answers.
    pub(crate) outgoing: Option<TcpStream>,
    /// From it: what it asks.
    pub(crate) incoming: Option<TcpStream>,
    /// Posted, not yet given to the connection.
    pub(crate) outbox: VecDeque<Request>,
    pub(crate) ready: bool,
    pub(crate) over: bool,
}

/// A transfer in flight: its segments hold their regions.
pub(crate) struct Flight {
    pub(crate) peer: PeerId,
    pub(crate) read: Vec<(Region, PostedSegment)>,
    /// What the peer is told once all is read.
    pub(crate) note: Option<Vec<u8>>,
    /// Settled, but the event was not polled yet: it still counts.
    pub(crate) over: bool,
}

impl State {
    pub(crate) fn handle(&mut self) -> u32 {
        self.handles += 1;
        self.handles
    }

    /// The live peer of an incarnation.
    pub(crate) fn known(&self, incarnation: [u8; 16]) -> Option<PeerId> {
        self.peers
            .iter()
            .find(|(_, peer)| peer.incarnation == incarnation && !peer.over)
            .map(|(handle, _)| *handle)
    }

    /// The live peer that may dial with this word.
    pub(crate) fn dialled_by(&mut self, incarnation: [u8; 16], word: u64) -> Option<PeerId> {
        self.known(incarnation).filter(|peer| self.peers[peer].word == word)
    }

    /// Ends a connection: everything in flight settles, then the peer is down.
    pub(crate) fn end(&mut self, handle: PeerId, why: Option<&'static str>) {
        let Some(peer) = self.peers.get_mut(&handle).filter(|peer| !peer.over) else { return };
        peer.over = true;
        peer.outbox.clear();
        for stream in [peer.outgoing.take(), peer.incoming.take()].into_iter().flatten() {
            // It may be shut down already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let left: Vec<_> = self
            .in_flight
            .iter()
            .filter(|(_, flight)| flight.peer == handle && !flight.over)
            .map(|(id, _)| *id)
            .collect();
        for id in left {
            let outcome = why.map_or(Outcome::Cancelled, |why| Outcome::Failed(gone(why)));
            self.settle(id, outcome);
        }
        self.events.push_back(Event::PeerDown { peer: handle, error: why.map(gone) });
    }

    pub(crate) fn settle(&mut self, id: TransferId, outcome: Outcome) {
        if let Some(flight) = self.in_flight.get_mut(&id).filter(|flight| !flight.over) {
            flight.over = true;
            flight.read.clear();
            self.events.push_back(Event::Settled { id, outcome });
        }
    }

    /// Does what a peer asks, on this side's memory.
    pub(crate) fn carry_out(&mut self, from: PeerId, request: &Request) -> Result<Vec<u8>, String> {
        let mut data = &request.data.0[..];
        let mut read = Vec::new();
        for Piece { key, offset, bytes } in &request.pieces {
            let handle = RegionId::new(key.slot, key.generation);
            let region = self.regions.get(&handle).filter(|(_, secret)| *secret == key.secret);
            let (region, _) = region.ok_or("the region is not registered")?;
            let count = usize::try_from(*bytes).map_err(|error| error.to_string())?;
            if request.write {
                let (now, rest) = data.split_at_checked(count).ok_or("too little data")?;
                region.write_at(*offset, now).map_err(|error| error.to_string())?;
                data = rest;
            } else {
                let end = offset.checked_add(*bytes).filter(|end| *end <= region.bytes());
                end.ok_or("outside the region")?;
                let at = read.len();
                read.resize(at + count, 0);
                region.read_at(*offset, &mut read[at..]).map_err(|error| error.to_string())?;
            }
        }
        if request.write
            && let Some(note) = &request.notify
        {
            self.events.push_back(Event::Notified { peer: from, payload: note.0.clone() });
        }
        Ok(read)
    }
}

/// The connection is over.
pub(crate) fn gone(why: &'static str) -> Error {
    Error::peer("connection", why).with_retry(Retry::Reconnect)
}
