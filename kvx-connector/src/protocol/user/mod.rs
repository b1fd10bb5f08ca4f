//! The user's side of leases, at one rank.
//!
//! A [`User`] is told what happened ([`Input`]) and what time it is, and says what is to be done ([`Output`]). Time is of its
//! own monotonic clock, and never goes back. Nonces follow from a number that is drawn at random when the process starts.
//!
//! # States of a request
//!
//! | state | until | then |
//! |---|---|---|
//! | *holding*: asked for, not admitted | `Begin` | active |
//! | *active* | every source is proven and every stage over | **ready** |
//! | *holding*, *active* | a source fails, the deadline passes, `Abort` | ending: everything is cancelled |
//! | *ending* | everything has settled and every stage is over | **failed** or **aborted** |
//! | | [`grace`](Config::grace) | peers with transfers that have not settled are severed |
//! | | [`sever_for`](Config::sever_for) after that | **failed** or **aborted**, *quarantined* |
//! | *quarantined* | everything has settled and every stage is over | `Unquarantined` |
//!
//! Each of its sources (ranks of the owner) is
//!
//! | state | in which | until |
//! |---|---|---|
//! | *open* | heartbeats are sent, and parts are transferred as they become known; perhaps a confirm of some is out | all has settled |
//! | *closing* | the last confirm is out, and sent again | the verdict |
//! | *proven* | it is done | |
//! | *failed* | nothing more is begun | |
//!
//! and each part at a source is *known*, in a stage *before*, *queued*, *flying*, in a stage *after*, *here*, or *lost*.
//!
//! # What each transition keeps
//!
//! - A source is proven only by a verdict with the nonce that was drawn after the last of its bytes had settled. The end of a
//!   lease that is heard of while a confirm is out decides nothing: its verdict does. (Promise 2.)
//! - Failed and aborted come after everything has settled, or quarantined. A writer releases a source only after everything
//!   that it posted there has settled, and posts nothing there before the owner has answered, or after its connection ended.
//!   (Promise 3.)
//! - *Holding* and *active* end at the deadline, *ending* at the latest by quarantine. (Promise 4.)
//! - What concerns one peer concerns only requests that have a source there. What a peer says is believed only of the source
//!   that it is. (Promise 6.)
//! - A source that is not proven is released at once (unless whoever asked goes on: [`Keeping::after_failure`]), so that its owner need not wait for the lease to expire. Releases
//!   outlive their request until they are answered, a bounded number of times.
//! - A full queue is no failure; a transfer that failed is tried again, a bounded number of times, while the lease is held.

mod config;
mod end;
mod flow;
mod hear;
mod release;
mod request;
mod terms;

pub use config::{Config, Counts};
pub use terms::{Ask, Input, Keeping, Outcome, Output, Prove, Route, Source, Unproven, Why};

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvx_core::id::Incarnation;

use super::id::{LeaseName, Part, Reader};
use super::plant::Plant;
#[cfg(any(test, feature = "sim"))]
use super::plant::Planted;
use super::terms::{Access, RequestNumber, StageNumber, TransferNumber};
use flow::Shared;
use release::Releases;
use request::{Phase, Request, State, Work};

/// The requests of one rank. See the [module documentation](self).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct User {
    /// Boxed, so that none is moved about in the tree as others come and go.
    requests: BTreeMap<RequestNumber, Box<Request>>,
    readers: BTreeMap<(LeaseName, Reader), RequestNumber>,
    peers: BTreeMap<Incarnation, Peer>,
    releases: Releases,
    due: BTreeSet<(Duration, RequestNumber)>,
    shared: Shared,
}

/// A peer that is needed, or can be reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Peer {
    ready: bool,
    /// Whether it was asked for, and no answer has come.
    needed: bool,
    /// Requests with a source there.
    requests: BTreeSet<RequestNumber>,
}

impl Peer {
    /// Asks for it, unless that was done.
    fn need(&mut self, peer: Incarnation, out: &mut Vec<Output>) {
        if !self.ready && !std::mem::replace(&mut self.needed, true) {
            out.push(Output::NeedPeer { peer });
        }
    }
}

impl User {
    /// A user without requests. `seed` is drawn at random for each process: nonces follow from it.
    #[must_use]
    pub fn new(config: Config, seed: u64) -> Self {
        Self {
            requests: BTreeMap::new(),
            readers: BTreeMap::new(),
            peers: BTreeMap::new(),
            releases: Releases::default(),
            due: BTreeSet::new(),
            shared: Shared::new(config, seed),
        }
    }

    /// The same with a fault.
    #[cfg(any(test, feature = "sim"))]
    #[must_use]
    pub fn with_fault(mut self, plant: Plant) -> Self {
        self.shared.planted = Planted::new(plant);
        self
    }

