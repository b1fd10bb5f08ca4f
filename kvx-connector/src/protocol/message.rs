//! What owners and users of leases say to each other.
//!
//! Any message may be lost, doubled, late, or overtaken by another. Whoever depends on an answer asks again; whoever answers
//! gives the same question the same answer.
//!
//! | from the user | is answered by | and again |
//! |---|---|---|
//! | [`Hold`] | [`PartList`], if there is something new or `asks`; [`Ended`] | at each heartbeat |
//! | [`Confirm`] | [`Verdict`], always | with backoff, until the verdict or the deadline |
//! | [`Release`] | [`Released`], always | with backoff, a bounded number of times |
//!
//! Of itself the owner sends [`PartList`] when parts are published, and [`Ended`] when the lease ends, to every reader that it
//! knows and that is not done.
//!
//! Fields may be added, each with a default: a reader passes over those that it does not know.

use std::time::Duration;

use kvx_core::wire;
use serde::{Deserialize, Serialize};

use super::id::{Fingerprint, LeaseName, Nonce, Part, Reader};
use super::terms::{Access, Ranks, Reason};

/// From a user to an owner.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ToOwner {
    /// I am using it, or will.
    Hold(Hold),
    /// My last byte has settled: was it in time?
    Confirm(Confirm),
    /// I need it no more.
    Release(Release),
}

/// From an owner to a user.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ToUser {
    /// These are published.
    Parts(PartList),
    /// The answer to a [`Confirm`].
    Verdict(Verdict),
    /// It ended, or you may not use it.
    Ended(Ended),
    /// The answer to a [`Release`].
    Released(Released),
}

/// A heartbeat: extends the lease, makes the reader known, asks for parts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Hold {
    /// Which lease.
    pub lease: LeaseName,
    /// Who.
    pub reader: Reader,
    /// All ranks of this attempt that will confirm at this owner.
    pub set: Ranks,
    /// Number of the first part that the reader does not know.
    pub have: u32,
    /// Whether it knows how many parts there are.
    pub total: bool,
    /// Whether it wants an answer even where there is nothing new: a writer writes only after one.
    #[serde(default)]
    pub asks: bool,
    /// What it will do under the lease. `None`: an earlier version, which does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// What it is to be done to, as its ticket says. `None`: an earlier version, or an engine, that does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
}

/// Asks whether the lease still held when this arrived.
///
/// The nonce was drawn after everything that it covers had settled, so a verdict with this nonce is about these bytes. A
/// writer's also says that these parts are written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Confirm {
    /// Which lease.
    pub lease: LeaseName,
    /// Who.
    pub reader: Reader,
    /// All ranks of this attempt that will confirm at this owner.
    pub set: Ranks,
    /// Drawn after the last byte.
    pub nonce: Nonce,
    /// How many parts from the first on are covered without a gap.
    pub parts: u32,
    /// Whether it covers all parts: the reader will touch the memory no more.
    pub last: bool,
    /// For how many milliseconds more the reader may ask again.
    pub left_ms: u32,
    /// What it has done under the lease. `None`: an earlier version, which does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// What it was done to, as its ticket says. `None`: an earlier version, or an engine, that does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
}

impl Confirm {
    /// A time as it is put into [`left_ms`](Self::left_ms), rounded up.
    #[must_use]
    pub fn millis(left: Duration) -> u32 {
        u32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
    }
}

/// One reader gives up its part in an attempt, and touches the memory no more. A writer says so only once everything that it
/// posted has settled.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Release {
    /// Which lease.
    pub lease: LeaseName,
    /// Who.
    pub reader: Reader,
    /// All ranks of this attempt that would have confirmed at this owner.
    pub set: Ranks,
    /// What it has done, or would have done, under the lease. `None`: an earlier version, which does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// What it was done to, or would have been, as its ticket says. `None`: an earlier version, or an engine, that does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
}

/// Parts that are published, in any order, not all of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PartList {
    /// Which lease.
    pub lease: LeaseName,
    /// For whom.
    pub reader: Reader,
    /// At most [`MAX`](Self::MAX).
    #[serde(deserialize_with = "wire::list::<_, _, { PartList::MAX }>")]
    pub parts: Vec<Part>,
    /// How many parts there are in all, once that is known.
    pub total: Option<u32>,
}

impl PartList {
    /// Most parts of one message.
    pub const MAX: usize = 256;
}

/// Whether the lease held when a [`Confirm`] came first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Verdict {
    /// Which lease.
    pub lease: LeaseName,
    /// For whom.
    pub reader: Reader,
    /// That of the question.
    pub nonce: Nonce,
    /// Whether it held.
    pub held: bool,
    /// Why not. `None` where it held, and from an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Reason>,
}

/// The lease has ended, or this reader may not use it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ended {
    /// Which lease.
    pub lease: LeaseName,
    /// For whom.
    pub reader: Reader,
    /// Why.
    pub reason: Reason,
}

