//! What can be seen of peers.

use std::time::Duration;

use serde::Serialize;

/// One peer, as it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeerStatus {
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
    /// What it is in.
    pub state: PeerState,
    /// Since when it is in that state, on the clock that steps are told.
    pub since: Duration,
    /// Sessions with it that are up.
    pub sessions: usize,
    /// The backend of its connection, or that was chosen for one.
    pub backend: Option<String>,
    /// What the connection really uses.
    pub transport: Option<String>,
    /// Why this backend was chosen.
    pub reason: Option<String>,
    /// The last error.
    pub last_error: Option<String>,
    /// Bytes kept for it on this side, without its card.
    pub bytes: usize,
}

/// What a peer is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PeerState {
    /// It is known, and nobody needs a connection.
    Known,
    /// It is being met, by this side or by its own wish.
    Meeting,
    /// There is a connection.
    Connected,
    /// There is a connection, and no session.
    Alone,
    /// An attempt failed; another follows while somebody wants it.
    Pausing,
    /// It was refused, and is not asked again for a while.
    Refused,
    /// A connection to it is ending.
    Ending,
}

/// Counters of one `Peers`, since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeersStats {
    /// Wants that were taken.
    pub wants: u64,
    /// Wants that ended ready.
    pub ready: u64,
    /// Wants that ended failed.
    pub failed: u64,
    /// Attempts to fetch cards.
    pub fetches: u64,
    /// Attempts to meet a rank.
    pub meetings: u64,
    /// Attempts, of both kinds, that failed.
    pub failures: u64,
    /// Handshakes of others that were answered to the end.
    pub answered: u64,
    /// Questions and attempts of others that were refused.
    pub refused: u64,
    /// Messages that could not be read.
    pub malformed: u64,
    /// Peers that are gone.
    pub gone: u64,
    /// Connections that did not end within their bound.
    pub undead: u64,
}
