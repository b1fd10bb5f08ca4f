//! The producer's part: requests whose cache is for another engine.
//!
//! ```text
//!            after_alloc            request_finished            every rank: ended
//!   (new) ─────────────▶ Running ─────────────────────▶ Held ─────────────────────▶ free
//!                        │    ▲  length-capped, blocks   │  ▲
//!               preempted│    │next epoch               └──┘ aborted: withdrawn
//!                        └────┘
//!                        └──── finished otherwise, or no blocks: withdrawn, nothing held
//! ```
//!
//! A request has its lease's number from when it is first given blocks, so that workers know it before any reader can speak of
//! it. No number is given twice. A request that is preempted goes on under the next epoch: what was copied or read in the
//! one before says nothing about it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvx_core::id::Incarnation;
use kvx_core::plan::BlockTable;
use kvx_core::{Error, Result};

use super::blocks;
use super::config::SchedulerConfig;
use super::ranks::RankSet;
use super::report::LeaseEnd;
use super::request::{FinishStatus, Finished, Finishing, Request, RequestId, Scheduled};
use super::stats::SchedulerStats;
use super::step::{Expect, Grant, Save, Withdrawal};
use crate::observe::TraceId;
use crate::protocol::{Access, LeaseName, Reason, TransferKey};
use crate::ticket::{Parts, Table, Ticket, TicketGroup};

/// A request that is being computed.
#[derive(Debug)]
struct Running {
    lease: LeaseName,
    key: TransferKey,
    prompt_tokens: u64,
    /// The workers expect the lease, or will with the next step.
    expected: bool,
    /// Its blocks so far, by group, where they are copied chunk by chunk.
    tables: Vec<Table>,
    /// Tokens that were copied in this epoch, and in how many parts.
    saved: u64,
    parts: u32,
}

/// A finished request whose blocks are held.
#[derive(Debug)]
struct Held {
    request: RequestId,
    key: TransferKey,
    withdrawn: bool,
    expired: bool,
    ranks: RankSet,
}

/// All requests whose cache is for another engine.
#[derive(Debug)]
pub(super) struct Publishing {
    owner: Incarnation,
    next: u64,
    running: BTreeMap<RequestId, Running>,
    held: BTreeMap<LeaseName, Held>,
    holding: BTreeMap<RequestId, LeaseName>,
    /// Keys in use.
    keys: BTreeSet<TransferKey>,
    pub(super) withdrawals: VecDeque<Withdrawal>,
    pub(super) expects: VecDeque<Expect>,
    pub(super) saves: VecDeque<Save>,
    pub(super) grants: VecDeque<Grant>,
}

