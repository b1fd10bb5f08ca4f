//! Which ranks have reported.

use std::collections::BTreeSet;

/// Those of an engine's ranks that have reported the end of something: a set, so that a report that comes twice counts once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RankSet(BTreeSet<u16>);

impl RankSet {
    /// Adds a rank; whether it is new.
    pub(super) fn insert(&mut self, rank: u16) -> bool {
        self.0.insert(rank)
    }

    /// Whether all of `ranks` have reported. Ranks are numbered from 0 and checked before they come here.
    pub(super) fn is_complete(&self, ranks: u32) -> bool {
        self.0.len() as u64 == u64::from(ranks)
    }
}
