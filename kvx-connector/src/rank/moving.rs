//! What becomes of a request: the ranks that it is read from, its transfers, their ends.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::port::TransferReport;
use kvx_core::{Error, ErrorKind, Retry};

use super::channel::Channel;
use super::fetch::Stage;
use super::orders::RankEvent;
use super::watch::Watch;
use super::{Flying, Rank, Todo, is_ghost};
use crate::observe::Outcome;
use crate::protocol::peers::{Connection, Role, Route, WantId};
use crate::protocol::user;
use crate::protocol::{Access, Part, Ranks, Reader, RequestNumber, TransferNumber};

/// What became of posting.
enum Posted {
    /// There is nothing to move.
    Nothing,
    /// It has settled already.
    Settled(Connection, kvx_core::Result<TransferReport>),
    Flying,
}

impl<C: Channel> Rank<C> {
    /// The other engine's ranks are connected: the lease machine is asked.
    pub(super) fn routed(&mut self, want: WantId, route: Arc<Route>) {
        if let Some(peer) = self.reaching.ended(want) {
            return self.reached(peer);
        }
        let Some(request) = self.wants.remove(&want) else { return };
        let Some(fetch) = self.fetches.get_mut(&request) else { return };
        let Stage::Routing { begin, .. } = fetch.stage else { return };
        let spent = self.now.saturating_sub(fetch.begun);
        fetch.report.routing = spent;
        let order = &fetch.order;
        let mut sources = Vec::new();
        let (mut links, mut peers) = (Vec::new(), Vec::new());
        let done = &order.options.proven;
        for confirm in route.confirms.iter().filter(|it| !done.contains(&it.incarnation)) {
            // Nobody waits for what is only read.
            if order.access == Access::Write {
                self.reaching.found(confirm.incarnation, order, Role::Producer);
            }
            let hears = confirm.hears.iter().filter_map(|rank| u16::try_from(*rank).ok());
            let Ok(set) = Ranks::new(hears) else { continue };
            let link = route.links.iter().position(|link| link.incarnation == confirm.incarnation);
            sources.push(user::Source {
                peer: confirm.incarnation,
                set,
                data: link.is_some(),
                parts: order.parts.clone(),
                total: order.total,
            });
            links.push(link);
            peers.push(confirm.incarnation);
        }
        let rank = u16::try_from(self.place.rank).unwrap_or(u16::MAX);
        let (before, after) = order.stages;
        let ask = user::Ask {
            request,
            key: order.key.clone(),
            lease: order.lease,
            access: order.access,
            fingerprint: order.options.fingerprint,
            reader: Reader { attempt: order.attempt, rank },
            sources,
            deadline: order.deadline.saturating_sub(spent),
            begin,
            prove: order.prove,
            before,
            after,
            keeping: user::Keeping {
                every: order.options.ttl.map(heartbeat),
                after_failure: order.options.keep,
            },
        };
        if !is_ghost(request) {
            self.watch.routed(fetch, links.len());
        }
        fetch.stage = Stage::Asked { route, links, peers };
        self.todo.push_back(Todo::User(user::Input::Ask(ask)));
        if is_ghost(request) {
            self.todo.push_back(Todo::User(user::Input::Abort { request }));
        }
    }

    pub(super) fn unrouted(&mut self, want: WantId, error: Arc<Error>) {
        if self.reaching.ended(want).is_some() {
            return;
        }
        let Some(request) = self.wants.remove(&want) else { return };
        let Some(mut fetch) = self.fetches.remove(&request) else { return };
        fetch.report.elapsed = self.now.saturating_sub(fetch.begun);
        let blocks = fetch.spoilt(&[], &self.layout);
        if !is_ghost(request) {
            let (outcome, kept) = (Outcome::Unrouted(error.kind()), (&blocks, false));
            self.watch.failed(self.now, &mut fetch, outcome, &error, kept);
        }
        let report = std::mem::take(&mut fetch.report);
        let (quarantined, proven) = (false, fetch.order.options.proven);
        let reason = None;
        let event =
            RankEvent::Failed { request, error, reason, blocks, quarantined, proven, report };
        self.ended(request, event);
    }

