//! Waiting until a worker has something to say.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Counts how often there was something new, and wakes those who wait for more.
#[derive(Debug, Default)]
pub(super) struct News {
    count: Mutex<u64>,
    more: Condvar,
}

impl News {
    pub(super) fn count(&self) -> u64 {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tell(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.more.notify_all();
    }

    /// Waits until more has come than was seen, or so long.
    pub(super) fn wait(&self, seen: u64, timeout: Duration) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let (count, _) = self
            .more
            .wait_timeout_while(count, timeout, |count| *count == seen)
            .unwrap_or_else(PoisonError::into_inner);
        drop(count);
    }
}
