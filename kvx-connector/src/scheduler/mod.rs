//! The scheduler's side: what an engine's scheduler calls, and what its workers are told of it.
//!
//! An engine's scheduler and its workers are separate processes. The scheduler has a [`SchedulerConnector`]; it never touches memory
//! or a socket. In each step it has bytes for the workers ([`StepMetadata`]), the same for all ranks, and afterwards takes
//! bytes from each of them ([`WorkerReport`]); the engine carries both.
//!
//! # One request, on both sides
//!
//! ```text
//!  router        producer's scheduler                 its workers │ consumer's scheduler                  its workers
//!    │ do_remote_decode  │                                 │      │      │                                     │
//!    ├──────────────────▶│ on_new_request                  │      │      │                                     │
//!    │                   │ matched_tokens ▶ 0              │      │      │                                     │
//!    │                   │ after_alloc                     │      │      │                                     │
//!    │                   │ build_step ── expects, saves ──▶│      │      │                                     │
//!    │                   │   (a step per chunk)            │      │      │                                     │
//!    │                   │ request_finished ▶ hold, ticket │      │      │                                     │
//!    │◀── ticket ────────┤                                 │      │      │                                     │
//!    │                   │ build_step ── grants ──────────▶│      │      │                                     │
//!    │ do_remote_prefill, ticket                           │      │      │                                     │
//!    ├────────────────────────────────────────────────────────────┼─────▶│ on_new_request                      │
//!    │                   │                                 │      │      │ build_step ── holds ───────────────▶│ heartbeats
//!    │                   │                                 │      │      │ matched_tokens ▶ so many            │
//!    │                   │                                 │      │      │ after_alloc                         │
//!    │                   │                                 │      │      │ build_step ── loads ───────────────▶│ reads,
//!    │                   │                                 │      │      │                                     │ confirms
//!    │                   │ update ◀── ended (each rank) ───┤      │      │ update ◀── loaded (each rank) ──────┤
//!    │                   │   ▶ sent: free the blocks       │      │      │   ▶ received: schedule it           │
//! ```
//!
//! At any moment a request may be aborted, preempted or rejected. Whatever happens:
//!
//! - a request whose blocks are held (`hold`) is named once in [`Updates`], after *every* rank has reported that nobody reads
//!   or writes them: ranks are kept as sets, so that a report that comes twice is no second rank;
//! - a ticket's lease is loaded from, or given back: never neither, never both unless the load failed;
//! - when all requests are finished and all ranks have reported, nothing is left in any table;
//! - a lease's number and an attempt's number are given once in a life of the engine.
//!
//! A connector must be told the truth: that what it asks to be held is held, and that each request ends in
//! [`request_finished`](SchedulerConnector::request_finished) or [`rejected`](SchedulerConnector::rejected).

mod blocks;
mod config;
mod intake;
mod publish;
mod pull;
mod pulling;
mod ranks;
mod report;
mod request;
mod stats;
mod step;
#[cfg(test)]
mod tests;
mod update;
mod used;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use kvx_core::card::Card;
use kvx_core::id::Incarnation;
use kvx_core::plan::BlockTable;
use kvx_core::{Error, Result};

pub use config::{LastToken, SchedulerConfig, SchedulerGroup};
pub use report::{LeaseEnd, LoadEnd, LoadOutcome, WorkerReport, WorkerStats};
pub use request::{
    FinishStatus, Finished, Finishing, LoadFailed, Matched, OnFailure, Received, Request,
    RequestId, Scheduled, Updates,
};
pub use stats::{SchedulerStats, Tables};
pub use step::{Expect, Grant, Hold, Load, Release, Save, Source, StepMetadata, Withdrawal};

use crate::ticket::{Table, Ticket};

