//! Names that both sides of a lease use.

use std::fmt;
use std::ops::Range;

use kvx_core::Result;
use kvx_core::id::Incarnation;
use kvx_core::wire::Text;
use serde::{Deserialize, Serialize};

/// The engine's name for a request's transfer: by this alone do the two sides know that they speak of the same request. It
/// comes from the router or from the engine that began, and is never one side's own request id.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TransferKey(Text<{ Self::MAX_BYTES }>);

impl TransferKey {
    /// Most bytes of a key.
    pub const MAX_BYTES: usize = 256;

    /// A key of this text.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): too long, or with a control character.
    pub fn new(text: impl Into<String>) -> Result<Self> {
        Ok(Self(Text::new(text)?))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl fmt::Display for TransferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for TransferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TransferKey({:?})", self.as_str())
    }
}

/// A lease: of one life of the owner's engine, with a number that this life never uses again.
///
/// All ranks of the owner's engine have the lease under this one name, each for its own memory. The epoch counts how often the
/// same request's blocks were taken back and granted anew (after a preemption): what was read in one epoch says nothing
/// about the next.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseName {
    /// The life of the owner's engine that granted it: drawn by its scheduler when it starts.
    pub owner: Incarnation,
    /// Its number, from 1 on, never given twice in this life.
    pub number: u64,
    /// Its epoch, from 0 on.
    pub epoch: u32,
}

impl fmt::Display for LeaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}.{}", self.owner, self.number, self.epoch)
    }
}

impl fmt::Debug for LeaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LeaseName({self})")
    }
}

/// One attempt of a user's engine to use a lease, by all its ranks together. A retry is another attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attempt {
    /// The life of the user's engine: drawn by its scheduler when it starts.
    pub user: Incarnation,
    /// Its number, never given twice in this life.
    pub number: u64,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.user, self.number)
    }
}

/// One rank of a user in one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Reader {
    /// The attempt.
    pub attempt: Attempt,
    /// Number of the rank in its replica, as in [`Pairing`](kvx_core::plan::Pairing).
    pub rank: u16,
}

impl fmt::Display for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rank {}", self.attempt, self.rank)
    }
}

/// Drawn at random by a reader after its last byte has settled: only the verdict with this nonce is about those bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Nonce(pub u64);

/// What a ticket says is to be read or written, in few bytes: which blocks of which groups, how many tokens, whether in parts, under
/// which lease, and whether to read or to write. Two of one lease are equal only where all of that is.
///
/// It is no seal: whoever means to deceive can say any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(pub u64);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// What of a request is published, transferred, settled, confirmed, and fails as one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    /// Its number in the request, from 0 on.
    pub number: u32,
    /// The cache group; `None` for all groups.
    pub group: Option<u16>,
    /// Global layers.
    pub layers: Range<u32>,
    /// Tokens of the request.
    pub tokens: Range<u64>,
}
