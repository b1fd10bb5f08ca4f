//! Jobs, and the threads that carry them out.

use std::borrow::Cow;
use std::sync::{Arc, MutexGuard};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kvx_core::Error;
use kvx_core::backend::{Event, Outcome, Submit};
use kvx_core::id::{PeerId, RegionId, TransferId};

use crate::engine::Shared;
use crate::error::{down, refused};
use crate::link::Link;
use crate::record::{self, Reply};
use crate::route::Route;
use crate::state::{Imported, Lanes, Outgoing, Phase, Place, State};
use crate::strides::run;
use crate::sys::runs::Runs;
use crate::sys::vm::Vectors;

/// A read of this side's.
pub(crate) struct Read {
    pub(crate) id: TransferId,
    pub(crate) keys: Vec<Arc<Imported>>,
    /// They hold the regions into which they go.
    pub(crate) runs: Runs,
    pub(crate) note: Option<Vec<u8>>,
    /// The last write that was posted before it.
    pub(crate) after: u64,
    pub(crate) stop: Arc<AtomicBool>,
}

/// A write of the peer's.
pub(crate) struct Serve {
    pub(crate) sequence: u64,
    pub(crate) places: Vec<Place>,
    /// They hold the regions into which they go.
    pub(crate) runs: Runs,
    /// Of the regions.
    pub(crate) targets: Vec<RegionId>,
    pub(crate) note: Option<Vec<u8>>,
    /// A region has been deregistered since the write came.
    pub(crate) gone: bool,
}

/// Why a job did not come to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Halt {
    /// It was cancelled, or its connection is over.
    Stopped,
    /// The peer has ended this side's access, or is gone.
    Over,
    /// The peer has deregistered a region.
    NoRegion,
    /// The peer's memory cannot be read through the kernel: why.
    NoAccess(String),
    /// The kernel refused: its error number.
    Kernel(i32),
    /// The peer has not said where a region is, or refused to: why.
    Nowhere(String),
}

impl Halt {
    fn into_error(self) -> Error {
        match self {
            Self::Stopped => down("transfer", "it was stopped"),
            Self::Over => down("transfer", "the peer has ended the connection, or is gone"),
            Self::NoRegion => refused("transfer", "the peer has deregistered the region"),
            Self::NoAccess(why) => {
                Error::unsupported("transfer", "the peer's borrowed memory cannot be read from here")
                    .with_backend(crate::error::BACKEND)
                    .with_remedy(why)
            }
            Self::Kernel(code) => refused("transfer", "the peer's memory cannot be read")
                .with_native(code.into())
                .with_source(std::io::Error::from_raw_os_error(code)),
            Self::Nowhere(why) => refused("transfer", why),
        }
    }
}

/// A job that a thread has taken.
pub(crate) enum Job {
    Read(Box<Read>),
    Serve(Box<Serve>),
}

impl Job {
    /// From where its runs are copied.
    pub(crate) fn places(&self) -> Result<Cow<'_, [Place]>, Halt> {
        match self {
            Self::Read(read) => read.places().map(Cow::Owned),
            Self::Serve(serve) if serve.gone => Err(Halt::NoRegion),
            Self::Serve(serve) => Ok(Cow::Borrowed(&serve.places)),
        }
    }

    pub(crate) fn runs(&self) -> &Runs {
        match self {
            Self::Read(read) => &read.runs,
            Self::Serve(serve) => &serve.runs,
        }
    }

    /// Whether it was cancelled.
    pub(crate) fn is_stopped(&self, link: &Link) -> bool {
        match self {
            Self::Read(read) => read.stop.load(Relaxed),
            Self::Serve(serve) => link.is_cancelled(serve.sequence),
        }
    }

    /// Whether what was copied counts, once all of it was.
    pub(crate) fn verify(&self, link: &Link) -> Result<(), Halt> {
        match self {
            Self::Read(read) => read.verify(link),
            Self::Serve(_) => Ok(()),
        }
    }
}

/// What a thread keeps from job to job.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) vectors: Vectors,
}

