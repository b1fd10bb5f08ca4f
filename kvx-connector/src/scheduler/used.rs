//! Which leases were used not long ago.

use std::collections::{BTreeSet, VecDeque};

use crate::protocol::LeaseName;

/// Leases that were used not long ago.
#[derive(Debug)]
pub(super) struct Used {
    set: BTreeSet<LeaseName>,
    order: VecDeque<LeaseName>,
}

impl Used {
    const MAX: usize = 16_384;

    pub(super) const fn new() -> Self {
        Self { set: BTreeSet::new(), order: VecDeque::new() }
    }

    pub(super) fn contains(&self, lease: &LeaseName) -> bool {
        self.set.contains(lease)
    }

    pub(super) fn insert(&mut self, lease: LeaseName) {
        if !self.set.insert(lease) {
            return;
        }
        self.order.push_back(lease);
        if self.order.len() > Self::MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.set.remove(&oldest);
        }
    }
}
