//! Which engines and ranks there are, and how this rank comes to be connected with those that it needs.
//!
//! [`Peers`] is a machine at one rank, or at a scheduler that only serves its engine's cards. Callers [`Want`] an engine and
//! are given a [`Route`] to it: whom to read from or write to, by which plan, and whom to tell. The control channel tells
//! of sessions and messages, whoever runs the ports tells what became of a backend's steps, and all that is to be done comes
//! out. Several ranks, each with such a machine, come to know each other by [`Message`]s, which sessions carry as bytes.
//!
//! # States
//!
//! **A site** is an address at which an engine's replica is said to be. One attempt to fetch its cards serves all who wait.
//!
//! | fetching | |
//! |---|---|
//! | idle | nobody waits, or what is known is fresh |
//! | queued | it waits for its turn: only so many attempts are young at a time |
//! | running | the address is dialled, then its cards are asked for part by part |
//! | pausing | it failed; once more after a pause that doubles, if somebody waits |
//! | refused | by a fact, a version, a name: whoever asks is told at once, until it is time to ask anew |
//!
//! Of a site may be *known*: a life of the engine, its cards, and for each [`Role`] nothing yet, a course (pairing, plans), a
//! route (all its peers are connected), or a refusal. What is known is used while the session it came by is up; otherwise
//! it is asked for again, and the answer may be that nothing has changed. It becomes
//! *suspect*, and is asked for again, when the engine says so, a rank is gone, or a rank is not found where its card says.
//!
//! **A peer** is one life of one rank, known by a card or by a session. It has sessions, at most one connection, at most one
//! attempt of this side's and one answer to its own:
//!
//! | this side's attempt | |
//! |---|---|
//! | idle, queued, pausing, refused | as above |
//! | running: dialling | its control address; who answers must be the rank of the card |
//! | offering, asking, completing | the backend's step, the peer's answer, the backend's step |
//! | settling | the peer's regions are added, and it says that it has finished |
//! | adding | it was connected by its own wish; only regions are missing |
//!
//! | answer to the peer's | |
//! |---|---|
//! | held | an earlier connection with it is ending |
//! | accepting, replied, finishing, adding | the backend's step, its completion awaited, the backend's steps |
//! | done | it was told so; a completion that comes again is answered again |
//!
//! | connection | |
//! |---|---|
//! | none | |
//! | half | the peer was accepted: only it may post |
//! | up | both may post; told of once all is there |
//!
//! A connection that breaks, or that the other side says is over, before it has lasted for [`Limits::proven`] counts as an attempt
//! that failed: the next one waits for the same pauses, and what it broke of is told to those who wait, at once where it does not
//! change by itself. Earlier failures are forgotten with a connection that has lasted.
//!
//! A limit that has left nothing for an attempt, of this process or of the peer (no descriptor), passes in a server under load, and
//! does not where it is too low: attempts go on after the usual pauses, and a want that has waited for [`Limits::starved`] is told of it
//! with the next attempt that fails of it, and not at its time.
//!
//! When both sides begin at once, both exchanges run to their end, and [`Handshake`](kvx_core::handshake::Handshake) gives one
//! connection.
//!
//! # Ends
//!
//! A peer is [`Gone`](Output::Gone): when another life of its rank is heard of by a session, or by a card while it has no session
//! itself; when its connection broke; when it says goodbye; when its card has changed; when it has had no session for
//! [`Limits::alone`]; when it is forgotten here. At that moment its connection is ended, its routes are no longer given, attempts and
//! answers are given up, and only then may anything be said of what comes in its place. A life that was replaced does not come back while
//! another is in its place: should it try, there are two engines of one name, and it is told so; once the other is gone, it is let in. One
//! that was lost may come back, and so may one that cards left out: they may have been on their way since before it began.
//!
//! # Invariants
//!
//! - Every want ends once, ready or failed, by its time. It fails of a limit only once it has waited for [`Limits::starved`], and of one
//!   that has left nothing since it came.
//! - At most one attempt per site and per peer is under way, whoever and however many want it.
//! - A route names only peers that have a session and, where bytes move, a connection; it is not given once one of them is gone.
//! - Every connection that a backend gave belongs to one peer or is ending, and is ended exactly once: by
//!   [`Disconnect`](Output::Disconnect) or [`Sever`](Output::Sever) (a `Sever` may follow a `Disconnect` that takes too long), also
//!   where its step was given up meanwhile. Only what the backend itself reported as over is not ended.
//! - No connection with a rank is begun while an earlier one with the same life is ending, or a step of one is not answered.
//! - What a session says counts for the rank that the session is authenticated for, and for no other.
//! - A mismatch refuses this engine alone, by field and both values, before more than the heads of its cards are read.
//! - All tables are bounded ([`Limits`]); what is over is forgotten.
//!
//! Both sides' clocks are never compared. The pauses' chance comes from [`Setup::seed`]; the same inputs give the same outputs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvx_core::card::{Address, CardReader, EngineName};
use kvx_core::id::Incarnation;
use kvx_core::layout::RankLayout;

