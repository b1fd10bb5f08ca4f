//! Posting and cancelling. Nothing is sent here: a thread sends what is in the outbox.

use kvx_core::backend::{Outcome, Submit};
use kvx_core::id::{PeerId, TransferId};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::{Error, Result};

use crate::NAME;
use crate::connection::Shared;
use crate::cursor::Cursor;
use crate::error::stale;
use crate::message::{Batch, MAX_NOTE, Note, Piece, Request};
use crate::state::{Flight, Posted, Stage, State};

impl Shared {
    /// Posts a batch. Everything that can be refused is refused before anything is entered.
    pub(crate) fn submit(
        &self,
        id: TransferId,
        peer: PeerId,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
        most_in_flight: u32,
    ) -> Result<Submit> {
        self.with(|state| {
            state.check_open("submit")?;
            let known = state.live("submit", peer)?;
            if known.stage == Stage::Met {
                return Err(misuse("the handshake with this peer is not complete"));
            }
            let in_flight = known.in_flight;
            if state.posted.contains_key(&id) {
                return Err(misuse("the id is in flight").with_context("id", id));
            }
            if notify.is_some_and(|note| note.len() > MAX_NOTE) {
                return Err(misuse("the notification is too long").with_context("limit", MAX_NOTE));
            }
            let (mut regions, mut pieces) = (Vec::new(), Vec::new());
            for segment in segments {
                let local = state.regions.get(&segment.local);
                let local = local.ok_or_else(|| stale("submit", segment.local))?;
                let remote = state.keys.get(&segment.remote).filter(|known| known.peer == peer);
                let key = remote.ok_or_else(|| stale("submit", segment.remote))?.key;
                regions.push(local.region.clone());
                let (offset, bytes) = (segment.remote_offset, segment.bytes);
                pieces.push(Piece::new(key.region(), key.secret, offset, bytes));
            }
            let ranges = segments.iter().map(|segment| (segment.local_offset, segment.bytes));
            let cursor = Cursor::new(ranges).map_err(|_| misuse("more bytes than there can be"))?;
            if in_flight >= most_in_flight {
                return Ok(Submit::Full);
            }
            let (ticket, note) = (state.ticket(), notify.map(Vec::from));
            state.flights.insert(ticket, Flight { id, peer, mode, regions, cursor, pieces, note });
            state.posted.insert(id, Posted { peer, ticket });
            let known = state.live("submit", peer)?;
            known.in_flight += 1;
            known.outbox.push_back(ticket);
            state.stirred = true;
            Ok(Submit::Submitted)
        })
    }

    /// Gives a transfer up. Both ways nothing more of it is copied from here on, so it is settled at once.
    pub(crate) fn cancel(&self, id: TransferId) -> Result<()> {
        self.with(|state| {
            let posted = state.posted.get(&id).map(|posted| (posted.ticket, posted.peer));
            let (ticket, peer) = posted.ok_or_else(|| stale("cancel", id))?;
            if !state.flights.contains_key(&ticket) {
                return Err(stale("cancel", id));
            }
            state.peer("cancel", peer)?.outbox.retain(|waiting| *waiting != ticket);
            state.settle(ticket, Outcome::Cancelled);
            Ok(())
        })
    }
}

impl State {
    /// The request with which a batch begins, unless it was given up.
    pub(crate) fn begin(&mut self, ticket: u64) -> Option<Request> {
        let flight = self.flights.get_mut(&ticket)?;
        let write = flight.mode == Mode::Write;
        // A peer is told of a read when all of it is here.
        let note = if write { flight.note.take().map(Note) } else { None };
        let batch = Batch { ticket, pieces: std::mem::take(&mut flight.pieces), note };
        Some(if write { Request::Write(batch) } else { Request::Read(batch) })
    }

    /// Goes on with a read whose data is here, and of which the peer is to be told: as a write of nothing.
    pub(crate) fn tell(&mut self, ticket: u64) -> bool {
        let Some(flight) = self.flights.get_mut(&ticket).filter(|flight| flight.note.is_some())
        else {
            return false;
        };
        flight.mode = Mode::Write;
        flight.regions.clear();
        if let Some(peer) = self.peers.get_mut(&flight.peer) {
            peer.outbox.push_back(ticket);
            self.stirred = true;
        }
        true
    }
}

fn misuse(message: &'static str) -> Error {
    Error::misuse("submit", message).with_backend(NAME)
}
