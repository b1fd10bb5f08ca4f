//! A rank of another engine, and what this side has with it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::Error;
use kvx_core::backend::PeerInfo;
use kvx_core::card::{Card, EngineName};
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::Incarnation;

use super::answer::Answer;
use super::config::Chosen;
use super::io::{Connection, GoneReason, Place, Remote, SessionId, StepId};
use super::site::{Fetch, SiteNo, Way};
use super::{Fault, Peers, Timer, User};

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) remote: Remote,
    pub(super) place: Place,
    /// It was heard of, and its end is to be told.
    pub(super) seen: bool,
    pub(super) sessions: Vec<SessionId>,
    /// Since when it has no session.
    pub(super) alone: Option<Duration>,
    pub(super) card: Option<Arc<Card>>,
    /// Sites of whose engine it is a rank, as far as this rank has to do with it.
    pub(super) sites: BTreeSet<SiteNo>,
    pub(super) link: Link,
    pub(super) attempt: Attempt,
    pub(super) answer: Answer,
    pub(super) chosen: Option<Arc<Chosen>>,
    pub(super) failures: u32,
    pub(super) error: Option<Arc<Error>>,
    /// When a limit last left nothing for it, unless something else has become of it since.
    pub(super) starved: Option<Duration>,
    /// Steps that were given up and are still to be answered.
    pub(super) orphans: u32,
    /// Connections that are ending.
    pub(super) endings: u32,
    pub(super) since: Duration,
}

/// The connection with a peer.
#[derive(Debug)]
pub(super) enum Link {
    /// There is none.
    None,
    /// The peer was accepted: only it may post.
    Half(Connection),
    /// Both may post.
    Up(Up),
}

#[derive(Debug)]
pub(super) struct Up {
    pub(super) connection: Connection,
    pub(super) since: Duration,
    pub(super) info: Option<PeerInfo>,
    /// The peer's regions are added.
    pub(super) regions: bool,
    /// It was told that the peer is met.
    pub(super) told: bool,
}

impl Link {
    pub(super) fn connection(&self) -> Option<Connection> {
        match self {
            Self::None => None,
            Self::Half(connection) | Self::Up(Up { connection, .. }) => Some(*connection),
        }
    }
}

/// How far this side's meeting with a peer is.
#[derive(Debug)]
pub(super) enum Attempt {
    /// There is nothing to do.
    Idle,
    /// It waits for its turn.
    Queued,
    /// It is under way: one at a time.
    Running(Run),
    /// It failed, and is repeated then if somebody still waits.
    Pausing(Duration),
    /// It was refused for a reason that does not change by itself; this is what is told until then.
    Refused(Duration, Arc<Error>),
}

#[derive(Debug)]
pub(super) struct Run {
    pub(super) number: u64,
    pub(super) deadline: Duration,
    /// It counts among the young ones until then.
    pub(super) young: Option<Duration>,
    pub(super) phase: Phase,
}

#[derive(Debug)]
pub(super) enum Phase {
    /// Its control address is dialled.
    Dialling,
    /// The backend makes an offer.
    Offering(StepId),
    /// The offer is with the peer.
    Asking { session: SessionId, offer: HandshakeBytes, again: Duration },
    /// The backend takes the answer.
    Completing(StepId, SessionId),
    /// The peer is told; the backend adds its regions.
    Settling {
        session: SessionId,
        completion: HandshakeBytes,
        again: Duration,
        finished: bool,
        adding: Option<StepId>,
    },
    /// There is a connection already: only its regions are missing.
    Adding(StepId),
}

impl Phase {
    const fn session(&self) -> Option<SessionId> {
        match self {
            Self::Asking { session, .. }
            | Self::Completing(_, session)
            | Self::Settling { session, .. } => Some(*session),
            Self::Dialling | Self::Offering(_) | Self::Adding(_) => None,
        }
    }

    pub(super) const fn step(&self) -> Option<StepId> {
        match self {
            Self::Offering(step) | Self::Completing(step, _) | Self::Adding(step) => Some(*step),
            Self::Settling { adding, .. } => *adding,
            Self::Dialling | Self::Asking { .. } => None,
        }
    }
}

