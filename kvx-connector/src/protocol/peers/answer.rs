//! A peer meets this side: its offer is accepted, its completion taken.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::card::Card;
use kvx_core::facts::Facts;
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::Incarnation;
use kvx_core::{Error, ErrorKind, Result, Retry};

use super::io::{Connection, GoneReason, Place, Remote, SessionId, Step, StepId, Stepped};
use super::message::{CardBytes, Message, Refusal};
use super::peer::Link;
use super::{Failure, Peers, StepOf};

/// What a peer asks for.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) number: u64,
    pub(super) session: SessionId,
    pub(super) to: Incarnation,
    pub(super) backend: String,
    pub(super) offer: HandshakeBytes,
    pub(super) card: Option<CardBytes>,
}

/// How far the answer to a peer's meeting is.
#[derive(Debug)]
pub(super) enum Answer {
    /// It has asked for nothing.
    None,
    /// It waits until what was before is over.
    Held { asked: Asked, offer: HandshakeBytes },
    /// The backend takes the offer.
    Accepting { asked: Asked, step: StepId },
    /// The peer has the answer.
    Replied { asked: Asked, reply: HandshakeBytes },
    /// The backend takes the completion.
    Finishing { asked: Asked, step: StepId },
    /// The peer's regions are added.
    Adding { asked: Asked, step: StepId },
    /// It is over, and the peer was told.
    Done { number: u64 },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    number: u64,
    session: SessionId,
    backend: &'static str,
    until: Duration,
}

impl Answer {
    const fn asked(&self) -> Option<&Asked> {
        match self {
            Self::None | Self::Done { .. } => None,
            Self::Held { asked, .. }
            | Self::Accepting { asked, .. }
            | Self::Replied { asked, .. }
            | Self::Finishing { asked, .. }
            | Self::Adding { asked, .. } => Some(asked),
        }
    }

    pub(super) fn until(&self) -> Option<Duration> {
        self.asked().map(|asked| asked.until)
    }

    pub(super) const fn step(&self) -> Option<StepId> {
        match self {
            Self::Accepting { step, .. }
            | Self::Finishing { step, .. }
            | Self::Adding { step, .. } => Some(*step),
            _ => None,
        }
    }

    pub(super) const fn number(&self) -> Option<u64> {
        match self {
            Self::Done { number } => Some(*number),
            _ => match self.asked() {
                Some(asked) => Some(asked.number),
                None => None,
            },
        }
    }

    pub(super) const fn is_under_way(&self) -> bool {
        self.asked().is_some()
    }
}

impl Peers {
    pub(super) fn asked_to_meet(&mut self, remote: &Remote, request: Request) {
        let incarnation = remote.incarnation;
        let Some(peer) = self.peers.get(&incarnation) else {
            let error = Error::unsupported("peers.accept", "only ranks are met");
            return self.refuse(request.session, request.number, &error, false);
        };
        match peer.answer.number() {
            Some(number) if request.number < number => return,
            Some(number) if request.number == number => {
                if let Answer::Replied { asked, reply } = &peer.answer {
                    let message = Message::MeetReply { number, reply: reply.clone() };
                    let session = asked.session;
                    self.send(session, &message);
                }
                return;
            }
            _ => {}
        }
        let (session, number) = (request.session, request.number);
        match self.admit(remote, &request) {
            Ok((backend, card)) => {
                self.cancel_answer(incarnation);
                let until = self.now + self.limits.attempt;
                let asked = Asked { number, session, backend, until };
                let Some(peer) = self.peers.get_mut(&incarnation) else { return };
                if let Some(card) = card.filter(|_| peer.card.is_none()) {
                    peer.card = Some(Arc::new(card));
                }
                peer.answer = Answer::Held { asked, offer: request.offer };
                self.answering.insert(incarnation);
                self.dirty_peers.insert(incarnation);
            }
            Err(error) => {
                let later = error.retry() != Retry::Never;
                self.refuse(session, number, &error, later);
            }
        }
    }

