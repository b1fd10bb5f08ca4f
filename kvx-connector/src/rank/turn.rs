//! One step: hear what happened, tell the machines, do what they say.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::id::Incarnation;
use kvx_core::port::TransferReport;
use kvx_core::{Error, ErrorKind, Retry};

use super::channel::{Channel, ChannelEvent};
use super::explain::{explain, reason};
use super::fabrics::Found;
use super::fetch::Stage;
use super::frame::{self, Frame};
use super::orders::{RankEvent, StageOf};
use super::watch::Watch;
use super::{Flying, NAP, Rank, Todo, is_ghost};
use crate::observe::Outcome;
use crate::protocol::message::ToUser;
use crate::protocol::peers::{self, Connection, Role, Route, SessionId, WantId};
use crate::protocol::user::{self, Unproven, Why};
use crate::protocol::{Access, Part, Ranks, Reader, RequestNumber, TransferNumber, owner};

/// What became of posting.
enum Posted {
    /// There is nothing to move.
    Nothing,
    /// It has settled already.
    Settled(Connection, kvx_core::Result<TransferReport>),
    Flying,
}

impl<C: Channel> Rank<C> {
    /// Does everything that can be done now. Returns when it wants to be called again at the latest: earlier whenever the
    /// channel or a port has something, or the engine has told it something. `None`: only then.
    ///
    /// `now` never goes back.
    pub fn step(&mut self, now: Duration) -> Option<Duration> {
        self.now = now.max(self.now);
        self.turn();
        self.give_up_digests();
        self.tick();
        if !self.todo.is_empty() {
            self.turn();
        }
        let nap = (self.fabrics.is_busy() || self.blind()).then(|| self.now + NAP);
        let digests = self.digests_due();
        self.hand_on();
        let due = [self.peers.wake(), self.owner.wake(), self.user.wake(), digests, nap];
        due.into_iter().flatten().min()
    }

    /// Whether some port must be polled though no descriptor says so. One without a descriptor also when nothing is in flight:
    /// a notification may come.
    fn blind(&self) -> bool {
        let met = !self.connections.is_empty();
        self.fabrics.ports().any(|port| port.wants_poll() || met && !port.capabilities().event_fd)
    }

    /// Tells the machines that time has passed where something is due.
    fn tick(&mut self) {
        let now = self.now;
        let due = |wake: Option<Duration>| wake.is_some_and(|at| at <= now);
        let ticks = [
            due(self.peers.wake()).then_some(Todo::Peers(peers::Input::Tick)),
            due(self.owner.wake()).then_some(Todo::Owner(owner::Input::Tick)),
            due(self.user.wake()).then_some(Todo::User(user::Input::Tick)),
        ];
        self.todo.extend(ticks.into_iter().flatten());
    }

    /// Does what is to be done, and takes what has happened, until nothing does.
    fn turn(&mut self) {
        loop {
            self.work();
            self.hear();
            self.find();
            if self.todo.is_empty() {
                return;
            }
        }
    }

    fn work(&mut self) {
        while let Some(todo) = self.todo.pop_front() {
            match todo {
                Todo::Peers(input) => {
                    let mut said = std::mem::take(&mut self.said.peers);
                    self.peers.step(self.now, input, &mut said);
                    said.drain(..).for_each(|output| self.peers_said(output));
                    self.said.peers = said;
                }
                Todo::Owner(input) => {
                    let mut said = std::mem::take(&mut self.said.owner);
                    self.owner.step(self.now, input, &mut said);
                    said.drain(..).for_each(|output| self.owner_said(output));
                    self.said.owner = said;
                }
                Todo::User(input) => {
                    let mut said = std::mem::take(&mut self.said.user);
                    self.user.step(self.now, input, &mut said);
                    said.drain(..).for_each(|output| self.user_said(output));
                    self.said.user = said;
                }
            }
        }
    }

    /// What the channel has.
    fn hear(&mut self) {
        let mut heard = std::mem::take(&mut self.heard);
        self.channel.poll(&mut heard);
        for event in heard.drain(..) {
            match event {
                ChannelEvent::Up { session, remote, dialled } => {
                    self.sessions.insert(session, remote.clone());
                    self.tell(peers::Input::SessionUp { session, remote, dialled });
                }
                ChannelEvent::DialFailed { address, error } => {
                    self.tell(peers::Input::DialFailed { address, error });
                }
                ChannelEvent::Down { session, error } => {
                    if self.sessions.remove(&session).is_some() {
                        self.tell(peers::Input::SessionDown { session, error });
                    }
                }
                ChannelEvent::Message { session, bytes } => self.message(session, &bytes),
            }
        }
        self.heard = heard;
    }

