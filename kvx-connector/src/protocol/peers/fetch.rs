//! Fetching the cards of an engine: asked for part by part, looked at head first, and put in place of what was known.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::card::{Card, CardHead};
use kvx_core::facts::Facts;
use kvx_core::id::Incarnation;
use kvx_core::wire::Text;
use kvx_core::{Error, ErrorKind, Result, Retry};

use super::io::{GoneReason, Place, Remote, SessionId};
use super::message::Message;
use super::route::{Course, Role};
use super::site::{Asking, Fetch, FetchRun, Known, SiteNo, Way};
use super::{Failure, Fault, Limits, Peers, User};

const OPERATION: &str = "peers.cards";

/// Cards of which a part is there.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    version: Option<(Incarnation, u64)>,
    lengths: Vec<u32>,
    bytes: Vec<u8>,
}

/// What a part of the cards has brought.
#[derive(Debug)]
enum Added {
    /// More is needed.
    Part,
    /// Nothing new: a part that was there, or is not next.
    Nothing,
    /// They are all there.
    Whole,
}

impl Assembly {
    fn offset(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn add(
        &mut self,
        version: (Incarnation, u64),
        lengths: Vec<u32>,
        offset: u64,
        part: &[u8],
        limits: &Limits,
        max_card: usize,
    ) -> Result<Added> {
        let total: u64 = lengths.iter().map(|length| u64::from(*length)).sum();
        if self.version != Some(version) {
            if lengths.is_empty() || lengths.len() > limits.ranks {
                return Err(Error::peer(OPERATION, "not a number of ranks that is taken")
                    .with_context("ranks", lengths.len())
                    .with_context("limit", limits.ranks));
            }
            let long = |length: &&u32| usize::try_from(**length).map_or(true, |l| l > max_card);
            let longest = lengths.iter().find(long);
            if longest.is_some() || total > limits.cards_bytes as u64 {
                return Err(Error::peer(OPERATION, "the cards are too long")
                    .with_context("bytes", total)
                    .with_context("limit", limits.cards_bytes)
                    .with_context("limit_of_one", max_card));
            }
            *self = Self { version: Some(version), lengths, bytes: Vec::new() };
        } else if lengths != self.lengths {
            return Err(Error::peer(OPERATION, "one version of the cards has two lengths"));
        }
        if offset != self.offset() || part.is_empty() {
            return Ok(Added::Nothing);
        }
        if offset + part.len() as u64 > total {
            return Err(Error::peer(OPERATION, "more bytes of cards than were announced")
                .with_context("bytes", offset + part.len() as u64)
                .with_context("announced", total));
        }
        self.bytes.extend_from_slice(part);
        Ok(if self.offset() == total { Added::Whole } else { Added::Part })
    }

    /// The cards, one by one.
    fn cards(&self) -> Vec<&[u8]> {
        let mut rest = &*self.bytes;
        let cut = |length: &u32| {
            let (card, after) = rest.split_at((*length as usize).min(rest.len()));
            rest = after;
            card
        };
        self.lengths.iter().map(cut).collect()
    }
}

impl Peers {
    /// Begins an attempt: its turn has come.
    pub(super) fn begin_fetch(&mut self, no: SiteNo) {
        let now = self.now;
        let Some(site) = self.sites.get_mut(&no) else { return };
        let (deadline, young) = (now + self.limits.attempt, Some(now + self.limits.young));
        site.fetch = Fetch::Running(FetchRun { began: now, deadline, young, asking: None });
        self.young += 1;
        self.stats.fetches += 1;
        let address = site.key.address.clone();
        // Somebody speaks of another life: the session that the cards came by may be dead without anybody having noticed.
        let life = site.known.as_ref().map(|known| known.life);
        let wants = site.waiters.iter().filter_map(|id| self.wants.get(id)?.life);
        if life.is_some_and(|life| wants.into_iter().any(|wanted| wanted != life)) {
            site.session = None;
            self.dialled.remove(&address);
        }
        let session = site.session;
        match session.or_else(|| self.dial(&address, User::Site(no))) {
            Some(session) => self.ask_for_cards(no, session),
            None => self.set_site_timer(no),
        }
    }