    /// Whether a peer's wish can be looked at: the backend that it means, and its card.
    fn admit(&self, remote: &Remote, request: &Request) -> Result<(&'static str, Option<Card>)> {
        let Some(rank) = &self.local.rank else {
            return Err(Error::unsupported(
                "peers.accept",
                "this is no rank: it only serves cards",
            ));
        };
        if request.to != self.local.incarnation {
            let sides = (("the peer", request.to), ("this side", self.local.incarnation));
            return Err(Error::mismatch_between("peers.accept", "incarnation", sides.0, sides.1)
                .with_kind(ErrorKind::Peer)
                .with_retry(Retry::Backoff));
        }
        let Some(backend) = rank.backends.iter().find(|backend| **backend == request.backend)
        else {
            let sides = (("the peer", &request.backend), ("this side", &rank.backends.join(", ")));
            return Err(Error::mismatch_between("peers.accept", "backend", sides.0, sides.1));
        };
        if self.answering.len() >= self.limits.answering {
            return Err(Error::new(ErrorKind::Resources, "peers.accept", "too many handshakes")
                .with_context("limit", self.limits.answering)
                .with_retry(Retry::Backoff));
        }
        let card = request.card.as_ref().map(|card| self.check_card(remote, card)).transpose()?;
        Ok((*backend, card))
    }

    /// The card of a peer that has sent it along.
    fn check_card(&self, remote: &Remote, card: &CardBytes) -> Result<Card> {
        let head = self.reader.peek(card.as_bytes())?;
        let identity = head.identity();
        let rank = Some(Place::from(&identity.coords));
        let (engine, incarnation) = (identity.engine.clone(), identity.incarnation);
        let found = Remote { engine, incarnation, rank };
        if found != *remote {
            let sides = (("the card", &found), ("the session", remote));
            return Err(Error::mismatch_between("peers.accept", "rank", sides.0, sides.1)
                .with_kind(ErrorKind::Peer));
        }
        // What this side is for the other one is not known here; it makes no difference to what is refused.
        Facts::check(&self.local.facts, head.facts())?;
        self.reader.decode(card.as_bytes())
    }

    fn refuse(&mut self, session: SessionId, number: u64, error: &Error, later: bool) {
        self.stats.refused += 1;
        let refusal = Refusal::new(error, later);
        self.send(session, &Message::Refused { number, refusal });
    }

    /// Goes on with what a peer has asked for: when it may, and as long as its time is not over.
    pub(super) fn advance_answer(&mut self, incarnation: Incarnation) {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        if peer.answer.until().is_some_and(|until| self.now >= until) {
            return self.cancel_answer(incarnation);
        }
        if peer.is_blocked() || !matches!(peer.answer, Answer::Held { .. }) {
            return;
        }
        let Answer::Held { asked, offer } = std::mem::replace(&mut peer.answer, Answer::None)
        else {
            return;
        };
        let step = self.ask_backend(incarnation, Step::Accept { backend: asked.backend, offer });
        self.set_answer(incarnation, Answer::Accepting { asked, step });
    }

    fn set_answer(&mut self, incarnation: Incarnation, answer: Answer) {
        if !answer.is_under_way() {
            self.answering.remove(&incarnation);
        }
        if let Some(peer) = self.peers.get_mut(&incarnation) {
            peer.answer = answer;
        }
        self.dirty_peers.insert(incarnation);
    }

    pub(super) fn take_completion(
        &mut self,
        incarnation: Incarnation,
        session: SessionId,
        number: u64,
        completion: HandshakeBytes,
    ) {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        if peer.answer.number() != Some(number) {
            let error = Error::peer("peers.accept", "this handshake is not under way")
                .with_retry(Retry::Backoff);
            return self.refuse(session, number, &error, true);
        }
        match &peer.answer {
            Answer::Done { .. } => self.send(session, &Message::Finished { number }),
            Answer::Replied { asked, .. } => {
                let asked = *asked;
                let step = Step::Finish { backend: asked.backend, completion };
                let step = self.ask_backend(incarnation, step);
                self.set_answer(incarnation, Answer::Finishing { asked, step });
            }
            _ => {}
        }
    }