    /// Tells it what happened, and appends to `out` what is to be done, in this order.
    pub fn step(&mut self, now: Duration, input: Input, out: &mut Vec<Output>) {
        match input {
            Input::Ask(ask) => self.take(now, ask, out),
            Input::Begin { request } => {
                if let Some(it) = self.requests.get_mut(&request)
                    && it.state == State::Holding
                {
                    it.state = State::Active;
                    self.advance(now, request, out);
                }
            }
            Input::Publish { request, parts, total } => {
                self.publish(now, request, parts, total, out);
            }
            Input::Until { request, deadline } => {
                if let Some(it) = self.requests.get_mut(&request).filter(|it| it.is_alive()) {
                    it.deadline_at = now + deadline;
                    self.advance(now, request, out);
                }
            }
            Input::Abort { request } => self.abort(now, request, out),
            Input::PeerReady { peer } => self.peer_ready(now, peer, out),
            Input::PeerFailed { peer } => self.peer_lost(now, peer, Why::PeerFailed, out),
            Input::PeerDown { peer } => self.peer_lost(now, peer, Why::PeerDown, out),
            Input::PeerGone { peer } => self.peer_lost(now, peer, Why::PeerGone, out),
            Input::Message { peer, message } => self.hear(now, peer, message, out),
            Input::Settled { transfer, outcome } => self.settled(now, transfer, outcome, out),
            Input::StageDone { stage, ok } => self.stage_done(now, stage, ok, out),
            Input::Tick => {}
        }
        while let Some((at, request)) = self.due.first().copied()
            && at <= now
        {
            self.due.pop_first();
            if let Some(it) = self.requests.get_mut(&request) {
                it.due = None;
                self.lapse(now, request, out);
            }
        }
        self.releases.lapse(now, &mut self.shared, out);
    }

    /// When it wants to be told that time has passed, if nothing else happens before.
    #[must_use]
    pub fn wake(&self) -> Option<Duration> {
        let requests = self.due.first().map(|(at, _)| *at);
        requests.into_iter().chain(self.releases.wake()).min()
    }

    /// What it has counted.
    #[must_use]
    pub const fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// How many requests are not over, or quarantined.
    #[must_use]
    pub fn live(&self) -> usize {
        self.requests.len()
    }

    /// How many releases wait for their answer.
    #[must_use]
    pub fn releasing(&self) -> usize {
        self.releases.len()
    }

    /// Whether a peer is still to be told that it is not used any more.
    #[must_use]
    pub fn owes(&self, peer: Incarnation) -> bool {
        self.releases.has(peer)
    }

    /// Starts to count anew.
    #[cfg(any(test, feature = "sim"))]
    pub fn forget_counts(&mut self) {
        self.shared.counts = Counts::default();
    }

    fn take(&mut self, now: Duration, ask: Ask, out: &mut Vec<Output>) {
        let number = ask.request;
        let peers: BTreeSet<Incarnation> = ask.sources.iter().map(|source| source.peer).collect();
        let sound = peers.len() == ask.sources.len()
            && ask.sources.len() <= self.shared.config.max_sources.min(usize::from(u16::MAX))
            && ask.sources.iter().all(|source| source.set.contains(ask.reader.rank));
        let known = self.requests.contains_key(&number)
            || self.readers.contains_key(&(ask.lease, ask.reader));
        if !sound || known || self.requests.len() >= self.shared.config.max_requests {
            self.shared.counts.refused += 1;
            return out.push(Output::Refused { request: number });
        }
        self.shared.counts.asked += 1;
        self.readers.insert((ask.lease, ask.reader), number);
        let known: Vec<_> = ask
            .sources
            .iter()
            .map(|source| (source.peer, source.parts.clone(), source.total))
            .collect();
        let most = self.shared.config.hold_every;
        let every = ask.keeping.every.map_or(most, |every| every.min(most));
        let mut request = Request::new(ask, now, every);
        if self.shared.planted.has(Plant::DeadlineForgotten) {
            request.deadline_at = now + Duration::from_secs(1 << 30);
        }
        let mut wrong = None;
        for (at, (peer, parts, total)) in known.into_iter().enumerate() {
            if let Err(why) = request.learn(at, parts, total, self.shared.config.max_parts) {
                wrong = Some((at, why));
            }
            let entry = self.peers.entry(peer).or_default();
            entry.need(peer, out);
            entry.requests.insert(number);
            let late = request.access == Access::Read
                && request.state == State::Active
                && (request.sources[at].total.is_some() || !request.sources[at].data);
            let first = self.shared.config.hold_first.min(every);
            let wait = if late { first } else { Duration::ZERO };
            let source = &mut request.sources[at];
            source.linked = entry.ready;
            source.hold_at = now + wait;
        }
        self.requests.insert(number, Box::new(request));
        match wrong {
            Some((at, why)) => self.fail(now, number, Some(at), why, out),
            None => self.advance(now, number, out),
        }
    }

