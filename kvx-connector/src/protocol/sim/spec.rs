//! What an owner must do with a lease: written down once more, without regard to how it is done.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvx_core::id::Incarnation;
use kvx_mock::sim::Violation;

use crate::protocol::id::{Attempt, Fingerprint, LeaseName, Nonce, Reader};
use crate::protocol::message::{Confirm, ToOwner};
use crate::protocol::owner::Grant;
use crate::protocol::terms::{Access, Reason};

use super::ensure;

/// A lease at one rank of the owner, as the checker sees it.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) access: Access,
    pub(super) fingerprint: Option<Fingerprint>,
    granted_at: Duration,
    ttl: Duration,
    hard_at: Duration,
    expires: Duration,
    attempts: BTreeMap<Attempt, Users>,
    /// Readers that were told of parts: from then on a writer may write.
    admitted: BTreeSet<Reader>,
    /// Nonces that came while it was held.
    held: BTreeSet<(Reader, Nonce)>,
    /// Until when they must be known.
    pub(super) known_until: Duration,
    /// Why it may end though nobody has confirmed.
    pub(super) cause: Option<Reason>,
    pub(super) over: Option<Reason>,
    pub(super) freed: bool,
    pub(super) quarantined: bool,
    pub(super) stages: usize,
}

#[derive(Clone, Debug)]
struct Users {
    set: Vec<u16>,
    stands: BTreeMap<u16, (Incarnation, Stand)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stand {
    Active,
    Confirmed,
    Released,
    Gone,
}

impl Users {
    fn all(&self, holds: impl Fn(Stand) -> bool) -> bool {
        self.set.iter().all(|rank| self.stands.get(rank).is_some_and(|(_, stand)| holds(*stand)))
    }
}

impl Spec {
    pub(super) fn new(grant: &Grant, now: Duration) -> Self {
        Self {
            access: grant.access,
            fingerprint: grant.fingerprint,
            granted_at: now,
            ttl: grant.ttl,
            hard_at: now + grant.hard,
            expires: now + grant.ttl.min(grant.hard),
            attempts: BTreeMap::new(),
            admitted: BTreeSet::new(),
            held: BTreeSet::new(),
            known_until: Duration::ZERO,
            cause: None,
            over: None,
            freed: false,
            quarantined: false,
            stages: 0,
        }
    }

    /// Readers that use it.
    pub(super) fn active(&self) -> BTreeSet<(Reader, Incarnation)> {
        let of = |(attempt, users): (&Attempt, &Users)| {
            let active = users.stands.iter().filter(|(_, (_, stand))| *stand == Stand::Active);
            let name = |(rank, (peer, _)): (&u16, &(Incarnation, Stand))| {
                (Reader { attempt: *attempt, rank: *rank }, *peer)
            };
            active.map(name).collect::<Vec<_>>()
        };
        self.attempts.iter().flat_map(of).collect()
    }

    /// Readers that were heard of, with their peers and sets.
    pub(super) fn readers(&self) -> Vec<(Reader, Incarnation, Vec<u16>)> {
        let of = |(attempt, users): (&Attempt, &Users)| {
            let name = |(rank, (peer, _)): (&u16, &(Incarnation, Stand))| {
                (Reader { attempt: *attempt, rank: *rank }, *peer, users.set.clone())
            };
            users.stands.iter().map(name).collect::<Vec<_>>()
        };
        self.attempts.iter().flat_map(of).collect()
    }

    /// A message comes. Before the owner is told.
    pub(super) fn hear(&mut self, now: Duration, peer: Incarnation, message: &ToOwner) {
        if now >= self.expires || self.over.is_some() {
            return;
        }
        let (reader, set) = (message.reader(), message.set().as_slice());
        let other = message.access().is_some_and(|access| access != self.access);
        let edited = message.fingerprint().is_some() && message.fingerprint() != self.fingerprint;
        if other || edited || !set.contains(&reader.rank) {
            return;
        }
        let users = self
            .attempts
            .entry(reader.attempt)
            .or_insert_with(|| Users { set: set.to_vec(), stands: BTreeMap::new() });
        if users.set != set {
            return;
        }
        let (bound, stand) = users.stands.entry(reader.rank).or_insert((peer, Stand::Active));
        if *bound != peer {
            return;
        }
        let active = *stand == Stand::Active;
        let extended = (now + self.ttl).min(self.hard_at).max(self.expires);
        match message {
            ToOwner::Hold(_) if active => self.expires = extended,
            ToOwner::Hold(_) => {}
            ToOwner::Confirm(Confirm { nonce, last, left_ms, .. }) => {
                self.held.insert((reader, *nonce));
                let left = Duration::from_millis((*left_ms).into());
                self.known_until = self.known_until.max(now + left);
                if *last && matches!(stand, Stand::Active | Stand::Gone) {
                    *stand = Stand::Confirmed;
                } else if active {
                    self.expires = extended;
                }
            }
            ToOwner::Release(_) if matches!(stand, Stand::Active | Stand::Gone) => {
                *stand = Stand::Released;
            }
            ToOwner::Release(_) => {}
        }
    }

