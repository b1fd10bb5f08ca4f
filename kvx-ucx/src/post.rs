//! Posting and cancelling.

use std::sync::Arc;
use std::time::Instant;

use kvx_core::Result;
use kvx_core::backend::{Event, Submit};
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::transfer::{Mode, PostedSegment};

use crate::core::Core;
use crate::error::{closed, down, misuse, over, stale};
use crate::flight::{Flight, Manner, Stop};
use crate::probe::{BATCH, IN_FLIGHT, NOTIFICATION};
use crate::sys::{Batch, Key, Memory, Part};

/// A batch of at most this many bytes may be over within the call.
const SMALL: u64 = 64 << 10;
/// Most rounds of progress for that.
const ROUNDS: u32 = 8;

/// A batch's memory and keys, each once, and its parts.
#[derive(Default)]
struct Named {
    locals: Vec<RegionId>,
    memory: Vec<Arc<Memory>>,
    remotes: Vec<RemoteRegionId>,
    keys: Vec<Arc<Key>>,
    parts: Vec<Part>,
    bytes: u64,
}

/// Finds a handle among those that were seen before. Most batches name few, one after the other.
fn position<T: PartialEq>(list: &[T], item: &T) -> Option<usize> {
    list.iter().rposition(|known| known == item)
}

impl Core {
    /// Posts a batch. Everything that can be refused is refused before anything is entered.
    pub(crate) fn submit(
        &mut self,
        id: TransferId,
        peer: PeerId,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Result<Submit> {
        let entered = Instant::now();
        let full = self.check(id, peer, segments, notify)?;
        let named = self.name(peer, segments)?;
        if full {
            return Ok(Submit::Full);
        }
        self.way("submit", peer)?;
        let token = self.token();
        let (Some(known), Some(worker)) = (self.peers.get_mut(peer), &self.worker) else {
            return Err(closed("submit"));
        };
        let Some(way) = &known.way else {
            return Err(down("submit", "the connection is over").with_context("peer", peer));
        };
        let batch = Batch::new(worker, &way.endpoint.load, token, named.memory, named.keys);
        let flight = Flight {
            id,
            peer,
            mode,
            batch,
            parts: named.parts,
            next: 0,
            manner: Manner::Unknown,
            offers: 0,
            flushed: false,
            note: notify.map(Vec::from),
            told: false,
            taken: false,
            stop: None,
        };
        self.flights.insert(token, flight);
        self.ids.insert(id, (peer, Some(token)));
        known.in_flight += 1;
        known.flights.insert(token);
        known.queue.push_back(token);
        self.waiting.insert(peer);
        self.pump(peer);
        // One with a notification is done when the peer has that: no call waits for it.
        if named.bytes <= SMALL && notify.is_none() {
            let mut rounds = 0;
            while rounds < ROUNDS && self.flights.contains_key(&token) && self.progress() {
                rounds += 1;
            }
        }
        let done = notify.is_none() && self.is_done(id);
        self.leaves(entered);
        Ok(if done { Submit::Done { route: None } } else { Submit::Submitted })
    }

    /// Whether a transfer is done just now. Then there is no need of an event.
    fn is_done(&mut self, id: TransferId) -> bool {
        let done = matches!(self.events.back(),
            Some(Event::Settled { id: settled, outcome }) if *settled == id && outcome.is_done());
        if done {
            self.events.pop_back();
            self.forget(id);
        }
        done
    }

    /// A transfer has settled, and somebody was told.
    pub(crate) fn forget(&mut self, id: TransferId) {
        let peer = self.ids.remove(&id).map(|(peer, _)| peer);
        if let Some(known) = peer.and_then(|peer| self.peers.get_mut(peer)) {
            known.in_flight = known.in_flight.saturating_sub(1);
        }
    }

    /// Whether there is no room.
    fn check(
        &self,
        id: TransferId,
        peer: PeerId,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Result<bool> {
        if self.closed {
            return Err(closed("submit"));
        }
        let known = self.peer("submit", peer)?;
        if !known.is_open() {
            return Err(known.over("submit").with_context("peer", peer));
        }
        if !known.ready {
            return Err(misuse("submit", "the handshake with this peer is not complete"));
        }
        if self.ids.contains_key(&id) {
            return Err(misuse("submit", "a transfer of this id is in flight").with_context("id", id));
        }
        if segments.is_empty() && notify.is_none() {
            return Err(misuse("submit", "a batch without segments and without a notification"));
        }
        if segments.len() > BATCH as usize {
            return Err(over("submit", "too many segments", segments.len(), BATCH));
        }
        if let Some(note) = notify
            && note.len() > NOTIFICATION as usize
        {
            return Err(over("submit", "the notification is too long", note.len(), NOTIFICATION));
        }
        Ok(known.in_flight >= IN_FLIGHT)
    }

    /// Looks up every handle, checks every range, and splits where pieces end.
    fn name(&self, peer: PeerId, segments: &[PostedSegment]) -> Result<Named> {
        let mut named = Named { parts: Vec::with_capacity(segments.len()), ..Named::default() };
        for segment in segments {
            let local = match position(&named.locals, &segment.local) {
                Some(known) => known,
                None => {
                    let memory = self.regions.get(segment.local);
                    let memory = memory.ok_or_else(|| stale("submit", "region", segment.local))?;
                    named.locals.push(segment.local);
                    named.memory.push(Arc::clone(memory));
                    named.memory.len() - 1
                }
            };
            let remote = match position(&named.remotes, &segment.remote) {
                Some(known) => known,
                None => {
                    let key = self.keys.get(segment.remote).filter(|key| key.peer == peer);
                    let key = key.ok_or_else(|| stale("submit", "key", segment.remote))?;
                    named.remotes.push(segment.remote);
                    named.keys.push(Arc::clone(&key.key));
                    named.keys.len() - 1
                }
            };
            let (memory, key) = (&named.memory[local], &named.keys[remote]);
            for (offset, size, which) in [
                (segment.local_offset, memory.bytes(), "a segment is outside its local region"),
                (segment.remote_offset, key.bytes(), "a segment is outside its remote region"),
            ] {
                if offset.checked_add(segment.bytes).is_none_or(|end| end > size) {
                    return Err(over("submit", which, offset, size).with_context("bytes", segment.bytes));
                }
            }
            let index = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
            let mut done = 0;
            while done < segment.bytes {
                let (local_at, remote_at) = (segment.local_offset + done, segment.remote_offset + done);
                let bytes = (segment.bytes - done).min(memory.run(local_at)).min(key.run(remote_at));
                if bytes == 0 {
                    return Err(over("submit", "a segment is outside its remote region", remote_at, key.bytes()));
                }
                named.parts.push(Part {
                    memory: index(local),
                    key: index(remote),
                    local: local_at,
                    remote: remote_at,
                    bytes,
                });
                done += bytes;
            }
            named.bytes = named.bytes.saturating_add(segment.bytes);
        }
        Ok(named)
    }

    /// Posts no more of a transfer. What UCX has of it goes on.
    pub(crate) fn cancel(&mut self, id: TransferId) -> Result<()> {
        let token = self.ids.get(&id).and_then(|(_, token)| *token);
        let token = token.ok_or_else(|| stale("cancel", "transfer", id))?;
        if let Some(flight) = self.flights.get_mut(&token)
            && !flight.told
        {
            flight.stop.get_or_insert(Stop::Cancelled);
            self.step(token);
        }
        Ok(())
    }
}
