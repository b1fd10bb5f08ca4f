//! Why leases ended of which nothing else is remembered.

use std::collections::BTreeMap;

use crate::protocol::id::LeaseName;
use crate::protocol::terms::Reason;

/// Bounded in count. All are of one life of the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Past {
    ends: BTreeMap<(u64, u32), Reason>,
}

impl Past {
    pub(super) fn keep(&mut self, name: LeaseName, why: Reason, most: usize) {
        self.ends.insert((name.number, name.epoch), why);
        // Numbers grow with time.
        while self.ends.len() > most {
            self.ends.pop_first();
        }
    }

    pub(super) fn why(&self, name: LeaseName) -> Option<Reason> {
        self.ends.get(&(name.number, name.epoch)).copied()
    }

    pub(super) fn forget(&mut self, name: LeaseName) {
        self.ends.remove(&(name.number, name.epoch));
    }
}
