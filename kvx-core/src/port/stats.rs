//! Counters: plain numbers that change under a lock that is held anyway.

use serde::Serialize;

/// What a port, or one peer of it, has done so far.
///
/// A peer's counters are forgotten with the peer; the port's go on counting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PortStats {
    /// Transfers accepted.
    pub transfers: u64,
    /// Transfers settled as done.
    pub done: u64,
    /// Transfers settled as failed or cancelled.
    pub failed: u64,
    /// Bytes of transfers settled as done.
    pub bytes: u64,
    /// Segments, after splitting, of transfers settled as done.
    pub segments: u64,
    /// Batches that the backend took.
    pub batches: u64,
    /// Times the backend said full. Not failures: the batch is posted later.
    pub full: u64,
    /// Notifications that arrived.
    pub notifications: u64,
    /// Notifications that arrived while the port was closing, and were discarded.
    pub discarded_notifications: u64,
    /// Peer-down events that nobody took, the oldest of which made room for newer ones.
    pub discarded_peer_downs: u64,
    /// Batches in flight now.
    pub in_flight: u64,
    /// Transfers not settled now.
    pub unsettled: u64,
}
