//! Connections: each one that a backend has given is a peer's or is ending, and is ended once.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::card::EngineName;
use kvx_core::id::Incarnation;
use kvx_core::{Error, Retry};

use super::io::{Connection, GoneReason, Output, Place, Remote, Stepped};
use super::message::{Message, Refusal};
use super::peer::{Attempt, Link, Up};
use super::site::Way;
use super::{Failure, Fault, Peers, Timer};

/// Most connections whose end was told before they were given.
const EARLY: usize = 4096;
/// Most lives that are remembered as over.
const SUPERSEDED: usize = 4096;

/// Two lives that are there at the same time, in one place: what the one is told in whose place the other is.
fn same_name(refused: &Remote, other: &Remote) -> Error {
    Error::config("peers", "two engines have one name: another one is in this one's place")
        .with_context("refused", refused)
        .with_context("in_its_place", other)
        .with_remedy(ONE_NAME)
}

/// What to do where two engines have one name.
pub(super) const ONE_NAME: &str =
    "give each engine a name of its own, or end one of the two: then the other is let in";

/// A connection that is ending.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    of: Incarnation,
    severed: bool,
}

/// A life in whose place another one was heard of.
#[derive(Clone, Debug)]
pub(super) struct Superseded {
    at: (EngineName, Place),
    /// Until when it is remembered.
    until: Duration,
}

