//! The owner's side of leases, at one rank.
//!
//! An [`Owner`] is told what happened ([`Input`]) and what time it is, and says what is to be done ([`Output`]). Time is of its
//! own monotonic clock, and never goes back. What is due by that time is done before the input is looked at, so that nothing
//! that comes late revives anything.
//!
//! # States of a lease
//!
//! | state | until | then |
//! |---|---|---|
//! | *early*: not granted, messages wait | `Grant` | each is answered as if it came now |
//! | | [`early_for`](Config::early_for), unless `Expect` came | each is refused as [`Unknown`](Reason::Unknown) |
//! | | `Withdraw`, where `Expect` came | each is told so; ended |
//! | *held* | one attempt's whole set has confirmed | over as [`Done`](Reason::Done) |
//! | | all attempts are over, and a reader has released | over as [`Released`](Reason::Released) |
//! | | no heartbeat for `ttl`, or `hard` has passed | over as [`Expired`](Reason::Expired) |
//! | | `Withdraw`, a failed stage, a later epoch | over as such |
//! | *draining*: over, and something may still write | every writer is quiescent and every stage over | free |
//! | | [`revoke_after`](Config::revoke_after) | writers' peers are revoked |
//! | | [`quarantine_after`](Config::quarantine_after) | quarantined |
//! | *quarantined* | every writer is quiescent and every stage over | free |
//! | *ended*: freed, its verdicts remembered | readers may ask no more, [`keep_for`](Config::keep_for) has passed | forgotten, but for why it ended |
//!
//! A reader *waits* (it wants to write while another attempt may still do so, and is not answered), *holds*, has *confirmed*,
//! has *released*, or is *gone*. It is known from its first message on, which must come while the lease is held; it is bound to
//! the peer that sent that message and to the set that it named. Only heartbeats of a reader that waits or holds, and its
//! confirms of some parts, extend the lease.
//!
//! # What each transition keeps
//!
//! - *Over* comes before *free*, each once. (The states are one enum; only *held* leads to over, only what is over to free.)
//! - A confirm is answered *held* only if its nonce came while the lease was held, so before `Over` and before any block was
//!   reused. Such nonces are remembered, so that the same question has the same answer after the end. (Promise 2.)
//! - A lease to write is freed only when each writer that was ever answered has confirmed all, has released, or is quiescent.
//!   A writer writes only after it was answered, and is answered only when nothing of another attempt can still move: what
//!   is written last is of one attempt, also where the other's process has died. (Promises 1 and 3.)
//! - *Held* ends at the latest when `hard` has passed, *draining* at the latest by quarantine. (Promise 4.)
//! - A user that says that it reads what is to be written, or writes what is to be read, or that it does so to other blocks or tokens
//!   than were granted, is refused before it is known as a reader: it neither holds nor ends the lease, is never told that it held, and
//!   a writer is never let in. (Promises 1 and 3.)
//! - Whoever comes late is told why the lease ended, also when all else of it is forgotten
//!   ([`max_past`](Config::max_past)).
//! - What one peer says changes only readers that it has made known itself. All tables are bounded; what is refused or
//!   forgotten for want of room is counted. (Promise 6.)
//! - Whoever uses a lease when it ends is told at once.
//! - A reader whose process is gone neither holds the lease nor ends it: another attempt may still use it, until it expires.

mod early;
mod end;
mod grant;
mod lease;
mod past;
mod talk;
mod terms;

pub use terms::{Config, Counts, Grant, Input, Output};

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvx_core::id::Incarnation;

use super::id::{LeaseName, TransferKey};
use super::message::ToOwner;
use super::plant::{Plant, Planted};
use super::terms::{Reason, StageNumber};
use early::{Early, Kept};
use lease::{Lease, State};
use past::Past;