/// What an engine's scheduler calls: see the [module](self).
#[derive(Debug)]
pub struct SchedulerConnector {
    config: SchedulerConfig,
    incarnation: Incarnation,
    step: u64,
    publishing: publish::Publishing,
    pulling: pulling::Pulling,
    quarantine: update::Quarantine,
    cards: BTreeMap<u16, Vec<u8>>,
    ranks: stats::RankStats,
    stats: SchedulerStats,
}

impl SchedulerConnector {
    /// Block ids in one step, of what is bounded by them.
    const STEP_IDS: usize = 4 << 20;

    /// The connector of a scheduler that has just started.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Config`](kvx_core::ErrorKind::Config): what is wrong in `config`.
    /// - [`ErrorKind::Resources`](kvx_core::ErrorKind::Resources): the operating system gives no random bytes.
    pub fn new(config: SchedulerConfig) -> Result<Self> {
        Self::with_incarnation(config, Incarnation::random()?)
    }

    /// As [`new`](Self::new), in this life of the engine: where whoever starts the engine's processes
    /// draws it, because workers are told of it before there is a scheduler. No two lives may have the same.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](kvx_core::ErrorKind::Config): what is wrong in `config`.
    pub fn with_incarnation(config: SchedulerConfig, incarnation: Incarnation) -> Result<Self> {
        config.check()?;
        Ok(Self {
            config,
            incarnation,
            step: 0,
            publishing: publish::Publishing::new(incarnation),
            pulling: pulling::Pulling::new(),
            quarantine: update::Quarantine::default(),
            cards: BTreeMap::new(),
            ranks: stats::RankStats::default(),
            stats: SchedulerStats::default(),
        })
    }

