//! What there is now, to be shown.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// All ranks of one replica of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EngineStatus {
    /// Its name.
    pub engine: String,
    /// Where its cards are served.
    pub address: String,
    /// Its ranks, in the order of the replica.
    pub ranks: Vec<RankStatus>,
}

impl EngineStatus {
    /// A status of these ranks.
    #[must_use]
    pub fn new(
        engine: impl Into<String>,
        address: impl Into<String>,
        ranks: Vec<RankStatus>,
    ) -> Self {
        Self { engine: engine.into(), address: address.into(), ranks }
    }
}

/// One rank, as it is now. Times are in milliseconds, by this process's monotonic clock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RankStatus {
    /// The engine.
    pub engine: String,
    /// The replica.
    pub replica: u32,
    /// The rank in the replica.
    pub rank: u32,
    /// Where its control channel listens.
    pub address: String,
    /// How long it has been running.
    pub up_ms: u64,
    /// The peers that it knows, by engine, replica and rank; not more than [`SHOWN_PEERS`](Self::SHOWN_PEERS).
    pub peers: Vec<PeerView>,
    /// How many peers it knows.
    pub peers_known: u64,
    /// How many of them are connected.
    pub peers_connected: u64,
    /// Sessions of its control channel that are up.
    pub sessions: u64,
    /// Bytes of messages that wait in them to be sent.
    pub queued_bytes: u64,
    /// Its leases.
    pub leases: Leases,
    /// Its requests.
    pub requests: Requests,
    /// What is kept because something might still move in it.
    pub quarantine: Quarantine,
    /// Everything counted since it was started: the counters of `docs/metrics.md`, by name and own labels.
    pub counters: BTreeMap<String, u64>,
}

impl RankStatus {
    /// Most peers that are listed.
    pub const SHOWN_PEERS: usize = 1_024;

    /// Most requests that are listed.
    pub const SHOWN_REQUESTS: usize = 64;

    /// A counter's value: the sum of all its series.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        let mine = |series: &&String| {
            series.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'))
        };
        let from = self.counters.range(name.to_owned()..);
        let near = from.take_while(|(series, _)| series.starts_with(name));
        near.filter(|(series, _)| mine(series)).map(|(_, count)| count).sum()
    }
}

/// A peer, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct PeerView {
    /// The engine.
    pub engine: String,
    /// Its replica.
    pub replica: u32,
    /// The rank in the replica.
    pub rank: u32,
    /// This life of the rank.
    pub incarnation: String,
    /// Where its control channel listens, if its card is known.
    pub address: Option<String>,
    /// What it is in: `known`, `meeting`, `connected`, `alone`, `pausing`, `refused` or `ending`, as
    /// [`PeerState`](crate::protocol::peers::PeerState) says.
    pub state: String,
    /// For how long.
    pub for_ms: u64,
    /// Sessions with it that are up.
    pub sessions: usize,
    /// The backend of its connection, or that was chosen for one.
    pub backend: Option<String>,
    /// What the connection really uses.
    pub transport: Option<String>,
    /// Why this backend was chosen.
    pub reason: Option<String>,
    /// The last error, and what to do about it.
    pub last_error: Option<String>,
}

/// Leases that are not freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Leases {
    /// Those that hold.
    pub held: u64,
    /// Those that are over and wait until nothing can move in their blocks.
    pub draining: u64,
    /// Those that have waited too long for that.
    pub quarantined: u64,
    /// How long ago the oldest of all was granted.
    pub oldest_ms: Option<u64>,
}

/// Requests that are not over, or whose blocks are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Requests {
    /// Those that wait until the other engine's ranks are connected.
    pub routing: u64,
    /// Those that move or are confirmed.
    pub active: u64,
    /// Those that are over, and whose blocks are kept.
    pub quarantined: u64,
    /// Transfers that are posted and have not settled.
    pub transfers: u64,
    /// The oldest, first of all; not more than [`RankStatus::SHOWN_REQUESTS`].
    pub oldest: Vec<RequestView>,
}

/// A request, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RequestView {
    /// The engine's name for it.
    pub key: String,
    /// Its name in traces.
    pub trace: String,
    /// The other engine.
    pub engine: String,
    /// The lease.
    pub lease: String,
    /// `read` or `write`.
    pub mode: String,
    /// `routing`, `active` or `quarantined`.
    pub state: String,
    /// How long ago it was asked for.
    pub age_ms: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Transfers done.
    pub transfers: u64,
}

/// Blocks that must not be used again before it is known that nothing moves in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Quarantine {
    /// Of requests that this rank moves.
    pub request_blocks: u64,
    /// Of leases that this rank granted.
    pub lease_blocks: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_the_sum_of_its_series_and_of_no_other() {
        let mut status = RankStatus::default();
        for (series, count) in
            [("a", 1), ("a_b", 2), ("a{x=\"1\"}", 4), ("a{x=\"2\"}", 8), ("b", 16)]
        {
            status.counters.insert(series.into(), count);
        }
        assert_eq!(status.counter("a"), 13);
        assert_eq!(status.counter("a_b"), 2);
        assert_eq!(status.counter("c"), 0);
    }

    #[test]
    fn a_status_of_another_version_can_be_read() {
        let status: RankStatus = serde_json::from_str(r#"{"rank": 3, "new": [1]}"#).unwrap();
        assert_eq!((status.rank, status.leases), (3, Leases::default()));
    }
}
