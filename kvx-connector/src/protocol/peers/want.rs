//! Those who want an engine: what becomes of each.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::id::Incarnation;
use kvx_core::{Error, ErrorKind, Retry};

use super::io::{Output, Want, WantId};
use super::peer::Attempt;
use super::route::{Confirm, Link, Role, Route};
use super::site::{Fetch, SiteKey, SiteNo, Way};
use super::{Fault, Peers, Timer};

/// A want that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) site: SiteNo,
    pub(super) since: Duration,
    pub(super) life: Option<Incarnation>,
    pub(super) role: Role,
}

/// What is to become of a want, of all of a role where it does not say more.
#[derive(Clone)]
pub(super) enum Judged {
    Fetch,
    Wait,
    Ready(Arc<Route>),
    Fail(Arc<Error>),
}

impl Peers {
    pub(super) fn want(&mut self, want: Want) {
        self.stats.wants += 1;
        let refuse = |error: Error| Some(Arc::new(error));
        let error = if self.closed {
            refuse(Error::new(ErrorKind::Closed, "peers.want", "this side is closed"))
        } else if self.wants.contains_key(&want.id) {
            refuse(Error::misuse("peers.want", "this number is waiting already"))
        } else if self.local.rank.is_none() {
            refuse(Error::misuse("peers.want", "what is no rank meets nobody"))
        } else if self.wants.len() >= self.limits.wants {
            refuse(
                Error::new(ErrorKind::Resources, "peers.want", "too many wait")
                    .with_context("limit", self.limits.wants)
                    .with_retry(Retry::Backoff),
            )
        } else {
            None
        };
        if let Some(error) = error {
            return self.tell_failed(want.id, error);
        }
        let key =
            SiteKey { engine: want.engine, replica: want.replica, address: want.address.clone() };
        let Some(no) = self.site(key) else {
            let error = Error::new(ErrorKind::Resources, "peers.want", "too many engines")
                .with_context("limit", self.limits.sites)
                .with_retry(Retry::Backoff);
            return self.tell_failed(want.id, Arc::new(error));
        };
        let until = want.until.min(self.now + self.limits.longest_want);
        let (life, role) = (want.life, want.role);
        let waiting = Waiting { site: no, since: self.now, life, role };
        self.wants.insert(want.id, waiting);
        if !self.broken(Fault::WaitsForEver) {
            self.timers.set(Timer::Want(want.id), Some(until));
        }
        if let Some(site) = self.sites.get_mut(&no) {
            site.waiters.insert(want.id);
        }
        self.dirty_sites.insert(no);
    }

    /// Takes a want out, without a word.
    pub(super) fn unwant(&mut self, id: WantId) -> Option<Waiting> {
        let waiting = self.wants.remove(&id)?;
        self.timers.set(Timer::Want(id), None);
        if let Some(site) = self.sites.get_mut(&waiting.site) {
            site.waiters.remove(&id);
        }
        self.dirty_sites.insert(waiting.site);
        Some(waiting)
    }

    pub(super) fn fail_want(&mut self, id: WantId, error: Arc<Error>) {
        if self.unwant(id).is_some() {
            self.tell_failed(id, error);
        }
    }

    fn tell_failed(&mut self, want: WantId, error: Arc<Error>) {
        self.stats.failed += 1;
        self.out.push(Output::Failed { want, error });
    }

    /// Its time is over: says what held it up, as far as that is known.
    pub(super) fn want_is_late(&mut self, id: WantId) {
        let Some(waiting) = self.wants.get(&id) else { return };
        let Some(site) = self.sites.get(&waiting.site) else { return };
        let mut error = Error::peer("peers.want", "the engine was not met in time")
            .with_context("engine", &site.key.engine)
            .with_context("address", &site.key.address)
            .with_context("waited_ms", (self.now - waiting.since).as_millis())
            .with_retry(Retry::Backoff);
        let ranks = site.known.iter().flat_map(|known| &known.cards);
        let of_ranks = ranks.filter_map(|card| {
            self.peers.get(&card.identity().incarnation).and_then(|peer| peer.error.as_ref())
        });
        if let Some(last) = of_ranks.chain(&site.error).next() {
            error = error.with_kind(last.kind()).with_context("last_error", last);
        }
        self.fail_want(id, Arc::new(error));
    }

    /// What becomes of one that waits at this site.
    pub(super) fn judge(
        &mut self,
        no: SiteNo,
        id: WantId,
        judged: &mut [Option<Judged>; 2],
    ) -> Judged {
        match self.judge_by_cards(no, id, judged) {
            waits @ (Judged::Fetch | Judged::Wait) => {
                self.starves(no, id).map_or(waits, Judged::Fail)
            }
            ended => ended,
        }
    }

