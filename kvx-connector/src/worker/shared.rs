//! The thread of a worker, and whoever gives it orders.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvx_core::thread::runs_briefly;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::inside::{Inside, Told};
use super::news::News;
use crate::observe::RankStatus;

/// How long the thread sleeps at most, so that a wake-up that was lost costs little.
pub(super) const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// How long a worker that is dropped waits until its peers are told.
const GOODBYE: Duration = Duration::from_millis(200);

pub(super) struct Shared {
    pub(super) inside: Mutex<Inside>,
    /// Wakes the thread.
    pub(super) bell: OwnedFd,
    pub(super) begun: Instant,
    pub(super) stop: AtomicBool,
    /// Whoever waits for a report.
    pub(super) news: Arc<News>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    pub(super) fn status(&self) -> RankStatus {
        self.lock().rank.status(self.now())
    }

    pub(super) fn ring(&self) {
        // A full counter rings too.
        let _rung = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Gives the rank an order and carries out what can be done at once.
    pub(super) fn act<T>(&self, order: impl FnOnce(&mut Inside) -> T) -> T {
        let mut inside = self.lock();
        let result = order(&mut inside);
        let mut told = Told::default();
        let due = inside.step(self.now(), &mut told);
        let sooner = due < inside.sleeps_until;
        drop(inside);
        if sooner {
            self.ring();
        }
        drop(told);
        result
    }

    /// The thread.
    pub(super) fn run(&self, descriptors: &[OwnedFd]) {
        runs_briefly();
        let mut leaves = None;
        loop {
            if self.stop.load(Ordering::Acquire) {
                let until = *leaves.get_or_insert_with(|| {
                    self.lock().rank.close();
                    Instant::now() + GOODBYE
                });
                if Instant::now() >= until || self.lock().rank.is_alone() {
                    return;
                }
            }
            let mut inside = self.lock();
            let mut told = Told::default();
            let due = inside.step(self.now(), &mut told);
            let longest = if leaves.is_some() { Duration::from_millis(5) } else { LONGEST_SLEEP };
            let sleep = due.saturating_sub(self.now()).min(longest);
            inside.sleeps_until = self.now() + sleep;
            drop(inside);
            drop(told);
            let mut watched: Vec<PollFd<'_>> =
                descriptors.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            let timeout = Timespec {
                tv_sec: i64::try_from(sleep.as_secs()).unwrap_or(1),
                tv_nsec: sleep.subsec_nanos().into(),
            };
            // Interrupted or refused, it looks again all the same; a refusal does not become a busy loop.
            if rustix::event::poll(&mut watched, Some(&timeout)).is_err() {
                std::thread::yield_now();
            }
            let mut rung = [0; 8];
            let _rung = rustix::io::read(&self.bell, &mut rung);
        }
    }
}
