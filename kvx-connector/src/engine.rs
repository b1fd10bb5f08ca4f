//! An engine in one process: all ranks of a replica, and the names of leases and attempts. For engines without a scheduler of
//! their own, and for tests.
//!
//! The producer [publishes](Engine::publish) a request's blocks and gives the [`Ticket`] to whoever decodes; the consumer
//! [fetches](Engine::fetch) it into blocks of its own.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvx_core::card::{Address, EngineName};
use kvx_core::id::Incarnation;
use kvx_core::layout::{CacheGroup, RankLayout};
use kvx_core::{Error, Result};

use crate::control::{Control, ControlConfig, RemoteIdentity};
use crate::observe::EngineStatus;
use crate::protocol::user::Prove;
use crate::protocol::{Access, Attempt, LeaseName, Part, Reason, RequestNumber, TransferKey};
use crate::rank::{FetchOptions, FetchOrder, GrantOrder, Kept, RankSetup};
use crate::ticket::{Parts, Table, Ticket, TicketGroup};
use crate::worker::{Glance, Worker};

mod blocks;
mod check;
mod handles;
mod setup;

pub use handles::{Fetch, Leased, Published};
pub use setup::{EngineSetup, RankParts};

use blocks::{Blocks, Use};
use check::{check_replica, held, moved};

/// All ranks of one replica of an engine. See the [module's documentation](self).
#[derive(Debug)]
pub struct Engine {
    workers: Vec<Worker>,
    layouts: Vec<RankLayout>,
    blocks: Arc<Mutex<Blocks>>,
    name: EngineName,
    life: Incarnation,
    cards: Address,
    ttl: Duration,
    hard: Duration,
    deadline: Duration,
    digests: bool,
    leases: AtomicU64,
    attempts: AtomicU64,
}

impl Engine {
    /// Starts it.
    ///
    /// # Errors
    ///
    /// Those of [`Control::start`], [`Control::listen`] and [`Worker::start`];
    /// [`ErrorKind::Config`](kvx_core::ErrorKind::Config): no ranks, or not all of one replica's, in order.
    pub fn start(setup: EngineSetup) -> Result<Self> {
        let life = Incarnation::random()?;
        let layouts: Vec<RankLayout> = setup.ranks.iter().map(|rank| rank.layout.clone()).collect();
        check_replica(&layouts)?;
        let mut workers: Vec<Worker> = Vec::new();
        let mut cards = None;
        for rank in setup.ranks {
            let incarnation = Incarnation::random()?;
            let me = RemoteIdentity {
                engine: setup.name.clone(),
                incarnation,
                rank: Some(*rank.layout.coords()),
            };
            let control = Control::start(ControlConfig::new(me, setup.security.clone()))?;
            // The first takes the address that was asked for, the others any port of that host.
            let wanted = match workers.is_empty() {
                true => setup.listen.clone(),
                false => setup.listen.clone().with_port(0),
            };
            let address = control.listen(&wanted)?;
            cards.get_or_insert_with(|| address.clone());
            let names = (setup.name.clone(), incarnation, life);
            let seed = seed_of(&incarnation);
            let facts = setup.facts.clone();
            let rank_setup = RankSetup::new(
                names,
                address,
                facts,
                (rank.layout, rank.regions),
                rank.backends,
                rank.choosing,
                seed,
            );
            workers.push(Worker::start(rank_setup.with_replica(layouts.clone()), control)?);
        }
        let (Some(first), Some(cards)) = (workers.first(), cards) else {
            return Err(Error::config("engine", "an engine without ranks"));
        };
        first.serve(workers.iter().map(Worker::card).collect())?;
        Ok(Self {
            blocks: Blocks::new(layouts.first().map(RankLayout::groups).unwrap_or_default()),
            layouts,
            name: setup.name,
            life,
            cards,
            ttl: setup.ttl,
            hard: setup.hard,
            deadline: setup.deadline,
            digests: setup.digests,
            leases: AtomicU64::new(1),
            attempts: AtomicU64::new(1),
            workers,
        })
    }

    /// Where its cards are served.
    pub const fn address(&self) -> &Address {
        &self.cards
    }

    /// What there is now at all ranks, as JSON can show it.
    pub fn status(&self) -> EngineStatus {
        self.glance().status()
    }

    /// Something to look at the engine with, from any thread, that does not keep it.
    pub fn glance(&self) -> EngineGlance {
        EngineGlance {
            name: self.name.clone(),
            cards: self.cards.clone(),
            ranks: self.workers.iter().map(Worker::glance).collect(),
        }
    }

    /// Its ranks.
    pub fn workers(&self) -> &[Worker] {
        &self.workers
    }

