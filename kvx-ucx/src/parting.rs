//! How this side ends a connection so that the peer hears of it: the peer is told, and the endpoint is closed once it was, or after a
//! while.
//!
//! To close an endpoint at once tells nobody while the two connect: for what the peer sends then, UCX makes another endpoint by itself,
//! and the peer would wait for ever for an answer. UCX 1.13 to 1.22 were seen to do so, also right after the two had connected.

use std::time::{Duration, Instant};

use kvx_core::id::PeerId;

use crate::core::Core;
use crate::message::{Header, Kind};
use crate::contact::{Contact, Way};
use crate::sys::{Batch, Endpoint};

/// How long the peer may take to be told. What UCX has in flight to it may settle only after that, and must within 2 s.
const PARTING: Duration = Duration::from_millis(500);

/// An endpoint that is closed once its last message was sent.
pub(crate) struct Lingering {
    peer: PeerId,
    endpoint: Endpoint,
    batch: Batch,
    /// Or then. `None`: to close it before it is connected might end the process.
    until: Option<Instant>,
    incarnation: [u8; 16],
}

/// Most endpoints to one peer that wait for a connection in order to be closed.
pub(crate) const MOST_STUCK: usize = 8;

impl Lingering {
    /// Whether it is of this peer, and is closed only once it is connected, which may be never.
    pub(crate) fn is_stuck(&self, incarnation: &[u8; 16]) -> bool {
        self.until.is_none() && self.incarnation == *incarnation
    }
}

impl Core {
    /// Lets go of a peer's endpoint. With the words for the connection, the peer's and this side's, the peer is told.
    pub(crate) fn part(&mut self, peer: PeerId, way: Way, words: Option<(u64, u64)>) {
        let Way { mut endpoint, token, contact } = way;
        self.ways.remove(&token);
        let fragile = self.library.is_fragile();
        let (batch, connecting) = match (contact, &self.worker) {
            (Contact::Trying(batch, _), _) if batch.is_pending() => (Some(batch), true),
            (Contact::Trying(batch, _), _) if batch.failure().is_some() => (None, false),
            (Contact::Broken, _) | (_, None) => (None, false),
            (_, Some(worker)) => {
                let own = words.map(|_| Batch::new(worker, &endpoint.load, token, Vec::new(), Vec::new()));
                (own, false)
            }
        };
        let Some(mut batch) = batch else { return self.close(token, endpoint) };
        if let Some((word, from)) = words {
            self.counters.count(Kind::Bye, 0);
            batch.send(&endpoint, Header { kind: Kind::Bye, word, from, number: 0 }.encode(), Vec::new());
        }
        let incarnation = self.peers.get(peer).map_or([0; 16], |known| known.incarnation);
        let lingers = words.is_some() || (connecting && fragile);
        if lingers && batch.is_pending() {
            let until = (!connecting || !fragile).then(|| Instant::now() + PARTING);
            self.timed |= until.is_some();
            self.lingering.insert(token, Lingering { peer, endpoint, batch, until, incarnation });
            return;
        }
        endpoint.close();
        self.mail.push((peer, batch));
        self.closing.insert(token, endpoint);
    }

    fn close(&mut self, token: u64, mut endpoint: Endpoint) {
        endpoint.close();
        self.closing.insert(token, endpoint);
        self.touched = true;
    }

    /// The last messages of an endpoint were sent, if they were.
    pub(crate) fn parted(&mut self, token: u64) {
        if self.lingering.get(&token).is_some_and(|lingering| !lingering.batch.is_pending()) {
            self.linger_no_more(token);
        }
    }

    /// An endpoint that waited to be closed can be.
    pub(crate) fn linger_no_more(&mut self, token: u64) {
        if let Some(Lingering { peer, endpoint, batch, .. }) = self.lingering.remove(&token) {
            self.close(token, endpoint);
            self.mail.push((peer, batch));
        }
    }

    /// Closes endpoints that have lingered for long enough. When the next will have.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        let times = self.lingering.iter().filter_map(|(token, lingering)| Some((*token, lingering.until?)));
        for (token, until) in times.collect::<Vec<_>>() {
            if until <= now {
                self.linger_no_more(token);
            } else {
                next = Some(next.map_or(until, |next| next.min(until)));
            }
        }
        next
    }
}
