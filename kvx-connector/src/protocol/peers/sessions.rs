//! Sessions of the control channel: who is there, what they say, and which of them can be closed.

use std::collections::BTreeSet;

use kvx_core::card::Address;
use kvx_core::id::Incarnation;
use kvx_core::{Error, ErrorKind, Retry};

use super::io::{GoneReason, Output, Remote, SessionId};
use super::message::{Message, Refusal};
use super::serve::Question;
use super::site::{Fetch, SiteNo};
use super::{Failure, Fault, Peers, User};

/// Most sessions with one rank: each side may have dialled, and a broken one may not be known as such yet.
const PER_PEER: usize = 4;

#[derive(Debug)]
pub(super) struct Session {
    pub(super) remote: Remote,
    pub(super) dialled: Option<Address>,
    /// The other side has cards of this one.
    pub(super) fetched: bool,
    /// Sites whose cards come by it.
    pub(super) sites: BTreeSet<SiteNo>,
}

impl Peers {
    pub(super) fn send(&mut self, session: SessionId, message: &Message) {
        match message.encode() {
            Ok(bytes) => self.out.push(Output::Send { session, bytes }),
            // Every message is made within the limits of its fields.
            Err(error) => tracing::error!(%error, "a message was not sent"),
        }
    }

    /// A session that leads to an address, or `None` when it is dialled for this user now.
    pub(super) fn dial(&mut self, address: &Address, user: User) -> Option<SessionId> {
        if let Some(session) = self.dialled.get(address) {
            return Some(*session);
        }
        if let Some(users) = self.dials.get_mut(address) {
            users.insert(user);
            return None;
        }
        self.dials.insert(address.clone(), BTreeSet::from([user]));
        self.out.push(Output::Dial(address.clone()));
        None
    }

    /// This user no longer waits for an address. What was asked for will be answered all the same.
    pub(super) fn leave_dial(&mut self, address: &Address, user: User) {
        if let Some(users) = self.dials.get_mut(address) {
            users.remove(&user);
        }
    }

    pub(super) fn dial_failed(&mut self, address: &Address, error: &Error) {
        for user in self.dials.remove(address).into_iter().flatten() {
            let error = not_reached(address, error);
            match user {
                User::Site(no) => self.fail_fetch(no, Failure::of(error)),
                User::Peer(incarnation) if Failure::is_permanent(&error) => {
                    self.fail_meeting(incarnation, Failure::permanent(error));
                }
                // This says nothing of where the rank is.
                User::Peer(incarnation) if Failure::is_starved(&error) => {
                    self.fail_meeting(incarnation, Failure::passing(error));
                }
                User::Peer(incarnation) => self.fail_meeting(incarnation, Failure::stale(error)),
            }
        }
    }

    pub(super) fn session_up(&mut self, id: SessionId, remote: Remote, dialled: Option<Address>) {
        let users: BTreeSet<User> =
            dialled.as_ref().and_then(|address| self.dials.remove(address)).unwrap_or_default();
        if self.sessions.contains_key(&id) {
            return;
        }
        let itself = remote.incarnation == self.local.incarnation;
        if self.closed || (self.sessions.len() >= self.limits.sessions && users.is_empty()) {
            return self.out.push(Output::CloseSession(id));
        }
        let session = Session {
            remote: remote.clone(),
            dialled: dialled.clone(),
            fetched: false,
            sites: BTreeSet::new(),
        };
        self.sessions.insert(id, session);
        if let Some(address) = &dialled {
            self.dialled.insert(address.clone(), id);
        }
        let attached = match remote.rank.is_some() && !itself {
            true => self.attach(id, &remote),
            false => Ok(()),
        };
        if let Err(error) = attached {
            let refusal = Refusal::new(&error, error.retry() != Retry::Never);
            self.send(id, &Message::Refused { number: 0, refusal });
            for user in users {
                self.fail_user(user, &error);
            }
            return self.close(id);
        }
        for user in &users {
            match user {
                User::Site(no) => self.ask_for_cards(*no, id),
                User::Peer(wanted) if *wanted == remote.incarnation => {
                    self.go_on_by(*wanted, id);
                }
                User::Peer(wanted) => self.wrong_life(*wanted, &remote),
            }
        }
        self.close_unused(id);
    }

    fn fail_user(&mut self, user: User, error: &Error) {
        let permanent = error.retry() == Retry::Never;
        let retry = if permanent { Retry::Never } else { Retry::Backoff };
        let mut copy = Error::peer("peers.session", error.to_string())
            .with_kind(error.kind())
            .with_retry(retry);
        if let Some(remedy) = error.remedy() {
            copy = copy.with_remedy(remedy.to_owned());
        }
        match user {
            User::Site(no) if permanent => self.fail_fetch(no, Failure::permanent(copy)),
            User::Site(no) => self.fail_fetch(no, Failure::passing(copy)),
            User::Peer(incarnation) => self.fail_meeting(incarnation, Failure::stale(copy)),
        }
    }

