//! The event log: what the fabric did, in order. The same seed and the same calls give the same log.

use std::collections::VecDeque;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use kvx_core::backend::Outcome;
use kvx_core::id::{PeerId, RegionId, TransferId};
use kvx_core::transfer::Mode;

/// Most entries that are kept; older ones are dropped, but stay in the digest.
const KEPT: usize = 65_536;

/// One entry of a fabric's event log.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Entry {
    /// Virtual time: how many steps the fabric had made.
    pub step: u64,
    /// Name of the engine to which it happened.
    pub engine: Arc<str>,
    /// What happened.
    pub what: What,
}

/// What happened to an engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum What {
    /// It was opened.
    Opened,
    /// It registered a region.
    Registered(RegionId),
    /// It ended a registration.
    Deregistered(RegionId),
    /// A handshake gave it a peer.
    Met {
        /// Its handle of the peer.
        peer: PeerId,
        /// The peer's name.
        name: Arc<str>,
    },
    /// It may post to a peer.
    Ready(PeerId),
    /// It posted a batch.
    Submitted {
        /// The transfer.
        id: TransferId,
        /// To which peer.
        peer: PeerId,
        /// In which direction.
        mode: Mode,
        /// How many segments.
        segments: usize,
        /// How long the notification is, in bytes, if there is one.
        notify: Option<usize>,
    },
    /// It had too many batches in flight to post one more.
    Full(PeerId),
    /// Some of a transfer's segments were copied.
    Moved {
        /// The transfer.
        id: TransferId,
        /// How many segments.
        segments: usize,
    },
    /// It asked that a transfer be given up.
    Cancelled(TransferId),
    /// A transfer of its own settled.
    Settled {
        /// The transfer.
        id: TransferId,
        /// How.
        how: How,
    },
    /// A notification reached it.
    Notified {
        /// From which peer.
        peer: PeerId,
        /// How many bytes.
        bytes: usize,
    },
    /// A notification of its own was lost with the connection.
    Lost {
        /// To which peer.
        peer: PeerId,
        /// How many bytes.
        bytes: usize,
    },
    /// It severed a peer.
    Severed(PeerId),
    /// It ended a peer's access.
    Revoked(PeerId),
    /// Its connection to a peer is over.
    PeerDown(PeerId),
    /// It was closed.
    Closed,
}

/// How a transfer settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum How {
    /// All data arrived.
    Done,
    /// It was cancelled.
    Cancelled,
    /// It failed.
    Failed,
}

impl From<&Outcome> for How {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::Done,
            Outcome::Cancelled => Self::Cancelled,
            _ => Self::Failed,
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>8} {}: {:?}", self.step, self.engine, self.what)
    }
}

/// The newest entries, and a digest of all.
pub(crate) struct Log {
    entries: VecDeque<Entry>,
    digest: Digest,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self { entries: VecDeque::new(), digest: Digest::START }
    }

    pub(crate) fn push(&mut self, entry: Entry) {
        entry.hash(&mut self.digest);
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    pub(crate) fn entries(&self) -> Vec<Entry> {
        self.entries.iter().cloned().collect()
    }

    pub(crate) fn digest(&self) -> u64 {
        self.digest.finish()
    }
}

/// FNV-1a of 64 bits: the same in every process, which the standard library's hasher is not.
struct Digest(u64);

impl Digest {
    const START: Self = Self(0xcbf2_9ce4_8422_2325);
}

impl Hasher for Digest {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(step: u64) -> Entry {
        Entry { step, engine: "a".into(), what: What::Full(PeerId::new(0, 0)) }
    }

    #[test]
    fn the_log_is_bounded_and_the_digest_sees_all() {
        let (mut log, mut other) = (Log::new(), Log::new());
        other.push(entry(u64::MAX));
        for step in 0..KEPT as u64 + 3 {
            log.push(entry(step));
            other.push(entry(step));
        }
        assert_eq!(log.entries().len(), KEPT);
        assert_eq!(log.entries()[0].step, 3);
        assert_eq!(log.entries(), other.entries());
        assert_ne!(log.digest(), other.digest());
        assert_eq!(entry(7).to_string(), "       7 a: Full(PeerId(0v0))");
    }
}
