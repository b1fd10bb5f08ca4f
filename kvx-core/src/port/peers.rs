//! Peers: the handshake, their regions, and their end.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Port;
use super::state::{Stage, State, Work};
use super::stats::PortStats;
use crate::backend::{PeerInfo, SEVER_BOUND};
use crate::error::{Error, ErrorKind, Result, Retry};
use crate::handshake::HandshakeBytes;
use crate::id::{Incarnation, PeerId, RemoteRegionId};
use crate::memory::KeyBlob;

/// A region of a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct RemoteRegion {
    pub(super) id: RemoteRegionId,
    pub(super) bytes: u64,
}

/// What the port knows of a peer.
#[derive(Debug, Default)]
pub(super) struct Peer {
    /// Its regions in its layout's order.
    pub(super) regions: Arc<[RemoteRegion]>,
    /// Transfers with batches that are not posted, oldest first.
    pub(super) queue: VecDeque<Work>,
    /// Batches in flight: never more than the backend's limit.
    pub(super) in_flight: u32,
    /// Number of the last batch posted: the lowest is served first where there is too little room for all.
    pub(super) last_batch: u64,
    /// Transfers not settled.
    pub(super) unsettled: usize,
    /// The last batch tried was refused as full.
    pub(super) waits_for_room: bool,
    /// A thread is posting to it: others leave their work in the queue.
    pub(super) posting: bool,
    /// It is being severed: no new transfers.
    pub(super) leaving: bool,
    pub(super) transport: Option<Arc<str>>,
    pub(super) stats: PortStats,
}