    /// Somebody else is where a card says that this rank is.
    fn wrong_life(&mut self, wanted: Incarnation, found: &Remote) {
        let Some(peer) = self.peers.get(&wanted) else { return };
        let sides = (("the card", &peer.remote), ("who answers", found));
        let error = Error::mismatch_between("peers", "rank", sides.0, sides.1)
            .with_kind(ErrorKind::Peer)
            .with_retry(Retry::Backoff);
        self.fail_meeting(wanted, Failure::stale(error));
    }

    /// A session with a rank: it is known from now on. A life that was known in its place is over.
    fn attach(&mut self, id: SessionId, remote: &Remote) -> Result<(), Error> {
        let incarnation = remote.incarnation;
        if let Some(error) = self.refuse_superseded(remote) {
            if let Some(suppressed) = self.warnings.pass(self.now) {
                tracing::warn!(%error, suppressed, "a peer is refused");
            }
            return Err(error);
        }
        if let Some(known) = self.peers.get(&incarnation).filter(|known| known.remote != *remote) {
            return Err(Error::peer("peers", "one incarnation, two names")
                .with_context("known", &known.remote)
                .with_context("told", remote));
        }
        if !self.enter_by_session(remote) {
            return Err(Error::new(ErrorKind::Resources, "peers", "too many peers")
                .with_context("limit", self.limits.peers)
                .with_retry(Retry::Backoff));
        }
        let Some(place) = remote.rank else { return Ok(()) };
        let at = (remote.engine.clone(), place);
        let old = self.places.get(&at).copied().filter(|old| *old != incarnation);
        let Some(peer) = self.peers.get_mut(&incarnation) else { return Ok(()) };
        peer.seen = true;
        peer.alone = None;
        self.places.insert(at, incarnation);
        if let Some(old) = old.filter(|_| !self.broken(Fault::KeepsOldLife)) {
            self.gone(old, GoneReason::Superseded);
        }
        let Some(peer) = self.peers.get_mut(&incarnation) else { return Ok(()) };
        peer.sessions.push(id);
        let surplus = (peer.sessions.len() > PER_PEER).then(|| peer.sessions[0]);
        if let Some(surplus) = surplus {
            self.close(surplus);
        }
        self.touch_peer(incarnation);
        Ok(())
    }

    /// Closes a session from this side.
    pub(super) fn close(&mut self, id: SessionId) {
        if self.sessions.contains_key(&id) {
            self.out.push(Output::CloseSession(id));
            let error = Error::new(ErrorKind::Closed, "peers.session", "closed on this side");
            self.session_down(id, Some(&error));
        }
    }

    /// Closes a session that was dialled, and serves nothing.
    pub(super) fn close_unused(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get(&id) else { return };
        if session.dialled.is_none() || !session.sites.is_empty() {
            return;
        }
        let peer = self.peers.get(&session.remote.incarnation);
        if !peer.is_some_and(super::peer::Peer::is_of_use) {
            self.close(id);
        }
    }

