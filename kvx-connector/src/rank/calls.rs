//! What an engine orders.

use std::collections::btree_map::Entry;
use std::time::Duration;

use kvx_core::{Error, Result};
use tracing::Span;

use super::channel::Channel;
use super::fetch::{Fetch, Stage};
use super::orders::{FetchOrder, FillOrder, GrantOrder, Kept, RankEvent, StageOf};
use super::watch::Watch;
use super::{GHOST, Rank, Todo, is_ghost};
use crate::protocol::peers::{self, WantId};
use crate::protocol::{Access, LeaseName, Part, Reason, RequestNumber, StageNumber, TransferKey};
use crate::protocol::{owner, user};
use crate::ticket::Table;

impl<C: Channel> Rank<C> {
    /// Says that a lease will be granted: what is said of it before is remembered until it is, or is
    /// [withdrawn](Self::withdraw).
    pub fn expect(&mut self, lease: LeaseName, key: TransferKey) {
        self.todo.push_back(Todo::Owner(owner::Input::Expect { lease, key }));
    }

    /// Grants a lease on this rank's blocks. [`RankEvent::Freed`] follows.
    pub fn grant(&mut self, order: GrantOrder) {
        let lease = order.lease;
        let grant = owner::Grant {
            lease: order.lease,
            key: order.key.clone(),
            access: order.access,
            fingerprint: order.fingerprint,
            ttl: order.ttl,
            hard: order.hard,
            parts: order.parts.clone(),
            total: order.total,
            stages: order.stages,
        };
        // One that is known is ignored by the machine, too.
        if let Entry::Vacant(entry) = self.grants.entry(order.lease) {
            entry.insert(self.watch.granted(order, self.now));
        }
        self.todo.push_back(Todo::Owner(owner::Input::Grant(grant)));
        self.answer_early_digests(lease);
    }

    /// Publishes more parts of a lease.
    pub fn publish(&mut self, lease: LeaseName, parts: Vec<Part>, total: Option<u32>) {
        if let Some(granted) = self.grants.get(&lease) {
            Watch::published(granted, parts.len(), total);
        }
        self.todo.push_back(Todo::Owner(owner::Input::Publish { lease, parts, total }));
    }

    /// Takes a lease back: its users are told at once.
    pub fn withdraw(&mut self, lease: LeaseName, why: Reason) {
        self.todo.push_back(Todo::Owner(owner::Input::Withdraw { lease, why }));
    }

    /// Moves a request. [`RankEvent::Ready`], [`RankEvent::Failed`] or [`RankEvent::Aborted`] follows, once.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): a request of this number is not over, or the number is 2⁶³ or more.
    /// Nothing follows.
    pub fn fetch(&mut self, now: Duration, order: FetchOrder) -> Result<()> {
        self.enter(now, order, Watch::asked)
    }

    /// Enters an order, under the span that `say` gives.
    fn enter(
        &mut self,
        now: Duration,
        order: FetchOrder,
        say: impl FnOnce(&mut Watch, &FetchOrder) -> Span,
    ) -> Result<()> {
        self.now = now.max(self.now);
        if is_ghost(order.request) {
            return Err(Error::misuse("fetch", "the numbers of requests are below 2^63"));
        }
        if self.fetches.contains_key(&order.request) {
            return Err(Error::misuse("fetch", "a request of this number is not over")
                .with_context("request", order.request.0));
        }
        let id = self.want(&order, order.deadline);
        let span = say(&mut self.watch, &order);
        let fetch = Fetch::new(order, id, self.now, span);
        self.fetches.insert(fetch.order.request, Box::new(fetch));
        Ok(())
    }

    /// Asks for the other engine's ranks, for so long.
    fn want(&mut self, order: &FetchOrder, patience: Duration) -> WantId {
        let id = WantId(self.next_want);
        self.next_want += 1;
        let want = peers::Want {
            id,
            engine: order.engine.clone(),
            replica: order.replica,
            address: order.address.clone(),
            life: Some(order.lease.owner),
            role: match order.access {
                Access::Read => peers::Role::Consumer,
                Access::Write => peers::Role::Producer,
            },
            until: self.now + patience,
        };
        self.wants.insert(id, order.request);
        self.todo.push_back(Todo::Peers(peers::Input::Want(want)));
        id
    }

