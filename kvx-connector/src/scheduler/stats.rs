//! What has been counted.

use std::collections::BTreeMap;

use super::report::WorkerStats;

/// What the scheduler has counted since it was made. Each request, lease and load counts once, however many ranks there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Leases granted.
    pub granted: u64,
    /// Leases that ended because all readers had confirmed, or their user had no need of them.
    pub sent: u64,
    /// Leases that ended because nobody extended them at one rank at least.
    pub expired: u64,
    /// Leases that were taken back.
    pub withdrawn: u64,
    /// Requests for another engine that were not published: too many, or too long.
    pub unpublished: u64,
    /// Loads begun, retries included.
    pub loads: u64,
    /// Of them, retries.
    pub retries: u64,
    /// Requests that were loaded.
    pub received: u64,
    /// Requests that could not be loaded.
    pub failed: u64,
    /// Loads that were aborted.
    pub aborted: u64,
    /// Leases given back without a load, or after one that failed.
    pub released: u64,
    /// Tickets that could not be read.
    pub bad_tickets: u64,
    /// Requests with a ticket that another request had used.
    pub used_tickets: u64,
    /// Ends that ranks reported of leases and loads that there are not (any more), and blocks that are not the load's.
    pub stray_reports: u64,
}

/// What is in the scheduler's tables now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Requests with a transfer that the engine has not finished.
    pub requests: usize,
    /// Leases that have not ended at all ranks.
    pub leases: usize,
    /// Loads that have not ended at all ranks.
    pub loads: usize,
    /// Things that the next step will tell the workers.
    pub messages: usize,
    /// Loads that left blocks in quarantine.
    pub quarantines: usize,
}

impl Tables {
    /// Whether all is over.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The ranks' own counts.
#[derive(Debug, Default)]
pub(super) struct RankStats(BTreeMap<u16, (u64, WorkerStats)>);

impl RankStats {
    /// Takes a rank's counts unless newer ones are there.
    pub(super) fn take(&mut self, rank: u16, number: u64, stats: WorkerStats) {
        let newest = self.0.entry(rank).or_default();
        if number > newest.0 {
            *newest = (number, stats);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u16, WorkerStats)> + '_ {
        self.0.iter().map(|(rank, (_, stats))| (*rank, *stats))
    }
}