    /// A session with whoever is at the site's address.
    pub(super) fn ask_for_cards(&mut self, no: SiteNo, session: SessionId) {
        let number = self.number();
        let again = self.now + self.limits.again;
        let Some(remote) = self.sessions.get(&session).map(|session| session.remote.clone()) else {
            return;
        };
        let Some(site) = self.sites.get_mut(&no) else { return };
        let wanted = &site.key.engine;
        if remote.incarnation == self.local.incarnation {
            let error = Error::config("peers", "the address is this side's own")
                .with_context("engine", wanted)
                .with_remedy("check the address that the engine publishes");
            self.fail_fetch(no, Failure::permanent(error));
            return self.close_unused(session);
        }
        if remote.engine != *wanted {
            let sides = (("the request", wanted), ("who answers", &remote.engine));
            let error = Error::mismatch_between("peers", "engine", sides.0, sides.1)
                .with_kind(ErrorKind::Peer)
                .with_remedy("check the address that the engine publishes");
            self.fail_fetch(no, Failure::permanent(error));
            return self.close_unused(session);
        }
        let Fetch::Running(run) = &mut site.fetch else { return };
        site.session = Some(session);
        run.asking = Some(Asking { session, number, again, assembly: Assembly::default() });
        if let Some(session) = self.sessions.get_mut(&session) {
            session.sites.insert(no);
        }
        self.put_question(no);
    }

    /// Asks for the cards from where they are missing on.
    pub(super) fn put_question(&mut self, no: SiteNo) {
        let again = self.now + self.limits.again;
        let Some(site) = self.sites.get_mut(&no) else { return };
        let Fetch::Running(FetchRun { asking: Some(asking), .. }) = &mut site.fetch else { return };
        asking.again = again;
        let offset = asking.assembly.offset();
        let version = match offset {
            0 => site.known.as_ref().map(|known| (known.life, known.version)),
            _ => asking.assembly.version,
        };
        let Ok(engine) = Text::new(site.key.engine.as_str()) else { return };
        let question = Message::GetCards {
            number: asking.number,
            engine,
            replica: site.key.replica,
            version,
            offset,
        };
        let session = asking.session;
        self.send(session, &question);
        self.set_site_timer(no);
    }

    /// A part of the cards came.
    pub(super) fn take_cards(
        &mut self,
        session: SessionId,
        number: u64,
        version: (Incarnation, u64),
        lengths: Vec<u32>,
        offset: u64,
        part: &[u8],
    ) {
        let Some(no) = self.asking_site(session, number) else { return };
        let Some(site) = self.sites.get_mut(&no) else { return };
        let Fetch::Running(run) = &mut site.fetch else { return };
        let Some(asking) = &mut run.asking else { return };
        let known = site.known.as_mut().filter(|known| (known.life, known.version) == version);
        if let Some(known) = known.filter(|_| part.is_empty() && offset == 0) {
            (known.asked, known.suspect) = (run.began, false);
            return self.end_fetch(no);
        }
        let max = self.reader.max_bytes;
        match asking.assembly.add(version, lengths, offset, part, &self.limits, max) {
            Ok(Added::Nothing) => {}
            Ok(Added::Part) => self.put_question(no),
            Ok(Added::Whole) => {
                let (assembly, began) = (std::mem::take(&mut asking.assembly), run.began);
                match self
                    .examine(no, &assembly)
                    .and_then(|cards| self.adopt(no, version, cards, began))
                {
                    Ok(()) => self.end_fetch(no),
                    Err(failure) => self.fail_fetch(no, failure),
                }
            }
            Err(error) => self.fail_fetch(no, Failure::permanent(error)),
        }
    }

