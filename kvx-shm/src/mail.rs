//! What peers put into their rings: notifications, answers, and writes that this side is to carry out.

use std::sync::Arc;

use kvx_core::backend::{Event, Outcome};
use kvx_core::id::PeerId;

use crate::engine::Shared;
use crate::error::{BACKEND, refused};
use crate::link::RING;
use crate::record::{Header, Record, Reply, Write};
use crate::state::{Outgoing, Peer, Phase, Place, State};
use crate::sys::memfd::Foreign;
use crate::sys::runs::Runs;
use crate::work::Serve;

/// Most writes of one peer that wait: more than it may have in flight.
const MOST_WRITES: usize = 256;
/// A peer is not listened to while this many of its notifications were not polled, or this many bytes of them.
const MOST_NOTES: usize = 1 << 14;
const MOST_NOTE_BYTES: usize = 16 << 20;
/// A peer is not listened to while this many records wait for room in the ring to it.
const MOST_ANSWERS: usize = 1024;
/// Most records that are taken from one peer before others have their turn.
const MOST_RECORDS: usize = 512;
/// As many as a ring can hold.
const ALL_RECORDS: usize = RING / Header::BYTES;

impl Shared {
    /// Takes what is in a peer's ring. Where its connection is over, writes are no longer carried out. Events that this brings
    /// are not signalled yet.
    pub(crate) fn take_mail(&self, state: &mut State, peer: PeerId, record: &mut Vec<u8>, open: bool) {
        let mut taken = false;
        for _ in 0..if open { MOST_RECORDS } else { ALL_RECORDS } {
            let Some(known) = state.peers.get_mut(peer).filter(|known| known.phase == Phase::Open)
            else {
                return;
            };
            let Some(link) = known.link.clone() else { return };
            known.stalled = known.notes >= MOST_NOTES || known.note_bytes >= MOST_NOTE_BYTES;
            if open && (known.stalled || !has_room(known)) {
                break;
            }
            match link.take(record) {
                Ok(true) => {}
                Ok(false) => break,
                Err(why) => {
                    return self.end(state, peer, Some(format!("the peer broke the protocol: {why}").into()));
                }
            }
            taken = true;
            match Record::decode(record) {
                Some(Record::Note(payload)) => {
                    known.notes += 1;
                    known.note_bytes += payload.len();
                    state.events.push_back(Event::Notified { peer, payload });
                }
                Some(Record::Reply { sequence, reply }) => {
                    if let Some(id) = known.writes.remove(&sequence) {
                        if let Reply::Done(route) = reply {
                            state.went(id, route);
                        }
                        state.settle(id, outcome(reply, peer));
                        state.kick(peer);
                    }
                }
                Some(Record::Write(write)) if open => {
                    if known.serves.jobs.len() >= MOST_WRITES {
                        let why = format!("the peer broke the protocol: {MOST_WRITES} writes at once");
                        return self.end(state, peer, Some(why.into()));
                    }
                    self.asked_to_write(state, peer, write);
                }
                Some(Record::Write(_)) => {}
                None => {
                    let why = "the peer broke the protocol: a record that makes no sense";
                    return self.end(state, peer, Some(why.into()));
                }
            }
        }
        let link = state.peers.get(peer).and_then(|known| known.link.as_ref());
        if let Some(link) = link.filter(|_| taken)
            && link.peer_wants_room()
        {
            link.ring_bell();
        }
    }

    fn asked_to_write(&self, state: &mut State, peer: PeerId, write: Write) {
        let missing = |state: &State| {
            state.peers.get(peer).is_some_and(|known| {
                write.sources.iter().any(|source| {
                    source.segment != 0 && !known.foreign.contains_key(&source.segment)
                })
            })
        };
        if missing(state) {
            // It was sent before the record was put, so it is in the socket.
            self.hear(state, peer, 0);
            // The thread that sleeps on the socket must not miss a bell that was heard here: peers ring once for each of its
            // sleeps.
            self.wake();
        }
        let sequence = write.sequence;
        match prepare(state, peer, write) {
            Ok(serve) => {
                if let Some(known) = state.peers.get_mut(peer) {
                    known.serves.jobs.push_back(serve);
                }
                state.kick(peer);
            }
            Err(reply) => self.send(state, peer, Outgoing::reply(sequence, reply)),
        }
    }
}

/// Whether a peer takes this side's answers, so that it may ask for more.
pub(crate) fn has_room(known: &Peer) -> bool {
    known.out.len() < MOST_ANSWERS
}

pub(crate) fn inside(memory: &Foreign, base: u64, bytes: u64) -> bool {
    base.checked_add(bytes).is_some_and(|end| end <= memory.bytes() as u64)
}

fn outcome(reply: Reply, peer: PeerId) -> Outcome {
    let error = match reply {
        Reply::Done(_) => return Outcome::done(),
        Reply::Cancelled => return Outcome::Cancelled,
        Reply::NoRegion => refused("transfer", "the peer has no such region (any more)"),
        Reply::Outside => refused("transfer", "the peer says that a segment is outside its region"),
        Reply::NoSource => refused("transfer", "the peer did not take this side's memory"),
        Reply::Kernel(code) => refused("transfer", "the peer cannot read this side's memory")
            .with_native(code.into())
            .with_source(std::io::Error::from_raw_os_error(code)),
        Reply::NoAccess => {
            kvx_core::Error::unsupported("transfer", "the peer may not read this side's borrowed memory")
                .with_backend(BACKEND)
                .with_remedy(
                    "set this side's option ptracer=any where kernel.yama.ptrace_scope is 1, give the peer \
                     CAP_SYS_PTRACE, or allocate the memory with kvx (kvx_shm::SharedMemory)",
                )
        }
    };
    Outcome::Failed(error.with_context("peer", peer))
}

/// Checks a peer's write against this side's regions, and its sources against what the peer has sent.
fn prepare(state: &State, peer: PeerId, write: Write) -> Result<Serve, Reply> {
    let known = state.peers.get(peer).ok_or(Reply::Cancelled)?;
    let (mut hold, mut targets) = (Vec::with_capacity(write.targets.len()), Vec::new());
    for target in &write.targets {
        let region = kvx_core::id::RegionId::new(target.slot, target.generation);
        let registered = state.regions.get(region).filter(|r| r.secret == target.secret);
        let registered = registered.ok_or(Reply::NoRegion)?;
        targets.push(region);
        hold.push(registered.region.clone());
    }
    let mut places = Vec::with_capacity(write.sources.len());
    for source in &write.sources {
        places.push(if source.segment == 0 {
            if source.base.checked_add(source.bytes).is_none() {
                return Err(Reply::Outside);
            }
            Place::Process(source.base)
        } else {
            let memory = known.foreign.get(&source.segment).ok_or(Reply::NoSource)?;
            if !inside(memory, source.base, source.bytes) {
                return Err(Reply::Outside);
            }
            Place::Shared(Arc::clone(memory), source.base)
        });
    }
    let mut runs = Runs::new(hold, write.parts.len());
    for part in &write.parts {
        let source = write.sources.get(part.source as usize).ok_or(Reply::Outside)?;
        let end = part.source_offset.checked_add(part.bytes);
        if end.is_none_or(|end| end > source.bytes) {
            return Err(Reply::Outside);
        }
        let (from, to) = ((part.source, part.source_offset), (part.target as usize, part.target_offset));
        runs.push(from, to, part.bytes).ok_or(Reply::Outside)?;
    }
    let Write { sequence, note, .. } = write;
    Ok(Serve { sequence, places, runs, targets, note, gone: false })
}
