//! The consumer's part: requests whose cache comes from another engine.
//!
//! ```text
//!            after_alloc          build_step            every rank: ended
//!   Waiting ─────────────▶ Queued ───────────▶ Loading ───────────────────▶ Over (received, or failed)
//!     │ ▲ a hold is sent     │       ▲            │  │
//!     │ └ with the next step │       └── Backoff ◀┘  │ finished, preempted: aborted
//!     │                      │      may be tried     ▼
//!     └──────────┬───────────┘         again      Draining ── every rank: ended ──▶ free
//!                ▼
//!        Over, the lease released: nothing is to be loaded, or the request is gone
//! ```
//!
//! A request loads once in its life. A lease is used by one request at a time, and by none after it was given back or its
//! load is over; a request that comes with the same ticket waits for the first one, and then computes what the engine's own
//! cache does not have.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use kvx_core::Result;
use kvx_core::plan::BlockTable;

use super::config::SchedulerConfig;
use super::pull::{Draining, Ends, Loading, Pull, State, load, misuse, source};
use super::request::{Matched, Request, RequestId};
use super::stats::SchedulerStats;
use super::step::{Hold, Load, Release};
use super::used::Used;
use crate::protocol::LeaseName;
use crate::ticket::Ticket;

/// All requests whose cache comes from another engine.
#[derive(Debug)]
pub(super) struct Pulling {
    next: u64,
    pub(super) requests: BTreeMap<RequestId, Pull>,
    /// Loads of which the workers know, by attempt.
    pub(super) attempts: BTreeMap<u64, RequestId>,
    pub(super) draining: BTreeMap<u64, Draining>,
    draining_of: BTreeMap<RequestId, u64>,
    /// Which request uses a lease.
    using: BTreeMap<LeaseName, RequestId>,
    used: Used,
    /// Requests to be held, to be loaded; what has changed since is left out when the step is built.
    holds: VecDeque<(RequestId, u64)>,
    loads: VecDeque<(RequestId, u64)>,
    pub(super) aborts: VecDeque<u64>,
    pub(super) releases: VecDeque<Release>,
    /// Loads to be tried again: when, the attempt, the request.
    backoffs: BTreeSet<(Duration, u64, RequestId)>,
    /// Blocks of the pool that loads have taken whose requests do not run yet.
    taken: u64,
}

impl Pulling {
    pub(super) const fn new() -> Self {
        Self {
            next: 1,
            requests: BTreeMap::new(),
            attempts: BTreeMap::new(),
            draining: BTreeMap::new(),
            draining_of: BTreeMap::new(),
            using: BTreeMap::new(),
            used: Used::new(),
            holds: VecDeque::new(),
            loads: VecDeque::new(),
            aborts: VecDeque::new(),
            releases: VecDeque::new(),
            backoffs: BTreeSet::new(),
            taken: 0,
        }
    }