    /// What it was made with.
    #[must_use]
    pub const fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// This life of the engine.
    #[must_use]
    pub const fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Cache groups of which nothing is given or had.
    pub fn local_only_groups(&self) -> impl Iterator<Item = usize> + '_ {
        let groups = self.config.groups.iter().enumerate();
        groups.filter(|(_, group)| group.local_only).map(|(index, _)| index)
    }

    /// A request has come. From now on its producer is asked to keep what it has for it, even if the request has long to wait.
    ///
    /// Engines that do not say so are told from the first [`matched_tokens`](Self::matched_tokens).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): blocks of another request of this name are still held.
    pub fn on_new_request(&mut self, request: &Request<'_>) -> Result<()> {
        // A bad ticket is an answer to whoever asks for tokens.
        match self.track(request) {
            Err(error) if error.kind() == kvx_core::ErrorKind::Misuse => Err(error),
            _ => Ok(()),
        }
    }

    /// How many tokens come from outside for a request of which the engine has `computed`. May be asked any number of times; the
    /// last answer counts.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): blocks of another request of this name are still held.
    /// - With [`OnFailure::Fail`], what is wrong with the ticket, naming the field. With [`OnFailure::Recompute`] that is logged
    ///   and counted, and no token comes from outside.
    pub fn matched_tokens(&mut self, request: &Request<'_>, computed: u64) -> Result<Matched> {
        match self.track(request) {
            Ok(intake::Tracked::Full) => return Ok(Matched::AskLater),
            Ok(intake::Tracked::Known) => {}
            Err(error) if error.kind() == kvx_core::ErrorKind::Misuse => return Err(error),
            Err(error) => {
                self.stats.bad_tickets += 1;
                tracing::warn!(request = %request.id, %error, "the ticket cannot be used");
                if self.config.on_failure == OnFailure::Fail {
                    return Err(error);
                }
                self.pulling.track_useless(&self.config, request);
                return Ok(Matched::NONE);
            }
        }
        Ok(self.pulling.matched(&self.config, request.id, computed, &mut self.stats))
    }

    /// The engine has given a request blocks: `tables` are all that it has now, one for each cache group, and `external` tokens of
    /// them are to come from outside. With 0 it computes all itself: what was promised is given back.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): more tokens than were promised, or a number that a state cannot be had
    /// for; tables that are missing, or end before the tokens do; or the request has loaded before.
    pub fn after_alloc(
        &mut self,
        request: &RequestId,
        tables: &[BlockTable<'_>],
        external: u64,
    ) -> Result<()> {
        let (config, stats) = (&self.config, &mut self.stats);
        self.pulling.after_alloc(config, request, tables, external, stats)?;
        self.publishing.after_alloc(config, request, tables)
    }

    /// What the workers are told in this step, in which the engine computes `scheduled`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): blocks that are missing. Nothing was taken from what waits to be told.
    pub fn build_step(
        &mut self,
        scheduled: &[Scheduled<'_>],
        now: Duration,
    ) -> Result<StepMetadata> {
        for at in scheduled {
            self.pulling.scheduled(at.request);
            self.publishing.scheduled(&self.config, at)?;
        }
        const MAX: usize = StepMetadata::MAX_ITEMS;
        self.step += 1;
        let mut step = StepMetadata::new(self.incarnation, self.step);
        let mut ids = Self::STEP_IDS;
        let publishing = &mut self.publishing;
        step.expects = drain(&mut publishing.expects, MAX, &mut ids, |_| 0);
        step.saves = drain(&mut publishing.saves, MAX, &mut ids, |save| blocks_in(&save.tables));
        // What one says rests on what was said before it.
        if publishing.saves.is_empty() {
            step.grants = drain(&mut publishing.grants, MAX, &mut ids, |it| blocks_in(&it.tables));
        }
        if publishing.grants.is_empty() && publishing.expects.is_empty() {
            step.withdrawals = drain(&mut publishing.withdrawals, MAX, &mut ids, |_| 0);
        }
        let pulling = &mut self.pulling;
        step.aborts = drain(&mut pulling.aborts, MAX, &mut ids, |_| 0);
        step.holds = pulling.take_holds(MAX, self.config.hard);
        step.loads = pulling.take_loads(MAX, ids, now, &mut self.stats);
        step.releases = drain(&mut pulling.releases, MAX, &mut ids, |_| 0);
        Ok(step)
    }

    /// A request has finished: whether its blocks must be held, and what goes to the consumer.
    ///
    /// A request whose blocks are held may be aborted all the same, by calling this once more: then they are free as soon as
    /// no rank uses them.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): tables that are missing, or end before the tokens do. Nothing is held
    /// then, and the connector knows the request no more.
    pub fn request_finished(
        &mut self,
        request: &Request<'_>,
        finishing: &Finishing<'_>,
    ) -> Result<Finished> {
        let known = self.knows(request.id);
        let stopped = self.pulling.remove(request.id, &mut self.stats);
        if !known {
            self.give_back_unseen(request);
        }
        let publish = finishing.status == FinishStatus::LengthCapped && !stopped;
        let running = self.publishing.is_running(request.id);
        if publish && !running && !self.publishing.holds(request.id) && self.wants_out(request) {
            self.stats.unpublished += 1;
        }
        let (config, stats) = (&self.config, &mut self.stats);
        let mut finished =
            self.publishing.finished(config, request.id, finishing, publish, stats)?;
        finished.hold |= self.pulling.drains(request.id);
        Ok(finished)
    }

    /// A request was refused before it had any block, perhaps before the scheduler ever saw it: what its ticket promises is given
    /// back.
    pub fn rejected(&mut self, request: &Request<'_>) {
        let finishing = Finishing { status: FinishStatus::Failed, tokens: 0, blocks: &[] };
        // Without blocks nothing can be wrong with them, nor be held.
        let _ = self.request_finished(request, &finishing);
    }

    /// The engine takes a request's blocks and will compute it later, from the start. Whether they must be held all the same,
    /// because something may still be written there: then [`Updates::drained`] names the request once that is over.
    pub fn preempted(&mut self, request: &RequestId) -> bool {
        self.publishing.preempted(request);
        self.pulling.stop(request, &mut self.stats)
    }

    /// Whether the next step has something to tell the workers: then the engine should make one, even if there is nothing to
    /// compute.
    #[must_use]
    pub fn has_pending(&self, now: Duration) -> bool {
        self.messages() > 0 || self.next_wake().is_some_and(|at| at <= now)
    }

    /// When there will be something to tell the workers though nothing else happens. It may turn out to be nothing.
    #[must_use]
    pub fn next_wake(&self) -> Option<Duration> {
        self.pulling.wake()
    }

    /// Blocks, by cache group, that workers write, or may still write, or are about to: from [`after_alloc`](Self::after_alloc)
    /// until the load has ended at every rank and is quiet. An engine must not zero them, copy them or compute into them
    /// meanwhile; what it queued on them before (a kernel that zeroes new blocks) must be over before the step with the load is
    /// given to the workers.
    #[must_use]
    pub fn being_written(&self) -> BTreeMap<u16, BTreeSet<u32>> {
        let mut blocks: BTreeMap<u16, BTreeSet<u32>> = BTreeMap::new();
        for (group, id) in self.pulling.being_written().chain(self.quarantine.blocks()) {
            blocks.entry(group).or_default().insert(id);
        }
        blocks
    }

    /// What is in the tables. While there are leases or loads, reports must be asked of the workers, though not in every moment:
    /// a worker says when it has one.
    #[must_use]
    pub fn tables(&self) -> Tables {
        let producing = self.publishing.requests();
        let both = producing.filter(|id| self.pulling.requests.contains_key(*id)).count();
        Tables {
            requests: self.pulling.requests.len() + self.publishing.requests().count() - both,
            leases: self.publishing.leases(),
            loads: self.pulling.attempts.len() + self.pulling.draining.len(),
            messages: self.messages(),
            quarantines: self.quarantine.len(),
        }
    }

    fn messages(&self) -> usize {
        self.publishing.messages() + self.pulling.messages()
    }

    /// What has been counted.
    #[must_use]
    pub const fn stats(&self) -> &SchedulerStats {
        &self.stats
    }

    /// What each rank's worker has counted, as it last reported.
    pub fn rank_stats(&self) -> impl Iterator<Item = (u16, WorkerStats)> + '_ {
        self.ranks.iter()
    }

    /// Takes the card of a rank of this replica, to be served at the engine's address; whether all ranks' cards are there now.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): there is no such rank, or the card is longer than anybody would read.
    pub fn set_handshake_metadata(&mut self, rank: u16, card: Vec<u8>) -> Result<bool> {
        if u32::from(rank) >= self.config.ranks() || card.len() > Card::MAX_BYTES {
            return Err(Error::misuse("scheduler", "not a card of one of this replica's ranks")
                .with_context("rank", rank)
                .with_context("ranks", self.config.ranks())
                .with_context("bytes", card.len())
                .with_context("limit", Card::MAX_BYTES));
        }
        self.cards.insert(rank, card);
        Ok(self.cards.len() as u64 == u64::from(self.config.ranks()))
    }

    /// The ranks' cards.
    #[must_use]
    pub const fn cards(&self) -> &BTreeMap<u16, Vec<u8>> {
        &self.cards
    }
}

/// Takes from the front of `queue`: at most `max`, and so many that their block ids are at most `ids`; or one.
fn drain<T>(
    queue: &mut VecDeque<T>,
    max: usize,
    ids: &mut usize,
    count: impl Fn(&T) -> usize,
) -> Vec<T> {
    let mut taken = Vec::new();
    while taken.len() < max
        && let Some(next) = queue.front()
    {
        let need = count(next);
        if need > *ids && !taken.is_empty() {
            break;
        }
        *ids = ids.saturating_sub(need);
        taken.extend(queue.pop_front());
    }
    taken
}

fn blocks_in(tables: &[Table]) -> usize {
    tables.iter().map(|table| table.ids.len()).sum()
}

const _: () = assert!(
    StepMetadata::MAX_BYTES > 2 * 4 * SchedulerConnector::STEP_IDS + 4 * 4 * Ticket::MAX_BLOCKS
);
