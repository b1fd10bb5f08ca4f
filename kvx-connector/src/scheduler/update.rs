//! What the ranks' reports come to, once all ranks have reported.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvx_core::{Error, Result};

use super::config::{SchedulerConfig, SchedulerGroup};
use super::pull::{Draining, Ends, State};
use super::report::{LoadEnd, LoadOutcome, WorkerReport};
use super::request::{LoadFailed, Received, RequestId, Updates};
use super::step::{Load, Release};
use super::{SchedulerConnector, blocks};
use crate::observe::TraceId;
use crate::ticket::Table;

/// Longest wait before a retry.
const MAX_BACKOFF: Duration = Duration::from_secs(60);

impl SchedulerConnector {
    /// Takes what the worker of `rank` (numbered in its replica) has reported, and says what of it the engine has to act on.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): there is no such rank, or the report is of another life of the engine.
    /// Nothing was taken from it.
    pub fn update(&mut self, rank: u16, report: &WorkerReport, now: Duration) -> Result<Updates> {
        let ranks = self.config.ranks();
        if u32::from(rank) >= ranks {
            return Err(Error::misuse("scheduler", "a report of a rank that there is not")
                .with_context("rank", rank)
                .with_context("ranks", ranks));
        }
        if report.engine != self.incarnation {
            return Err(Error::misuse("scheduler", "a report of another life of the engine")
                .with_context("rank", rank)
                .with_context("engine", report.engine)
                .with_context("this", self.incarnation));
        }
        self.ranks.take(rank, report.number, report.stats);
        let mut updates = Updates::default();
        for end in &report.ended {
            let sent = self.publishing.ended(ranks, rank, end, &mut self.stats);
            updates.sent.extend(sent);
        }
        for end in &report.loads {
            self.load_ended(rank, end, now, &mut updates);
        }
        for attempt in &report.quiet {
            // Perhaps before the others have ended the load.
            if let Some(ends) = self.pulling.ends(*attempt)
                && ends.unquiet.remove(&rank)
                && ends.unquiet.is_empty()
            {
                ends.quarantined.clear();
            }
            if let Some(blocks) = self.quarantine.quiet(*attempt, rank) {
                name(&mut updates.unquarantined, &blocks);
            }
        }
        Ok(updates)
    }

    fn load_ended(&mut self, rank: u16, end: &LoadEnd, now: Duration, updates: &mut Updates) {
        let ranks = self.config.ranks();
        if let Some(Draining { load, ends, .. }) = self.pulling.draining.get_mut(&end.attempt) {
            self.stats.stray_reports += ends.take(&self.config.groups, load, rank, end);
            if ends.ranks.is_complete(ranks)
                && let Some(draining) = self.pulling.drained(end.attempt)
            {
                updates.drained.push(draining.request);
                self.quarantine.add(end.attempt, &draining.ends, updates);
            }
            return;
        }
        let Some(request) = self.pulling.attempts.get(&end.attempt).cloned() else {
            self.stats.stray_reports += 1;
            return;
        };
        let Some(pull) = self.pulling.requests.get_mut(&request) else { return };
        let State::Loading(loading) = &mut pull.state else { return };
        self.stats.stray_reports +=
            loading.ends.take(&self.config.groups, &loading.load, rank, end);
        if !loading.ends.ranks.is_complete(ranks) {
            return;
        }
        self.pulling.attempts.remove(&end.attempt);
        self.settle(&request, now, updates);
    }

    /// A load has ended at all ranks.
    fn settle(&mut self, request: &RequestId, now: Duration, updates: &mut Updates) {
        let Some(pull) = self.pulling.requests.get_mut(request) else { return };
        let loading = match std::mem::replace(&mut pull.state, State::Over) {
            State::Loading(loading) => *loading,
            other => {
                pull.state = other;
                return;
            }
        };
        let prompt_tokens = pull.prompt_tokens;
        self.quarantine.add(loading.load.attempt, &loading.ends, updates);
        let (load, ends) = (&loading.load, &loading.ends);
        let source = load.source.clone();
        if !ends.failed {
            let computed = self.config.computed(load.tokens.end, prompt_tokens);
            self.pulling.over(source.lease);
            updates.received.push(Received { request: request.clone(), computed });
            self.stats.received += 1;
            return;
        }
        // Where somebody may still write, nothing more can be loaded.
        let retry = !ends.for_good && ends.quarantined.is_empty();
        if retry && loading.tries < self.config.retries {
            let wait = backoff(&self.config, loading.tries);
            self.stats.retries += 1;
            self.pulling.again(request, loading, now + wait);
            return;
        }
        let good =
            blocks::good_tokens(&self.config.groups, &load.local, &load.tokens, &ends.blocks);
        let reason = ends.reason.clone().unwrap_or_default();
        let trace = TraceId::from(&source.key);
        tracing::warn!(%trace, %request, lease = %source.lease, %reason, "a load has failed");
        updates.failed.push(LoadFailed {
            request: request.clone(),
            blocks: ends.blocks.clone(),
            computed: self.config.computed(good, prompt_tokens),
            then: self.config.on_failure,
            reason,
        });
        self.stats.failed += 1;
        self.stats.released += 1;
        self.pulling.over(source.lease);
        self.pulling.releases.push_back(Release { attempt: load.attempt, source });
    }
}

