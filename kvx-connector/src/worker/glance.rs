//! Looking at a worker from elsewhere.

use std::fmt;
use std::sync::Weak;

use super::shared::Shared;
use crate::observe::RankStatus;

/// Looks at a [`Worker`](super::Worker) for as long as there is one, from any thread.
#[derive(Clone)]
pub struct Glance {
    pub(super) worker: Weak<Shared>,
}

impl Glance {
    /// What there is now, while the worker is there.
    #[must_use]
    pub fn status(&self) -> Option<RankStatus> {
        Some(self.worker.upgrade()?.status())
    }
}

impl fmt::Debug for Glance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let there = self.worker.strong_count() > 0;
        f.debug_struct("Glance").field("there", &there).finish()
    }
}