    /// Lets a request do what it can, and ends it where it is over.
    fn advance(&mut self, now: Duration, number: RequestNumber, out: &mut Vec<Output>) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        if request.is_alive() {
            if let Err(why) = request.advance(now, &mut self.shared, out) {
                return self.fail(now, number, None, why, out);
            }
            if request.is_ready(&self.shared.planted) {
                self.shared.counts.ready += 1;
                out.push(Output::Ready { request: number });
                return self.remove(number);
            }
        }
        self.retime(number);
    }

    /// Puts a request's next time into the list of what is due.
    fn retime(&mut self, number: RequestNumber) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        let next = request.next(self.shared.config.window);
        if request.due != next {
            if let Some(before) = request.due.take() {
                self.due.remove(&(before, number));
            }
            if let Some(next) = next {
                self.due.insert((next, number));
            }
            request.due = next;
        }
    }

    /// Forgets a request that is over.
    fn remove(&mut self, number: RequestNumber) {
        let Some(request) = self.requests.remove(&number) else { return };
        if let Some(due) = request.due {
            self.due.remove(&(due, number));
        }
        self.readers.remove(&(request.lease, request.reader));
        for source in &request.sources {
            if let Some(peer) = self.peers.get_mut(&source.peer) {
                peer.requests.remove(&number);
                if peer.requests.is_empty() && !peer.ready && !self.releases.has(source.peer) {
                    self.peers.remove(&source.peer);
                }
            }
        }
    }

    fn publish(
        &mut self,
        now: Duration,
        number: RequestNumber,
        parts: Vec<Part>,
        total: Option<u32>,
        out: &mut Vec<Output>,
    ) {
        let most = self.shared.config.max_parts;
        let Some(request) = self.requests.get_mut(&number).filter(|it| it.is_alive()) else {
            return;
        };
        for at in 0..request.sources.len() {
            if let Err(why) = request.learn(at, parts.clone(), total, most) {
                return self.fail(now, number, Some(at), why, out);
            }
        }
        self.advance(now, number, out);
    }

    fn settled(
        &mut self,
        now: Duration,
        transfer: TransferNumber,
        outcome: Outcome,
        out: &mut Vec<Output>,
    ) {
        let Some(place) = self.shared.transfers.remove(&transfer) else { return };
        let (number, at, id) = place;
        let retries = self.shared.config.retries;
        let Some(request) = self.requests.get_mut(&number) else { return };
        let alive = request.is_alive();
        let source = &mut request.sources[at];
        source.flying -= 1;
        let Some(piece) = source.parts.get_mut(&id) else { return };
        let busy = outcome == Outcome::Busy && !self.shared.planted.has(Plant::BusyIsFailure);
        if !alive {
            piece.work = Work::Lost;
            return self.quieter(now, number, at, out);
        }
        if outcome == Outcome::Done {
            request.settled(place, &mut self.shared, out);
            return self.advance(now, number, out);
        }
        let wait = if busy {
            self.shared.counts.busy += 1;
            Some(self.shared.config.busy_for)
        } else if outcome == (Outcome::Failed { retry: false }) || piece.tries >= retries {
            None
        } else {
            self.shared.counts.retried += 1;
            piece.tries += 1;
            Some(self.shared.config.retry_first * (1 << (piece.tries - 1).min(16)))
        };
        let Some(wait) = wait.filter(|_| busy || outcome != Outcome::Busy) else {
            piece.work = Work::Lost;
            return self.fail(now, number, Some(at), Why::Transfer, out);
        };
        piece.work = Work::Queued;
        source.queue.insert((now + wait, id));
        self.advance(now, number, out);
    }

    fn stage_done(&mut self, now: Duration, stage: StageNumber, ok: bool, out: &mut Vec<Output>) {
        let Some(place) = self.shared.stages.remove(&stage) else { return };
        let (number, at, _) = place;
        let Some(request) = self.requests.get_mut(&number) else { return };
        request.staging -= 1;
        if !request.is_alive() {
            self.quieter(now, number, at, out);
        } else if ok {
            request.staged(now, place, &mut self.shared, out);
            self.advance(now, number, out);
        } else {
            self.fail(now, number, Some(at), Why::Stage, out);
        }
    }

    fn peer_ready(&mut self, now: Duration, peer: Incarnation, out: &mut Vec<Output>) {
        let entry = self.peers.entry(peer).or_default();
        entry.ready = true;
        entry.needed = false;
        for number in entry.requests.clone() {
            if let Some(request) = self.requests.get_mut(&number) {
                for source in request.sources.iter_mut().filter(|source| source.peer == peer) {
                    source.linked = true;
                    match &mut source.phase {
                        Phase::Open { asking: Some(asking) } | Phase::Closing { asking } => {
                            asking.next = now;
                        }
                        _ => {}
                    }
                }
                self.advance(now, number, out);
            }
        }
        self.releases.reached(now, peer);
    }
}
