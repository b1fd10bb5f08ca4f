//! The event log: what the fabric did, in order. The same seed and the same calls give the same log.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::Outcome;
use kvx_core::id::{PeerId, RegionId, TransferId};
use kvx_core::transfer::Mode;

use crate::digest::Digest;
use crate::rule::{Kind, Verdict};
use crate::timing::nanos;

mod feed;

/// Most entries that are kept; older ones are dropped, but stay in the digest.
const KEPT: usize = 65_536;

/// One entry of a fabric's event log.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// How many steps the fabric had made.
    pub step: u64,
    /// Virtual time.
    pub at: Duration,
    /// Name of the engine to which it happened.
    pub engine: Arc<str>,
    /// What happened.
    pub what: What,
}

/// What happened to an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// All data of a transfer of its own has arrived, but the peer has no room for the notification now.
    NoRoom(TransferId),
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
    /// It learnt that a peer had ended the connection.
    Told(PeerId),
    /// It gave up a peer that does not answer.
    Silent(PeerId),
    /// Something of its own was lost for good: nothing more of what it posted to this peer moves.
    Broken(PeerId),
    /// Its connection to a peer is over.
    PeerDown(PeerId),
    /// It was closed.
    Closed,
    /// Its process was killed.
    Killed,
    /// Its process was stopped.
    Stopped,
    /// Its process went on.
    Resumed,
    /// Nothing gets from it to the engine of this name, or back.
    Cut(Arc<str>),
    /// The way to the engine of this name is open again.
    Healed(Arc<str>),
    /// A rule decided about an operation of its own.
    Ruled {
        /// What kind of operation.
        kind: Kind,
        /// The transfer to which it belongs.
        id: Option<TransferId>,
        /// What was decided.
        verdict: Verdict,
    },
    /// A rule's verdict meant nothing for an operation of its own, and was taken as `Pass`.
    Ignored {
        /// What kind of operation.
        kind: Kind,
        /// The transfer to which it belongs.
        id: Option<TransferId>,
        /// What the rule said.
        verdict: Verdict,
    },
    /// The fabric received something of its own twice and passed it on once.
    Suppressed {
        /// What kind of operation.
        kind: Kind,
        /// The transfer to which it belongs.
        id: TransferId,
    },
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
            Outcome::Done { .. } => Self::Done,
            Outcome::Cancelled => Self::Cancelled,
            _ => Self::Failed,
        }
    }
}

/// `step`, microseconds, engine, what.
impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = nanos(self.at);
        let (micros, rest) = (nanos / 1000, nanos % 1000);
        write!(f, "{:>8} {micros:>9}.{rest:03} {}: {:?}", self.step, self.engine, self.what)
    }
}

/// The newest entries, and a digest of all.
pub(crate) struct Log {
    entries: VecDeque<Entry>,
    digest: Digest,
}

impl Log {
    pub(crate) const fn new() -> Self {
        Self { entries: VecDeque::new(), digest: Digest::START }
    }

    pub(crate) fn push(&mut self, entry: Entry) {
        entry.feed(&mut self.digest);
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    pub(crate) fn entries(&self) -> Vec<Entry> {
        self.entries.iter().cloned().collect()
    }

    /// The newest `count` entries, oldest first.
    pub(crate) fn newest(&self, count: usize) -> Vec<Entry> {
        let from = self.entries.len().saturating_sub(count);
        self.entries.range(from..).cloned().collect()
    }

    pub(crate) const fn digest(&self) -> u64 {
        self.digest.value()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(step: u64) -> Entry {
        let at = Duration::from_nanos(step + 12_345);
        Entry { step, at, engine: "a".into(), what: What::Full(PeerId::new(0, 0)) }
    }

    #[test]
    fn the_log_is_bounded_and_the_digest_sees_all() {
        let (mut log, mut other) = (Log::new(), Log::new());
        other.push(entry(1 << 40));
        for step in 0..KEPT as u64 + 3 {
            log.push(entry(step));
            other.push(entry(step));
        }
        assert_eq!(log.entries().len(), KEPT);
        assert_eq!(log.entries()[0].step, 3);
        assert_eq!(log.entries(), other.entries());
        assert_ne!(log.digest(), other.digest());
        assert_eq!(log.newest(2), log.entries()[KEPT - 2..]);
        assert_eq!(log.newest(KEPT + 1), log.entries());
        assert_eq!(entry(7).to_string(), "       7        12.352 a: Full(PeerId(0v0))");
    }
}
