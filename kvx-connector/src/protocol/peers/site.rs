//! An address at which an engine is said to be, who waits for it, and what is known of it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::card::{Address, Card, EngineName};
use kvx_core::id::Incarnation;
use kvx_core::{Error, Retry};

use super::fetch::Assembly;
use super::io::{Output, SessionId, WantId};
use super::route::{Course, Route};
use super::want::Judged;
use super::{Failure, Fault, Peers, Timer, User};

/// Number of a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SiteNo(pub(super) u64);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SiteKey {
    pub(super) engine: EngineName,
    pub(super) replica: u32,
    pub(super) address: Address,
}

#[derive(Debug)]
pub(super) struct Site {
    pub(super) key: SiteKey,
    pub(super) waiters: BTreeSet<WantId>,
    pub(super) fetch: Fetch,
    pub(super) failures: u32,
    /// Not asked again before.
    pub(super) not_before: Duration,
    pub(super) error: Option<Arc<Error>>,
    /// When a limit left nothing for the last attempt to fetch its cards.
    pub(super) starved: Option<Duration>,
    /// With whoever serves the cards.
    pub(super) session: Option<SessionId>,
    pub(super) known: Option<Known>,
}

impl Site {
    /// How many ranks its engine's replica has, as far as that is known.
    pub(super) fn ranks(&self) -> usize {
        self.known.as_ref().map_or(0, |known| known.cards.len())
    }
}

/// How far the fetching of cards is.
#[derive(Debug)]
pub(super) enum Fetch {
    /// There is nothing to do.
    Idle,
    /// It waits for its turn.
    Queued,
    /// It is under way: one at a time.
    Running(FetchRun),
    /// It failed, and is repeated then if somebody still waits.
    Pausing(Duration),
    /// It was refused for a reason that does not change by itself; this is what is told until then.
    Refused(Duration, Arc<Error>),
}

#[derive(Debug)]
pub(super) struct FetchRun {
    pub(super) began: Duration,
    pub(super) deadline: Duration,
    /// It counts among the young ones until then.
    pub(super) young: Option<Duration>,
    /// `None` while the address is dialled.
    pub(super) asking: Option<Asking>,
}

#[derive(Debug)]
pub(super) struct Asking {
    pub(super) session: SessionId,
    pub(super) number: u64,
    pub(super) again: Duration,
    pub(super) assembly: Assembly,
}

/// What one life of an engine's replica is.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) life: Incarnation,
    pub(super) version: u64,
    pub(super) cards: Vec<Arc<Card>>,
    /// When these cards were asked for.
    pub(super) asked: Duration,
    /// Something does not fit any more: to be asked for again before it is used.
    pub(super) suspect: bool,
    pub(super) ways: [Way; 2],
}

/// What is to be done with it in one role.
#[derive(Debug, Default)]
pub(super) enum Way {
    /// Nobody has asked.
    #[default]
    Unknown,
    /// Peers are being met, or were lost.
    Course(Arc<Course>),
    /// All is there.
    Route(Arc<Course>, Arc<Route>),
    /// The two engines do not fit.
    Refused(Duration, Arc<Error>),
}

impl Way {
    pub(super) fn course(&self) -> Option<&Arc<Course>> {
        match self {
            Self::Course(course) | Self::Route(course, _) => Some(course),
            Self::Unknown | Self::Refused(..) => None,
        }
    }
}

impl Peers {
    /// The site of this key, a new one if there is room.
    pub(super) fn site(&mut self, key: SiteKey) -> Option<SiteNo> {
        if let Some(no) = self.site_numbers.get(&key) {
            return Some(*no);
        }
        if self.sites.len() >= self.limits.sites {
            let idle = |site: &Site| site.waiters.is_empty() && site.known.is_none();
            let (no, _) = self.sites.iter().find(|(_, site)| idle(site))?;
            self.remove_site(*no);
        }
        let no = SiteNo(self.number());
        self.site_numbers.insert(key.clone(), no);
        let site = Site {
            key,
            waiters: BTreeSet::new(),
            fetch: Fetch::Idle,
            failures: 0,
            not_before: Duration::ZERO,
            error: None,
            starved: None,
            session: None,
            known: None,
        };
        self.sites.insert(no, site);
        Some(no)
    }

    /// Does what is to be done for whoever waits at a site, and forgets it when nobody does and nothing is known.
    pub(super) fn advance_site(&mut self, no: SiteNo) {
        let now = self.now;
        let Some(site) = self.sites.get_mut(&no) else { return };
        if let Fetch::Refused(until, error) = &site.fetch {
            if now >= *until {
                site.fetch = Fetch::Idle;
            } else if !site.waiters.is_empty() {
                let (error, all) = (Arc::clone(error), std::mem::take(&mut site.waiters));
                all.into_iter().for_each(|id| self.fail_want(id, Arc::clone(&error)));
            }
        }
        let Some(site) = self.sites.get_mut(&no) else { return };
        if let Some(known) = &mut site.known {
            for way in &mut known.ways {
                if matches!(way, Way::Refused(until, _) if now >= *until) {
                    (*way, known.suspect) = (Way::Unknown, true);
                }
            }
        }
        let waiters: Vec<WantId> = site.waiters.iter().copied().collect();
        if waiters.is_empty() {
            return self.rest_site(no);
        }
        let mut fetch = false;
        let mut judged = [None, None];
        for id in waiters {
            match self.judge(no, id, &mut judged) {
                Judged::Fetch => fetch = true,
                Judged::Wait => {}
                Judged::Fail(error) => self.fail_want(id, error),
                Judged::Ready(route) => {
                    self.unwant(id);
                    self.stats.ready += 1;
                    self.out.push(Output::Ready { want: id, route });
                }
            }
        }
        let Some(site) = self.sites.get_mut(&no) else { return };
        if fetch && matches!(site.fetch, Fetch::Idle) {
            if now < site.not_before {
                site.fetch = Fetch::Pausing(site.not_before);
            } else {
                site.fetch = Fetch::Queued;
                self.queue.push(User::Site(no), site.failures > 0);
            }
        }
        self.set_site_timer(no);
    }