    fn tell(&mut self, input: peers::Input) {
        self.todo.push_back(Todo::Peers(input));
    }

    fn message(&mut self, session: SessionId, bytes: &[u8]) {
        let Some(remote) = self.sessions.get(&session) else { return };
        let life = remote.incarnation;
        match frame::read(bytes) {
            Ok(Some(Frame::Peers(message))) => {
                self.tell(peers::Input::Message { session, bytes: message.to_vec() });
            }
            Ok(Some(frame)) => self.lease_frame(life, frame),
            Ok(None) => self.counts.unknown_frames += 1,
            Err(error) => {
                self.counts.bad_frames += 1;
                self.watch.bad_frame(self.now, remote, &error);
                self.sessions.remove(&session);
                self.channel.close(session);
                self.tell(peers::Input::SessionDown { session, error: Some(error) });
            }
        }
    }

    /// A message about leases, from a life that is proven.
    fn lease_frame(&mut self, peer: Incarnation, frame: Frame<'_>) {
        match frame {
            Frame::ToOwner(message) => {
                self.watch.heard(peer, &message, self.grants.get(&message.lease()));
                self.todo.push_back(Todo::Owner(owner::Input::Message { peer, message }));
            }
            Frame::ToUser(message) => {
                self.todo.push_back(Todo::User(user::Input::Message { peer, message }));
            }
            Frame::Digests(digests) => self.digests(peer, digests),
            // Not by this way.
            Frame::Peers(_) => self.counts.unknown_frames += 1,
        }
    }

    /// What the ports have.
    fn find(&mut self) {
        let mut found = std::mem::take(&mut self.found);
        self.fabrics.poll(&mut found);
        for one in found.drain(..) {
            match one {
                Found::Stepped(step, result) => self.tell(peers::Input::Stepped { step, result }),
                Found::Settled(number, connection, result) => {
                    self.settled(number, connection, result);
                }
                Found::Notified(connection, payload) => self.notified(connection, &payload),
                Found::Down(connection, error) => {
                    if let Some(peer) = self.connections.remove(&connection) {
                        self.todo.push_back(Todo::User(user::Input::PeerDown { peer }));
                        if self.fabrics.down_is_quiet(connection) {
                            self.todo.push_back(Todo::Owner(owner::Input::Quiescent { peer }));
                        }
                    }
                    self.tell(peers::Input::PeerDown { connection, error });
                }
            }
        }
        self.found = found;
    }

    fn notified(&mut self, connection: Connection, payload: &[u8]) {
        let Some(peer) = self.connections.get(&connection).copied() else { return };
        match frame::read(payload) {
            Ok(Some(frame)) => self.lease_frame(peer, frame),
            Ok(None) => self.counts.unknown_frames += 1,
            Err(error) => {
                self.counts.bad_frames += 1;
                self.watch.bad_frame(self.now, &peer, &error);
                self.fabrics.sever(connection);
            }
        }
    }

    fn peers_said(&mut self, output: peers::Output) {
        match output {
            peers::Output::Dial(address) => self.channel.dial(&address, None),
            peers::Output::CloseSession(session) => {
                self.sessions.remove(&session);
                self.channel.close(session);
            }
            peers::Output::Send { session, bytes } => {
                if !self.channel.send(session, &frame::peers(&bytes)) {
                    self.counts.unsent += 1;
                }
            }
            peers::Output::Step { id, step } => {
                if let Some(result) = self.fabrics.step(id, step) {
                    self.tell(peers::Input::Stepped { step: id, result });
                }
            }
            peers::Output::Disconnect(connection) => self.fabrics.disconnect(connection),
            peers::Output::Sever(connection) => self.fabrics.sever(connection),
            peers::Output::Ready { want, route } => self.routed(want, route),
            peers::Output::Failed { want, error } => self.unrouted(want, error),
            peers::Output::Met { remote, connection } => {
                self.connections.insert(connection, remote.incarnation);
                let peer = remote.incarnation;
                self.todo.push_back(Todo::User(user::Input::PeerReady { peer }));
            }
            peers::Output::Gone { remote, reason, .. } => {
                self.watch.gone(&remote, reason);
                let peer = remote.incarnation;
                if reason == peers::GoneReason::Superseded {
                    self.reaching.forget(peer);
                }
                self.todo.push_back(Todo::User(user::Input::PeerGone { peer }));
                self.todo.push_back(Todo::Owner(owner::Input::PeerGone { peer }));
            }
        }
    }