    /// A site no longer has to do with a session.
    pub(super) fn leave_session(&mut self, id: SessionId, no: SiteNo) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.sites.remove(&no);
        }
        self.close_unused(id);
    }

    pub(super) fn session_down(&mut self, id: SessionId, error: Option<&Error>) {
        let Some(session) = self.sessions.remove(&id) else { return };
        let dialled = session.dialled.as_ref();
        if let Some(address) = dialled.filter(|address| self.dialled.get(address) == Some(&id)) {
            self.dialled.remove(address);
        }
        let why = error.map_or_else(|| "the session ended".to_owned(), ToString::to_string);
        let lost = || Error::peer("peers.session", why.clone()).with_retry(Retry::Backoff);
        for no in session.sites {
            let Some(site) = self.sites.get_mut(&no) else { continue };
            if site.session == Some(id) {
                site.session = None;
            }
            if self.asks_by(no, id) {
                self.fail_fetch(no, Failure::passing(lost()));
            }
            self.dirty_sites.insert(no);
        }
        let incarnation = session.remote.incarnation;
        let Some(peer) = self.peers.get_mut(&incarnation) else { return };
        peer.sessions.retain(|known| *known != id);
        if peer.sessions.is_empty() && peer.seen {
            peer.alone = Some(self.now);
        }
        if peer.meets_by(id) {
            self.fail_meeting(incarnation, Failure::passing(lost()));
        }
        self.forget_answer_by(incarnation, id);
        self.unroute(incarnation);
        self.touch_peer(incarnation);
    }

    /// Whether a site's cards are being asked for by a session.
    fn asks_by(&self, no: SiteNo, id: SessionId) -> bool {
        self.sites.get(&no).is_some_and(|site| match &site.fetch {
            Fetch::Running(run) => run.asking.as_ref().is_some_and(|asking| asking.session == id),
            _ => false,
        })
    }

    pub(super) fn message(&mut self, id: SessionId, bytes: &[u8]) {
        let Some(session) = self.sessions.get(&id) else { return };
        let remote = session.remote.clone();
        let message = match Message::decode(bytes) {
            Ok(message) => message,
            Err(error) => {
                self.stats.malformed += 1;
                if let Some(suppressed) = self.warnings.pass(self.now) {
                    tracing::warn!(%remote, %error, suppressed, "a message could not be read");
                }
                let refusal = Refusal::new(&error, false);
                self.send(id, &Message::Refused { number: 0, refusal });
                return self.close(id);
            }
        };
        let incarnation = remote.incarnation;
        match message {
            Message::GetCards { number, engine, replica, version, offset } => {
                let engine = engine.into_string();
                let question = Question { number, engine, replica, version, offset };
                self.answer_question(id, question);
            }
            Message::Cards { number, life, version, lengths, offset, bytes } => {
                self.take_cards(id, number, (life, version), lengths, offset, &bytes);
            }
            Message::Meet { number, to, backend, offer, card } => {
                self.asked_to_meet(
                    &remote,
                    super::answer::Request {
                        number,
                        session: id,
                        to,
                        backend: backend.into_string(),
                        offer,
                        card,
                    },
                );
            }
            Message::MeetReply { number, reply } => {
                self.take_reply(incarnation, id, number, reply);
            }
            Message::MeetCompletion { number, completion } => {
                self.take_completion(incarnation, id, number, completion);
            }
            Message::Finished { number } => self.take_finished(incarnation, number),
            Message::Refused { number, refusal } => {
                self.take_refusal(id, &remote, number, &refusal)
            }
            Message::Changed => self.cards_are_old(id),
            Message::Parted => self.parted(incarnation),
            Message::Bye => {
                match remote.rank {
                    Some(_) => self.gone(incarnation, GoneReason::Bye),
                    None => self.cards_are_old(id),
                }
                self.close(id);
                let peer = self.peers.get(&incarnation);
                let others = peer.map(|peer| peer.sessions.clone()).unwrap_or_default();
                others.into_iter().for_each(|session| self.close(session));
            }
        }
    }

    /// Whoever serves cards by this session has others now, or none.
    fn cards_are_old(&mut self, id: SessionId) {
        if self.broken(Fault::IgnoresChanges) {
            return;
        }
        let sites = self.sessions.get(&id).map(|session| session.sites.clone());
        for no in sites.into_iter().flatten() {
            let known = self.sites.get_mut(&no).and_then(|site| site.known.as_mut());
            if let Some(known) = known {
                known.suspect = true;
            }
            self.dirty_sites.insert(no);
        }
    }

    /// Something that was asked is refused, or, without a number, the whole session.
    fn take_refusal(&mut self, id: SessionId, remote: &Remote, number: u64, refusal: &Refusal) {
        let failure = || {
            let error = refusal.to_error().with_context("peer", remote);
            if refusal.later { Failure::passing(error) } else { Failure::permanent(error) }
        };
        if number == 0 {
            // It is the session that is refused: with all that is asked by it.
            let sites = self.sessions.get(&id).map(|session| session.sites.clone());
            for no in sites.into_iter().flatten() {
                if self.asks_by(no, id) {
                    self.fail_fetch(no, failure());
                }
            }
        }
        let failure = failure();
        if let Some(no) = self.asking_site(id, number) {
            return self.fail_fetch(no, failure);
        }
        if number == 0
            && let Some(suppressed) = self.warnings.pass(self.now)
        {
            let error = &failure.error;
            tracing::warn!(peer = %remote, %error, suppressed, "the peer refuses this side");
        }
        let incarnation = remote.incarnation;
        let Some(peer) = self.peers.get(&incarnation) else { return };
        if peer.is_attempt(number) || (number == 0 && peer.is_meeting()) {
            self.fail_meeting(incarnation, failure);
        }
    }
}

/// What whoever waits for an address is told. What the channel says of it has the address, too, and a remedy: each is said once.
fn not_reached(address: &Address, why: &Error) -> Error {
    let message = format!("the address cannot be reached: {}", why.message());
    let mut error = Error::peer("peers.dial", message)
        .with_kind(why.kind())
        .with_context("address", address)
        .with_retry(if Failure::is_permanent(why) { Retry::Never } else { Retry::Backoff });
    if let Some(code) = why.native() {
        error = error.with_native(code);
    }
    match why.remedy() {
        Some(remedy) => error.with_remedy(remedy.to_owned()),
        None => error,
    }
}