    /// Nobody waits here.
    fn rest_site(&mut self, no: SiteNo) {
        let Some(site) = self.sites.get_mut(&no) else { return };
        if matches!(site.fetch, Fetch::Queued | Fetch::Pausing(_)) {
            site.fetch = Fetch::Idle;
        }
        let alive = |card: &Arc<Card>| {
            self.peers.get(&card.identity().incarnation).is_some_and(super::peer::Peer::is_seen)
        };
        let useless = |known: &Known| known.suspect || !known.cards.iter().any(alive);
        if site.known.as_ref().is_some_and(useless) {
            self.drop_known(no);
        }
        let Some(site) = self.sites.get(&no) else { return };
        if site.known.is_none() && matches!(site.fetch, Fetch::Idle) {
            return self.remove_site(no);
        }
        self.set_site_timer(no);
    }

    /// Forgets what is known of the engine at a site. Its peers stay, as far as they live.
    pub(super) fn drop_known(&mut self, no: SiteNo) {
        let known = self.sites.get_mut(&no).and_then(|site| site.known.take());
        for card in known.iter().flat_map(|known| &known.cards) {
            let incarnation = card.identity().incarnation;
            if let Some(peer) = self.peers.get_mut(&incarnation) {
                peer.sites.remove(&no);
                self.dirty_peers.insert(incarnation);
            }
        }
    }

    pub(super) fn remove_site(&mut self, no: SiteNo) {
        self.drop_known(no);
        let Some(site) = self.sites.remove(&no) else { return };
        self.site_numbers.remove(&site.key);
        self.timers.set(Timer::Site(no), None);
        if let Fetch::Running(run) = &site.fetch {
            self.young -= usize::from(run.young.is_some());
        }
        self.leave_dial(&site.key.address, User::Site(no));
        if let Some(session) = site.session {
            self.leave_session(session, no);
        }
    }

    pub(super) fn set_site_timer(&mut self, no: SiteNo) {
        let Some(site) = self.sites.get(&no) else { return };
        let fetch = match &site.fetch {
            Fetch::Idle | Fetch::Queued => None,
            Fetch::Running(run) => {
                let again = run.asking.as_ref().map(|asking| asking.again);
                [run.young, again].into_iter().flatten().chain([run.deadline]).min()
            }
            Fetch::Pausing(until) | Fetch::Refused(until, _) => Some(*until),
        };
        let ways = site.known.iter().flat_map(|known| &known.ways).filter_map(|way| match way {
            Way::Refused(until, _) => Some(*until),
            _ => None,
        });
        self.timers.set(Timer::Site(no), ways.chain(fetch).min());
    }

    /// A fetch came to nothing.
    pub(super) fn fail_fetch(&mut self, no: SiteNo, failure: Failure) {
        let Some(site) = self.sites.get_mut(&no) else { return };
        if let Fetch::Running(run) = &site.fetch {
            self.young -= usize::from(run.young.is_some());
        }
        self.stats.count_failure(&failure.error);
        site.failures = site.failures.saturating_add(1);
        let failures = site.failures;
        let address = site.key.address.clone();
        let is_named = failure.error.context().iter().any(|(_, said)| *said == address.to_string());
        let error = match is_named {
            true => Arc::new(failure.error),
            false => Arc::new(failure.error.with_context("at", &address)),
        };
        let pause = self.now + self.pause(failures);
        let never = self.broken(Fault::NeverRetries);
        let Some(site) = self.sites.get_mut(&no) else { return };
        site.starved = Failure::is_starved(&error).then_some(self.now);
        site.error = Some(Arc::clone(&error));
        site.fetch = match failure.permanent {
            true => Fetch::Refused(self.now + self.limits.refusal, error),
            false if never => Fetch::Pausing(Duration::MAX),
            false => Fetch::Pausing(pause),
        };
        self.leave_dial(&address, User::Site(no));
        self.dirty_sites.insert(no);
    }

    /// Something of a site is due.
    pub(super) fn site_time(&mut self, no: SiteNo) {
        let now = self.now;
        self.dirty_sites.insert(no);
        let Some(site) = self.sites.get_mut(&no) else { return };
        match &mut site.fetch {
            Fetch::Pausing(until) if now >= *until => site.fetch = Fetch::Idle,
            Fetch::Running(run) if now >= run.deadline => {
                let what = match run.asking {
                    Some(_) => "the cards did not come in time",
                    None => "the address was not reached in time",
                };
                let error = Error::peer("peers.cards", what).with_retry(Retry::Backoff);
                self.fail_fetch(no, Failure::passing(error));
            }
            Fetch::Running(run) => {
                if run.young.is_some_and(|until| now >= until) {
                    run.young = None;
                    self.young -= 1;
                }
                if run.asking.as_ref().is_some_and(|asking| now >= asking.again) {
                    self.put_question(no);
                }
            }
            _ => {}
        }
    }
}