impl Shared {
    /// The life of a thread that copies.
    pub(crate) fn copy_jobs(&self) {
        let mut scratch = Scratch::default();
        let mut state = self.lock();
        while !state.finished {
            if let Some((peer, lane)) = state.runnable.pop_front() {
                if let Some((job, link)) = take(&mut state, peer, lane) {
                    drop(state);
                    self.lead(peer, job, link, &mut scratch);
                    state = self.lock();
                } else {
                    self.freed(&mut state, peer, lane);
                }
            } else if let Some(crew) = state.crews.first().cloned() {
                self.wants_nobody();
                drop(state);
                self.help(crew, &mut scratch);
                state = self.lock();
            } else {
                state = self.wait_for_work(state);
            }
        }
    }

    /// Carries a read out on the calling thread. The lane must have been made busy for it.
    pub(crate) fn read_inline(&self, peer: PeerId, read: Read, link: &Link) -> Submit {
        let result = run_read(&read, link, &mut Scratch::default());
        let Read { id, runs, note, stop, .. } = read;
        drop(runs);
        let mut state = self.lock();
        let done = match result {
            Ok(route) if self.told_at_once(&mut state, peer, note.as_deref()) => {
                state.went(id, route);
                state.never_settles(id);
                Submit::Done { route: route.name() }
            }
            result => {
                self.has_read(&mut state, peer, id, result, note, &stop);
                Submit::Submitted
            }
        };
        self.freed(&mut state, peer, Lanes::Reads);
        done
    }

    /// Tells an open peer what there is to be told, unless that has to wait. Returns whether it was.
    pub(crate) fn told_at_once(&self, state: &mut State, peer: PeerId, note: Option<&[u8]>) -> bool {
        let Some(known) = state.peers.get(peer).filter(|known| known.phase == Phase::Open) else {
            return false;
        };
        let Some(note) = note else { return true };
        let nothing_waits = known.out.is_empty() && known.unsent.is_empty();
        let Some(link) = known.link.as_ref().filter(|_| nothing_waits) else { return false };
        let told = link.put(&record::note(note));
        if told {
            link.knock();
        }
        told
    }

    /// Takes a peer's write, and carries it out on the calling thread. The lane must have been made busy for it.
    pub(crate) fn serve_here<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        peer: PeerId,
        scratch: &mut Scratch,
    ) -> MutexGuard<'a, State> {
        match take(&mut state, peer, Lanes::Serves) {
            None => self.freed(&mut state, peer, Lanes::Serves),
            Some((job, link)) => {
                drop(state);
                self.carry_out(peer, job, &link, scratch);
                state = self.lock();
            }
        }
        state
    }

    /// Carries a job out on the calling thread alone.
    pub(crate) fn carry_out(&self, peer: PeerId, job: Job, link: &Link, scratch: &mut Scratch) {
        let result = run_job(&job, link, scratch);
        self.complete(peer, job, result);
    }

    /// No thread is in a job any more: tells what became of it, and frees its lane.
    pub(crate) fn complete(&self, peer: PeerId, job: Job, result: Result<Route, Halt>) {
        match job {
            Job::Read(read) => {
                let Read { id, runs, note, stop, .. } = *read;
                // Its regions are let go of before anybody is told.
                drop(runs);
                let mut state = self.lock();
                self.has_read(&mut state, peer, id, result, note, &stop);
                self.freed(&mut state, peer, Lanes::Reads);
            }
            Job::Serve(serve) => {
                let Serve { sequence, runs, note, .. } = *serve;
                drop(runs);
                let mut state = self.lock();
                self.has_served(&mut state, peer, sequence, result, note);
                self.freed(&mut state, peer, Lanes::Serves);
            }
        }
    }

    fn has_read(
        &self,
        state: &mut State,
        peer: PeerId,
        id: TransferId,
        result: Result<Route, Halt>,
        note: Option<Vec<u8>>,
        stop: &AtomicBool,
    ) {
        if let Ok(route) = result {
            state.went(id, route);
        }
        let open = state.peers.get(peer).is_some_and(|known| known.phase == Phase::Open);
        let outcome = match (result, note) {
            // What ended the connection settles it.
            (Err(_), _) if !open => return,
            (Ok(_), Some(note)) if open => {
                self.send(state, peer, Outgoing::note(&note, id));
                return;
            }
            // It was not told, so it is not done.
            (Ok(_), Some(_)) => return,
            (Ok(_), None) => Outcome::done(),
            (Err(Halt::Stopped), _) if stop.load(Relaxed) => Outcome::Cancelled,
            (Err(halt), _) => Outcome::Failed(halt.into_error().with_context("peer", peer)),
        };
        state.settle(id, outcome);
        self.signal(state);
    }

    fn has_served(
        &self,
        state: &mut State,
        peer: PeerId,
        sequence: u64,
        result: Result<Route, Halt>,
        note: Option<Vec<u8>>,
    ) {
        let reply = match result {
            Ok(route) => Reply::Done(route),
            Err(Halt::Stopped) => Reply::Cancelled,
            Err(Halt::Kernel(code)) => Reply::Kernel(code),
            Err(Halt::NoAccess(_)) => Reply::NoAccess,
            Err(Halt::NoRegion) => Reply::NoRegion,
            Err(Halt::Nowhere(_)) => Reply::NoSource,
            Err(Halt::Over) => return,
        };
        let Some(known) = state.peers.get_mut(peer).filter(|known| known.phase == Phase::Open) else {
            return;
        };
        let told = match (reply, note) {
            (Reply::Done(_), Some(payload)) => {
                known.notes += 1;
                known.note_bytes += payload.len();
                state.events.push_back(Event::Notified { peer, payload });
                true
            }
            _ => false,
        };
        // Both are asleep, and waking takes a while: first the one who has waited for longer.
        self.send(state, peer, Outgoing::reply(sequence, reply));
        if told {
            self.signal(state);
        }
    }

    /// A lane has no thread any more.
    fn freed(&self, state: &mut State, peer: PeerId, lane: Lanes) {
        let Some(known) = state.peers.get_mut(peer) else { return };
        match lane {
            Lanes::Reads => known.reads.busy = false,
            Lanes::Serves => known.serves.busy = false,
        }
        if known.phase == Phase::Open {
            state.kick(peer);
            self.employ(state);
        } else {
            self.try_finish(state, peer);
            self.idle_lanes();
        }
    }

    /// Puts a record into the ring of a peer, now or as soon as there is room.
    pub(crate) fn send(&self, state: &mut State, peer: PeerId, outgoing: Outgoing) {
        if let Some(known) = state.peers.get_mut(peer) {
            known.out.push_back(outgoing);
            self.flush(state, peer);
        }
    }
}