    /// The site that has put this question.
    pub(super) fn asking_site(&self, session: SessionId, number: u64) -> Option<SiteNo> {
        let asks = |no: &&SiteNo| match self.sites.get(no).map(|site| &site.fetch) {
            Some(Fetch::Running(FetchRun { asking: Some(asking), .. })) => {
                (asking.session, asking.number) == (session, number)
            }
            _ => false,
        };
        self.sessions.get(&session)?.sites.iter().find(asks).copied()
    }

    fn end_fetch(&mut self, no: SiteNo) {
        let Some(site) = self.sites.get_mut(&no) else { return };
        if let Fetch::Running(run) = &site.fetch {
            self.young -= usize::from(run.young.is_some());
        }
        (site.fetch, site.failures, site.error) = (Fetch::Idle, 0, None);
        self.dirty_sites.insert(no);
    }

    /// Looks at the heads of all cards before anything else in them is decoded.
    fn examine(&self, no: SiteNo, assembly: &Assembly) -> Result<Vec<Arc<Card>>, Failure> {
        let Some(site) = self.sites.get(&no) else { return Ok(Vec::new()) };
        let key = &site.key;
        let cards = assembly.cards();
        let heads = cards.iter().map(|card| self.reader.peek(card)).collect::<Result<Vec<_>>>();
        let heads: Vec<CardHead> = heads.map_err(Failure::permanent)?;
        let role = site.waiters.first().and_then(|id| self.wants.get(id)).map(|want| want.role);
        let mut lives = BTreeSet::new();
        for (rank, head) in heads.iter().enumerate() {
            let identity = head.identity();
            identity
                .expect_engine(key.engine.as_str(), &key.address)
                .map_err(Failure::permanent)?;
            let (theirs, ours) = (head.facts(), &self.local.facts);
            match role {
                Some(Role::Producer) => Facts::check(ours, theirs),
                _ => Facts::check(theirs, ours),
            }
            .map_err(|error| Failure::permanent(error.with_context("engine", &key.engine)))?;
            let (place, grid) = (Place::from(&identity.coords), identity.coords.grid);
            let wanted =
                Place { replica: key.replica, rank: u32::try_from(rank).unwrap_or(u32::MAX) };
            let same = heads[0].identity().coords.grid == grid;
            if place != wanted || !same || (grid.tp * grid.pp) as usize != heads.len() {
                let error = Error::peer(OPERATION, "not one card for each rank of the replica")
                    .with_context("wanted", wanted)
                    .with_context("found", place)
                    .with_context("grid", grid)
                    .with_context("cards", heads.len());
                return Err(Failure::permanent(error));
            }
            if !lives.insert(identity.incarnation) {
                let error = Error::peer(OPERATION, "two ranks have one incarnation")
                    .with_context("incarnation", identity.incarnation);
                return Err(Failure::permanent(error));
            }
            let itself = identity.incarnation == self.local.incarnation;
            let other = self.superseded_by(identity.incarnation);
            if itself || other.is_some() {
                let mut error = Error::peer(OPERATION, "the cards are old, or two engines have one name: another one is in this one's place")
                    .with_context("refused", Remote {
                        engine: identity.engine.clone(),
                        incarnation: identity.incarnation,
                        rank: Some(place),
                    })
                    .with_remedy(super::links::ONE_NAME);
                if let Some(other) = other {
                    error = error.with_context("in_its_place", other);
                }
                return Err(Failure::passing(error));
            }
        }
        let decode = |bytes: &&[u8]| self.reader.decode(bytes).map(Arc::new);
        cards.iter().map(decode).collect::<Result<_>>().map_err(Failure::permanent)
    }