mod answer;
mod config;
mod failure;
mod fault;
mod fetch;
mod forget;
mod io;
mod links;
mod meet;
mod message;
mod peer;
mod route;
mod serve;
mod sessions;
mod site;
mod status;
mod steps;
#[cfg(test)]
mod tests;
mod timers;
mod want;

pub use config::{Choosing, Chosen, Limits, Local, LocalRank, Setup};
pub use io::{
    Connection, GoneReason, Input, Output, Place, Remote, SessionId, Step, StepId, Stepped, Want,
    WantId,
};
pub use message::{BackendName, CardBytes, Disagreement, Message, Refusal, Words};
pub use route::{Confirm, Link, Role, Route};
pub use serve::OwnCards;
pub use status::{PeerState, PeerStatus, PeersStats};

use crate::observe::Quota;
use failure::Failure;
use fault::Fault;
use links::{Ending, Superseded};
use peer::{Attempt, Peer};
use sessions::Session;
use site::{Fetch, Site, SiteKey, SiteNo};
use timers::{Chance, Queue, Timers};
use want::Waiting;

/// The machine. See the [module documentation](self).
#[derive(Debug)]
pub struct Peers {
    local: Local,
    limits: Limits,
    reader: CardReader,
    choosing: Box<dyn Choosing>,
    chance: Chance,
    now: Duration,
    last_number: u64,
    closed: bool,
    stats: PeersStats,
    warnings: Quota,

    own_cards: OwnCards,
    own_version: u64,

    wants: BTreeMap<WantId, Waiting>,
    sites: BTreeMap<SiteNo, Site>,
    site_numbers: BTreeMap<SiteKey, SiteNo>,
    peers: BTreeMap<Incarnation, Peer>,
    /// Which life is in which place, of those that have been heard of.
    places: BTreeMap<(EngineName, Place), Incarnation>,
    superseded: BTreeMap<Incarnation, Superseded>,
    sessions: BTreeMap<SessionId, Session>,
    /// The newest session that was dialled, by address.
    dialled: BTreeMap<Address, SessionId>,
    /// Addresses that are being dialled, and for whom.
    dials: BTreeMap<Address, BTreeSet<User>>,
    choices: BTreeMap<Vec<String>, Arc<Chosen>>,

    steps: BTreeMap<StepId, StepOf>,
    connections: BTreeMap<Connection, Incarnation>,
    ending: BTreeMap<Connection, Ending>,
    /// Connections that broke before the step that gives them was answered.
    early_downs: BTreeSet<Connection>,
    /// Peers whose wish to meet is under way.
    answering: BTreeSet<Incarnation>,

    /// Attempts that are young.
    young: usize,
    queue: Queue<User>,
    timers: Timers<Timer>,
    dirty_sites: BTreeSet<SiteNo>,
    dirty_peers: BTreeSet<Incarnation>,
    out: Vec<Output>,
    #[cfg(test)]
    fault: Option<Fault>,
}

/// Who has something done that others may wait for, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum User {
    Site(SiteNo),
    Peer(Incarnation),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Want(WantId),
    Site(SiteNo),
    Peer(Incarnation),
    End(Connection),
}

/// A step that is to be answered.
#[derive(Clone, Copy, Debug)]
struct StepOf {
    peer: Incarnation,
    backend: &'static str,
}

impl Peers {
    /// Says the layouts of all ranks of its replica, in order, where [`Setup`] did not: before anything is wanted.
    pub fn set_replica(&mut self, layouts: Vec<RankLayout>) {
        if let Some(rank) = &mut self.local.rank {
            rank.layouts = layouts;
        }
    }