    pub(super) fn post(
        &mut self,
        transfer: TransferNumber,
        request: RequestNumber,
        source: u16,
        part: &Part,
    ) {
        let outcome = match self.try_post(transfer, request, source, part) {
            Ok(Posted::Flying) => return,
            Ok(Posted::Settled(connection, result)) => {
                return self.settled(transfer, connection, result);
            }
            Ok(Posted::Nothing) => user::Outcome::Done,
            Err(error) => {
                let retry = error.retry() != Retry::Never;
                let span = self.fetches.get(&request).map(|fetch| &fetch.span);
                self.watch.unsettled(span, &error);
                self.note(request, error);
                user::Outcome::Failed { retry }
            }
        };
        self.todo.push_back(Todo::User(user::Input::Settled { transfer, outcome }));
    }

    /// Posts the transfer of a part, if there is one.
    fn try_post(
        &mut self,
        transfer: TransferNumber,
        request: RequestNumber,
        source: u16,
        part: &Part,
    ) -> kvx_core::Result<Posted> {
        let Some(fetch) = self.fetches.get_mut(&request) else { return Ok(Posted::Nothing) };
        let Some(Some(link)) = fetch.link(source) else { return Ok(Posted::Nothing) };
        let connection = link.connection;
        let limits = self.fabrics.limits(connection.backend)?;
        if !fetch.segments(link, part, limits, &mut self.list)? {
            return Ok(Posted::Nothing);
        }
        let mode = fetch.mode();
        fetch.posted.get_or_insert(self.now);
        let posted = self.fabrics.post(transfer, connection, mode, self.list.as_slice());
        if let Err(error) = &posted
            && error.retry() == Retry::Reconnect
        {
            // It is over, though its end was not told yet: it is not to be used until that comes.
            self.fabrics.sever(connection);
        }
        let settled = posted?;
        let span = Watch::posted(fetch, connection, source, part, self.list.as_slice().len());
        self.flying.insert(transfer, Flying { request, source, part: part.clone(), span });
        Ok(match settled {
            Some(result) => Posted::Settled(connection, result),
            None => Posted::Flying,
        })
    }

    pub(super) fn note(&mut self, request: RequestNumber, error: Error) {
        if let Some(fetch) = self.fetches.get_mut(&request) {
            fetch.error = Some(Arc::new(error));
        }
    }

    pub(super) fn settled(
        &mut self,
        transfer: TransferNumber,
        connection: Connection,
        result: kvx_core::Result<TransferReport>,
    ) {
        let (flying, now) = (self.flying.remove(&transfer), self.now);
        let outcome = match result {
            Ok(moved) => {
                let mut digests = false;
                if let Some(flying) = &flying
                    && let Some(fetch) = self.fetches.get_mut(&flying.request)
                {
                    self.watch.settled(fetch, flying, connection, &moved);
                    fetch.add(connection.backend, &moved, now);
                    digests = fetch.order.digests;
                }
                match flying {
                    Some(flying) if digests => return self.compare(transfer, &flying),
                    _ => user::Outcome::Done,
                }
            }
            Err(error) if error.kind() == ErrorKind::Closed => user::Outcome::Cancelled,
            Err(error) => {
                self.watch.unsettled(flying.as_ref().map(|flying| &flying.span), &error);
                let retry = error.retry() == Retry::Backoff;
                if let Some(flying) = flying {
                    self.note(flying.request, error);
                }
                user::Outcome::Failed { retry }
            }
        };
        self.todo.push_back(Todo::User(user::Input::Settled { transfer, outcome }));
    }
}

/// How often a lease is extended that holds for `ttl` without that: thrice in that time, but not so often that whoever names
/// a time has a say in how busy this rank is.
fn heartbeat(ttl: Duration) -> Duration {
    (ttl / 3).max(Duration::from_millis(20))
}
