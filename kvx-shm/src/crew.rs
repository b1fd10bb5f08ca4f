//! Large jobs, which all threads that have nothing else to do carry out together.
//!
//! A lane's job is taken by one thread, the *lead*. Where it is large (the option `together_bytes`) and there are other threads, the lead lays it out in
//! chunks and adds it to the list of crews. From then on its states are:
//!
//! - *open*: it is in the list. A thread without a job of its own joins by taking a reference to it, under the lock, and copies
//!   chunks. It leaves early, after a chunk, when a lane waits for a thread; the lead stays, so an open job always goes on.
//! - *withdrawn*: it is not in the list, so nobody joins any more. The first member that finds no chunk left, or a reason to
//!   stop, withdraws it. The others finish the chunk that they are in.
//! - *over*: the last member has let go of its reference, and with that has become the only one that has the job. It tells
//!   what became of it, and frees the lane, as a thread does that had it alone.
//!
//! The lane is busy from before the job is taken until after it is over: its next job begins when no thread is in this one, and
//! a connection comes to its end, as `revoke` does, not before the last member is out. Each member enters and leaves the
//! peer's memory by itself, stride by stride, and looks each time whether it still may. The regions are held by the job, which
//! the last member takes apart.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Release;
use std::sync::{Arc, OnceLock};

use kvx_core::id::PeerId;

use crate::chunks::Chunks;
use crate::engine::Shared;
use crate::link::Link;
use crate::route::Route;
use crate::state::{Place, State};
use crate::strides::run;
use crate::work::{Halt, Job, Scratch};

/// A large job, and the threads that carry it out: those that have a reference.
pub(crate) struct Crew {
    peer: PeerId,
    job: Job,
    places: Vec<Place>,
    link: Arc<Link>,
    chunks: Chunks,
    /// Chunks that have not been copied.
    left: AtomicUsize,
    /// Why it is not to be gone on with: what the first member says that has a reason.
    halt: OnceLock<Halt>,
}

/// Why a member stopped copying.
enum Left {
    /// Nothing is left to be taken.
    Finished,
    /// It is wanted elsewhere.
    Early,
}

impl Shared {
    /// Carries a job out on the calling thread, with those that have nothing to do if it is large.
    pub(crate) fn lead(&self, peer: PeerId, job: Job, link: Arc<Link>, scratch: &mut Scratch) {
        if self.options.copy_threads == 1 || !is_large(&job, self.options.together_bytes) {
            return self.carry_out(peer, job, &link, scratch);
        }
        let places = match job.places() {
            Ok(places) => places.into_owned(),
            Err(halt) => return self.complete(peer, job, Err(halt)),
        };
        let chunks = Chunks::new(&places, job.runs().list());
        let left = AtomicUsize::new(chunks.count());
        let halt = OnceLock::new();
        let crew = Arc::new(Crew { peer, job, places, link, chunks, left, halt });
        let mut state = self.lock();
        state.crews.push(Arc::clone(&crew));
        self.call_for_help(&state);
        drop(state);
        let left = crew.copy(scratch, || false);
        self.leave(crew, &left);
    }

    /// Copies with others.
    pub(crate) fn help(&self, crew: Arc<Crew>, scratch: &mut Scratch) {
        let left = crew.copy(scratch, || self.is_wanted());
        self.leave(crew, &left);
    }

    /// A member goes. The last one tells.
    fn leave(&self, crew: Arc<Crew>, left: &Left) {
        if matches!(left, Left::Finished) {
            withdraw(&mut self.lock(), &crew);
        }
        let Some(Crew { peer, job, places, link, left, halt, .. }) = Arc::into_inner(crew) else {
            return;
        };
        let result = match halt.into_inner() {
            Some(halt) => Err(halt),
            // A member has panicked.
            None if left.into_inner() > 0 => Err(Halt::Stopped),
            None => job.verify(&link).map(|()| Route::of(&places, job.runs().list())),
        };
        drop(places);
        self.complete(peer, job, result);
    }
}