    /// Blocks of loads that have not ended everywhere, as (cache group, block).
    pub(super) fn being_written(&self) -> impl Iterator<Item = (u16, u32)> + '_ {
        let loads = self.requests.values().filter_map(Pull::load);
        loads.chain(self.draining.values().map(|it| &it.load)).flat_map(Load::local_blocks)
    }

    fn attempt(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// Takes a request up; `false` where there are too many.
    pub(super) fn track(
        &mut self,
        config: &SchedulerConfig,
        request: &Request<'_>,
        ticket: Ticket,
        stats: &mut SchedulerStats,
    ) -> bool {
        if self.requests.len() + self.draining.len() >= config.max_requests {
            return false;
        }
        let attempt = self.attempt();
        let source = source(&ticket);
        let lease = source.lease;
        let state = if ticket.is_empty() {
            State::Over
        } else if self.used.contains(&lease) {
            stats.used_tickets += 1;
            State::Over
        } else if let Entry::Vacant(free) = self.using.entry(lease) {
            free.insert(request.id.clone());
            self.holds.push_back((request.id.clone(), attempt));
            State::Waiting { ticket: Box::new(ticket), asked: None }
        } else {
            State::Second
        };
        let prompt_tokens = request.prompt_tokens;
        let pull = Pull { prompt_tokens, attempt, source: Some(source), state, need: 0 };
        self.requests.insert(request.id.clone(), pull);
        true
    }

    /// Takes up a request whose ticket is of no use.
    pub(super) fn track_useless(&mut self, config: &SchedulerConfig, request: &Request<'_>) {
        if self.requests.len() + self.draining.len() < config.max_requests {
            let attempt = self.attempt();
            let (prompt_tokens, state) = (request.prompt_tokens, State::Over);
            let pull = Pull { prompt_tokens, attempt, source: None, state, need: 0 };
            self.requests.insert(request.id.clone(), pull);
        }
    }

    pub(super) fn matched(
        &mut self,
        config: &SchedulerConfig,
        request: &RequestId,
        computed: u64,
        stats: &mut SchedulerStats,
    ) -> Matched {
        let taken = self.taken;
        let Some(pull) = self.requests.get_mut(request) else { return Matched::NONE };
        match &mut pull.state {
            State::Waiting { ticket, asked } => {
                let usable = config.usable(ticket, pull.prompt_tokens);
                let tokens = usable.saturating_sub(computed);
                *asked = Some((computed, tokens));
                if tokens == 0 {
                    return Matched::NONE;
                }
                let need = config.pool_need(pull.prompt_tokens);
                if config.pool_blocks.is_some_and(|pool| taken > 0 && taken + need > pool) {
                    *asked = None;
                    return Matched::AskLater;
                }
                Matched::Tokens { tokens, asynchronous: config.asynchronous }
            }
            State::Second
                if pull.source.as_ref().is_some_and(|it| self.using.contains_key(&it.lease)) =>
            {
                Matched::AskLater
            }
            State::Second => {
                stats.used_tickets += 1;
                pull.state = State::Over;
                Matched::NONE
            }
            _ => Matched::NONE,
        }
    }

    /// The engine has given the request blocks, `external` tokens of which are to come.
    pub(super) fn after_alloc(
        &mut self,
        config: &SchedulerConfig,
        request: &RequestId,
        tables: &[BlockTable<'_>],
        external: u64,
        stats: &mut SchedulerStats,
    ) -> Result<()> {
        let Some(pull) = self.requests.get_mut(request) else {
            return match external {
                0 => Ok(()),
                _ => Err(misuse("nothing was promised for this request", request)),
            };
        };
        match &pull.state {
            State::Waiting { .. } if external == 0 => {
                self.give_back(request, stats);
                Ok(())
            }
            State::Waiting { ticket, asked } => {
                let load = load(config, request, pull, ticket, *asked, tables, external)?;
                pull.need = config.pool_need(pull.prompt_tokens);
                self.taken += pull.need;
                pull.state = State::Queued(Box::new(load));
                self.loads.push_back((request.clone(), pull.attempt));
                Ok(())
            }
            // Engines say so once more when a request that was loaded is scheduled.
            _ if external == 0 => {
                self.scheduled(request);
                Ok(())
            }
            _ => Err(misuse("a request loads once", request)),
        }
    }

    /// The request runs: what it takes of the pool is no concern of loads any more.
    pub(super) fn scheduled(&mut self, request: &RequestId) {
        if let Some(pull) = self.requests.get_mut(request)
            && matches!(pull.state, State::Over)
        {
            self.taken -= std::mem::take(&mut pull.need);
        }
    }

    /// There is nothing (more) to load for the request, and its lease is given back, if it has one that is not.
    pub(super) fn give_back(&mut self, request: &RequestId, stats: &mut SchedulerStats) {
        let Some(pull) = self.requests.get_mut(request) else { return };
        if matches!(pull.state, State::Over | State::Second) {
            return;
        }
        let attempt = pull.attempt;
        pull.state = State::Over;
        let Some(source) = pull.source.clone() else { return };
        self.over(source.lease);
        self.releases.push_back(Release { attempt, source });
        stats.released += 1;
    }

    /// The lease is not used any more.
    pub(super) fn over(&mut self, lease: LeaseName) {
        self.using.remove(&lease);
        self.used.insert(lease);
    }

    /// A request that never came this far is not wanted: its ticket's lease is given back.
    pub(super) fn refuse(&mut self, ticket: &Ticket, stats: &mut SchedulerStats) {
        let source = source(ticket);
        let lease = source.lease;
        if ticket.is_empty() || self.used.contains(&lease) || self.using.contains_key(&lease) {
            return;
        }
        let attempt = self.attempt();
        self.over(lease);
        self.releases.push_back(Release { attempt, source });
        stats.released += 1;
    }

    /// The engine wants its blocks back, or the request is gone: whether something may still be written into them.
    pub(super) fn stop(&mut self, request: &RequestId, stats: &mut SchedulerStats) -> bool {
        let Some(pull) = self.requests.get_mut(request) else { return false };
        self.taken -= std::mem::take(&mut pull.need);
        let Some(loading) = pull.stop_loading() else {
            self.give_back(request, stats);
            return false;
        };
        let Loading { load, ends, .. } = *loading;
        let (attempt, lease) = (load.attempt, load.source.lease);
        self.attempts.remove(&attempt);
        self.aborts.push_back(attempt);
        self.draining.insert(attempt, Draining { request: request.clone(), load, ends });
        self.draining_of.insert(request.clone(), attempt);
        self.over(lease);
        stats.aborted += 1;
        true
    }

    /// Holds that the next step is to send, at most `max`.
    pub(super) fn take_holds(&mut self, max: usize, hard: Duration) -> Vec<Hold> {
        let mut holds = Vec::new();
        while holds.len() < max
            && let Some((request, attempt)) = self.holds.pop_front()
        {
            let waiting = self.requests.get(&request);
            let waiting = waiting.filter(|pull| pull.attempt == attempt && pull.waits());
            let source = waiting.and_then(|pull| pull.source.clone());
            holds.extend(source.map(|source| Hold { attempt, deadline: hard, source }));
        }
        holds
    }

    /// Loads that the next step is to begin: at most `max`, with at most `ids` block ids, or one.
    pub(super) fn take_loads(
        &mut self,
        max: usize,
        ids: usize,
        now: Duration,
        stats: &mut SchedulerStats,
    ) -> Vec<Load> {
        self.end_backoffs(now);
        let (mut loads, mut taken) = (Vec::<Load>::new(), 0);
        while loads.len() < max
            && let Some((request, attempt)) = self.loads.front().cloned()
        {
            let Some(pull) = self.requests.get_mut(&request).filter(|it| it.attempt == attempt)
            else {
                self.loads.pop_front();
                continue;
            };
            if let State::Queued(load) | State::Backoff { load, .. } = &pull.state {
                let count = load.blocks();
                if taken > 0 && taken + count > ids {
                    break;
                }
                taken += count;
            }
            if let Some(load) = pull.begin() {
                stats.loads += 1;
                self.attempts.insert(attempt, request);
                loads.push(load);
            }
            self.loads.pop_front();
        }
        loads
    }

    /// Queues loads whose time to be tried again has come.
    fn end_backoffs(&mut self, now: Duration) {
        while self.backoffs.first().is_some_and(|(at, ..)| *at <= now)
            && let Some((_, attempt, request)) = self.backoffs.pop_first()
        {
            self.loads.push_back((request, attempt));
        }
    }

    /// Takes a load that failed once more, later, under a new attempt.
    pub(super) fn again(&mut self, request: &RequestId, loading: Loading, at: Duration) {
        let attempt = self.attempt();
        let Some(pull) = self.requests.get_mut(request) else { return };
        let mut load = loading.load;
        load.replaces = Some(load.attempt);
        load.attempt = attempt;
        pull.attempt = attempt;
        pull.state = State::Backoff { load: Box::new(load), tries: loading.tries + 1 };
        self.backoffs.insert((at, attempt, request.clone()));
    }

    /// When the next load is to be tried again, at the earliest.
    pub(super) fn wake(&self) -> Option<Duration> {
        self.backoffs.first().map(|(at, ..)| *at)
    }

    /// The request is gone: whether something may still be written into its blocks.
    pub(super) fn remove(&mut self, request: &RequestId, stats: &mut SchedulerStats) -> bool {
        let stopped = self.stop(request, stats);
        self.requests.remove(request);
        stopped
    }

    /// Whether something may still be written into blocks that a request of this name had.
    pub(super) fn drains(&self, request: &RequestId) -> bool {
        self.draining_of.contains_key(request)
    }

    /// What ranks have said of an attempt that has not ended at all of them.
    pub(super) fn ends(&mut self, attempt: u64) -> Option<&mut Ends> {
        if let Some(draining) = self.draining.get_mut(&attempt) {
            return Some(&mut draining.ends);
        }
        let request = self.attempts.get(&attempt)?;
        match &mut self.requests.get_mut(request)?.state {
            State::Loading(loading) => Some(&mut loading.ends),
            _ => None,
        }
    }

    /// Nothing is written any more by an attempt that was aborted.
    pub(super) fn drained(&mut self, attempt: u64) -> Option<Draining> {
        let draining = self.draining.remove(&attempt)?;
        self.draining_of.remove(&draining.request);
        Some(draining)
    }

    pub(super) fn messages(&self) -> usize {
        let count = |queue: &VecDeque<(RequestId, u64)>, wanted: fn(&Pull) -> bool| {
            let live = |(request, attempt): &&(RequestId, u64)| {
                self.requests.get(request).is_some_and(|it| it.attempt == *attempt && wanted(it))
            };
            queue.iter().filter(live).count()
        };
        count(&self.holds, Pull::waits)
            + count(&self.loads, Pull::begins)
            + self.aborts.len()
            + self.releases.len()
    }
}