    /// A step of an answer is done.
    pub(super) fn answer_stepped(
        &mut self,
        incarnation: Incarnation,
        of: &StepOf,
        result: Stepped,
    ) {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        let answer = std::mem::replace(&mut peer.answer, Answer::None);
        let Some(asked) = answer.asked().copied() else { return };
        let done = match (answer, result) {
            (_, Stepped::Failed(error)) => Err(Failure::of(error)),
            (Answer::Accepting { .. }, Stepped::Accepted(peer, reply)) => {
                let connection = Connection { backend: of.backend, peer };
                self.install(incarnation, connection, false).map(|()| {
                    let message = Message::MeetReply { number: asked.number, reply: reply.clone() };
                    self.send(asked.session, &message);
                    Some(Answer::Replied { asked, reply })
                })
            }
            (Answer::Finishing { .. }, Stepped::Finished(peer, info)) => {
                let connection = Connection { backend: of.backend, peer };
                self.install(incarnation, connection, true)
                    .and_then(|()| self.choosing.check_transport(&info).map_err(Failure::permanent))
                    .map(|()| self.reach(incarnation, connection, asked, info))
            }
            (Answer::Adding { .. }, Stepped::Added(info)) => {
                if let Some(Link::Up(up)) =
                    self.peers.get_mut(&incarnation).map(|peer| &mut peer.link)
                {
                    (up.regions, up.info) = (true, Some(info));
                }
                Ok(None)
            }
            (_, result) => Err(Failure::passing(
                Error::new(ErrorKind::Internal, "peers", "another step was answered")
                    .with_context("result", result.words()),
            )),
        };
        match done {
            Ok(Some(next)) => self.set_answer(incarnation, next),
            Ok(None) => {
                let number = asked.number;
                self.stats.answered += 1;
                self.set_answer(incarnation, Answer::Done { number });
                self.send(asked.session, &Message::Finished { number });
                self.tell_met(incarnation);
                self.touch_peer(incarnation);
            }
            Err(failure) => {
                self.refuse(asked.session, asked.number, &failure.error, !failure.permanent);
                self.set_answer(incarnation, Answer::None);
                self.end_unused(incarnation, GoneReason::Refused);
                if let Some(peer) = self.peers.get_mut(&incarnation) {
                    peer.error = Some(Arc::new(failure.error));
                }
            }
        }
    }

    /// The peer can be reached. Where its card is there, its regions are added.
    fn reach(
        &mut self,
        incarnation: Incarnation,
        connection: Connection,
        asked: Asked,
        info: kvx_core::backend::PeerInfo,
    ) -> Option<Answer> {
        let peer = self.peers.get_mut(&incarnation)?;
        let has_keys =
            peer.card.as_ref().is_some_and(|card| card.offer(connection.backend).is_some());
        let Link::Up(up) = &mut peer.link else { return None };
        up.info = Some(info);
        // This side's own meeting may be adding them.
        let meeting = matches!(&peer.attempt, super::peer::Attempt::Running(run) if run.phase.step().is_some());
        if up.regions || up.told || meeting || !has_keys {
            return None;
        }
        let step = self.add_regions(incarnation, connection).ok()?;
        Some(Answer::Adding { asked, step })
    }

    /// Gives up what a peer has asked for.
    pub(super) fn cancel_answer(&mut self, incarnation: Incarnation) {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        if !peer.answer.is_under_way() {
            return;
        }
        let answer = std::mem::replace(&mut peer.answer, Answer::None);
        peer.orphans += u32::from(answer.step().is_some());
        self.answering.remove(&incarnation);
        self.end_unused(incarnation, GoneReason::Lost);
        self.dirty_peers.insert(incarnation);
    }

    /// Gives it up if it came by this session.
    pub(super) fn forget_answer_by(&mut self, incarnation: Incarnation, session: SessionId) {
        let Some(peer) = self.peers.get(&incarnation) else { return };
        if peer.answer.asked().is_some_and(|asked| asked.session == session) {
            self.cancel_answer(incarnation);
        }
    }

    /// Ends a connection that came about by an answer alone, and was not told of.
    fn end_unused(&mut self, incarnation: Incarnation, reason: GoneReason) {
        let Some(peer) = self.peers.get(&incarnation) else { return };
        let meeting = matches!(peer.attempt, super::peer::Attempt::Running(_));
        let unused = match &peer.link {
            Link::None => false,
            Link::Half(_) => true,
            Link::Up(up) => !up.told && !meeting,
        };
        if unused {
            self.part(incarnation, reason);
        }
    }
}