impl Peers {
    /// A backend gave a connection for a peer: `full` where this side may post, too.
    pub(super) fn install(
        &mut self,
        incarnation: Incarnation,
        connection: Connection,
        full: bool,
    ) -> Result<(), Failure> {
        let passing = |what: &'static str| {
            Failure::passing(
                Error::peer("peers.connection", what)
                    .with_backend(connection.backend)
                    .with_context("connection", connection.peer)
                    .with_retry(Retry::Reconnect),
            )
        };
        if self.early_downs.contains(&connection) && !self.broken(Fault::ForgetsEarlyDowns) {
            return Err(passing("it broke before it was made"));
        }
        if self.ending.contains_key(&connection) {
            return Err(passing("it is ending"));
        }
        match self.connections.get(&connection) {
            Some(other) if *other != incarnation => {
                return Err(passing("what the peer sent leads to another one"));
            }
            _ => {}
        }
        let Some(peer) = self.peers.get(&incarnation) else { return Ok(()) };
        if peer.link.connection().is_some_and(|known| known != connection) {
            self.part(incarnation, GoneReason::Down);
        }
        self.connections.insert(connection, incarnation);
        let Some(peer) = self.peers.get_mut(&incarnation) else { return Ok(()) };
        match &peer.link {
            Link::Up(_) => {}
            _ if full => {
                let since = self.now;
                let up = Up { connection, since, info: None, regions: false, told: false };
                peer.link = Link::Up(up);
            }
            _ => peer.link = Link::Half(connection),
        }
        Ok(())
    }

    /// What a step has given that nobody waits for any more.
    pub(super) fn orphan(
        &mut self,
        incarnation: Incarnation,
        backend: &'static str,
        result: &Stepped,
    ) {
        if let Some(peer) = self.peers.get_mut(&incarnation) {
            peer.orphans = peer.orphans.saturating_sub(1);
        }
        self.dirty_peers.insert(incarnation);
        let (Stepped::Accepted(peer, _) | Stepped::Completed(peer, _) | Stepped::Finished(peer, _)) =
            result
        else {
            return;
        };
        let connection = Connection { backend, peer: *peer };
        let known = self.connections.contains_key(&connection)
            || self.ending.contains_key(&connection)
            || self.early_downs.contains(&connection);
        if !known && !self.broken(Fault::LosesOrphans) {
            self.end(incarnation, connection, true);
        }
    }

    fn end(&mut self, of: Incarnation, connection: Connection, at_once: bool) {
        self.connections.remove(&connection);
        if self.broken(Fault::NeverDisconnects) {
            return;
        }
        if self.broken(Fault::DisconnectsTwice) {
            self.out.push(Output::Disconnect(connection));
        }
        self.out.push(match at_once {
            true => Output::Sever(connection),
            false => Output::Disconnect(connection),
        });
        self.ending.insert(connection, Ending { of, severed: at_once });
        self.timers.set(Timer::End(connection), Some(self.now + self.limits.ending));
        if let Some(peer) = self.peers.get_mut(&of) {
            peer.endings += 1;
        }
    }

    /// A connection takes too long to end.
    pub(super) fn end_is_late(&mut self, connection: Connection) {
        let Some(ending) = self.ending.get_mut(&connection) else { return };
        if ending.severed {
            self.stats.undead += 1;
            if !self.steps.is_empty() {
                self.early_downs.insert(connection);
            }
            return self.ended(connection);
        }
        ending.severed = true;
        self.out.push(Output::Sever(connection));
        self.timers.set(Timer::End(connection), Some(self.now + self.limits.ending));
    }

    fn ended(&mut self, connection: Connection) {
        let Some(ending) = self.ending.remove(&connection) else { return };
        self.timers.set(Timer::End(connection), None);
        if let Some(peer) = self.peers.get_mut(&ending.of) {
            peer.endings = peer.endings.saturating_sub(1);
        }
        self.touch_peer(ending.of);
    }

    pub(super) fn peer_down(&mut self, connection: Connection, error: Option<Error>) {
        // A step that is not answered yet may give it, or give it again.
        if !self.steps.is_empty() && self.early_downs.len() < EARLY {
            self.early_downs.insert(connection);
        }
        if let Some(ending) = self.ending.get(&connection) {
            // The other side may have said that it is over before the backend says why.
            if let Some(error) = error.filter(Failure::is_starved)
                && let Some(peer) = self.peers.get_mut(&ending.of)
            {
                peer.error = Some(Arc::new(error.with_context("rank", &peer.remote)));
                peer.starved = Some(self.now);
            }
            return self.ended(connection);
        }
        let Some(incarnation) = self.connections.remove(&connection) else { return };
        let early = error.is_some();
        self.broke(incarnation, error, GoneReason::Down, early);
    }

    /// The other side says that the connection is over.
    pub(super) fn parted(&mut self, incarnation: Incarnation) {
        if self.peers.get(&incarnation).is_some_and(|peer| peer.link.connection().is_some()) {
            self.broke(incarnation, None, GoneReason::Bye, true);
        }
    }

    /// A connection is over that this side would have kept. Where it has not lasted it counts as an attempt that failed, like one
    /// that never came so far, if `counts`.
    fn broke(
        &mut self,
        incarnation: Incarnation,
        error: Option<Error>,
        reason: GoneReason,
        counts: bool,
    ) {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        let lasted = match &peer.link {
            Link::Up(up) => self.now.saturating_sub(up.since),
            _ => Duration::ZERO,
        };
        let early = lasted < self.limits.proven && counts;
        peer.failures = if early { peer.failures.saturating_add(1) } else { 0 };
        let failures = peer.failures;
        // What does not change by itself is told to those who wait.
        let permanent = error.as_ref().is_some_and(Failure::is_permanent);
        let error = error.map(|error| Arc::new(error.with_context("rank", &peer.remote)));
        if let Some(error) = &error {
            peer.starved = Failure::is_starved(error).then_some(self.now);
            peer.error = Some(Arc::clone(error));
        }
        self.lose(incarnation, reason, reason == GoneReason::Down);
        let pause = self.now + self.pause(failures);
        let refusal = self.now + self.limits.refusal;
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        if matches!(peer.attempt, Attempt::Idle) {
            match error {
                Some(error) if permanent => peer.attempt = Attempt::Refused(refusal, error),
                _ if early => peer.attempt = Attempt::Pausing(pause),
                _ => {}
            }
        }
        self.touch_peer(incarnation);
    }

    /// Ends a connection, and says so where it was told of.
    pub(super) fn part(&mut self, incarnation: Incarnation, reason: GoneReason) {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        match std::mem::replace(&mut peer.link, Link::None) {
            Link::None => {}
            Link::Up(up) if up.told => {
                peer.link = Link::Up(up);
                self.lose(incarnation, reason, false);
            }
            Link::Half(connection) | Link::Up(Up { connection, .. }) => {
                let session = peer.sessions.last().copied();
                self.end(incarnation, connection, true);
                if let Some(session) = session {
                    self.send(session, &Message::Parted);
                }
                self.dirty_peers.insert(incarnation);
            }
        }
    }

    /// A peer is gone: all that was based on it is over, at once.
    pub(super) fn gone(&mut self, incarnation: Incarnation, reason: GoneReason) {
        self.lose(incarnation, reason, false);
    }

    fn lose(&mut self, incarnation: Incarnation, reason: GoneReason, broken: bool) {
        self.cancel_meeting(incarnation);
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        // What was refused of what has changed since may be taken.
        if !matches!(reason, GoneReason::Down | GoneReason::Bye | GoneReason::Refused) {
            peer.attempt = Attempt::Idle;
        }
        let link = std::mem::replace(&mut peer.link, Link::None);
        let connection = link.connection();
        let told = matches!(&link, Link::Up(up) if up.told);
        self.cancel_answer(incarnation);
        if let Some(connection) = connection.filter(|_| !broken) {
            let at_once = !matches!(reason, GoneReason::Forgotten | GoneReason::Changed);
            self.end(incarnation, connection, at_once);
        }
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        let sessions = peer.sessions.clone();
        (peer.chosen, peer.alone, peer.since) = (None, None, self.now);
        peer.answer = super::answer::Answer::None;
        let over = matches!(
            reason,
            GoneReason::Bye | GoneReason::Forgotten | GoneReason::Superseded | GoneReason::Unlisted
        );
        if std::mem::replace(&mut peer.seen, !sessions.is_empty() && !over) {
            let connection = connection.filter(|_| told);
            let remote = peer.remote.clone();
            self.stats.gone += 1;
            self.out.push(Output::Gone { remote, connection, reason });
        }
        self.suspect(incarnation, self.now);
        self.unroute(incarnation);
        match reason {
            GoneReason::Superseded => self.replace(incarnation, sessions),
            GoneReason::Forgotten => {
                for session in sessions {
                    self.send(session, &Message::Bye);
                    self.close(session);
                }
            }
            GoneReason::Down | GoneReason::Changed | GoneReason::Refused
                if connection.is_some() =>
            {
                if let Some(session) = sessions.last() {
                    self.send(*session, &Message::Parted);
                }
            }
            _ => {}
        }
        self.touch_peer(incarnation);
    }

    /// Who is in the place of a life that was replaced.
    pub(super) fn superseded_by(&self, incarnation: Incarnation) -> Option<&Remote> {
        let known = self.superseded.get(&incarnation).filter(|known| self.now < known.until)?;
        let other = self.peers.get(self.places.get(&known.at)?)?;
        (other.seen && other.remote.incarnation != incarnation).then_some(&other.remote)
    }

    /// Why a life is refused that comes although another is in its place. It is remembered anew.
    pub(super) fn refuse_superseded(&mut self, remote: &Remote) -> Option<Error> {
        let other = self.superseded_by(remote.incarnation)?.clone();
        let until = self.now + self.limits.superseded;
        if let Some(known) = self.superseded.get_mut(&remote.incarnation) {
            known.until = until;
        }
        Some(same_name(remote, &other))
    }

    /// Another life is in this one's place: it does not come back.
    fn replace(&mut self, incarnation: Incarnation, sessions: Vec<super::SessionId>) {
        if self.superseded.len() >= SUPERSEDED {
            let oldest = self.superseded.iter().min_by_key(|(_, known)| known.until);
            if let Some(oldest) = oldest.map(|(incarnation, _)| *incarnation) {
                self.superseded.remove(&oldest);
            }
        }
        let (now, until) = (self.now, self.now + self.limits.superseded);
        self.superseded.retain(|_, known| now < known.until);
        let Some(peer) = self.peers.get(&incarnation) else { return };
        let remote = peer.remote.clone();
        let at = (remote.engine.clone(), peer.place);
        self.superseded.insert(incarnation, Superseded { at, until });
        let other = self.superseded_by(incarnation).cloned();
        for session in sessions {
            let error = same_name(&remote, other.as_ref().unwrap_or(&remote));
            let refusal = Refusal::new(&error, false);
            self.send(session, &Message::Refused { number: 0, refusal });
            self.close(session);
        }
        if let Some(peer) = self.peers.get_mut(&incarnation) {
            (peer.alone, peer.card) = (None, None);
            peer.sites.clear();
        }
    }

    /// Routes with this peer are not given any more.
    pub(super) fn unroute(&mut self, incarnation: Incarnation) {
        if self.broken(Fault::KeepsRoutes) {
            return;
        }
        let Some(peer) = self.peers.get(&incarnation) else { return };
        for no in &peer.sites {
            let known = self.sites.get_mut(no).and_then(|site| site.known.as_mut());
            for way in known.into_iter().flat_map(|known| &mut known.ways) {
                if let Way::Route(course, _) = way {
                    *way = Way::Course(Arc::clone(course));
                }
            }
        }
    }
}