    /// The other engine's ranks are connected: the lease machine is asked.
    fn routed(&mut self, want: WantId, route: Arc<Route>) {
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

    /// Tells the engine how a request ended, unless it was over for it before.
    fn ended(&mut self, request: RequestNumber, event: RankEvent) {
        if !is_ghost(request) {
            self.events.push_back(event);
        }
    }

    fn unrouted(&mut self, want: WantId, error: Arc<Error>) {
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

    fn owner_said(&mut self, output: owner::Output) {
        match output {
            owner::Output::Send { peer, message } => {
                let granted = self.grants.get(&message.lease());
                self.watch.answered(self.now, peer, &message, granted);
                let fast = matches!(message, ToUser::Verdict(_));
                self.send(peer, frame::to_user(&message), fast);
            }
            owner::Output::RunStage { stage, lease, part, which } => {
                self.events.push_back(RankEvent::Stage {
                    stage,
                    of: StageOf::Lease(lease),
                    part,
                    which,
                });
            }
            owner::Output::Revoke { peer } => {
                let connections: Vec<Connection> = self.connections_of(peer).collect();
                let quiet = connections.iter().all(|connection| self.fabrics.revoke(*connection));
                if quiet && !connections.is_empty() {
                    self.todo.push_back(Todo::Owner(owner::Input::Quiescent { peer }));
                }
            }
            owner::Output::Written { .. } => {}
            owner::Output::Over { lease, why } => {
                self.watch.over(self.now, lease, why, self.grants.get_mut(&lease));
            }
            owner::Output::Free { lease, why } => {
                if let Some(granted) = self.grants.remove(&lease) {
                    self.watch.freed(&granted, why);
                }
                self.events.push_back(RankEvent::Freed { lease, why });
            }
            owner::Output::Quarantined { lease, why } => {
                let granted = self.grants.get_mut(&lease);
                self.watch.lease_quarantined(self.now, lease, why, granted);
                self.events.push_back(RankEvent::LeaseQuarantined { lease, why });
            }
        }
    }

    fn user_said(&mut self, output: user::Output) {
        match output {
            user::Output::NeedPeer { peer } => {
                // A route was there, so it was met, or can at least be told; where it is gone since, this is what there is to say.
                let met = self.is_met(peer);
                if !met && self.user.owes(peer) {
                    self.reach(peer);
                }
                self.todo.push_back(Todo::User(match met {
                    true => user::Input::PeerReady { peer },
                    false => user::Input::PeerFailed { peer },
                }));
            }
            user::Output::Send { peer, message, route } => {
                Watch::asking(peer, &message, self.fetches.values().map(AsRef::as_ref));
                let fast = route == user::Route::WithData;
                self.send(peer, frame::to_owner(&message), fast);
            }
            user::Output::Post { transfer, request, source, part } => {
                self.post(transfer, request, source, &part);
            }
            user::Output::Cancel { transfer } => {
                self.fabrics.cancel(transfer);
                self.cancel_compare(transfer);
            }
            user::Output::Sever { peer } => {
                let connections: Vec<Connection> = self.connections_of(peer).collect();
                connections.into_iter().for_each(|connection| self.fabrics.sever(connection));
            }
            user::Output::RunStage { stage, request, source, part, which } => {
                let of = StageOf::Request(request, source);
                self.events.push_back(RankEvent::Stage { stage, of, part, which });
            }
            user::Output::PartProven { request, source, part } => {
                self.part_proven(request, source, part);
            }
            user::Output::Ready { request } => {
                if let Some(mut fetch) = self.fetches.remove(&request) {
                    fetch.report.elapsed = self.now.saturating_sub(fetch.begun);
                    self.watch.ready(&fetch);
                    self.ended(request, RankEvent::Ready { request, report: fetch.report });
                }
            }
            user::Output::Failed { request, why, unproven, quarantined } => {
                self.failed(request, why, &unproven, quarantined);
            }
            user::Output::Aborted { request, quarantined } => {
                if let Some(fetch) = self.fetches.get_mut(&request).filter(|_| !is_ghost(request)) {
                    self.watch.aborted(fetch, quarantined);
                }
                self.over(request, quarantined);
                self.ended(request, RankEvent::Aborted { request, quarantined });
            }
            user::Output::Unquarantined { request } => {
                if let Some(fetch) = self.fetches.remove(&request) {
                    self.watch.unquarantined(&fetch);
                }
                self.ended(request, RankEvent::Unquarantined { request });
            }
            user::Output::Refused { request } => {
                let error = Error::new(
                    ErrorKind::Resources,
                    "fetch",
                    "there are too many requests, or it contradicts itself",
                )
                .with_retry(Retry::Backoff);
                if let Some(fetch) = self.fetches.get_mut(&request) {
                    fetch.error = Some(Arc::new(error));
                }
                self.failed(request, Why::Contradiction, &[], false);
            }
        }
    }

    fn over(&mut self, request: RequestNumber, quarantined: bool) {
        if !quarantined {
            self.fetches.remove(&request);
        } else if let Some(fetch) = self.fetches.get_mut(&request) {
            fetch.stage = Stage::Quarantined;
        }
    }

    fn failed(
        &mut self,
        request: RequestNumber,
        why: Why,
        unproven: &[Unproven],
        quarantined: bool,
    ) {
        let Some(fetch) = self.fetches.get_mut(&request) else { return };
        fetch.report.elapsed = self.now.saturating_sub(fetch.begun);
        let error = fetch
            .error
            .take()
            .filter(|_| matches!(why, Why::Transfer | Why::Stage | Why::Contradiction));
        let error = error.unwrap_or_else(|| Arc::new(explain(why, fetch)));
        let (blocks, report) = (fetch.spoilt(unproven, &self.layout), fetch.report.clone());
        let proven = fetch.proven_but(unproven);
        if !is_ghost(request) {
            let (outcome, kept) = (Outcome::Failed(why), (&blocks, quarantined));
            self.watch.failed(self.now, fetch, outcome, &error, kept);
        }
        self.over(request, quarantined);
        let reason = reason(why);
        let event =
            RankEvent::Failed { request, error, reason, blocks, quarantined, proven, report };
        self.ended(request, event);
    }

    fn part_proven(&mut self, request: RequestNumber, source: u16, part: u32) {
        let Some(fetch) = self.fetches.get_mut(&request) else { return };
        let Stage::Asked { links, .. } = &fetch.stage else { return };
        let all = links.len();
        let proven = fetch.proven.entry(part).or_default();
        if proven.insert(source) && proven.len() == all {
            self.events.push_back(RankEvent::PartReady { request, part });
        }
    }

    fn post(&mut self, transfer: TransferNumber, request: RequestNumber, source: u16, part: &Part) {
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

    fn settled(
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

    pub(super) fn connections_of(
        &self,
        peer: Incarnation,
    ) -> impl Iterator<Item = Connection> + '_ {
        self.connections.iter().filter(move |(_, life)| **life == peer).map(|(one, _)| *one)
    }

    /// The newest session with a peer.
    pub(super) fn session_of(&self, peer: Incarnation) -> Option<SessionId> {
        let mut newest = self.sessions.iter().rev();
        newest.find(|(_, remote)| remote.incarnation == peer).map(|(session, _)| *session)
    }

    /// Sends a message about a lease: with the data where it may and can, else by the newest session.
    pub(super) fn send(&mut self, peer: Incarnation, bytes: kvx_core::Result<Vec<u8>>, fast: bool) {
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(error) => return tracing::error!(%error, "a message cannot be expressed"),
        };
        if fast {
            let connection = self.connections_of(peer).next();
            if connection.is_some_and(|connection| self.fabrics.notify(connection, &bytes)) {
                self.counts.by_fabric += 1;
                return;
            }
        }
        match self.session_of(peer) {
            Some(session) if self.channel.send(session, &bytes) => self.counts.by_channel += 1,
            _ => self.counts.unsent += 1,
        }
    }
}

/// How often a lease is extended that holds for `ttl` without that: thrice in that time, but not so often that whoever names
/// a time has a say in how busy this rank is.
fn heartbeat(ttl: Duration) -> Duration {
    (ttl / 3).max(Duration::from_millis(20))
}
