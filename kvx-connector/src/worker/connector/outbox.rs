//! What is to be reported, and what was.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvx_core::id::Incarnation;

use crate::rank::FetchReport;
use crate::scheduler::{LeaseEnd, LoadEnd, LoadOutcome, WorkerReport, WorkerStats};

/// What the next report says.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    reports: u64,
    ended: VecDeque<LeaseEnd>,
    loads: VecDeque<LoadEnd>,
    quiet: VecDeque<u64>,
    /// Blocks of loads that did not load, until somebody asks.
    failed: BTreeSet<(u16, u32)>,
    stats: WorkerStats,
}

impl Outbox {
    pub(super) fn lease(&mut self, end: LeaseEnd) {
        self.ended.push_back(end);
    }

    pub(super) fn load(&mut self, end: LoadEnd) {
        match end.outcome {
            LoadOutcome::Loaded => self.stats.loads += 1,
            _ => {
                self.stats.failed_loads += 1;
                self.failed.extend(&end.blocks);
            }
        }
        self.stats.quarantined += end.quarantined.len() as u64;
        self.loads.push_back(end);
    }

    /// Blocks of an attempt are in quarantine no more.
    pub(super) fn quiet(&mut self, attempt: u64, blocks: u64) {
        self.stats.quarantined = self.stats.quarantined.saturating_sub(blocks);
        self.quiet.push_back(attempt);
    }

    pub(super) fn moved(&mut self, report: &FetchReport) {
        self.stats.bytes += report.bytes;
        self.stats.segments += report.segments;
        self.stats.transfer_us += u64::try_from(report.moving.as_micros()).unwrap_or(u64::MAX);
    }

    pub(super) const fn stats(&self) -> WorkerStats {
        self.stats
    }

    pub(super) fn take_failed(&mut self) -> BTreeSet<(u16, u32)> {
        std::mem::take(&mut self.failed)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ended.is_empty() && self.loads.is_empty() && self.quiet.is_empty()
    }

    /// The next report: what does not fit waits for the one after.
    pub(super) fn report(&mut self, engine: Incarnation) -> WorkerReport {
        const MAX: usize = WorkerReport::MAX_ITEMS;
        self.reports += 1;
        let mut report = WorkerReport::new(engine, self.reports);
        report.ended = self.ended.drain(..self.ended.len().min(MAX)).collect();
        let mut blocks = 0;
        while report.loads.len() < MAX
            && let Some(next) = self.loads.front()
        {
            blocks += next.blocks.len() + next.quarantined.len();
            // One at least, or it would wait for ever.
            if blocks > WorkerReport::MAX_BLOCKS && !report.loads.is_empty() {
                break;
            }
            report.loads.extend(self.loads.pop_front());
        }
        // Said after the end that it is about, which may have been left for later.
        if self.loads.is_empty() {
            report.quiet = self.quiet.drain(..self.quiet.len().min(MAX)).collect();
        }
        report.stats = self.stats;
        report
    }
}

/// How attempts ended here, of those that ended not long ago.
#[derive(Debug, Default)]
pub(super) struct Recent {
    map: BTreeMap<u64, Past>,
    order: VecDeque<u64>,
}

/// How an attempt ended here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Past {
    /// All of it is there; where it goes through the host's buffer, whether it was copied from there.
    Loaded { copied: bool },
    /// In some other way, and the lease was released.
    Over,
}

impl Recent {
    /// How many are remembered. Of those that are forgotten, a load that takes their place reads all once more.
    pub(super) const MAX: usize = 16_384;

    pub(super) fn insert(&mut self, attempt: u64, past: Past) {
        if self.map.insert(attempt, past).is_none() {
            self.order.push_back(attempt);
        }
        if self.order.len() > Self::MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.map.remove(&oldest);
        }
    }

    pub(super) fn get(&self, attempt: u64) -> Option<Past> {
        self.map.get(&attempt).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{LeaseName, Reason};

    const LIFE: Incarnation = Incarnation::from_bytes([1; 16]);

    #[test]
    fn what_does_not_fit_into_a_report_is_in_the_next() {
        let mut out = Outbox::default();
        for number in 1..=5000 {
            let lease = LeaseName { owner: LIFE, number, epoch: 0 };
            out.lease(LeaseEnd { lease, why: Reason::Done });
            out.load(LoadEnd::new(number, LoadOutcome::Loaded, ""));
        }
        out.quiet(1, 0);
        let (first, second) = (out.report(LIFE), out.report(LIFE));
        assert_eq!((first.number, first.ended.len(), first.loads.len()), (1, 4096, 4096));
        assert_eq!((second.number, second.ended.len(), second.loads.len()), (2, 904, 904));
        assert_eq!((first.quiet.len(), second.quiet.as_slice()), (0, &[1][..]));
        assert_eq!(second.loads[0].attempt, first.loads[4095].attempt + 1);
        assert!(out.is_empty() && first.encode().is_ok() && second.encode().is_ok());
    }

    #[test]
    fn loads_of_many_blocks_are_spread_over_reports() {
        let mut out = Outbox::default();
        for attempt in 1..=3 {
            let mut end = LoadEnd::new(attempt, LoadOutcome::Failed, "");
            end.blocks = (0..700_000).map(|id| (0, id)).collect();
            out.load(end);
        }
        for attempt in 1..=3 {
            let report = out.report(LIFE);
            assert_eq!(report.loads.iter().map(|it| it.attempt).collect::<Vec<_>>(), [attempt]);
            assert!(report.encode().is_ok());
        }
        assert!(out.is_empty());
        assert_eq!(out.take_failed().len(), 700_000);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut recent = Recent::default();
        for attempt in 0..20_000 {
            recent.insert(attempt, Past::Over);
        }
        assert_eq!((recent.map.len(), recent.order.len()), (Recent::MAX, Recent::MAX));
        assert_eq!((recent.get(1), recent.get(19_999)), (None, Some(Past::Over)));
    }
}