    /// Leases the blocks that hold the cache of a request's `tokens` tokens, one table per cache group. They must not change
    /// until the [`Published`] says that the lease is over.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): not one table per cache group, or one that ends before the tokens do; a block that
    /// is outside of the pool, in a table twice, or being written by a [fetch](Self::fetch). No lease exists then. Blocks behind the
    /// tokens are left out.
    pub fn publish(
        &self,
        key: TransferKey,
        tokens: u64,
        tables: &[Table],
    ) -> Result<Published<'_>> {
        self.lease(Access::Read, key, tokens, tables)
    }

    /// Leases blocks for another engine to [write](Self::store) a request's cache into. They must not be used until the
    /// [`Published`] says that the lease is over, and hold the request only where it ended as [done](Reason::Done).
    ///
    /// # Errors
    ///
    /// As for [`publish`](Self::publish). Several invitations may name one block: whoever is invited writes only what it [stores](Self::store).
    pub fn invite(&self, key: TransferKey, tokens: u64, tables: &[Table]) -> Result<Published<'_>> {
        self.lease(Access::Write, key, tokens, tables)
    }

    fn lease(
        &self,
        access: Access,
        key: TransferKey,
        tokens: u64,
        tables: &[Table],
    ) -> Result<Published<'_>> {
        let operation = match access {
            Access::Read => "publish",
            Access::Write => "invite",
        };
        let groups = self.groups();
        if groups.len() != tables.len() {
            return Err(Error::misuse(operation, "there must be one block table per cache group")
                .with_context("groups", groups.len())
                .with_context("tables", tables.len()));
        }
        let tables = groups
            .iter()
            .zip(tables)
            .enumerate()
            .map(|(number, (group, table))| {
                held(operation, group, table, tokens)
                    .map_err(|error| error.with_context("group", number))
            })
            .collect::<Result<Vec<Table>>>()?;
        let kept = self.take(operation, Use::Shares, &tables, 0..tokens)?;
        let number = self.leases.fetch_add(1, Ordering::Relaxed);
        let lease = LeaseName { owner: self.life, number, epoch: 0 };
        let part = Part { number: 0, group: None, layers: 0..u32::MAX, tokens: 0..tokens };
        let (parts, total) = match tokens {
            0 => (Vec::new(), 0),
            _ => (vec![part], 1),
        };
        let group = |(group, table): (&CacheGroup, &Table)| TicketGroup {
            kind: group.kind,
            block_tokens: group.block_tokens,
            table: table.clone(),
        };
        let ticket = Ticket {
            access,
            key: key.clone(),
            engine: self.name.clone(),
            cards: self.cards.clone(),
            replica: self.layouts.first().map_or(0, |layout| layout.coords().dp),
            tp: self.layouts.first().map_or(1, |layout| layout.coords().grid.tp),
            lease,
            ttl: self.ttl,
            tokens,
            parts: Parts::Whole,
            groups: groups.iter().zip(&tables).map(group).collect(),
        };
        let order = GrantOrder {
            lease,
            key,
            access,
            tables,
            fingerprint: Some(ticket.fingerprint()),
            ttl: self.ttl,
            hard: self.hard,
            parts,
            total: Some(total),
            stages: 0,
            kept,
        };
        let orders = std::iter::repeat_n(order, self.workers.len());
        let granted = self.workers.iter().zip(orders).map(|(worker, order)| worker.grant(order));
        let granted = granted.collect();
        Ok(Published { engine: self, ticket, granted })
    }

    /// Reads tokens `range` of what `ticket` leases into blocks of this engine's, one table per cache group. It must be awaited
    /// before the blocks are used, or used for something else: also when it is no longer wanted ([`Fetch::abort`]).
    ///
    /// A ticket is for one fetch: one that fails gives the lease back, and what comes with the same ticket later finds it over.
    ///
    /// # Errors
    ///
    /// Those of [`Worker::fetch`], and [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): the range is not inside of what is
    /// leased; the ticket is one to write into; not one table per cache group, or one that ends before the range does; a block that is outside
    /// of the pool, in a table twice, or in use by another: being written by another fetch, leased, or [stored](Self::store) from. The owner has been told nothing then, and the ticket is as good as before.
    pub fn fetch(&self, ticket: &Ticket, range: Range<u64>, tables: &[Table]) -> Result<Fetch> {
        self.transfer(Access::Read, ticket, range, tables)
    }

    /// Writes tokens `range` of a request into what `ticket` leases to be [written](Self::invite), from blocks of this engine's.
    /// It must be awaited before the blocks change. Digests are not compared.
    ///
    /// # Errors
    ///
    /// As for [`fetch`](Self::fetch); blocks may be stored from, and leased, by many at once.
    pub fn store(&self, ticket: &Ticket, range: Range<u64>, tables: &[Table]) -> Result<Fetch> {
        self.transfer(Access::Write, ticket, range, tables)
    }

    /// Takes the blocks of a lease of this engine's back: whoever uses it is told at once.
    pub fn withdraw(&self, lease: LeaseName, why: Reason) {
        for worker in &self.workers {
            worker.withdraw(lease, why);
        }
    }

    fn transfer(
        &self,
        access: Access,
        ticket: &Ticket,
        range: Range<u64>,
        tables: &[Table],
    ) -> Result<Fetch> {
        let (operation, uses) = match access {
            Access::Read => ("fetch", Use::Fetches),
            Access::Write => ("store", Use::Shares),
        };
        if ticket.access != access {
            let (does, with) = match access {
                Access::Read => ("it is leased to be written", "store"),
                Access::Write => ("it is leased to be read", "fetch"),
            };
            return Err(Error::misuse(operation, does)
                .with_context("lease", ticket.lease)
                .with_remedy(format!("use Engine::{with} with this ticket")));
        }
        let groups = self.groups().len();
        if tables.len() != groups {
            return Err(Error::misuse(operation, "there must be one block table per cache group")
                .with_context("groups", groups)
                .with_context("tables", tables.len()));
        }
        if range.start > range.end || range.end > ticket.tokens {
            return Err(Error::misuse(operation, "the range is not inside of what is leased")
                .with_context("range", format_args!("{}..{}", range.start, range.end))
                .with_context("tokens", ticket.tokens));
        }
        let kept = self.take(operation, uses, tables, range.clone())?;
        let number = self.attempts.fetch_add(1, Ordering::Relaxed);
        let (parts, total) = match (ticket.parts, ticket.tokens) {
            (_, 0) => (Vec::new(), Some(0)),
            (Parts::Whole, tokens) => (
                vec![Part { number: 0, group: None, layers: 0..u32::MAX, tokens: 0..tokens }],
                Some(1),
            ),
            _ => (Vec::new(), None),
        };
        let order = FetchOrder {
            request: RequestNumber(number),
            key: ticket.key.clone(),
            engine: ticket.engine.clone(),
            address: ticket.cards.clone(),
            replica: ticket.replica,
            lease: ticket.lease,
            access,
            attempt: Attempt { user: self.life, number },
            tokens: ticket.tokens,
            range,
            theirs: ticket.groups.iter().map(|group| group.table.clone()).collect(),
            ours: tables.to_vec(),
            parts,
            total,
            deadline: self.deadline,
            begin: true,
            prove: Prove::Whole,
            digests: self.digests && access == Access::Read,
            stages: (0, 0),
            options: FetchOptions {
                ttl: Some(ticket.ttl),
                fingerprint: Some(ticket.fingerprint()),
                kept,
                ..FetchOptions::default()
            },
        };
        let orders = std::iter::repeat_n(order, self.workers.len());
        let ranks = self.workers.iter().zip(orders).map(|(worker, order)| worker.fetch(order));
        Ok(Fetch { ranks: ranks.collect::<Result<_>>()? })
    }

    fn groups(&self) -> &[CacheGroup] {
        self.layouts.first().map(RankLayout::groups).unwrap_or_default()
    }

    /// Takes the blocks that hold these tokens into use.
    fn take(
        &self,
        operation: &'static str,
        uses: Use,
        tables: &[Table],
        tokens: Range<u64>,
    ) -> Result<Kept> {
        let groups = self.groups();
        let each = groups.iter().zip(tables).enumerate().map(|(number, (group, table))| {
            moved(operation, group, table, &tokens)
                .map_err(|error| error.with_context("group", number))
        });
        Blocks::take(&self.blocks, operation, uses, groups, &each.collect::<Result<Vec<_>>>()?)
    }
}

/// Looks at an [`Engine`]: at those of its ranks that are there.
#[derive(Clone, Debug)]
pub struct EngineGlance {
    name: EngineName,
    cards: Address,
    ranks: Vec<Glance>,
}

impl EngineGlance {
    /// What there is now.
    #[must_use]
    pub fn status(&self) -> EngineStatus {
        let ranks = self.ranks.iter().filter_map(Glance::status).collect();
        EngineStatus::new(self.name.to_string(), self.cards.to_string(), ranks)
    }
}

/// A number out of what is random already.
pub(crate) fn seed_of(incarnation: &Incarnation) -> u64 {
    let mut seed = [0; 8];
    seed.copy_from_slice(&incarnation.as_bytes()[..8]);
    u64::from_le_bytes(seed)
}
