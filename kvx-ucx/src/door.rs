//! What wakes a program that sleeps on the backend's descriptor: events that wait for it, and, while the door is open, whatever
//! comes to the worker, so that it hears of it as soon as the thread does.
//!
//! The door is shut while what comes brings the program no events, such as a peer's reads, which are carried out here: the thread
//! is there for that.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll;

/// So often in a row a program wakes for nothing, before the door is shut.
const FUTILE: u32 = 8;
/// What comes after such a pause opens it. So do events, each of which counts for two.
const PAUSE: Duration = Duration::from_millis(1);
const USEFUL: u32 = 8;
/// A program that polls so soon after it was woken sleeps on the descriptor.
const PROMPT: Duration = Duration::from_micros(200);

pub(crate) struct Door {
    /// What the program sleeps on.
    ready: OwnedFd,
    open: bool,
    futile: u32,
    useful: u32,
    /// When the thread had something to do.
    busy: Instant,
    /// When the program was woken.
    signalled: Option<Instant>,
    /// It was quick to come the last time.
    prompt: bool,
}

impl Door {
    pub(crate) fn new(ready: OwnedFd) -> Self {
        let busy = Instant::now();
        Self { ready, open: false, futile: 0, useful: 0, busy, signalled: None, prompt: false }
    }

    /// The program polled: whether it made progress, and had events.
    pub(crate) fn polled(&mut self, worker: Option<BorrowedFd<'_>>, any: bool, events: bool) {
        if events {
            self.futile = 0;
        } else if any && self.open {
            self.futile += 1;
            if self.futile >= FUTILE {
                self.shut(worker);
            }
        }
    }

    /// The thread made progress: whether that brought events.
    pub(crate) fn worked(&mut self, worker: Option<BorrowedFd<'_>>, events: bool, now: Instant) {
        let pause = now.saturating_duration_since(self.busy);
        self.busy = now;
        self.useful = if events { self.useful + 2 } else { self.useful.saturating_sub(1) };
        if !self.open
            && (pause >= PAUSE || self.useful >= USEFUL)
            && let Some(worker) = worker
        {
            // Where descriptors are nested too deep already, it stays shut.
            self.open = epoll::add(&self.ready, worker, epoll::EventData::new_u64(1), epoll::EventFlags::IN).is_ok();
            (self.futile, self.useful) = (0, 0);
        }
    }

    pub(crate) fn shut(&mut self, worker: Option<BorrowedFd<'_>>) {
        if std::mem::take(&mut self.open)
            && let Some(worker) = worker
        {
            // It is in there.
            let _ = epoll::delete(&self.ready, worker);
        }
        (self.useful, self.busy) = (0, Instant::now());
    }

    /// The program is woken for events.
    pub(crate) fn rings(&mut self) {
        self.signalled = Some(Instant::now());
    }

    /// The program polls.
    pub(crate) fn answered(&mut self, now: Instant) {
        if let Some(rung) = self.signalled.take() {
            self.prompt = now.saturating_duration_since(rung) < PROMPT;
        }
    }

    /// The program was woken with the thread, and did not come.
    pub(crate) fn missed(&mut self) {
        self.prompt = false;
    }

    /// Whether the program may be expected to come by itself.
    pub(crate) fn is_awaited(&self) -> bool {
        self.open && self.prompt
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

    use super::*;

    #[test]
    fn it_opens_for_what_is_rare_or_useful_and_shuts_for_what_is_neither() {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        // Of the worker there is always something to be had.
        let worker = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
        let mut door = Door::new(set.try_clone().unwrap());
        let is_open = || {
            let mut ready = [PollFd::new(&set, PollFlags::IN)];
            poll(&mut ready, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
        };
        let some = Some(worker.as_fd());
        let busy = door.busy;
        door.worked(some, false, busy);
        assert!(!is_open());
        door.worked(some, false, busy + PAUSE);
        assert!(is_open());
        for _ in 0..FUTILE {
            assert!(is_open());
            door.polled(some, true, false);
        }
        assert!(!is_open());
        let busy = door.busy;
        for _ in 0..USEFUL / 2 {
            assert!(!is_open());
            door.worked(some, true, busy);
        }
        assert!(is_open());
        for _ in 0..2 * FUTILE {
            // Nothing to be done, or something of use.
            door.polled(some, false, false);
            door.polled(some, true, true);
        }
        assert!(is_open());
        door.shut(some);
        assert!(!is_open());
    }
}
