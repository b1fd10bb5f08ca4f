//! One lease, and who uses it.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_core::id::Incarnation;

use crate::protocol::few::Few;
use crate::protocol::id::{Attempt, Fingerprint, Nonce, Part, TransferKey};
use crate::protocol::message::ToOwner;
use crate::protocol::terms::{Access, Ranks, Reason};

/// A lease at one rank of the owner.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Lease {
    pub(super) key: TransferKey,
    /// `None`: it was never granted.
    pub(super) granted: Option<Access>,
    /// `None`: the engine did not say what exactly.
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) ttl: Duration,
    /// When it ends, whoever extends it.
    pub(super) hard_at: Duration,
    pub(super) state: State,
    pub(super) parts: BTreeMap<u32, Known>,
    pub(super) total: Option<u32>,
    pub(super) stages: u8,
    /// Stages that run.
    pub(super) running: usize,
    pub(super) attempts: Few<Attempt, Users>,
    /// Until when a reader may ask again for its verdict.
    pub(super) asked_until: Duration,
    /// Its place in the owner's list of what is due.
    pub(super) due: Option<Duration>,
}

/// See the [documentation of owners](super).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum State {
    Held { expires: Duration },
    Draining { why: Reason, revoke_at: Option<Duration>, quarantine_at: Duration },
    Quarantined { why: Reason },
    Ended { why: Reason, forget_at: Duration },
}

/// A part that the engine has named.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Known {
    pub(super) part: Part,
    /// Whether readers are told of it: it has passed its stages.
    pub(super) published: bool,
}

/// The readers of one attempt.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Users {
    pub(super) set: Ranks,
    /// Those heard of.
    pub(super) readers: Few<u16, User>,
}

/// One reader that was heard of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct User {
    pub(super) peer: Incarnation,
    pub(super) stand: Stand,
    /// Nonces that came while the lease held, the newest last.
    pub(super) held: Vec<Nonce>,
    #[cfg(any(test, feature = "sim"))]
    pub(super) confirms: u32,
}

/// Where a reader stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Stand {
    /// It wants to write, and another attempt may still do so: it is not answered yet.
    Waiting,
    /// It uses the lease.
    Active,
    /// It said that all it did is over, and in time.
    Confirmed,
    /// It said that it gives up, and that all it did is over.
    Released,
    /// It is gone, or its access was ended. `quiet`: it is known that nothing of it moves.
    Gone { quiet: bool },
}

impl Stand {
    /// Whether it still wants something of the lease.
    pub(super) const fn is_open(self) -> bool {
        matches!(self, Self::Waiting | Self::Active)
    }

    /// Whether it has said its last word.
    pub(super) const fn is_final(self) -> bool {
        matches!(self, Self::Confirmed | Self::Released)
    }

    /// Whether something that it posted may still move.
    pub(super) const fn may_move(self) -> bool {
        matches!(self, Self::Active | Self::Gone { quiet: false })
    }
}

impl User {
    /// How many nonces are remembered: a reader waits for the verdict on one before it draws the next.
    const NONCES: usize = 4;

    pub(super) const fn new(peer: Incarnation, writes: bool) -> Self {
        let stand = if writes { Stand::Waiting } else { Stand::Active };
        Self {
            peer,
            stand,
            held: Vec::new(),
            #[cfg(any(test, feature = "sim"))]
            confirms: 0,
        }
    }

    /// Whether this nonce came while the lease held.
    pub(super) fn knows(&self, nonce: Nonce) -> bool {
        self.held.contains(&nonce)
    }

    /// A nonce came while the lease holds; whether for the first time.
    pub(super) fn learn(&mut self, nonce: Nonce) -> bool {
        if self.knows(nonce) {
            return false;
        }
        if self.held.len() == Self::NONCES {
            self.held.remove(0);
        }
        self.held.push(nonce);
        true
    }
}

impl Users {
    pub(super) const fn new(set: Ranks) -> Self {
        Self { set, readers: Few::new() }
    }

    fn all(&self, holds: impl Fn(&User) -> bool) -> bool {
        self.set.as_slice().iter().all(|rank| self.readers.get(rank).is_some_and(&holds))
    }

    /// Whether the whole set has confirmed.
    pub(super) fn is_done(&self) -> bool {
        self.all(|user| user.stand == Stand::Confirmed)
    }

    /// Whether none of the set will do anything more.
    pub(super) fn is_over(&self) -> bool {
        self.all(|user| !user.stand.is_open())
    }

    pub(super) fn gave_up(&self) -> bool {
        self.readers.values().any(|user| user.stand == Stand::Released)
    }
}

impl Lease {
    /// One that was expected, and is never granted.
    pub(super) const fn never(key: TransferKey, why: Reason, forget_at: Duration) -> Self {
        Self {
            key,
            granted: None,
            fingerprint: None,
            ttl: Duration::ZERO,
            hard_at: Duration::ZERO,
            state: State::Ended { why, forget_at },
            parts: BTreeMap::new(),
            total: None,
            stages: 0,
            running: 0,
            attempts: Few::new(),
            asked_until: Duration::ZERO,
            due: None,
        }
    }

    /// Whether its users write.
    pub(super) const fn is_written(&self) -> bool {
        matches!(self.granted, Some(Access::Write))
    }

    /// Why it does not allow what a user says that it does, if so.
    pub(super) fn forbids(&self, message: &ToOwner) -> Option<Reason> {
        if differ(self.granted, message.access()) {
            return Some(Reason::Access);
        }
        differ(self.fingerprint, message.fingerprint()).then_some(Reason::Ticket)
    }

    pub(super) const fn is_held(&self) -> bool {
        matches!(self.state, State::Held { .. })
    }

    /// When something is due, other than to be forgotten.
    pub(super) const fn next(&self) -> Option<Duration> {
        match self.state {
            State::Held { expires } => Some(expires),
            State::Draining { revoke_at: Some(at), quarantine_at, .. } => {
                Some(if at.as_nanos() < quarantine_at.as_nanos() { at } else { quarantine_at })
            }
            State::Draining { quarantine_at, .. } => Some(quarantine_at),
            State::Quarantined { .. } | State::Ended { .. } => None,
        }
    }

    pub(super) fn users(&self) -> impl Iterator<Item = (Attempt, u16, &User)> {
        self.attempts.iter().flat_map(|(attempt, users)| {
            users.readers.iter().map(|(rank, user)| (*attempt, *rank, user))
        })
    }

    pub(super) fn users_mut(&mut self) -> impl Iterator<Item = (Attempt, u16, &mut User)> {
        self.attempts.iter_mut().flat_map(|(attempt, users)| {
            users.readers.iter_mut().map(|(rank, user)| (*attempt, *rank, user))
        })
    }

    /// Whether an attempt may write: no other may still do so, so that whatever is written last is of one attempt.
    pub(super) fn admits(&self, attempt: Attempt) -> bool {
        self.users().all(|(other, _, user)| other == attempt || !user.stand.may_move())
    }

    /// Whether nothing can move in the blocks any more but what only reads them.
    pub(super) fn is_quiet(&self) -> bool {
        let writers = self.is_written() && self.users().any(|(_, _, user)| user.stand.may_move());
        self.running == 0 && !writers
    }
}

/// Whether a user says another thing than was granted, where both are said.
fn differ<T: PartialEq>(granted: Option<T>, said: Option<T>) -> bool {
    granted.is_some() && said.is_some() && granted != said
}