/// Nobody joins any more.
fn withdraw(state: &mut State, crew: &Arc<Crew>) {
    state.crews.retain(|other| !Arc::ptr_eq(other, crew));
}

fn is_large(job: &Job, limit: u64) -> bool {
    job.runs().bytes() >= limit
}

impl Crew {
    /// Copies chunk after chunk, until none is left, or a member has a reason to stop, or this one is `wanted` elsewhere.
    fn copy(&self, scratch: &mut Scratch, wanted: impl Fn() -> bool) -> Left {
        let stop = || self.halt.get().is_some() || self.job.is_stopped(&self.link);
        loop {
            if wanted() {
                return Left::Early;
            }
            let runs = self.job.runs();
            let Some(parts) = self.chunks.take(runs.list()) else { return Left::Finished };
            if let Err(halt) = run(&self.link, &self.places, runs, parts, &stop, scratch) {
                // Where another one was first, its reason counts.
                let _ = self.halt.set(halt);
                return Left::Finished;
            }
            self.left.fetch_sub(1, Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use kvx_core::backend::{Event, Events, Outcome, Submit, TransferBackend as _};
    use kvx_core::handshake::Handshake as _;
    use kvx_core::id::TransferId;
    use kvx_core::memory::{MemoryRegistry as _, Region};
    use kvx_core::transfer::{Mode, PostedSegment};

    use crate::backend::ShmBackend;
    use crate::segment::SharedMemory;

    const BYTES: u64 = 16 << 20;

    /// Reads so many bytes again and again, up to `jobs` times, until so many threads were seen in one job. Returns the most that
    /// were, and whether any job had a crew.
    fn most_in_a_job(threads: usize, bytes: u64, until: usize, jobs: u64) -> (usize, bool) {
        let options = format!("copy_threads={threads},inline_bytes=0").parse().unwrap();
        let options = crate::config::Options::read(&options).unwrap();
        let [one, other] = [0, 1].map(|_| ShmBackend::open(&options).unwrap());
        let (_, reply) = other.accept(&one.offer().unwrap()).unwrap();
        let (peer, completion) = one.complete(&reply).unwrap();
        other.finish(&completion).unwrap();
        let [mine, theirs]: [Region; 2] = [0, 1].map(|_| SharedMemory::region(BYTES).unwrap());
        let local = one.register(&mine).unwrap();
        let blob = other.key_blob(other.register(&theirs).unwrap()).unwrap();
        let remote = one.import_key(peer, &blob).unwrap();
        let segment = PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes };
        let (mut most, mut crews, mut events) = (0, false, Events::with_limit(8));
        let begin = Instant::now();
        for id in 0..jobs {
            let posted = one.submit(TransferId(id), peer, Mode::Read, &[segment], None);
            assert_eq!(posted.unwrap(), Submit::Submitted);
            let mut settled = false;
            while !settled {
                if let Some(crew) = one.shared.lock().crews.first() {
                    crews = true;
                    // The list has one, too.
                    most = most.max(std::sync::Arc::strong_count(crew) - 1);
                }
                one.poll(&mut events);
                for event in events.drain() {
                    let Event::Settled { outcome, .. } = event else { panic!("{event:?}") };
                    assert!(matches!(outcome, Outcome::Done { .. }), "{outcome:?}");
                    settled = true;
                }
                assert!(begin.elapsed() < Duration::from_secs(40), "{most} threads");
            }
            assert!(one.shared.lock().crews.is_empty());
            if most >= until {
                break;
            }
        }
        (most, crews)
    }

    #[test]
    fn all_threads_are_in_a_large_job() {
        // On a busy machine they seldom run at the same time.
        assert_eq!(most_in_a_job(3, BYTES, 3, 10_000), (3, true));
    }

    #[test]
    fn one_thread_is_in_a_job_that_is_not_large_or_where_there_is_no_other() {
        assert_eq!(most_in_a_job(3, BYTES - 1, 1, 50), (0, false));
        assert_eq!(most_in_a_job(1, BYTES, 1, 50), (0, false));
    }
}