/// The leases of one rank. See the [module documentation](self).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    config: Config,
    leases: BTreeMap<LeaseName, Lease>,
    early: Early,
    past: Past,
    /// Leases that will be granted.
    expected: BTreeMap<LeaseName, TransferKey>,
    stages: BTreeMap<StageNumber, Running>,
    next_stage: u64,
    /// Leases that expire, drain, or wait to be granted.
    due: BTreeSet<(Duration, LeaseName)>,
    /// Leases that have ended, by when they are forgotten.
    forget: BTreeSet<(Duration, LeaseName)>,
    /// Writers whose revocation was asked for, until they are quiescent.
    revoking: BTreeSet<Incarnation>,
    counts: Counts,
    planted: Planted,
}

/// A stage that runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Running {
    lease: LeaseName,
    part: u32,
    which: u8,
}

impl Owner {
    /// An owner without leases.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            leases: BTreeMap::new(),
            early: Early::default(),
            past: Past::default(),
            expected: BTreeMap::new(),
            stages: BTreeMap::new(),
            next_stage: 0,
            due: BTreeSet::new(),
            forget: BTreeSet::new(),
            revoking: BTreeSet::new(),
            counts: Counts::default(),
            planted: Planted::default(),
        }
    }

    /// The same with a fault.
    #[cfg(any(test, feature = "sim"))]
    #[must_use]
    pub fn with_fault(mut self, plant: Plant) -> Self {
        self.planted = Planted::new(plant);
        self
    }

    /// Tells it what happened, and appends to `out` what is to be done, in this order.
    pub fn step(&mut self, now: Duration, input: Input, out: &mut Vec<Output>) {
        if self.planted.has(Plant::LateHoldRevives) {
            self.take(now, input, out);
            self.lapse(now, out);
        } else {
            self.lapse(now, out);
            self.take(now, input, out);
        }
        self.shrink();
    }

    /// When it wants to be told that time has passed, if nothing else happens before.
    #[must_use]
    pub fn wake(&self) -> Option<Duration> {
        let first = |set: &BTreeSet<(Duration, LeaseName)>| set.first().map(|(at, _)| *at);
        first(&self.due).into_iter().chain(first(&self.forget)).min()
    }

    /// What it has counted.
    #[must_use]
    pub const fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Why a lease has ended that was granted here, as far as that is remembered, or is of another life. `None`: it is held, or may still
    /// be granted.
    #[must_use]
    pub fn ended(&self, lease: LeaseName) -> Option<Reason> {
        if lease.owner != self.config.life {
            return Some(Reason::OtherLife);
        }
        match self.leases.get(&lease).map(|known| &known.state) {
            Some(State::Held { .. }) => None,
            Some(
                State::Draining { why, .. } | State::Quarantined { why } | State::Ended { why, .. },
            ) => Some(*why),
            None => self.past.why(lease),
        }
    }

    /// How many leases are not free.
    #[must_use]
    pub fn live(&self) -> usize {
        self.leases.len() - self.forget.len()
    }

    /// How many leases and early messages it remembers, freed or not.
    #[must_use]
    pub fn remembered(&self) -> usize {
        self.leases.len() + self.early.len()
    }

    /// Starts to count anew.
    #[cfg(any(test, feature = "sim"))]
    pub fn forget_counts(&mut self) {
        self.counts = Counts::default();
    }

    fn take(&mut self, now: Duration, input: Input, out: &mut Vec<Output>) {
        match input {
            Input::Expect { lease, key } => {
                let known = lease.owner != self.config.life || self.leases.contains_key(&lease);
                if known || self.expected.len() >= self.config.max_leases {
                    self.counts.ignored += 1;
                } else {
                    self.expected.insert(lease, key);
                }
            }
            Input::Grant(grant) => self.grant(now, grant, out),
            Input::Publish { lease, parts, total } => self.publish(lease, parts, total, out),
            Input::Withdraw { lease, why } => {
                if self.leases.get(&lease).is_some_and(Lease::is_held) {
                    self.end(now, lease, why, out);
                } else if let Some(key) = self.expected.remove(&lease) {
                    self.never(now, (lease, key), why, out);
                } else {
                    self.counts.ignored += 1;
                }
            }
            Input::Message { peer, message } => self.hear(now, peer, message, out),
            Input::StageDone { stage, ok } => self.stage_done(now, stage, ok, out),
            Input::PeerGone { peer } => self.peer_gone(now, peer, out),
            Input::Quiescent { peer } => self.quiescent(now, peer, out),
            Input::Tick => {}
        }
    }

    /// Does what is due.
    fn lapse(&mut self, now: Duration, out: &mut Vec<Output>) {
        while let Some((at, name)) = self.due.pop_first_if(now) {
            let Some(lease) = self.leases.get_mut(&name) else {
                if self.expected.contains_key(&name) {
                    continue;
                }
                for (peer, message) in self.early.take(name) {
                    self.counts.early_lapsed += 1;
                    self.refuse(peer, &message, Reason::Unknown, out);
                }
                continue;
            };
            // Messages that came before the grant were due then; they have been answered.
            if lease.due != Some(at) {
                continue;
            }
            lease.due = None;
            match lease.state {
                State::Held { .. } => self.end(now, name, Reason::Expired, out),
                State::Draining { .. } => self.drain(now, name, out),
                State::Quarantined { .. } | State::Ended { .. } => {}
            }
        }
        while let Some((_, name)) = self.forget.pop_first_if(now) {
            self.forget_one(name);
        }
    }

    /// Keeps what is remembered of ended leases within its bound.
    fn shrink(&mut self) {
        while self.forget.len() > self.config.max_ended {
            if let Some((_, name)) = self.forget.pop_first() {
                self.forget_one(name);
                self.counts.forgotten += 1;
            }
        }
    }

    /// Forgets a lease that has ended, but for why it did.
    fn forget_one(&mut self, name: LeaseName) {
        if let Some(Lease { state: State::Ended { why, .. }, .. }) = self.leases.remove(&name) {
            self.past.keep(name, why, self.config.max_past);
        }
    }

    /// Puts a lease's next time into the list of what is due.
    fn retime(&mut self, name: LeaseName) {
        let Some(lease) = self.leases.get_mut(&name) else { return };
        let next = lease.next();
        if lease.due != next {
            if let Some(before) = lease.due.take() {
                self.due.remove(&(before, name));
            }
            if let Some(next) = next {
                self.due.insert((next, name));
            }
            lease.due = next;
        }
    }

    /// A message came.
    fn hear(&mut self, now: Duration, peer: Incarnation, message: ToOwner, out: &mut Vec<Output>) {
        let name = self.meant(message.lease());
        if name.owner != self.config.life {
            self.counts.other_life += 1;
            return self.refuse(peer, &message, Reason::OtherLife, out);
        }
        if !message.set().contains(message.reader().rank) {
            self.counts.contradictions += 1;
            return self.refuse(peer, &message, Reason::Contradiction, out);
        }
        if self.leases.contains_key(&name) {
            return self.answer_one(now, name, peer, message, out);
        }
        if self.planted.has(Plant::EarlyForgotten) {
            return;
        }
        if let Some(why) = self.past.why(name) {
            return self.long_after(peer, &message, why, out);
        }
        match self.early.keep(peer, message, &self.config) {
            Kept::First => {
                self.counts.early += 1;
                self.due.insert((now + self.config.early_for, name));
            }
            Kept::More => self.counts.early += 1,
            Kept::Again => {}
            Kept::Refused => self.counts.early_refused += 1,
        }
    }

    /// The lease that a message means: the one that it names.
    fn meant(&self, name: LeaseName) -> LeaseName {
        let mut meant = name;
        if self.planted.has(Plant::NumbersRestart) {
            meant.owner = self.config.life;
        }
        if self.planted.has(Plant::EpochIgnored) {
            let near = LeaseName { epoch: 0, ..meant }..=LeaseName { epoch: u32::MAX, ..meant };
            if let Some((newest, _)) = self.leases.range(near).next_back() {
                meant = *newest;
            }
        }
        meant
    }
}

/// The first of a list of times, if it is due.
trait Due {
    fn pop_first_if(&mut self, now: Duration) -> Option<(Duration, LeaseName)>;
}

impl Due for BTreeSet<(Duration, LeaseName)> {
    fn pop_first_if(&mut self, now: Duration) -> Option<(Duration, LeaseName)> {
        if self.first().is_some_and(|(at, _)| *at <= now) { self.pop_first() } else { None }
    }
}