    /// What one that has waited for a while is told: a limit has left nothing for an attempt that was made since it came. Whoever comes
    /// later has another one made.
    fn starves(&self, no: SiteNo, id: WantId) -> Option<Arc<Error>> {
        let (want, site) = (self.wants.get(&id)?, self.sites.get(&no)?);
        if self.now < want.since + self.limits.starved {
            return None;
        }
        let since = |at: Option<Duration>| at.is_some_and(|at| at >= want.since);
        if matches!(site.fetch, Fetch::Pausing(_)) && since(site.starved) {
            return site.error.clone();
        }
        let known = site.known.as_ref()?;
        let course = known.ways[want.role as usize].course()?;
        course.links.iter().find_map(|(rank, _)| {
            let peer = self.peers.get(&known.cards[*rank].identity().incarnation)?;
            let starves = matches!(peer.attempt, Attempt::Pausing(_)) && since(peer.starved);
            starves.then(|| peer.error.clone()).flatten()
        })
    }

    /// What becomes of one, by what is known of the site.
    fn judge_by_cards(
        &mut self,
        no: SiteNo,
        id: WantId,
        judged: &mut [Option<Judged>; 2],
    ) -> Judged {
        let (Some(want), Some(site)) = (self.wants.get(&id), self.sites.get(&no)) else {
            return Judged::Wait;
        };
        let Some(known) = &site.known else { return Judged::Fetch };
        let recent = known.asked >= want.since;
        // Without the session nobody would say that the cards have changed.
        if known.suspect || !(recent || site.session.is_some()) {
            return Judged::Fetch;
        }
        if let Some(life) = want.life.filter(|life| *life != known.life) {
            if !recent {
                return Judged::Fetch;
            }
            let sides = (("the request", life), ("the engine", known.life));
            let error = Error::mismatch_between("peers", "life", sides.0, sides.1)
                .with_kind(ErrorKind::Peer)
                .with_context("engine", &site.key.engine)
                .with_context("address", &site.key.address)
                .with_remedy("the engine was started anew since: have the request prefilled again");
            return Judged::Fail(Arc::new(error));
        }
        let role = want.role;
        judged[role as usize].get_or_insert_with(|| self.look_for_route(no, role)).clone()
    }

    /// The route in this role, or why there is none, or that peers have to be met first.
    fn look_for_route(&mut self, no: SiteNo, role: Role) -> Judged {
        let refusal = self.now + self.limits.refusal;
        if let Err(error) = self.chart(no, role) {
            let error = Arc::new(error);
            let known = self.sites.get_mut(&no).and_then(|site| site.known.as_mut());
            if let Some(known) = known.filter(|_| error.retry() == Retry::Never) {
                known.ways[role as usize] = Way::Refused(refusal, Arc::clone(&error));
            }
            return Judged::Fail(error);
        }
        let Some(site) = self.sites.get(&no) else { return Judged::Wait };
        let Some(known) = &site.known else { return Judged::Wait };
        let course = match &known.ways[role as usize] {
            Way::Route(_, route) => return Judged::Ready(Arc::clone(route)),
            Way::Refused(_, error) => return Judged::Fail(Arc::clone(error)),
            Way::Unknown => return Judged::Wait,
            Way::Course(course) => Arc::clone(course),
        };
        let identity = |rank: usize| known.cards[rank].identity().incarnation;
        let ranks = course.links.iter().map(|(rank, _)| (*rank, true));
        let ranks = ranks.chain(course.confirms.iter().map(|(rank, _)| (*rank, false)));
        let mut missing = false;
        for (rank, linked) in ranks {
            let incarnation = identity(rank);
            let Some(peer) = self.peers.get(&incarnation) else { return Judged::Wait };
            if !peer.satisfied(linked) {
                if let Some(error) = peer.refused(self.now) {
                    return Judged::Fail(error);
                }
                missing = true;
                self.dirty_peers.insert(incarnation);
            }
        }
        if missing {
            return Judged::Wait;
        }
        let links = course.links.iter().filter_map(|(rank, plan)| {
            let peer = self.peers.get(&identity(*rank))?;
            Some(Link {
                rank: *rank,
                incarnation: identity(*rank),
                connection: peer.link.connection()?,
                card: Arc::clone(&known.cards[*rank]),
                plan: Arc::clone(plan),
            })
        });
        let confirms = course.confirms.iter().map(|(rank, hears)| Confirm {
            rank: *rank,
            incarnation: identity(*rank),
            hears: hears.clone(),
        });
        let route = Arc::new(Route {
            engine: site.key.engine.clone(),
            replica: site.key.replica,
            life: known.life,
            role,
            ranks: known.cards.len(),
            links: links.collect(),
            confirms: confirms.collect(),
        });
        if let Some(known) = self.sites.get_mut(&no).and_then(|site| site.known.as_mut()) {
            known.ways[role as usize] = Way::Route(course, Arc::clone(&route));
        }
        Judged::Ready(route)
    }
}