impl Publishing {
    pub(super) fn new(owner: Incarnation) -> Self {
        Self {
            owner,
            next: 1,
            running: BTreeMap::new(),
            held: BTreeMap::new(),
            holding: BTreeMap::new(),
            keys: BTreeSet::new(),
            withdrawals: VecDeque::new(),
            expects: VecDeque::new(),
            saves: VecDeque::new(),
            grants: VecDeque::new(),
        }
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = &RequestId> {
        self.running.keys()
    }

    pub(super) fn leases(&self) -> usize {
        self.held.len()
    }

    pub(super) fn messages(&self) -> usize {
        self.withdrawals.len() + self.expects.len() + self.saves.len() + self.grants.len()
    }

    pub(super) fn is_running(&self, request: &RequestId) -> bool {
        self.running.contains_key(request)
    }

    /// Whether the blocks of a finished request of this name are held.
    pub(super) fn holds(&self, request: &RequestId) -> bool {
        self.holding.contains_key(request)
    }

    /// Takes a request up. `wanted` is the router's name for the transfer.
    pub(super) fn track(
        &mut self,
        config: &SchedulerConfig,
        request: &Request<'_>,
        wanted: Option<TransferKey>,
    ) -> Result<()> {
        if self.running.contains_key(request.id) {
            return Ok(());
        }
        if self.running.len() + self.held.len() >= config.max_requests {
            tracing::warn!(request = %request.id, "not published: too many requests are");
            return Ok(());
        }
        let lease = LeaseName { owner: self.owner, number: self.next, epoch: 0 };
        let key = self.key(request.id, wanted, lease)?;
        self.next += 1;
        self.keys.insert(key.clone());
        let running = Running {
            lease,
            key,
            prompt_tokens: request.prompt_tokens,
            expected: false,
            tables: vec![Table::default(); config.groups.len()],
            saved: 0,
            parts: 0,
        };
        self.running.insert(request.id.clone(), running);
        Ok(())
    }

    /// The transfer's name: the router's, if it is good for this request alone; else the lease's. Never the request's own: the
    /// two sides have the same request under different names, and may have different ones under the same.
    fn key(
        &self,
        request: &RequestId,
        wanted: Option<TransferKey>,
        lease: LeaseName,
    ) -> Result<TransferKey> {
        match wanted {
            Some(key) if key.as_str() != request.as_str() && !self.keys.contains(&key) => Ok(key),
            _ => TransferKey::new(lease.to_string()),
        }
    }

    /// The engine has given the request blocks.
    pub(super) fn after_alloc(
        &mut self,
        config: &SchedulerConfig,
        request: &RequestId,
        tables: &[BlockTable<'_>],
    ) -> Result<()> {
        let Some(running) = self.running.get_mut(request) else { return Ok(()) };
        if config.host_buffer {
            if tables.len() != running.tables.len() {
                return Err(wrong_count(tables.len(), running.tables.len()));
            }
            running.tables = tables.iter().copied().map(Table::from).collect();
        }
        if !running.expected {
            running.expected = true;
            self.expects.push_back(Expect { lease: running.lease, key: running.key.clone() });
        }
        Ok(())
    }

    /// A step computes some of the request: what of it is to be copied into the host's buffer.
    pub(super) fn scheduled(&mut self, config: &SchedulerConfig, at: &Scheduled<'_>) -> Result<()> {
        let Some(running) = self.running.get_mut(at.request).filter(|_| config.host_buffer) else {
            return Ok(());
        };
        if !at.appended.is_empty() && at.appended.len() != running.tables.len() {
            return Err(wrong_count(at.appended.len(), running.tables.len()));
        }
        for (table, more) in running.tables.iter_mut().zip(at.appended) {
            table.ids.extend_from_slice(more);
        }
        let end = at.computed.saturating_add(at.tokens).min(running.prompt_tokens);
        let tables = std::mem::take(&mut running.tables);
        let views: Vec<_> = tables.iter().map(Table::as_plan).collect();
        let save = running.save(config, &views, end);
        running.tables = tables;
        self.saves.extend(save?);
        Ok(())
    }

    /// The engine took the request's blocks and will compute it anew.
    pub(super) fn preempted(&mut self, request: &RequestId) {
        let Some(running) = self.running.get_mut(request) else { return };
        let lease = running.lease;
        if std::mem::take(&mut running.expected) {
            running.lease.epoch += 1;
        }
        running.tables.fill(Table::default());
        (running.saved, running.parts) = (0, 0);
        if lease != running.lease {
            self.withdraw(lease, Reason::Preempted);
        }
    }

    /// The request has finished: whether its blocks are held, and the ticket.
    pub(super) fn finished(
        &mut self,
        config: &SchedulerConfig,
        request: &RequestId,
        finishing: &Finishing<'_>,
        publish: bool,
        stats: &mut SchedulerStats,
    ) -> Result<Finished> {
        if let Some(lease) = self.holding.get(request).copied() {
            self.take_back(lease);
            return Ok(Finished { hold: true, params: None });
        }
        let Some(mut running) = self.running.remove(request) else {
            return Ok(Finished::default());
        };
        let outcome = match publish {
            true => self.grant(config, request, &mut running, finishing, stats),
            false => Ok(Finished::default()),
        };
        let held = matches!(&outcome, Ok(finished) if finished.hold);
        if !held {
            self.keys.remove(&running.key);
            if running.expected {
                let why = match finishing.status {
                    FinishStatus::Failed => Reason::Failed,
                    _ => Reason::Aborted,
                };
                self.withdraw(running.lease, why);
            }
        }
        outcome
    }

    fn grant(
        &mut self,
        config: &SchedulerConfig,
        request: &RequestId,
        running: &mut Running,
        finishing: &Finishing<'_>,
        stats: &mut SchedulerStats,
    ) -> Result<Finished> {
        let tables = blocks::own(&config.groups, finishing.blocks, &(0..finishing.tokens))?;
        let empty = tables.iter().all(|table| table.ids.is_empty());
        let tokens = if empty { 0 } else { finishing.tokens };
        let ticket = running.ticket(config, tokens, &tables);
        let params = match ticket.to_params(request.as_str()) {
            Ok(params) => Some(params),
            Err(error) => {
                stats.unpublished += 1;
                tracing::warn!(%request, %error, "not published");
                return Ok(Finished::default());
            }
        };
        if empty {
            return Ok(Finished { hold: false, params });
        }
        if config.host_buffer {
            // Where a step was not shown.
            let save = running.save(config, finishing.blocks, tokens)?;
            self.saves.extend(save);
        }
        let (lease, key) = (running.lease, running.key.clone());
        self.grants.push_back(Grant {
            lease,
            key: key.clone(),
            request: request.clone(),
            tokens,
            ttl: config.lease,
            hard: config.hard,
            fingerprint: ticket.fingerprint(),
            parts: running.parts.max(1),
            tables,
        });
        let (request, ranks) = (request.clone(), RankSet::default());
        self.holding.insert(request.clone(), lease);
        self.held.insert(lease, Held { request, key, withdrawn: false, expired: false, ranks });
        stats.granted += 1;
        Ok(Finished { hold: true, params })
    }

    /// A request whose blocks are held has been aborted: its lease ends at once.
    fn take_back(&mut self, lease: LeaseName) {
        if let Some(held) = self.held.get_mut(&lease).filter(|held| !held.withdrawn) {
            held.withdrawn = true;
            // A rank that has not been told of the lease yet must be, or it would have no end to report.
            self.withdrawals.push_back(Withdrawal { lease, why: Reason::Aborted });
        }
    }

    fn withdraw(&mut self, lease: LeaseName, why: Reason) {
        self.saves.retain(|save| save.lease != lease);
        let told = self.expects.len();
        self.expects.retain(|expect| expect.lease != lease);
        if told == self.expects.len() {
            self.withdrawals.push_back(Withdrawal { lease, why });
        }
    }

    /// A rank reports that a lease's epoch has ended there. The request, once all have.
    pub(super) fn ended(
        &mut self,
        ranks: u32,
        rank: u16,
        end: &LeaseEnd,
        stats: &mut SchedulerStats,
    ) -> Option<RequestId> {
        let Some(held) = self.held.get_mut(&end.lease) else {
            stats.stray_reports += 1;
            return None;
        };
        held.expired |= end.why == Reason::Expired;
        if !held.ranks.insert(rank) || !held.ranks.is_complete(ranks) {
            return None;
        }
        let held = self.held.remove(&end.lease)?;
        self.keys.remove(&held.key);
        self.holding.remove(&held.request);
        // All ranks are done with it: there is nothing left to grant or to take back.
        self.grants.retain(|grant| grant.lease != end.lease);
        self.withdrawals.retain(|withdrawal| withdrawal.lease != end.lease);
        match (held.withdrawn, held.expired) {
            (true, _) => stats.withdrawn += 1,
            (false, true) => {
                stats.expired += 1;
                let (trace, request) = (TraceId::from(&held.key), &held.request);
                tracing::warn!(%trace, %request, lease = %end.lease, "a lease has expired");
            }
            (false, false) => stats.sent += 1,
        }
        Some(held.request)
    }
}

impl Running {
    /// What of the tokens up to `end` is not copied yet.
    fn save(
        &mut self,
        config: &SchedulerConfig,
        tables: &[BlockTable<'_>],
        end: u64,
    ) -> Result<Option<Save>> {
        let tokens = self.saved..end;
        if tokens.is_empty() {
            return Ok(None);
        }
        let tables = blocks::own(&config.groups, tables, &tokens)?;
        let part = self.parts;
        (self.saved, self.parts) = (end, part + 1);
        Ok(Some(Save { lease: self.lease, part, tokens, tables }))
    }

    fn ticket(&self, config: &SchedulerConfig, tokens: u64, tables: &[Table]) -> Ticket {
        let groups = config.groups.iter().zip(tables).map(|(group, table)| TicketGroup {
            kind: group.group.kind,
            block_tokens: group.group.block_tokens,
            table: table.clone(),
        });
        Ticket {
            key: self.key.clone(),
            engine: config.engine.clone(),
            cards: config.cards.clone(),
            replica: config.replica,
            tp: config.grid.tp,
            lease: self.lease,
            access: Access::Read,
            ttl: config.lease,
            tokens,
            // What goes through the host's buffer is there once the workers have copied it, and they say when.
            parts: if config.host_buffer { Parts::Announced } else { Parts::Whole },
            groups: groups.collect(),
        }
    }
}

fn wrong_count(tables: usize, groups: usize) -> Error {
    Error::misuse("scheduler", "there must be a block table for each cache group")
        .with_context("tables", tables)
        .with_context("groups", groups)
}
