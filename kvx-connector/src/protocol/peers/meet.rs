//! This side meets a peer: by session, offer, answer, completion, and the keys to its memory.

use std::sync::Arc;

use kvx_core::card::Card;
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::Incarnation;
use kvx_core::{Error, ErrorKind, Retry};

use super::io::{Connection, GoneReason, Output, SessionId, Step, Stepped};
use super::message::{CardBytes, Message};
use super::peer::{Attempt, Link, Phase, Run};
use super::{Failure, Fault, Peers, StepOf, User};

impl Peers {
    /// Begins an attempt: its turn has come.
    pub(super) fn begin_meeting(&mut self, incarnation: Incarnation) {
        let now = self.now;
        let number = self.number();
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        let (deadline, young) = (now + self.limits.attempt, Some(now + self.limits.young));
        peer.attempt = Attempt::Running(Run { number, deadline, young, phase: Phase::Dialling });
        peer.since = now;
        self.young += 1;
        self.stats.meetings += 1;
        if let Some(session) = peer.sessions.last().copied() {
            return self.go_on_by(incarnation, session);
        }
        let Some(card) = peer.card.clone() else { return };
        // A session that leads to an earlier life there may be dead without anybody having noticed.
        let known = self.dialled.get(card.control()).and_then(|id| self.sessions.get(id));
        if known.is_some_and(|session| session.remote.incarnation != incarnation) {
            self.dialled.remove(card.control());
        }
        match self.dial(card.control(), User::Peer(incarnation)) {
            Some(session) => self.go_on_by(incarnation, session),
            None => self.set_peer_timer(incarnation),
        }
    }

    /// There is a session with the peer.
    pub(super) fn go_on_by(&mut self, incarnation: Incarnation, _session: SessionId) {
        let Some(peer) = self.peers.get(&incarnation) else { return };
        if !matches!(&peer.attempt, Attempt::Running(run) if matches!(run.phase, Phase::Dialling)) {
            return;
        }
        if !self.needs_link(incarnation) {
            return self.met(incarnation);
        }
        if peer.is_blocked() && !self.broken(Fault::MeetsWhileEnding) {
            let error = Error::peer("peers.meet", "an earlier connection is ending");
            return self.fail_meeting(incarnation, Failure::passing(error));
        }
        let step = match &peer.link {
            Link::Up(up) if up.regions => return self.met(incarnation),
            Link::Up(up) => {
                let connection = up.connection;
                self.add_regions(incarnation, connection).map(Phase::Adding)
            }
            Link::None | Link::Half(_) => self.choose(incarnation).map(|chosen| {
                let backend = chosen.backend;
                Phase::Offering(self.ask_backend(incarnation, Step::Offer { backend }))
            }),
        };
        match step {
            Ok(phase) => self.set_phase(incarnation, phase),
            Err(error) => self.fail_meeting(incarnation, Failure::permanent(error)),
        }
    }

    fn set_phase(&mut self, incarnation: Incarnation, phase: Phase) {
        let attempt = self.peers.get_mut(&incarnation).map(|peer| &mut peer.attempt);
        if let Some(Attempt::Running(run)) = attempt {
            run.phase = phase;
        }
        self.set_peer_timer(incarnation);
    }