impl Port {
    /// This side's incarnation.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.inner.backend.incarnation()
    }

    /// Begins a handshake: bytes for any peer. See [`Handshake`](crate::handshake::Handshake).
    ///
    /// # Errors
    ///
    /// Those of [`Handshake::offer`](crate::handshake::Handshake::offer), and
    /// [`ErrorKind::Closed`] when the port was closed.
    pub fn offer(&self) -> Result<HandshakeBytes> {
        self.inner.lock().open("port.offer")?;
        self.inner.backend.offer()
    }

    /// Takes a peer's offer and answers it.
    ///
    /// # Errors
    ///
    /// Those of [`Handshake::accept`](crate::handshake::Handshake::accept), [`ErrorKind::Closed`] when the port was
    /// closed, and [`ErrorKind::Peer`] when the peer went down meanwhile.
    pub fn accept(&self, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        self.meet("port.accept", || self.inner.backend.accept(offer), |(peer, _)| *peer)
    }

    /// Takes the answer to this side's offer. From here on this side may transfer.
    ///
    /// # Errors
    ///
    /// Those of [`Handshake::complete`](crate::handshake::Handshake::complete), and as for [`accept`](Self::accept).
    pub fn complete(&self, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        self.meet("port.complete", || self.inner.backend.complete(reply), |(peer, _)| *peer)
    }

    /// Takes the initiator's completion. From here on the acceptor may transfer.
    ///
    /// # Errors
    ///
    /// Those of [`Handshake::finish`](crate::handshake::Handshake::finish), and as for [`accept`](Self::accept).
    pub fn finish(&self, completion: &HandshakeBytes) -> Result<PeerId> {
        self.meet("port.finish", || self.inner.backend.finish(completion), |peer| *peer)
    }

    /// Runs a step of a handshake and enters the peer that it gives.
    ///
    /// Another thread may be told that this very peer is down before it is entered; such peers are remembered while a
    /// step is under way, so that none is entered for ever.
    fn meet<T>(
        &self,
        operation: &'static str,
        step: impl FnOnce() -> Result<T>,
        peer: impl FnOnce(&T) -> PeerId,
    ) -> Result<T> {
        {
            let mut state = self.inner.lock();
            state.open(operation)?;
            state.meetings += 1;
        }
        let result = step();
        let mut state = self.inner.lock();
        let entered = match &result {
            Ok(value) => state.enter(operation, peer(value)),
            Err(_) => Ok(()),
        };
        state.meetings -= 1;
        if state.meetings == 0 {
            state.early_downs.clear();
        }
        drop(state);
        entered.and(result)
    }

    /// Imports regions of a peer: their keys and sizes in bytes, in the order of the peer's layout. They follow those
    /// that were added before; the result is the index of the first
    /// ([`Segment::remote_region`](crate::transfer::Segment::remote_region)). All are added, or none.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Peer`]: a key is malformed or not of this backend, a size is zero, or the peer went down
    ///   meanwhile. The error names the index.
    /// - [`ErrorKind::Misuse`]: the peer is stale or unknown.
    pub fn add_regions(&self, peer: PeerId, regions: &[(KeyBlob, u64)]) -> Result<u32> {
        const OPERATION: &str = "port.add_regions";
        self.inner.lock().peer(OPERATION, peer)?;
        let mut imported = Vec::with_capacity(regions.len());
        let added = regions
            .iter()
            .enumerate()
            .try_for_each(|(index, (key, bytes))| {
                if *bytes == 0 {
                    return Err(Error::peer(OPERATION, "the peer's region is empty")
                        .with_context("index", index));
                }
                let id = self
                    .inner
                    .backend
                    .import_key(peer, key)
                    .map_err(|error| error.with_context("index", index))?;
                imported.push(RemoteRegion { id, bytes: *bytes });
                Ok(())
            })
            .and_then(|()| self.inner.lock().add_remote(OPERATION, peer, &imported));
        if added.is_err() {
            for region in imported {
                // Fails when the peer is gone, and its keys with it: then there is nothing to release.
                let _gone = self.inner.backend.release_key(peer, region.id);
            }
        }
        added
    }

    /// How many regions of a peer were added.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`]: the peer is stale or unknown.
    pub fn region_count(&self, peer: PeerId) -> Result<usize> {
        Ok(self.inner.lock().peer("port.region_count", peer)?.regions.len())
    }

    /// What the connection to a peer really uses.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`]: the peer is stale or unknown.
    pub fn peer_info(&self, peer: PeerId) -> Result<PeerInfo> {
        self.inner.lock().peer("port.peer_info", peer)?;
        self.inner.backend.peer_info(peer)
    }

    /// The peers that are known now: met, and not down.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerId> {
        self.inner.lock().peers.keys().copied().collect()
    }

    /// Waits until transfers to a peer whose handshake is complete can be posted.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`]: the peer is stale or unknown. Otherwise those of
    /// [`TransferBackend::connect`](crate::backend::TransferBackend::connect).
    pub async fn connect(&self, peer: PeerId) -> Result<()> {
        self.inner.lock().peer("port.connect", peer)?;
        self.inner.backend.connect(peer).await.map_err(|error| {
            // What was polled meanwhile says why.
            let state = self.inner.lock();
            let why = state.peer_downs.iter().rev().find(|(down, _)| *down == peer);
            why.and_then(|(_, why)| why.as_ref()).map_or(error, Error::again)
        })
    }

    /// Ends a peer at once. What is not posted is given up; what is in flight settles, as failed or otherwise, within
    /// [`SEVER_BOUND`]; then the peer is reported down.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`]: the peer is stale or unknown.
    pub fn sever(&self, peer: PeerId) -> Result<()> {
        self.end("port.sever", peer, |port| match port.inner.backend.sever(peer) {
            // It went down by itself: that will be reported too.
            Err(error) if error.kind() == ErrorKind::Misuse => Ok(()),
            other => other,
        })
    }

    /// Ends a peer's access to this side's memory, and everything else as [`sever`](Self::sever) does.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`]: the backend's [`revoke`](crate::capability::Capabilities::revoke) says so.
    /// [`ErrorKind::Misuse`]: the peer is stale or unknown.
    pub fn revoke(&self, peer: PeerId) -> Result<()> {
        self.inner.lock().peer("port.revoke", peer)?;
        // First the backend: where it cannot, nothing may have changed.
        self.inner.backend.revoke(peer)?;
        match self.end("port.revoke", peer, |_| Ok(())) {
            // It is down already.
            Err(error) if error.kind() == ErrorKind::Misuse => Ok(()),
            other => other,
        }
    }

    fn end(
        &self,
        operation: &'static str,
        peer: PeerId,
        step: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        let mut effects = super::state::Effects::default();
        {
            let mut state = self.inner.lock();
            state.peer(operation, peer)?.leaving = true;
            state.give_up(
                |record| record.peer == peer,
                || Error::new(ErrorKind::Closed, operation, "the peer was severed"),
                &mut effects,
            );
        }
        let result = step(self);
        self.inner.run(effects);
        result
    }

    /// Ends a peer gently: refuses new transfers, waits until those begun have settled, then severs it and waits until it
    /// is down. Waits as long as the transfers take; [`sever`](Self::sever) hurries it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`]: the peer is stale or unknown. [`ErrorKind::Fabric`]: it did not go down within twice
    /// [`SEVER_BOUND`].
    pub async fn disconnect(&self, peer: PeerId) -> Result<()> {
        const OPERATION: &str = "port.disconnect";
        self.inner.lock().peer(OPERATION, peer)?.leaving = true;
        self.until_settled(|state| state.peers.get(&peer).is_none_or(|peer| peer.unsettled == 0))
            .await;
        match self.sever(peer) {
            // It went down by itself.
            Err(error) if error.kind() == ErrorKind::Misuse => return Ok(()),
            other => other?,
        }
        let bound = SEVER_BOUND * 2;
        if self.until(bound, |state| !state.peers.contains_key(&peer)).await {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Fabric, OPERATION, "the backend did not report the peer down")
            .with_backend(self.backend_name())
            .with_context("peer", peer)
            .with_context("waited", format_args!("{} ms", bound.as_millis())))
    }

    /// Counters of one peer.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`]: the peer is stale or unknown.
    pub fn peer_stats(&self, peer: PeerId) -> Result<PortStats> {
        let mut state = self.inner.lock();
        let peer = state.peer("port.peer_stats", peer)?;
        Ok(PortStats {
            in_flight: peer.in_flight.into(),
            unsettled: peer.unsettled as u64,
            ..peer.stats
        })
    }
}

