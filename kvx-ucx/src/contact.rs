//! Endpoints to peers: made, greeted over, and known for what they use once that was sent.

use std::time::Instant;

use kvx_core::Result;
use kvx_core::backend::PeerInfo;
use kvx_core::id::PeerId;

use crate::core::Core;
use crate::error::down;
use crate::lanes::{Lanes, Reach};
use crate::message::{Header, Kind};
use crate::parting::MOST_STUCK;
use crate::reach::{self, unreached};
use crate::require::unwanted;
use crate::sys::{Batch, Endpoint, Worker};

/// An endpoint, and how far it has come.
pub(crate) struct Way {
    pub(crate) endpoint: Endpoint,
    pub(crate) token: u64,
    pub(crate) contact: Contact,
}

pub(crate) enum Contact {
    /// Nothing was sent over it.
    Silent,
    /// Its first message was not sent.
    Trying(Batch, Instant),
    /// What it uses, and what of the peer's memory UCX reaches by itself.
    Made(PeerInfo, Reach),
    /// UCX has given it up.
    Broken,
}

impl Core {
    /// Makes the endpoint of an open peer, if there is none. Nothing is sent over it: but whether the peer can be reached is known.
    pub(crate) fn find(&mut self, operation: &'static str, peer: PeerId) -> Result<()> {
        let token = self.token();
        let (Some(known), Some(worker)) = (self.peers.get_mut(peer), &mut self.worker) else {
            return Err(down(operation, "the connection is over"));
        };
        if !known.is_open() {
            return Err(known.over(operation));
        }
        if known.way.is_some() {
            return Ok(());
        }
        let stuck = self.lingering.values().filter(|other| other.is_stuck(&known.incarnation)).count();
        if stuck >= MOST_STUCK {
            return Err(reach::stuck(operation, stuck));
        }
        self.touched = true;
        if let Some(error) = self.barred.why(&known.address) {
            return Err(error);
        }
        let endpoint = Endpoint::new(worker, &known.address, token).map_err(|failure| {
            let both = (&self.networks, &*known);
            let error = unreached(operation, &failure, (self.library, &self.options), both);
            self.barred.note(&known.address, &failure, &error);
            error
        })?;
        known.way = Some(Way { endpoint, token, contact: Contact::Silent });
        self.ways.insert(token, peer);
        Ok(())
    }

    /// As [`find`](Self::find), and greets the peer, so that the two connect.
    pub(crate) fn way(&mut self, operation: &'static str, peer: PeerId) -> Result<()> {
        self.find(operation, peer).map_err(|error| error.with_context("peer", peer))?;
        let (Some(known), Some(worker)) = (self.peers.get_mut(peer), &self.worker) else { return Ok(()) };
        let Some(way) = known.way.as_mut().filter(|way| matches!(way.contact, Contact::Silent)) else { return Ok(()) };
        self.touched = true;
        let mut batch = Batch::new(worker, &way.endpoint.load, way.token, Vec::new(), Vec::new());
        // Not a flush: until there is a connection none is given to UCX. 1.20 was seen to use one after it was freed, when the
        // connection ended in the moment in which it came about.
        let (word, from) = (known.their_word.unwrap_or(0), known.word);
        let header = Header { kind: Kind::Hello, word, from, number: 0 };
        batch.send(&way.endpoint, header.encode(), Vec::new());
        self.counters.count(Kind::Hello, 0);
        let over = !batch.is_pending();
        way.contact = Contact::Trying(batch, Instant::now());
        self.trying.insert(peer);
        if over {
            self.contacted(peer);
        }
        Ok(())
    }

    /// The first message to a peer was sent: now it is known what its endpoint uses.
    pub(crate) fn contacted(&mut self, peer: PeerId) {
        let Some(known) = self.peers.get_mut(peer) else { return };
        let Some(way) = &mut known.way else { return };
        let Contact::Trying(batch, _) = &way.contact else { return };
        if batch.is_pending() {
            return;
        }
        if let Some(status) = batch.failure() {
            return self.broken(peer, "it cannot be reached", status);
        }
        let lanes = Lanes::of(&way.endpoint.lanes(), self.taken);
        way.contact = Contact::Made(lanes.info(), lanes.reach());
        self.trying.remove(&peer);
        self.stirred = true;
        tracing::info!(target: "kvx_ucx", "peer {peer} is reached by {lanes}");
        let required = self.options.require.as_ref().filter(|names| !lanes.admitted_by(names));
        if let Some(required) = required {
            let found = self.worker.as_ref().map(Worker::resources).unwrap_or_default();
            let error = unwanted(required, &self.options, &found, (&lanes, self.taken));
            self.end(peer, Some(error));
            return;
        }
        self.serve_early(peer);
        if !known_queue_is_empty(self, peer) {
            self.waiting.insert(peer);
        }
    }
}

fn known_queue_is_empty(core: &Core, peer: PeerId) -> bool {
    core.peers.get(peer).is_none_or(|known| known.queue.is_empty())
}
