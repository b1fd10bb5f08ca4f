//! Posting and cancelling.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kvx_core::backend::{Outcome, Submit};
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::Region;
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::Result;

use crate::engine::Shared;
use crate::error::{closed, misuse, over, stale};
use crate::probe::{BATCH, IN_FLIGHT, NOTIFICATION};
use crate::record::{self, Part, Source, Write};
use crate::route::Route;
use crate::segment::Segment;
use crate::state::{Flight, Imported, Outgoing, Phase, Registered, State};
use crate::sys::runs::Runs;
use crate::work::Read;

/// A batch's regions, each once.
#[derive(Default)]
struct Named {
    locals: Vec<RegionId>,
    remotes: Vec<RemoteRegionId>,
    keys: Vec<Arc<Imported>>,
}

/// Finds a handle among those that were seen before. Most batches name few, one after the other.
fn position<T: PartialEq>(list: &[T], item: &T) -> Option<usize> {
    list.iter().rposition(|known| known == item)
}

impl Shared {
    pub(crate) fn submit(
        &self,
        id: TransferId,
        peer: PeerId,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Result<Submit> {
        let mut state = self.lock();
        let full = check(&state, id, peer, segments, notify)?;
        let (named, places) = name(&state, peer, segments)?;
        if full {
            return Ok(Submit::Full);
        }
        if segments.is_empty() && self.told_at_once(&mut state, peer, notify) {
            return Ok(Submit::Done { route: None });
        }
        let reads = match mode {
            Mode::Read if !segments.is_empty() => Some(runs(&state, &named, &places)?),
            _ => None,
        };
        let stop = Arc::new(AtomicBool::new(false));
        let flight = Flight {
            peer,
            over: false,
            stop: Arc::clone(&stop),
            hold: Vec::new(),
            segments: Vec::new(),
            sequence: None,
            route: Route::default(),
        };
        state.flights.insert(id, flight);
        if let Some(known) = state.peers.get_mut(peer) {
            known.in_flight += 1;
        }
        match reads {
            None if segments.is_empty() => {
                self.send(&mut state, peer, Outgoing::note(notify.unwrap_or_default(), id));
            }
            None => self.post_write(&mut state, id, peer, &named, places, notify),
            Some(runs) => {
                let Some(known) = state.peers.get_mut(peer) else { return Ok(Submit::Submitted) };
                let (keys, after) = (named.keys, known.sequence);
                let note = notify.map(Vec::from);
                let read = Read { id, keys, runs, note, after, stop };
                let bytes: u64 = segments.iter().map(|segment| segment.bytes).sum();
                if bytes <= self.options.inline_bytes
                    && !known.reads.busy
                    && known.reads.jobs.is_empty()
                    && known.can_read(&read)
                    && let Some(link) = known.link.clone()
                {
                    known.reads.busy = true;
                    drop(state);
                    return Ok(self.read_inline(peer, read, &link));
                }
                known.reads.jobs.push_back(read);
                state.kick(peer);
                self.employ(&state);
            }
        }
        Ok(Submit::Submitted)
    }

    fn post_write(
        &self,
        state: &mut State,
        id: TransferId,
        peer: PeerId,
        named: &Named,
        parts: Vec<Part>,
        notify: Option<&[u8]>,
    ) {
        let hold = regions(state, &named.locals);
        let mut write = Write { parts, note: notify.map(Vec::from), ..Write::default() };
        let mut used: Vec<Arc<Segment>> = Vec::new();
        for local in &named.locals {
            let Some(Registered { region, shared, .. }) = state.regions.get(*local) else { continue };
            let bytes = region.bytes();
            write.sources.push(match shared {
                Some((segment, base)) => {
                    if used.iter().all(|known| known.number != segment.number) {
                        used.push(Arc::clone(segment));
                    }
                    Source { segment: segment.number, base: *base, bytes }
                }
                None => Source { segment: 0, base: region.address().addr().get() as u64, bytes },
            });
        }
        for key in &named.keys {
            let Imported { slot, generation, secret, .. } = **key;
            write.targets.push(record::Target { slot, generation, secret });
        }
        used.iter().for_each(|segment| state.uses(segment));
        let Some(known) = state.peers.get_mut(peer) else { return };
        known.sequence += 1;
        let sequence = known.sequence;
        write.sequence = sequence;
        known.writes.insert(sequence, id);
        used.iter().for_each(|segment| known.send_segment(segment));
        if let Some(flight) = state.flights.get_mut(&id) {
            flight.hold = hold;
            flight.segments = used.iter().map(|segment| segment.number).collect();
            flight.sequence = Some(sequence);
        }
        self.send(state, peer, Outgoing::write(&write));
    }

    pub(crate) fn cancel(&self, id: TransferId) -> Result<()> {
        let mut state = self.lock();
        let flight = state.flights.get(&id).filter(|flight| !flight.over);
        let flight = flight.ok_or_else(|| stale("cancel", "transfer", id))?;
        let (peer, sequence) = (flight.peer, flight.sequence);
        flight.stop.store(true, Relaxed);
        let Some(known) = state.peers.get_mut(peer).filter(|known| known.phase == Phase::Open) else {
            return Ok(());
        };
        // What nobody has begun with is over at once.
        let jobs = known.reads.jobs.len();
        known.reads.jobs.retain(|read| read.id != id);
        let mut unbegun = known.reads.jobs.len() < jobs;
        let records = known.out.len();
        known.out.retain(|outgoing| {
            let same = outgoing.sequence.is_some() && outgoing.sequence == sequence;
            !same && outgoing.settles != Some(id)
        });
        unbegun |= known.out.len() < records;
        if unbegun {
            if let Some(sequence) = sequence {
                known.writes.remove(&sequence);
            }
            state.settle(id, Outcome::Cancelled);
            self.signal(&mut state);
            state.kick(peer);
            self.employ(&state);
        } else if let (Some(sequence), Some(link)) = (sequence, &known.link) {
            link.cancel(sequence);
        }
        Ok(())
    }
}

/// Whether there is no room.
fn check(
    state: &State,
    id: TransferId,
    peer: PeerId,
    segments: &[PostedSegment],
    notify: Option<&[u8]>,
) -> Result<bool> {
    if state.closed {
        return Err(closed("submit"));
    }
    let known = state.peer("submit", peer)?;
    if known.phase != Phase::Open {
        return Err(known.phase.over("submit").with_context("peer", peer));
    }
    if known.ready.is_none() {
        return Err(misuse("submit", "the handshake with this peer is not complete"));
    }
    if state.flights.contains_key(&id) {
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

/// Looks up every handle, and checks every range: what comes after this relies on it.
fn name(state: &State, peer: PeerId, segments: &[PostedSegment]) -> Result<(Named, Vec<Part>)> {
    let mut named = Named::default();
    let mut sizes: (Vec<u64>, Vec<u64>) = Default::default();
    let mut parts = Vec::with_capacity(segments.len());
    for segment in segments {
        let local = match position(&named.locals, &segment.local) {
            Some(known) => known,
            None => {
                let registered = state.regions.get(segment.local);
                let registered =
                    registered.ok_or_else(|| stale("submit", "region", segment.local))?;
                sizes.0.push(registered.region.bytes());
                named.locals.push(segment.local);
                named.locals.len() - 1
            }
        };
        let remote = match position(&named.remotes, &segment.remote) {
            Some(known) => known,
            None => {
                let key = state.keys.get(segment.remote).filter(|key| key.peer == peer);
                let key = key.ok_or_else(|| stale("submit", "key", segment.remote))?;
                sizes.1.push(key.imported.bytes);
                named.remotes.push(segment.remote);
                named.keys.push(Arc::clone(&key.imported));
                named.remotes.len() - 1
            }
        };
        for (offset, size, which) in [
            (segment.local_offset, sizes.0[local], "a segment is outside its local region"),
            (segment.remote_offset, sizes.1[remote], "a segment is outside its remote region"),
        ] {
            if offset.checked_add(segment.bytes).is_none_or(|end| end > size) {
                return Err(over("submit", which, offset, size)
                    .with_context("bytes", segment.bytes));
            }
        }
        let index = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        parts.push(Part {
            source: index(local),
            target: index(remote),
            source_offset: segment.local_offset,
            target_offset: segment.remote_offset,
            bytes: segment.bytes,
        });
    }
    Ok((named, parts))
}

fn regions(state: &State, locals: &[RegionId]) -> Vec<Region> {
    locals
        .iter()
        .filter_map(|local| state.regions.get(*local))
        .map(|registered| registered.region.clone())
        .collect()
}

/// A read's parts: from the remote regions into the local ones.
fn runs(state: &State, named: &Named, parts: &[Part]) -> Result<Runs> {
    let mut runs = Runs::new(regions(state, &named.locals), parts.len());
    for part in parts {
        let (from, to) = ((part.target, part.target_offset), (part.source as usize, part.source_offset));
        // `name` has checked it.
        runs.push(from, to, part.bytes).ok_or_else(|| {
            over("submit", "a segment is outside its local region", part.source_offset, part.bytes)
        })?;
    }
    Ok(runs)
}
