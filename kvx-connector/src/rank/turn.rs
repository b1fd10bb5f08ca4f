//! One step: hear what happened, tell the machines, do what they say.

use std::time::Duration;

use kvx_core::id::Incarnation;

use super::channel::{Channel, ChannelEvent};
use super::fabrics::Found;
use super::frame::{self, Frame};
use super::{NAP, Rank, Todo};
use crate::protocol::owner;
use crate::protocol::peers::{self, Connection, SessionId};
use crate::protocol::user::{self};

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
                    if let Some(remote) = self.sessions.remove(&session) {
                        self.tell(peers::Input::SessionDown { session, error });
                        self.seek(remote.incarnation);
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
                self.channel.close(session);
                if let Some(remote) = self.sessions.remove(&session) {
                    self.seek(remote.incarnation);
                }
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
                self.seek(peer);
            }
        }
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