    /// A step of this side's meeting is done.
    pub(super) fn meeting_stepped(
        &mut self,
        incarnation: Incarnation,
        of: &StepOf,
        result: Stepped,
    ) {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        let Attempt::Running(run) = &mut peer.attempt else { return };
        let number = run.number;
        let phase = std::mem::replace(&mut run.phase, Phase::Dialling);
        let backend = of.backend;
        match (phase, result) {
            (_, Stepped::Failed(error)) => {
                self.fail_meeting(incarnation, Failure::of(error));
            }
            (Phase::Offering(_), Stepped::Offered(offer)) => {
                let Some(session) = peer.sessions.last().copied() else {
                    let error = Error::peer("peers", "the session is lost");
                    return self.fail_meeting(incarnation, Failure::passing(error));
                };
                let again = self.now + self.limits.again;
                self.set_phase(incarnation, Phase::Asking { session, offer, again });
                self.put_offer(incarnation);
            }
            (Phase::Completing(_, session), Stepped::Completed(peer, completion)) => {
                let connection = Connection { backend, peer };
                if let Err(failure) = self.install(incarnation, connection, true) {
                    return self.fail_meeting(incarnation, failure);
                }
                let running = self.peers.get(&incarnation).map(|peer| &peer.attempt);
                if !matches!(running, Some(Attempt::Running(_))) {
                    // Another connection was in its place, and took this attempt with it.
                    return self.part(incarnation, GoneReason::Down);
                }
                let again = self.now + self.limits.again;
                let told = Message::MeetCompletion { number, completion: completion.clone() };
                self.send(session, &told);
                let has_regions = match self.peers.get(&incarnation).map(|peer| &peer.link) {
                    Some(Link::Up(up)) => up.regions,
                    _ => false,
                };
                let adding = match has_regions {
                    true => Ok(None),
                    false => self.add_regions(incarnation, connection).map(Some),
                };
                let (adding, failed) = match adding {
                    Ok(adding) => (adding, None),
                    Err(error) => (None, Some(error)),
                };
                let phase = Phase::Settling { session, completion, again, finished: false, adding };
                self.set_phase(incarnation, phase);
                if let Some(error) = failed {
                    self.fail_meeting(incarnation, Failure::permanent(error));
                }
            }
            (
                Phase::Settling { session, completion, again, finished, .. },
                Stepped::Added(info),
            ) => {
                let phase = Phase::Settling { session, completion, again, finished, adding: None };
                self.set_phase(incarnation, phase);
                if self.added(incarnation, info) && finished {
                    self.met(incarnation);
                }
            }
            (Phase::Adding(_), Stepped::Added(info)) => {
                if self.added(incarnation, info) {
                    self.met(incarnation);
                }
            }
            (_, result) => {
                let error = Error::new(ErrorKind::Internal, "peers", "another step was answered")
                    .with_context("result", result.words());
                self.fail_meeting(incarnation, Failure::passing(error));
            }
        }
    }

    /// Puts this side's offer, once more if need be.
    pub(super) fn put_offer(&mut self, incarnation: Incarnation) {
        let again_at = self.now + self.limits.again;
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        let Attempt::Running(run) = &mut peer.attempt else { return };
        let Phase::Asking { session, offer, again } = &mut run.phase else { return };
        let Some(chosen) = &peer.chosen else { return };
        let Ok(backend) = kvx_core::wire::Text::new(chosen.backend) else { return };
        *again = again_at;
        let card = self.local.rank.as_ref().and_then(|rank| rank.card.as_deref());
        let (session, to) = (*session, incarnation);
        let message = Message::Meet {
            number: run.number,
            to,
            backend,
            offer: offer.clone(),
            card: card.and_then(CardBytes::new),
        };
        self.send(session, &message);
        self.set_peer_timer(incarnation);
    }

    pub(super) fn take_reply(
        &mut self,
        incarnation: Incarnation,
        session: SessionId,
        number: u64,
        reply: HandshakeBytes,
    ) {
        let Some(peer) = self.peers.get(&incarnation) else { return };
        let Attempt::Running(run) = &peer.attempt else { return };
        let Some(chosen) = &peer.chosen else { return };
        if run.number != number || !matches!(run.phase, Phase::Asking { .. }) {
            return;
        }
        let step = Step::Complete { backend: chosen.backend, reply };
        let step = self.ask_backend(incarnation, step);
        self.set_phase(incarnation, Phase::Completing(step, session));
    }

    pub(super) fn take_finished(&mut self, incarnation: Incarnation, number: u64) {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        let Attempt::Running(run) = &mut peer.attempt else { return };
        if run.number != number {
            return;
        }
        if let Phase::Settling { finished, adding, .. } = &mut run.phase {
            *finished = true;
            if adding.is_none() {
                self.met(incarnation);
            }
        }
    }

    /// The attempt has come to its end.
    pub(super) fn met(&mut self, incarnation: Incarnation) {
        let now = self.now;
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        if let Attempt::Running(run) = &peer.attempt {
            self.young -= usize::from(run.young.is_some());
        }
        // Earlier failures are forgotten once the connection has proven to last.
        (peer.attempt, peer.error, peer.since) = (Attempt::Idle, None, now);
        peer.starved = None;
        self.tell_met(incarnation);
        self.touch_peer(incarnation);
    }