/// A release has come, or there is nothing to release any more.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Released {
    /// Which lease.
    pub lease: LeaseName,
    /// Whose.
    pub reader: Reader,
}

impl ToOwner {
    /// The lease that it is about.
    #[must_use]
    pub const fn lease(&self) -> LeaseName {
        match self {
            Self::Hold(Hold { lease, .. })
            | Self::Confirm(Confirm { lease, .. })
            | Self::Release(Release { lease, .. }) => *lease,
        }
    }

    /// Who sent it.
    #[must_use]
    pub const fn reader(&self) -> Reader {
        match self {
            Self::Hold(Hold { reader, .. })
            | Self::Confirm(Confirm { reader, .. })
            | Self::Release(Release { reader, .. }) => *reader,
        }
    }

    /// What the sender does under the lease, as far as it says so.
    #[must_use]
    pub const fn access(&self) -> Option<Access> {
        match self {
            Self::Hold(Hold { access, .. })
            | Self::Confirm(Confirm { access, .. })
            | Self::Release(Release { access, .. }) => *access,
        }
    }

    /// To what the sender does it, as far as it says so.
    #[must_use]
    pub const fn fingerprint(&self) -> Option<Fingerprint> {
        match self {
            Self::Hold(Hold { fingerprint, .. })
            | Self::Confirm(Confirm { fingerprint, .. })
            | Self::Release(Release { fingerprint, .. }) => *fingerprint,
        }
    }

    /// The readers of the sender's attempt.
    #[must_use]
    pub const fn set(&self) -> &Ranks {
        match self {
            Self::Hold(Hold { set, .. })
            | Self::Confirm(Confirm { set, .. })
            | Self::Release(Release { set, .. }) => set,
        }
    }
}

impl ToUser {
    /// The lease that it is about.
    #[must_use]
    pub const fn lease(&self) -> LeaseName {
        match self {
            Self::Parts(PartList { lease, .. })
            | Self::Verdict(Verdict { lease, .. })
            | Self::Ended(Ended { lease, .. })
            | Self::Released(Released { lease, .. }) => *lease,
        }
    }

    /// Why the lease ended, or may not be used, where that is what it says.
    #[must_use]
    pub const fn why(&self) -> Option<Reason> {
        match self {
            Self::Verdict(Verdict { why, .. }) => *why,
            Self::Ended(Ended { reason, .. }) => Some(*reason),
            Self::Parts(_) | Self::Released(_) => None,
        }
    }

    /// Whom it is for.
    #[must_use]
    pub const fn reader(&self) -> Reader {
        match self {
            Self::Parts(PartList { reader, .. })
            | Self::Verdict(Verdict { reader, .. })
            | Self::Ended(Ended { reader, .. })
            | Self::Released(Released { reader, .. }) => *reader,
        }
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::id::Incarnation;

    use super::*;
    use crate::protocol::id::Attempt;

    fn hold(ranks: impl IntoIterator<Item = u16>) -> ToOwner {
        let life = Incarnation::from_bytes([7; 16]);
        ToOwner::Hold(Hold {
            lease: LeaseName { owner: life, number: 3, epoch: 1 },
            reader: Reader { attempt: Attempt { user: life, number: 9 }, rank: 2 },
            set: Ranks::new(ranks).unwrap(),
            have: 4,
            total: true,
            asks: false,
            access: None,
            fingerprint: None,
        })
    }

    #[test]
    fn a_message_is_what_was_sent() {
        let sent = hold([5, 2, 2]);
        assert_eq!(sent.set().as_slice(), [2, 5]);
        let bytes = wire::to_bytes("test", &sent).unwrap();
        assert_eq!(wire::from_bytes::<ToOwner>("test", "it", &bytes).unwrap(), sent);
        assert!(bytes.len() < 160, "{} bytes", bytes.len());
    }

    #[test]
    fn a_set_is_bounded_and_in_order() {
        let refused = |ranks: &[u16]| {
            let bytes = wire::to_bytes("test", ranks).unwrap();
            wire::from_bytes::<Ranks>("test", "it", &bytes).unwrap_err().to_string()
        };
        for ranks in [&[][..], &[2, 1], &[1, 1]] {
            assert!(refused(ranks).contains("not in order"), "{ranks:?}");
        }
        assert!(refused(&vec![1; 1025]).contains("limit"), "too many");
        assert!(Ranks::new([]).is_err() && Ranks::new(0..1025).is_err());
        assert!(Ranks::new(0..1024).is_ok());
    }

    /// A later version may give a reason that this one does not know.
    #[test]
    fn an_unknown_reason_is_other() {
        let bytes = wire::to_bytes("test", "Eclipsed").unwrap();
        assert_eq!(wire::from_bytes::<Reason>("test", "it", &bytes).unwrap(), Reason::Other);
        assert_eq!(Confirm::millis(Duration::from_micros(1)), 1);
        assert_eq!(Confirm::millis(Duration::MAX), u32::MAX);
    }
}