/// What somebody needs a peer for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    Nothing,
    Session,
    Link,
}

impl Peer {
    fn new(remote: Remote, place: Place, now: Duration) -> Self {
        Self {
            remote,
            place,
            seen: false,
            sessions: Vec::new(),
            alone: None,
            card: None,
            sites: BTreeSet::new(),
            link: Link::None,
            attempt: Attempt::Idle,
            answer: Answer::None,
            chosen: None,
            failures: 0,
            error: None,
            starved: None,
            orphans: 0,
            endings: 0,
            since: now,
        }
    }

    pub(super) const fn is_seen(&self) -> bool {
        self.seen
    }

    /// Whether a session with it serves anything.
    pub(super) fn is_of_use(&self) -> bool {
        !self.sites.is_empty()
            || !matches!(self.link, Link::None)
            || !matches!(self.attempt, Attempt::Idle)
            || !matches!(self.answer, Answer::None)
    }

    /// Whether it can be used: by session alone, or with its memory, too.
    pub(super) fn satisfied(&self, linked: bool) -> bool {
        let usable = matches!(&self.link, Link::Up(up) if up.regions && up.told);
        !self.sessions.is_empty() && (!linked || usable)
    }

    pub(super) fn refused(&self, now: Duration) -> Option<Arc<Error>> {
        match &self.attempt {
            Attempt::Refused(until, error) if now < *until => Some(Arc::clone(error)),
            _ => None,
        }
    }

    pub(super) fn meets_by(&self, id: SessionId) -> bool {
        matches!(&self.attempt, Attempt::Running(run) if run.phase.session() == Some(id))
    }

    pub(super) const fn is_meeting(&self) -> bool {
        matches!(self.attempt, Attempt::Running(_))
    }

    pub(super) fn is_attempt(&self, number: u64) -> bool {
        matches!(&self.attempt, Attempt::Running(run) if run.number == number)
    }

    /// Something of an earlier connection is not over yet: none is made before that.
    pub(super) const fn is_blocked(&self) -> bool {
        self.orphans > 0 || self.endings > 0
    }

    /// Nothing is left of it.
    fn is_over(&self) -> bool {
        self.sessions.is_empty()
            && !self.seen
            && self.sites.is_empty()
            && !self.is_blocked()
            && matches!(self.link, Link::None)
            && matches!(self.answer, Answer::None)
            && !matches!(self.attempt, Attempt::Running(_))
    }

    fn next(&self, limits: &super::Limits) -> Option<Duration> {
        let attempt = match &self.attempt {
            Attempt::Idle | Attempt::Queued => None,
            Attempt::Pausing(until) | Attempt::Refused(until, _) => Some(*until),
            Attempt::Running(run) => {
                let again = match &run.phase {
                    Phase::Asking { again, .. } => Some(*again),
                    Phase::Settling { again, finished: false, .. } => Some(*again),
                    _ => None,
                };
                [run.young, again].into_iter().flatten().chain([run.deadline]).min()
            }
        };
        let alone = self.alone.map(|since| since + limits.alone);
        [attempt, alone, self.answer.until()].into_iter().flatten().min()
    }
}

impl Peers {
    /// Enters a rank of an engine by its card. `false` where there is no room.
    pub(super) fn enter_by_card(&mut self, no: SiteNo, card: &Arc<Card>) -> bool {
        let identity = card.identity();
        let place = Place::from(&identity.coords);
        let incarnation = identity.incarnation;
        let remote = Remote { engine: identity.engine.clone(), incarnation, rank: Some(place) };
        let entered = self.enter(remote, place);
        if let Some(peer) = self.peers.get_mut(&incarnation).filter(|_| entered) {
            peer.card = Some(Arc::clone(card));
            peer.sites.insert(no);
        }
        entered
    }

    pub(super) fn enter_by_session(&mut self, remote: &Remote) -> bool {
        remote.rank.is_none_or(|place| self.enter(remote.clone(), place))
    }