fn backoff(config: &SchedulerConfig, tries: u32) -> Duration {
    config.backoff.saturating_mul(1 << tries.min(20)).min(MAX_BACKOFF)
}

/// Blocks that somebody may still write though what they were for is over: by attempt, with the ranks that say so.
#[derive(Debug, Default)]
pub(super) struct Quarantine(BTreeMap<u64, (BTreeSet<u16>, Blocks)>);

/// Blocks, as (cache group, logical block).
type Blocks = BTreeSet<(u16, u32)>;

impl Quarantine {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// All blocks that are kept from use.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (u16, u32)> + '_ {
        self.0.values().flat_map(|(_, blocks)| blocks.iter().copied())
    }

    /// A load has ended, perhaps with blocks that are to be kept from use.
    fn add(&mut self, attempt: u64, ends: &Ends, updates: &mut Updates) {
        if !ends.quarantined.is_empty() {
            name(&mut updates.quarantined, &ends.quarantined);
            self.0.insert(attempt, (ends.unquiet.clone(), ends.quarantined.clone()));
        }
    }

    /// A rank says that nothing moves any more. The blocks, if no other rank has reason to doubt it.
    fn quiet(&mut self, attempt: u64, rank: u16) -> Option<Blocks> {
        let (ranks, _) = self.0.get_mut(&attempt)?;
        ranks.remove(&rank);
        if !ranks.is_empty() {
            return None;
        }
        self.0.remove(&attempt).map(|(_, blocks)| blocks)
    }
}

/// Names blocks by group.
fn name(named: &mut BTreeMap<u16, BTreeSet<u32>>, blocks: &Blocks) {
    for (group, block) in blocks {
        named.entry(*group).or_default().insert(*block);
    }
}

impl Ends {
    /// Takes a rank's end of `load`, and says how much of it was about something else: a rank that has reported already, blocks that
    /// are not the load's.
    fn take(&mut self, groups: &[SchedulerGroup], load: &Load, rank: u16, end: &LoadEnd) -> u64 {
        if !self.ranks.insert(rank) {
            return 1;
        }
        let failed = end.outcome != LoadOutcome::Loaded;
        if !failed && end.quarantined.is_empty() {
            return 0;
        }
        let all = blocks_of(groups, load);
        let mut stray = 0;
        let mut own = |blocks: &[(u16, u32)]| -> BTreeSet<_> {
            let own: BTreeSet<_> = blocks.iter().copied().filter(|it| all.contains(it)).collect();
            stray += u64::from(blocks.iter().any(|block| !all.contains(block)));
            own
        };
        let mut quarantined = own(&end.quarantined);
        if !quarantined.is_empty() {
            self.quarantined.append(&mut quarantined);
            self.unquiet.insert(rank);
        }
        if failed {
            let bad = own(&end.blocks);
            self.blocks.extend(if bad.is_empty() { &all } else { &bad });
            self.failed = true;
            self.for_good |= end.outcome != LoadOutcome::Retry;
            self.reason.get_or_insert_with(|| format!("rank {rank}: {}", end.reason));
        }
        stray
    }
}

/// All blocks of a load.
fn blocks_of(groups: &[SchedulerGroup], load: &Load) -> Blocks {
    let group = |(number, (group, table))| {
        let (group, table): (&SchedulerGroup, &Table) = (group, table);
        let ids = table.ids.iter().filter(|id| Some(**id) != group.group.null_block);
        ids.map(move |id| (number, *id))
    };
    (0..).zip(groups.iter().zip(&load.local)).flat_map(group).collect()
}