    /// A peer is gone.
    pub(super) fn gone(&mut self, peer: Incarnation) {
        for users in self.attempts.values_mut() {
            for (bound, stand) in users.stands.values_mut() {
                if *bound == peer && *stand == Stand::Active {
                    *stand = Stand::Gone;
                }
            }
        }
    }

    /// Whether the owner cannot have forgotten what it must answer.
    pub(super) fn must_know(&self, now: Duration, message: &ToOwner) -> bool {
        let ToOwner::Confirm(confirm) = message else { return false };
        let held = self.held.contains(&(confirm.reader, confirm.nonce));
        self.over.is_none() || (held && now < self.known_until)
    }

    /// Whether a reader has confirmed everything, in time.
    pub(super) fn has_confirmed(&self, reader: Reader) -> bool {
        let stand = self.attempts.get(&reader.attempt).and_then(|it| it.stands.get(&reader.rank));
        self.over == Some(Reason::Empty) || stand.is_some_and(|it| it.1 == Stand::Confirmed)
    }

    pub(super) fn admit(&mut self, reader: Reader) {
        self.admitted.insert(reader);
    }

    /// The access of a peer has ended: what it was admitted to.
    pub(super) fn quiet(&mut self, peer: Incarnation) {
        for (attempt, users) in &mut self.attempts {
            for (rank, (bound, stand)) in &mut users.stands {
                let reader = Reader { attempt: *attempt, rank: *rank };
                let admitted = self.admitted.contains(&reader);
                if *bound == peer && *stand == Stand::Active && admitted {
                    *stand = Stand::Gone;
                }
            }
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.attempts.values().any(|users| users.all(|stand| stand == Stand::Confirmed))
    }

    fn is_released(&self) -> bool {
        let released =
            |users: &Users| users.stands.values().any(|(_, stand)| *stand == Stand::Released);
        self.attempts.values().any(released)
            && self.attempts.values().all(|users| users.all(|stand| stand != Stand::Active))
    }

    /// The owner says that it is over.
    pub(super) fn ends(
        &mut self,
        name: LeaseName,
        now: Duration,
        why: Reason,
    ) -> Result<(), Violation> {
        ensure!(self.over.is_none(), "{name} is over twice: {why}");
        let right = match why {
            Reason::Done => self.is_done(),
            Reason::Released => self.is_released(),
            Reason::Expired => now >= self.expires,
            why => self.cause == Some(why),
        };
        ensure!(right, "{name} is over without cause: {why}");
        self.over = Some(why);
        Ok(())
    }

    /// The owner answers a confirm.
    pub(super) fn judged(
        &self,
        name: LeaseName,
        now: Duration,
        (reader, nonce): (Reader, Nonce),
        held: bool,
    ) -> Result<(), Violation> {
        let came = self.held.contains(&(reader, nonce)) || self.over == Some(Reason::Empty);
        ensure!(!held || came, "{name}: {reader} is told that it held, and it had ended");
        let forgotten = self.over.is_some() && now >= self.known_until;
        ensure!(
            held || !came || forgotten,
            "{name}: {reader} is told that it had ended, and it held"
        );
        Ok(())
    }

    /// The owner says to a user why it may not, or may no longer, use the lease.
    pub(super) fn explained(
        &self,
        name: LeaseName,
        now: Duration,
        why: Reason,
    ) -> Result<(), Violation> {
        let refused = [Reason::Contradiction, Reason::Full, Reason::Revoked];
        let mistaken = [Reason::Access, Reason::Ticket];
        // What waited for the grant until this moment has waited too long.
        let right = mistaken.contains(&why)
            || refused.contains(&why)
            || (why == Reason::Unknown && now == self.granted_at)
            || (self.over.is_some() && [self.over, self.cause].contains(&Some(why)));
        ensure!(right, "{name}: {why} is told, and it is not so: over {:?}", self.over);
        Ok(())
    }

    /// After each step of its owner.
    pub(super) fn check(&self, name: LeaseName, now: Duration) -> Result<(), Violation> {
        if self.over.is_some() {
            return Ok(());
        }
        ensure!(now < self.expires, "{name} should have expired");
        ensure!(!self.is_done(), "{name} should be over: it is done");
        ensure!(!self.is_released(), "{name} should be over: it is released");
        Ok(())
    }
}
