//! A transfer, as the checker follows it.

use kvx_core::id::{PeerId, RegionId, TransferId};
use kvx_core::transfer::Mode;

use super::checker::LifeId;

/// A transfer that was posted: what its initiator wants moved where.
#[derive(Clone, Debug)]
pub struct Posted {
    /// Its id: never used twice in one run.
    pub id: TransferId,
    /// Who posted it.
    pub from: LifeId,
    /// To which peer, by its handle.
    pub peer: PeerId,
    /// In which direction.
    pub mode: Mode,
    /// Offsets and lengths: the initiator's, the peer's, bytes. Targets must be [free](super::Checker::is_free).
    pub segments: Vec<(u64, u64, u64)>,
    /// The registrations of its own that it uses.
    pub registrations: Vec<RegionId>,
    /// The notification: its first eight bytes, or all if there are fewer, must be the id's in little endian.
    pub notify: Option<Vec<u8>>,
}

/// How far a transfer has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Not settled.
    Open,
    Done,
    NotDone,
    /// Its initiator died.
    Orphan,
}

pub(super) struct Flight {
    pub(super) from: LifeId,
    pub(super) to: LifeId,
    pub(super) peer: PeerId,
    pub(super) connection: u64,
    pub(super) mode: Mode,
    pub(super) notify: Option<Vec<u8>>,
    pub(super) notified: bool,
    /// How many were posted before it.
    pub(super) order: u64,
    /// Whether the data of one that was posted later to the same peer was there first.
    pub(super) overtaken: bool,
    pub(super) cancelled: bool,
    pub(super) fate: Fate,
    /// Whether it has no data.
    pub(super) bare: bool,
    /// The initiator's.
    pub(super) registrations: Vec<RegionId>,
    /// Where its target ranges begin, while the checker expects them to change.
    pub(super) targets: Vec<u64>,
    /// Once they are expected to change no more: whether all the data was there then.
    pub(super) complete: Option<bool>,
}

impl Flight {
    /// In whose memory data arrives.
    pub(super) const fn target(&self) -> LifeId {
        match self.mode {
            Mode::Read => self.from,
            Mode::Write => self.to,
        }
    }

    /// From whose memory it comes.
    pub(super) const fn source(&self) -> LifeId {
        match self.mode {
            Mode::Read => self.to,
            Mode::Write => self.from,
        }
    }
}
