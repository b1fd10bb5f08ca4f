//! The thread that makes progress when nobody polls. It sleeps on the worker's descriptor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::Outcome;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::core::{Attention, Core, LONG_WATCH, WATCH};
use crate::error::down;
use crate::shared::Shared;
use crate::sys::Worker;

/// Most rounds of progress while the lock is held.
const ROUNDS: u32 = 4;

/// How long endpoints are waited for once the backend is closed: from then on what they still do ends with the worker.
const LAST: Duration = Duration::from_millis(1500);

/// What the thread does next.
enum Next {
    /// There is more.
    Again,
    /// A program that polls without pause does all that there is to do: until it has stopped, or until a time.
    Watch(Option<Instant>),
    /// Until the descriptor or somebody else says so, or until a time.
    Sleep(Option<Instant>),
    End,
}

impl Shared {
    pub(crate) fn progress(self: &Arc<Self>) {
        // The worker lives until this thread ends it.
        let Some((descriptor, attention)) = self.look(|core| {
            let worker = core.worker.as_ref()?;
            Some((worker.descriptor().try_clone_to_owned().ok()?, Arc::clone(&core.attention)))
        }) else {
            return;
        };
        let (mut closed_since, mut busy) = (None, Instant::now());
        let mut slept: Option<Instant> = None;
        loop {
            let mut awaited = false;
            let next = self.with_thread(|core| {
                core.asleep = false;
                if slept.is_some_and(|slept| core.polled().is_none_or(|polled| polled < slept)) {
                    core.door.missed();
                }
                let (mut rounds, before) = (0, core.events.len());
                while rounds < ROUNDS && core.progress() {
                    rounds += 1;
                }
                let now = Instant::now();
                if rounds > 0 {
                    let worker = core.worker.as_ref().map(Worker::descriptor);
                    core.door.worked(worker, core.events.len() > before, now);
                }
                let until = core.give_up(now);
                core.settle();
                if core.closed {
                    let since = *closed_since.get_or_insert(now);
                    if rounds > 0 || !core.is_quiet() {
                        busy = now;
                    }
                    let waited = now.duration_since(since);
                    if now.duration_since(busy) >= core.grace() || waited > LAST {
                        core.finish();
                        return Next::End;
                    }
                    return if rounds == 0 { Next::Sleep(Some(now + Duration::from_millis(1))) } else { Next::Again };
                }
                if core.is_attended() {
                    return Next::Watch(until);
                }
                if rounds == ROUNDS || !core.arm() {
                    return Next::Again;
                }
                core.asleep = true;
                awaited = core.door.is_awaited();
                Next::Sleep(until)
            });
            slept = None;
            match next {
                Next::Again => {}
                Next::Watch(until) => self.stand_by(&attention, until),
                Next::Sleep(until) => {
                    let since = Instant::now();
                    if !self.doze(Some(&descriptor), until) && awaited {
                        slept = Some(since);
                        self.lets_first(&attention);
                    }
                }
                Next::End => return,
            }
        }
    }

    /// Sleeps while a program polls without pause. It takes no lock for which that would have to wait.
    fn stand_by(&self, attention: &Attention, until: Option<Instant>) {
        let mut watch = WATCH;
        loop {
            let look = Instant::now() + watch;
            watch = (watch * 2).min(LONG_WATCH);
            let woken = self.doze(None, Some(until.map_or(look, |until| until.min(look))));
            if woken || !self.is_attended(attention) || until.is_some_and(|until| until <= Instant::now()) {
                return;
            }
        }
    }

    /// Sleeps until a descriptor is readable, or until a time. Whether it was woken by another thread.
    fn doze(&self, descriptor: Option<&std::os::fd::OwnedFd>, until: Option<Instant>) -> bool {
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        let wake = PollFd::new(&self.wake, PollFlags::IN);
        let mut fds = [wake.clone(), wake];
        let mut count = 1;
        if let Some(descriptor) = descriptor {
            fds[1] = PollFd::new(descriptor, PollFlags::IN);
            count = 2;
        }
        // An interruption is one more reason to look.
        let _ = poll(&mut fds[..count], timeout.as_ref());
        let woken = fds[0].revents().contains(PollFlags::IN);
        if woken {
            // It may have been read before.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
        woken
    }
}

impl Core {
    /// Whether nothing is left to be waited for.
    fn is_quiet(&self) -> bool {
        self.flights.is_empty()
            && self.services.is_empty()
            && self.closing.is_empty()
            && self.lingering.is_empty()
    }

    /// How long UCX must have had nothing to do before its worker is ended.
    fn grace(&self) -> Duration {
        Duration::from_millis(if self.library.is_fragile() { 30 } else { 2 })
    }

    /// Ends the worker, and with it whatever still goes on.
    fn finish(&mut self) {
        let late: Vec<u64> = self.flights.keys().copied().collect();
        for peer in self.peers.handles().collect::<Vec<_>>() {
            if let Some(known) = self.peers.get_mut(peer) {
                known.way = None;
                known.keys.clear();
            }
        }
        self.door.shut(self.worker.as_ref().map(Worker::descriptor));
        // Batches first, which hold keys; then the keys; then what they were made from.
        self.mail.clear();
        self.services.clear();
        self.keys.drain();
        self.closing.clear();
        self.spoiled |= !self.lingering.is_empty();
        self.lingering.clear();
        if self.spoiled && self.library.is_fragile() {
            // To destroy it might end the process.
            tracing::warn!(target: "kvx_ucx", "a worker of UCX {} is left as it is", self.library.version_text());
            std::mem::forget(self.worker.take());
        } else if late.is_empty() {
            self.worker = None;
        } else {
            // UCX has not let go of something in time: it keeps it, and its memory, for good.
            tracing::error!(target: "kvx_ucx", "{} transfers were not let go of when the backend was closed", late.len());
            std::mem::forget(self.worker.take());
        }
        for token in late {
            self.settled(token, Outcome::Failed(down("close", "it did not end in time")));
        }
        self.finished = true;
        self.stirred = true;
    }
}
