//! What can be seen of peers.

use std::time::Duration;

use kvx_core::Error;
use kvx_core::card::Card;
use serde::Serialize;

use super::Peers;
use super::peer::{Attempt, Link, Peer};
use super::site::{Site, Way};
use crate::observe::error_kind;

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

impl PeerState {
    /// Its name, as in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Known => "known",
            Self::Meeting => "meeting",
            Self::Connected => "connected",
            Self::Alone => "alone",
            Self::Pausing => "pausing",
            Self::Refused => "refused",
            Self::Ending => "ending",
        }
    }
}

/// Counters of one [`Peers`](super::Peers), since it was made.
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
    /// The same by the kind of error, in the order of [`ErrorKind`](kvx_core::ErrorKind).
    pub failures_by_kind: [u64; 8],
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

impl PeersStats {
    /// An attempt failed.
    pub(super) fn count_failure(&mut self, error: &Error) {
        self.failures += 1;
        self.failures_by_kind[error_kind(error.kind())] += 1;
    }
}

impl Peers {
    /// All peers, by engine, replica and rank.
    #[must_use]
    pub fn status(&self) -> Vec<PeerStatus> {
        let mut list: Vec<_> = self.peers.values().map(|peer| self.status_of(peer)).collect();
        list.sort_by(|one, other| {
            let key = |status: &PeerStatus| (status.replica, status.rank);
            one.engine.cmp(&other.engine).then_with(|| key(one).cmp(&key(other)))
        });
        list
    }

    fn status_of(&self, peer: &Peer) -> PeerStatus {
        let connection = peer.link.connection();
        let info = match &peer.link {
            Link::Up(up) => up.info.as_ref(),
            _ => None,
        };
        let state = match (&peer.link, &peer.attempt) {
            (Link::Up(up), _) if up.told && peer.sessions.is_empty() => PeerState::Alone,
            (Link::Up(up), _) if up.told => PeerState::Connected,
            (_, Attempt::Running(_) | Attempt::Queued) => PeerState::Meeting,
            (Link::Half(_) | Link::Up(_), _) => PeerState::Meeting,
            (_, Attempt::Refused(until, _)) if self.now < *until => PeerState::Refused,
            (_, Attempt::Pausing(_)) => PeerState::Pausing,
            _ if peer.is_blocked() => PeerState::Ending,
            _ => PeerState::Known,
        };
        let chosen = peer.chosen.as_ref();
        let backend = connection.map(|connection| connection.backend);
        PeerStatus {
            engine: peer.remote.engine.to_string(),
            replica: peer.place.replica,
            rank: peer.place.rank,
            incarnation: peer.remote.incarnation.to_string(),
            address: peer.card.as_deref().map(|card| Card::control(card).to_string()),
            state,
            since: peer.since,
            sessions: peer.sessions.len(),
            backend: backend.or_else(|| Some(chosen?.backend)).map(str::to_owned),
            transport: info.map(|info| info.transport.clone()),
            reason: chosen.map(|chosen| chosen.reason.clone()),
            last_error: peer.error.as_ref().map(ToString::to_string),
            bytes: self.bytes_of(peer),
        }
    }

    /// Bytes kept for a peer: its own, and its share of what is kept of its engine.
    fn bytes_of(&self, peer: &Peer) -> usize {
        let sites = peer.sites.iter().filter_map(|no| self.sites.get(no));
        let shares = sites.map(|site| bytes_of_site(site) / site.ranks().max(1));
        let error = peer.error.as_ref().map_or(0, |error| error.to_string().len() + 256);
        // Entries of tables have a key and a place in a node beside themselves.
        size_of_val(peer)
            + 2 * peer.remote.engine.as_str().len()
            + 512
            + error
            + shares.sum::<usize>()
    }

    /// How many peers it knows.
    #[must_use]
    pub fn known(&self) -> usize {
        self.peers.len()
    }

    /// What was counted.
    #[must_use]
    pub const fn stats(&self) -> PeersStats {
        self.stats
    }

    /// How many entries there are in all tables together. Nothing is left when all is forgotten and has ended, but for lives that were
    /// replaced, which are remembered for a while, and for addresses that are being dialled.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.wants.len()
            + self.sites.len()
            + self.site_numbers.len()
            + self.peers.len()
            + self.places.len()
            + self.sessions.len()
            + self.dialled.len()
            + self.steps.len()
            + self.connections.len()
            + self.ending.len()
            + self.early_downs.len()
            + self.answering.len()
            + self.timers.len()
            + self.queue.len()
            + self.young
    }
}

fn bytes_of_site(site: &Site) -> usize {
    let ways = site.known.iter().flat_map(|known| &known.ways);
    let courses = ways.filter_map(Way::course).map(|course| course.memory_bytes());
    size_of_val(site) + 2 * site.key.engine.as_str().len() + 512 + 2 * courses.sum::<usize>()
}