impl State {
    /// The peer, unless it is stale or unknown.
    pub(super) fn peer(&mut self, operation: &'static str, peer: PeerId) -> Result<&mut Peer> {
        let closed = self.stage != Stage::Open;
        self.peers.get_mut(&peer).ok_or_else(|| {
            if closed {
                return super::state::closed(operation);
            }
            Error::misuse(operation, "the peer is stale or unknown")
                .with_context("peer", peer)
                .with_retry(Retry::Reconnect)
                .with_remedy("a peer that went down must be met again by a handshake")
        })
    }

    /// Enters a peer that a handshake gave; nothing changes when it is known.
    fn enter(&mut self, operation: &'static str, peer: PeerId) -> Result<()> {
        self.open(operation)?;
        if self.early_downs.contains(&peer) {
            return Err(Error::peer(operation, "the peer went down during the handshake")
                .with_context("peer", peer)
                .with_retry(Retry::Reconnect));
        }
        self.peers.entry(peer).or_default();
        Ok(())
    }

    fn add_remote(
        &mut self,
        operation: &'static str,
        peer: PeerId,
        regions: &[RemoteRegion],
    ) -> Result<u32> {
        let known = self.peer(operation, peer)?;
        let first = u32::try_from(known.regions.len());
        let all = u32::try_from(known.regions.len() + regions.len());
        let (Ok(first), Ok(_)) = (first, all) else {
            return Err(Error::peer(operation, "more regions than can be numbered"));
        };
        known.regions = known.regions.iter().chain(regions).copied().collect();
        Ok(first)
    }
}