    /// A machine that knows nobody.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        let Setup { local, limits, reader, choosing, seed } = setup;
        Self {
            local,
            limits,
            reader,
            choosing,
            chance: Chance::new(seed),
            now: Duration::ZERO,
            last_number: 0,
            closed: false,
            stats: PeersStats::default(),
            warnings: Quota::new(10, Duration::from_secs(1)),
            own_cards: OwnCards::default(),
            own_version: 0,
            wants: BTreeMap::new(),
            sites: BTreeMap::new(),
            site_numbers: BTreeMap::new(),
            peers: BTreeMap::new(),
            places: BTreeMap::new(),
            superseded: BTreeMap::new(),
            sessions: BTreeMap::new(),
            dialled: BTreeMap::new(),
            dials: BTreeMap::new(),
            choices: BTreeMap::new(),
            steps: BTreeMap::new(),
            connections: BTreeMap::new(),
            ending: BTreeMap::new(),
            early_downs: BTreeSet::new(),
            answering: BTreeSet::new(),
            young: 0,
            queue: Queue::new(),
            timers: Timers::new(),
            dirty_sites: BTreeSet::new(),
            dirty_peers: BTreeSet::new(),
            out: Vec::new(),
            #[cfg(test)]
            fault: None,
        }
    }

    /// Takes what happened, and appends what is to be done to `out`, in order. `now` is the time of this process's monotonic
    /// clock; one that is earlier than before counts as before.
    pub fn step(&mut self, now: Duration, input: Input, out: &mut Vec<Output>) {
        self.now = self.now.max(now);
        match input {
            Input::Want(want) => self.want(want),
            Input::Unwant(id) => drop(self.unwant(id)),
            Input::Serve(cards) => self.serve(cards),
            Input::SessionUp { session, remote, dialled } => {
                self.session_up(session, remote, dialled);
            }
            Input::DialFailed { address, error } => self.dial_failed(&address, &error),
            Input::SessionDown { session, error } => self.session_down(session, error.as_ref()),
            Input::Message { session, bytes } => self.message(session, &bytes),
            Input::Stepped { step, result } => self.stepped(step, result),
            Input::PeerDown { connection, error } => self.peer_down(connection, error),
            Input::Forget(engine) => self.forget(Some(&engine)),
            Input::Close => {
                self.closed = true;
                self.forget(None);
            }
            Input::Tick => {}
        }
        self.settle();
        out.append(&mut self.out);
    }

    /// When to step next, if nothing happens before.
    #[must_use]
    pub fn wake(&self) -> Option<Duration> {
        self.timers.next()
    }

    /// The session by which to send something to a rank.
    #[must_use]
    pub fn session_of(&self, incarnation: Incarnation) -> Option<SessionId> {
        self.peers.get(&incarnation)?.sessions.last().copied()
    }

    /// Who is at the other end of a session.
    #[must_use]
    pub fn remote_of(&self, session: SessionId) -> Option<&Remote> {
        Some(&self.sessions.get(&session)?.remote)
    }

    /// Does all that follows from what happened and from what time it is.
    fn settle(&mut self) {
        loop {
            if let Some(incarnation) = self.dirty_peers.pop_first() {
                self.advance_peer(incarnation);
            } else if let Some(no) = self.dirty_sites.pop_first() {
                self.advance_site(no);
            } else if let Some(timer) = self.timers.due(self.now) {
                self.due(timer);
            } else if !self.begin_next() {
                break;
            }
        }
        if self.steps.is_empty() {
            self.early_downs.clear();
        }
    }

    fn due(&mut self, timer: Timer) {
        match timer {
            Timer::Want(id) => self.want_is_late(id),
            Timer::Site(no) => self.site_time(no),
            Timer::Peer(incarnation) => self.peer_time(incarnation),
            Timer::End(connection) => self.end_is_late(connection),
        }
    }

    /// Begins the next attempt, if there is one and room for it.
    fn begin_next(&mut self) -> bool {
        if self.young >= self.limits.young_attempts {
            return false;
        }
        let Some(user) = self.queue.pop() else { return false };
        match user {
            User::Site(no) => {
                if self.sites.get(&no).is_some_and(|site| matches!(site.fetch, Fetch::Queued)) {
                    self.begin_fetch(no);
                }
            }
            User::Peer(incarnation) => {
                let peer = self.peers.get(&incarnation);
                if peer.is_some_and(|peer| matches!(peer.attempt, Attempt::Queued)) {
                    self.begin_meeting(incarnation);
                }
            }
        }
        true
    }

    fn stepped(&mut self, id: StepId, result: Stepped) {
        let Some(of) = self.steps.remove(&id) else { return };
        let peer = self.peers.get(&of.peer);
        let meets = peer.is_some_and(|peer| match &peer.attempt {
            Attempt::Running(run) => run.phase.step() == Some(id),
            _ => false,
        });
        if meets {
            self.meeting_stepped(of.peer, &of, result);
        } else if peer.is_some_and(|peer| peer.answer.step() == Some(id)) {
            self.answer_stepped(of.peer, &of, result);
        } else {
            self.orphan(of.peer, of.backend, &result);
        }
        self.dirty_peers.insert(of.peer);
    }

    /// A number that was not given before.
    fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    fn pause(&mut self, failures: u32) -> Duration {
        self.chance.pause(failures, self.limits.first_pause, self.limits.longest_pause)
    }

    /// Whether a test has planted this fault.
    fn broken(&self, fault: Fault) -> bool {
        #[cfg(test)]
        return self.fault == Some(fault);
        #[cfg(not(test))]
        {
            let _ = fault;
            false
        }
    }
}