    /// Puts these cards in place of what was known of the engine. What no longer is, is ended first.
    fn adopt(
        &mut self,
        no: SiteNo,
        (life, version): (Incarnation, u64),
        cards: Vec<Arc<Card>>,
        asked: Duration,
    ) -> Result<(), Failure> {
        let Some(site) = self.sites.get_mut(&no) else { return Ok(()) };
        let (engine, replica) = (site.key.engine.clone(), site.key.replica);
        let mut changed = Vec::new();
        for card in &cards {
            let incarnation = card.identity().incarnation;
            let known = self.peers.get(&incarnation).and_then(|peer| peer.card.as_ref());
            if known.is_some_and(|known| known != card) {
                changed.push(incarnation);
            }
        }
        // A card is hearsay: it ends no life that is heard of by a session of its own.
        let place = |rank| Place { replica, rank };
        let old = self.places.range((engine.clone(), place(0))..=(engine, place(u32::MAX)));
        let replaced = |(at, incarnation): &(&(_, Place), &Incarnation)| {
            let card = cards.get(at.1.rank as usize);
            let same = card.is_some_and(|card| card.identity().incarnation == **incarnation);
            !same && self.peers.get(incarnation).is_some_and(|peer| peer.sessions.is_empty())
        };
        let old: Vec<Incarnation> =
            old.filter(replaced).map(|(_, incarnation)| *incarnation).collect();
        if !self.broken(Fault::KeepsOldLife) {
            // These cards may be those of a life before it: it may come back.
            old.into_iter().for_each(|incarnation| self.gone(incarnation, GoneReason::Unlisted));
        }
        if !self.broken(Fault::IgnoresChanges) {
            changed.into_iter().for_each(|incarnation| self.gone(incarnation, GoneReason::Changed));
        }
        self.drop_known(no);
        if let Some(site) = self.sites.get_mut(&no) {
            let ways = [Way::Unknown, Way::Unknown];
            site.known = Some(Known { life, version, cards, asked, suspect: false, ways });
        }
        Ok(())
    }

    /// Works out what this rank has to do with the engine at a site, once, and enters the ranks that it needs.
    pub(super) fn chart(&mut self, no: SiteNo, role: Role) -> Result<()> {
        let Some(rank) = &self.local.rank else { return Ok(()) };
        let Some(site) = self.sites.get_mut(&no) else { return Ok(()) };
        let Some(known) = &mut site.known else { return Ok(()) };
        if !matches!(known.ways[role as usize], Way::Unknown) {
            return Ok(());
        }
        let (own, rotation) = (rank.coords.replica_index() as usize, rank.coords.dp);
        let course = Course::new(role, &rank.layouts, own, rotation, &known.cards)
            .map_err(|error| error.with_context("engine", &site.key.engine))?;
        let mut ranks: Vec<usize> = course.links.iter().map(|(rank, _)| *rank).collect();
        ranks.extend(course.confirms.iter().map(|(rank, _)| *rank));
        let cards: Vec<_> = ranks.iter().map(|rank| Arc::clone(&known.cards[*rank])).collect();
        known.ways[role as usize] = Way::Course(Arc::new(course));
        for card in cards {
            if !self.enter_by_card(no, &card) {
                if let Some(known) = self.sites.get_mut(&no).and_then(|site| site.known.as_mut()) {
                    known.ways[role as usize] = Way::Unknown;
                }
                return Err(Error::new(ErrorKind::Resources, "peers", "too many peers")
                    .with_context("limit", self.limits.peers)
                    .with_retry(Retry::Backoff));
            }
        }
        Ok(())
    }

    /// Has the cards of a peer's engine fetched again before they are used, and not before this moment.
    pub(super) fn suspect(&mut self, incarnation: Incarnation, not_before: Duration) {
        let Some(peer) = self.peers.get(&incarnation) else { return };
        for no in &peer.sites {
            let Some(site) = self.sites.get_mut(no) else { continue };
            site.not_before = site.not_before.max(not_before);
            if let Some(known) = &mut site.known {
                known.suspect = true;
            }
            self.dirty_sites.insert(*no);
        }
    }
}