    fn enter(&mut self, remote: Remote, place: Place) -> bool {
        if self.peers.contains_key(&remote.incarnation) {
            return true;
        }
        if self.peers.len() >= self.limits.peers {
            return false;
        }
        self.peers.insert(remote.incarnation, Peer::new(remote, place, self.now));
        true
    }

    pub(super) fn touch_peer(&mut self, incarnation: Incarnation) {
        self.dirty_peers.insert(incarnation);
        if let Some(peer) = self.peers.get(&incarnation) {
            self.dirty_sites.extend(&peer.sites);
        }
    }

    /// What a peer is needed for.
    fn need(&self, peer: &Peer) -> Need {
        let linked = !matches!(peer.link, Link::None);
        let mut need = if linked && peer.card.is_some() { Need::Session } else { Need::Nothing };
        for site in peer.sites.iter().filter_map(|no| self.sites.get(no)) {
            let Some(known) = site.known.as_ref().filter(|known| !known.suspect) else { continue };
            if site.waiters.is_empty() || matches!(site.fetch, Fetch::Refused(..)) {
                continue;
            }
            let is_it =
                |rank: usize| known.cards[rank].identity().incarnation == peer.remote.incarnation;
            for course in known.ways.iter().filter_map(Way::course) {
                if course.links.iter().any(|(rank, _)| is_it(*rank)) {
                    return Need::Link;
                }
                if course.confirms.iter().any(|(rank, _)| is_it(*rank)) {
                    need = Need::Session;
                }
            }
        }
        need
    }

    pub(super) fn needs_link(&self, incarnation: Incarnation) -> bool {
        self.peers.get(&incarnation).is_some_and(|peer| self.need(peer) == Need::Link)
    }

    /// Does what is to be done with a peer now, and forgets it when nothing is left of it and nobody needs it.
    pub(super) fn advance_peer(&mut self, incarnation: Incarnation) {
        let now = self.now;
        let keeps = self.broken(Fault::KeepsTheLonely);
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        if peer.alone.is_some_and(|since| now >= since + self.limits.alone) {
            peer.alone = None;
            if !keeps {
                self.gone(incarnation, GoneReason::Lost);
            }
        }
        self.advance_answer(incarnation);
        let Some(peer) = self.peers.get(&incarnation) else { return };
        let need = self.need(peer);
        let satisfied = need == Need::Nothing || peer.satisfied(need == Need::Link);
        let blocked = peer.is_blocked() && !self.broken(Fault::MeetsWhileEnding);
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        match &peer.attempt {
            Attempt::Pausing(until) | Attempt::Refused(until, _) if now >= *until => {
                peer.attempt = Attempt::Idle;
            }
            // A pause goes on while nobody needs the peer, or it would end with each look at the cards.
            Attempt::Pausing(_) if satisfied && need != Need::Nothing => {
                peer.attempt = Attempt::Idle;
            }
            Attempt::Queued if satisfied => peer.attempt = Attempt::Idle,
            _ => {}
        }
        let twice = self.broken(Fault::MeetsTwice);
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        if twice && !satisfied && matches!(peer.attempt, Attempt::Running(_)) {
            self.begin_meeting(incarnation);
        } else if matches!(peer.attempt, Attempt::Idle) && !satisfied && !blocked {
            peer.attempt = Attempt::Queued;
            self.queue.push(User::Peer(incarnation), peer.failures > 0);
        } else if need == Need::Nothing && peer.is_over() {
            return self.remove_peer(incarnation);
        }
        self.set_peer_timer(incarnation);
    }

    pub(super) fn set_peer_timer(&mut self, incarnation: Incarnation) {
        let next = self.peers.get(&incarnation).and_then(|peer| peer.next(&self.limits));
        self.timers.set(Timer::Peer(incarnation), next);
    }

    fn remove_peer(&mut self, incarnation: Incarnation) {
        let Some(peer) = self.peers.remove(&incarnation) else { return };
        self.timers.set(Timer::Peer(incarnation), None);
        let at: (EngineName, Place) = (peer.remote.engine, peer.place);
        if self.places.get(&at) == Some(&incarnation) {
            self.places.remove(&at);
        }
    }
}