    /// Says what a request that was held without that is to move, and until when: before it begins.
    pub fn fill(&mut self, now: Duration, request: RequestNumber, fill: FillOrder) {
        self.now = now.max(self.now);
        let Some(fetch) = self.fetches.get_mut(&request) else { return };
        let order = &mut fetch.order;
        order.deadline = self.now.saturating_sub(fetch.begun) + fill.deadline;
        (order.tokens, order.range) = (fill.tokens, fill.range);
        (order.theirs, order.ours) = (fill.theirs, fill.ours);
        (order.parts, order.total) = (fill.parts, fill.total);
        order.options.without = fill.without;
        match &fetch.stage {
            Stage::Routing { want, begin } => {
                let (before, begin, order) = (*want, *begin, order.clone());
                self.wants.remove(&before);
                self.todo.push_back(Todo::Peers(peers::Input::Unwant(before)));
                let want = self.want(&order, fill.deadline);
                if let Some(fetch) = self.fetches.get_mut(&request) {
                    fetch.stage = Stage::Routing { want, begin };
                }
            }
            Stage::Asked { .. } => {
                let deadline = fill.deadline;
                let (parts, total) = (order.parts.clone(), order.total);
                self.todo.push_back(Todo::User(user::Input::Until { request, deadline }));
                if total.is_some() {
                    let publish = user::Input::Publish { request, parts, total };
                    self.todo.push_back(Todo::User(publish));
                }
            }
            Stage::Quarantined => {}
        }
    }

    /// Releases a lease that `order` says how to find: what its reader was to move is not wanted, or not any more. Nothing
    /// follows.
    ///
    /// # Errors
    ///
    /// Those of [`fetch`](Self::fetch).
    pub fn release(&mut self, now: Duration, order: FetchOrder) -> Result<()> {
        let request = order.request;
        // It is no request: none is counted, and none ends.
        self.enter(now, FetchOrder { begin: false, ..order }, |_, _| Span::none())?;
        self.release_once_routed(request);
        Ok(())
    }

    /// A request that was held is admitted: its blocks are there.
    pub fn begin(&mut self, request: RequestNumber) {
        match self.fetches.get_mut(&request).map(|fetch| &mut fetch.stage) {
            Some(Stage::Routing { begin, .. }) => *begin = true,
            Some(Stage::Asked { .. }) => {
                self.todo.push_back(Todo::User(user::Input::Begin { request }));
            }
            Some(Stage::Quarantined) | None => {}
        }
    }

    /// Gives the blocks of a request that was held without any: before it begins.
    pub fn assign(&mut self, request: RequestNumber, ours: Vec<Table>) {
        if let Some(fetch) = self.fetches.get_mut(&request) {
            fetch.order.ours = ours;
        }
    }

    /// Gives a request up. Its blocks are in use until [`RankEvent::Aborted`].
    pub fn abort(&mut self, request: RequestNumber) {
        let Some(fetch) = self.fetches.get_mut(&request) else { return };
        match fetch.stage {
            Stage::Routing { .. } => {
                self.watch.aborted(fetch, false);
                self.events.push_back(RankEvent::Aborted { request, quarantined: false });
                self.release_once_routed(request);
            }
            Stage::Asked { .. } => {
                self.todo.push_back(Todo::User(user::Input::Abort { request }));
            }
            Stage::Quarantined => {}
        }
    }

    /// A request that is over for the engine before the owner's ranks are known: its lease is released once they are, or ends by
    /// itself where they cannot be reached.
    fn release_once_routed(&mut self, request: RequestNumber) {
        let Some(mut fetch) = self.fetches.remove(&request) else { return };
        let Stage::Routing { want, begin } = &mut fetch.stage else { return };
        let ghost = RequestNumber(GHOST | self.next_want);
        self.next_want += 1;
        *begin = false;
        // Nothing was begun in its blocks.
        fetch.order.options.kept = Kept::default();
        self.wants.insert(*want, ghost);
        self.fetches.insert(ghost, fetch);
    }

    /// A stage of the engine's is over: it no longer touches the blocks.
    pub fn stage_done(&mut self, of: StageOf, stage: StageNumber, ok: bool) {
        self.todo.push_back(match of {
            StageOf::Lease(_) => Todo::Owner(owner::Input::StageDone { stage, ok }),
            StageOf::Request(..) => Todo::User(user::Input::StageDone { stage, ok }),
        });
    }
}