/// Takes the first job of a lane.
fn take(state: &mut State, peer: PeerId, lane: Lanes) -> Option<(Job, Arc<Link>)> {
    let known = state.peers.get_mut(peer).filter(|known| known.phase == Phase::Open)?;
    let link = Arc::clone(known.link.as_ref()?);
    let job = match lane {
        Lanes::Reads => Job::Read(Box::new(known.reads.jobs.pop_front()?)),
        Lanes::Serves => {
            let mut serve = known.serves.jobs.pop_front()?;
            // A region may have been deregistered since the write came.
            if serve.targets.iter().any(|region| state.regions.get(*region).is_none()) {
                serve.gone = true;
            }
            Job::Serve(Box::new(serve))
        }
    };
    Some((job, link))
}

impl Read {
    fn places(&self) -> Result<Vec<Place>, Halt> {
        let place = |key: &Arc<Imported>| match key.place.get() {
            Some(Ok(place)) => Ok(place.clone()),
            Some(Err(why)) => Err(Halt::Nowhere(why.clone())),
            None => Err(Halt::Nowhere("the peer has not said where the region is".into())),
        };
        self.keys.iter().map(place).collect()
    }

    /// What was read is the region's only if it is still registered afterwards.
    fn verify(&self, link: &Link) -> Result<(), Halt> {
        let registered = |key: &Arc<Imported>| link.regions.has(key.slot, key.generation);
        if self.keys.iter().all(registered) { Ok(()) } else { Err(Halt::NoRegion) }
    }
}

fn run_job(job: &Job, link: &Link, scratch: &mut Scratch) -> Result<Route, Halt> {
    let (places, runs) = (job.places()?, job.runs());
    run(link, &places, runs, runs.whole(), &|| job.is_stopped(link), scratch)?;
    job.verify(link)?;
    Ok(Route::of(&places, runs.list()))
}

fn run_read(read: &Read, link: &Link, scratch: &mut Scratch) -> Result<Route, Halt> {
    let (places, runs) = (read.places()?, &read.runs);
    run(link, &places, runs, runs.whole(), &|| read.stop.load(Relaxed), scratch)?;
    read.verify(link)?;
    Ok(Route::of(&places, runs.list()))
}
