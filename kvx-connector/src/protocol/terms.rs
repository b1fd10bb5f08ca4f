//! What both sides of a lease say and mean alike.

use std::fmt;
use std::sync::Arc;

use kvx_core::{Error, Result, wire};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What a lease allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Access {
    /// The owner's memory is read: the owner is the producer.
    Read,
    /// The owner's memory is written: the owner is the consumer.
    Write,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "to be read",
            Self::Write => "to be written",
        })
    }
}

/// Ranks of one user that will confirm at one rank of the owner: sorted, none twice, at least one.
///
/// They are named in every message, because the owner knows of a user only what the user says. The set of one attempt never
/// changes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ranks(Arc<[u16]>);

impl Ranks {
    /// Most ranks of a set.
    pub const MAX: usize = 1024;

    /// A set of these ranks, in whatever order.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): none, or more than [`MAX`](Self::MAX).
    pub fn new(ranks: impl IntoIterator<Item = u16>) -> Result<Self> {
        let mut ranks: Vec<u16> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        if ranks.is_empty() || ranks.len() > Self::MAX {
            return Err(Error::misuse("ranks", "a set of readers has 1 to 1024 ranks")
                .with_context("ranks", ranks.len()));
        }
        Ok(Self(ranks.into()))
    }

    /// Whether this rank is one of them.
    #[must_use]
    pub fn contains(&self, rank: u16) -> bool {
        self.0.binary_search(&rank).is_ok()
    }

    /// In order.
    #[must_use]
    pub fn as_slice(&self) -> &[u16] {
        &self.0
    }
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ranks({:?})", self.0)
    }
}

impl Serialize for Ranks {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.0.as_ref().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Ranks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let ranks: Vec<u16> = wire::list::<_, _, { Self::MAX }>(deserializer)?;
        if ranks.is_empty() || !ranks.is_sorted_by(|one, next| one < next) {
            return Err(serde::de::Error::custom("a set of ranks is empty, or not in order"));
        }
        Ok(Self(ranks.into()))
    }
}

/// Why a lease has ended, or is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Reason {
    /// One attempt's whole set has confirmed.
    Done,
    /// Whoever used it gave it up.
    Released,
    /// Nobody extended it in time, or its hard deadline came.
    Expired,
    /// The owner's engine aborted the request.
    Aborted,
    /// The owner's engine took the blocks back; it may grant the request again, in a later epoch.
    Preempted,
    /// The owner's engine failed the request: what was published is not all there will be.
    Failed,
    /// A stage (a local copy, a digest) failed at the owner.
    Stage,
    /// There is nothing to transfer.
    Empty,
    /// The owner has no room for another lease or attempt.
    Full,
    /// Of another life of the owner's engine.
    OtherLife,
    /// Never granted here, or forgotten.
    Unknown,
    /// The message contradicts what was said before: another set, another peer, a rank that is not of the set.
    Contradiction,
    /// This user's access was ended by the owner.
    Revoked,
    /// It is leased to be read and the user writes, or the other way round.
    Access,
    /// The user's ticket is not as its owner gave it: other blocks, other tokens, other parts.
    Ticket,
    /// Something that this version does not know.
    #[serde(other)]
    Other,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Done => "done",
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Aborted => "aborted by the owner's engine",
            Self::Preempted => "preempted by the owner's engine",
            Self::Failed => "failed at the owner's engine",
            Self::Stage => "a stage failed at the owner",
            Self::Empty => "nothing to transfer",
            Self::Full => "the owner has no room",
            Self::OtherLife => "of another life of the owner's engine",
            Self::Unknown => "unknown to the owner",
            Self::Contradiction => "it contradicts what was said before",
            Self::Revoked => "this user's access was ended",
            Self::Access => "it is leased for the other access: to be read or to be written",
            Self::Ticket => "the ticket is not as the owner gave it",
            Self::Other => "for a reason that this version does not know",
        })
    }
}

/// A stage that is to be run: a copy, a digest. Unique in one life of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StageNumber(pub u64);

/// A transfer that is to be posted. Unique in one life of a `User`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferNumber(pub u64);

/// A request of a `User`: chosen by whoever asks, unique among those not yet over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestNumber(pub u64);
