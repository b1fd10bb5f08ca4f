//! What may happen while transfers are in flight.

use kvx_core::backend::TransferBackend as _;
use kvx_core::id::TransferId;
use kvx_core::memory::MemoryRegistry as _;
use kvx_core::transfer::Mode;

use crate::pair::Pair;

/// What happens in the midst of transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Happens {
    Cancel,
    /// The side that posted ends the connection.
    Sever,
    /// The side that did not.
    Severed,
    Revoke,
    /// The memory that is read is not registered any more.
    SourceGone,
    TargetGone,
}

impl Happens {
    pub(crate) const ALL: [Self; 6] = [
        Self::Cancel,
        Self::Sever,
        Self::Severed,
        Self::Revoke,
        Self::SourceGone,
        Self::TargetGone,
    ];

    pub(crate) fn ends_connection(self) -> bool {
        matches!(self, Self::Sever | Self::Severed | Self::Revoke)
    }
}

pub(crate) fn happen(what: Happens, pair: &Pair, mode: Mode) {
    let (one, other) = (&pair.one, &pair.other);
    let (reader, read) = if mode == Mode::Read { (one, other) } else { (other, one) };
    match what {
        // Each may have settled.
        Happens::Cancel => (0..3).for_each(|id| drop(one.backend.cancel(TransferId(id)))),
        Happens::Sever => one.backend.sever(one.peer).unwrap(),
        Happens::Severed => other.backend.sever(other.peer).unwrap(),
        Happens::Revoke => other.backend.revoke(other.peer).unwrap(),
        Happens::SourceGone => read.backend.deregister(read.region).unwrap(),
        Happens::TargetGone => reader.backend.deregister(reader.region).unwrap(),
    }
}
