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

/// For how long a rank counts as busy after an order: its thread sleeps [`SHORT_SLEEP`] at most, so that whatever an order wants
/// done later need not wake it to say so.
const BUSY: Duration = Duration::from_millis(200);
const SHORT_SLEEP: Duration = Duration::from_millis(20);

/// How long a worker that is dropped waits until its peers are told.
const GOODBYE: Duration = Duration::from_millis(200);

/// Something that a rank is to do.
pub(super) type Order = Box<dyn FnOnce(&mut Inside) + Send>;

pub(super) struct Shared {
    pub(super) inside: Mutex<Inside>,
    /// Orders that were given while the thread was awake, in order: it carries them out before it sleeps.
    pub(super) orders: Mutex<Vec<Order>>,
    /// Whether the thread looks at orders before it sleeps.
    pub(super) awake: AtomicBool,
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

    /// To look at what there is, with all that was ordered.
    pub(super) fn look(&self) -> MutexGuard<'_, Inside> {
        let mut inside = self.lock();
        self.catch_up(&mut inside);
        inside
    }

    pub(super) fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    pub(super) fn status(&self) -> RankStatus {
        self.look().rank.status(self.now())
    }

    pub(super) fn ring(&self) {
        // A full counter rings too.
        let _rung = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Gives the rank an order that nobody waits for: leaves it to the thread where that is at work already, so that neither waits
    /// for the other, and else carries out what can be done at once.
    pub(super) fn give(&self, order: impl FnOnce(&mut Inside) + Send + 'static) {
        if !self.awake.load(Ordering::SeqCst) {
            return self.act(order);
        }
        self.orders().push(Box::new(order));
        // It says that it sleeps before it looks for the last time, so one of the two sees the other.
        if !self.awake.load(Ordering::SeqCst) {
            self.act(|_| ());
        }
    }

    fn orders(&self) -> MutexGuard<'_, Vec<Order>> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out the orders that were left to the thread.
    fn catch_up(&self, inside: &mut Inside) {
        let orders = std::mem::take(&mut *self.orders());
        orders.into_iter().for_each(|order| order(inside));
    }

    /// Gives the rank an order and carries out what can be done at once, after what was ordered before.
    pub(super) fn act<T>(&self, order: impl FnOnce(&mut Inside) -> T) -> T {
        let mut inside = self.lock();
        self.catch_up(&mut inside);
        let result = order(&mut inside);
        inside.ordered = self.now();
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
        let mut watched: Vec<PollFd<'_>> =
            descriptors.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let mut leaves = None;
        loop {
            if self.stop.load(Ordering::Acquire) {
                let until = *leaves.get_or_insert_with(|| {
                    self.lock().rank.close();
                    Instant::now() + GOODBYE
                });
                if Instant::now() >= until || self.lock().rank.is_alone() {
                    // Nobody is left to leave anything to.
                    return self.awake.store(false, Ordering::SeqCst);
                }
            }
            let mut inside = self.lock();
            self.catch_up(&mut inside);
            let mut told = Told::default();
            let now = self.now();
            let due = inside.step(now, &mut told);
            let longest = match leaves {
                Some(_) => Duration::from_millis(5),
                None if now < inside.ordered + BUSY => SHORT_SLEEP,
                None => LONGEST_SLEEP,
            };
            let now = self.now();
            let sleep = due.saturating_sub(now).min(longest);
            inside.sleeps_until = now + sleep;
            self.awake.store(false, Ordering::SeqCst);
            let more = !self.orders().is_empty();
            self.awake.store(more, Ordering::SeqCst);
            drop(inside);
            drop(told);
            if more {
                continue;
            }
            let timeout = Timespec {
                tv_sec: i64::try_from(sleep.as_secs()).unwrap_or(1),
                tv_nsec: sleep.subsec_nanos().into(),
            };
            // Interrupted or refused, it looks again all the same; a refusal does not become a busy loop.
            if rustix::event::poll(&mut watched, Some(&timeout)).is_err() {
                std::thread::yield_now();
            }
            self.awake.store(true, Ordering::SeqCst);
            if watched.first().is_none_or(|bell| !bell.revents().is_empty()) {
                let mut rung = [0; 8];
                let _rung = rustix::io::read(&self.bell, &mut rung);
            }
        }
    }
}
