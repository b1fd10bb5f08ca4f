//! Taking a lease back without keeping the worker that granted it.

use std::fmt;
use std::sync::Weak;

use super::shared::Shared;
use crate::protocol::{LeaseName, Reason};

/// Takes leases of a [`Worker`](super::Worker) back for as long as there is one, from any thread.
#[derive(Clone)]
pub(crate) struct Recall {
    pub(super) worker: Weak<Shared>,
}

impl Recall {
    /// As [`Worker::withdraw`](super::Worker::withdraw).
    pub(crate) fn withdraw(&self, lease: LeaseName, why: Reason) {
        if let Some(shared) = self.worker.upgrade() {
            shared.give(move |inside| inside.rank.withdraw(lease, why));
        }
    }
}

impl fmt::Debug for Recall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let there = self.worker.strong_count() > 0;
        f.debug_struct("Recall").field("there", &there).finish()
    }
}