    /// Says once that a peer is connected.
    pub(super) fn tell_met(&mut self, incarnation: Incarnation) {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        let Link::Up(up) = &mut peer.link else { return };
        if !std::mem::replace(&mut up.told, true) {
            peer.seen = true;
            // Its last session may have ended while the backend was at it: it is not kept for that any longer than others.
            if peer.sessions.is_empty() {
                peer.alone.get_or_insert(self.now);
            }
            let (remote, connection) = (peer.remote.clone(), up.connection);
            self.out.push(Output::Met { remote, connection });
        }
    }

    /// The attempt came to nothing. A connection that it has made, and nobody else uses, is ended.
    pub(super) fn fail_meeting(&mut self, incarnation: Incarnation, failure: Failure) {
        let Some(peer) = self.peers.get(&incarnation) else { return };
        let Attempt::Running(run) = &peer.attempt else { return };
        let unusable = matches!(run.phase, Phase::Settling { .. } | Phase::Adding(_));
        self.cancel_meeting(incarnation);
        if unusable {
            self.part(incarnation, GoneReason::Down);
        }
        self.stats.count_failure(&failure.error);
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        peer.failures = peer.failures.saturating_add(1);
        let failures = peer.failures;
        let error = Arc::new(failure.error.with_context("rank", &peer.remote));
        peer.starved = Failure::is_starved(&error).then_some(self.now);
        peer.error = Some(Arc::clone(&error));
        let pause = self.now + self.pause(failures);
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        peer.since = self.now;
        peer.attempt = if failure.permanent {
            Attempt::Refused(self.now + self.limits.refusal, error)
        } else {
            Attempt::Pausing(pause)
        };
        if failure.stale {
            self.suspect(incarnation, pause);
        }
        self.touch_peer(incarnation);
    }

    /// Gives up what is under way. A step that is not answered yet remains to be.
    pub(super) fn cancel_meeting(&mut self, incarnation: Incarnation) {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        // A pause is not over because of that.
        if let Attempt::Running(run) = &peer.attempt {
            self.young -= usize::from(run.young.is_some());
            peer.orphans += u32::from(run.phase.step().is_some());
            peer.attempt = Attempt::Idle;
            let address = peer.card.as_ref().map(|card: &Arc<Card>| card.control().clone());
            if let Some(address) = address {
                self.leave_dial(&address, User::Peer(incarnation));
            }
        }
    }

    /// Something of this side's meeting is due.
    pub(super) fn peer_time(&mut self, incarnation: Incarnation) {
        let now = self.now;
        let again_at = now + self.limits.again;
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        if let Attempt::Running(run) = &mut peer.attempt {
            if now >= run.deadline {
                let error = Error::peer("peers.meet", "the peer was not met in time")
                    .with_context("phase", phase_name(&run.phase))
                    .with_retry(Retry::Backoff);
                let dialling = matches!(run.phase, Phase::Dialling);
                let failure =
                    if dialling { Failure::stale(error) } else { Failure::passing(error) };
                self.fail_meeting(incarnation, failure);
            } else {
                if run.young.is_some_and(|until| now >= until) {
                    run.young = None;
                    self.young -= 1;
                }
                let number = run.number;
                match &mut run.phase {
                    Phase::Asking { again, .. } if now >= *again => self.put_offer(incarnation),
                    Phase::Settling { session, completion, again, finished: false, .. }
                        if now >= *again =>
                    {
                        *again = again_at;
                        let (session, completion) = (*session, completion.clone());
                        self.send(session, &Message::MeetCompletion { number, completion });
                    }
                    _ => {}
                }
            }
        }
        self.touch_peer(incarnation);
    }
}

const fn phase_name(phase: &Phase) -> &'static str {
    match phase {
        Phase::Dialling => "dialling",
        Phase::Offering(_) => "offering",
        Phase::Asking { .. } => "waiting for its answer",
        Phase::Completing(..) => "completing",
        Phase::Settling { adding: Some(_), .. } | Phase::Adding(_) => "adding its regions",
        Phase::Settling { .. } => "waiting until it has finished",
    }
}
