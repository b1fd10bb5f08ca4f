//! One engine's end.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use async_trait::async_trait;
use kvx_core::Result;
use kvx_core::backend::{Events, Outcome, PeerInfo, Submit, TransferBackend};
use kvx_core::capability::Capabilities;
use kvx_core::id::{PeerId, TransferId};
use kvx_core::transfer::{Mode, PostedSegment};

use super::connection::{Connection, Lane};
use super::engine::{Engine, Life};
use super::{Hub, TRANSPORT, lock};
use crate::error::{BACKEND, down, misuse, stale};
use crate::post::check;
use crate::preset::Preset;

/// One engine's end of a [`Loopback`](crate::Loopback). Dropping it ends the engine.
pub struct LoopbackBackend {
    pub(super) hub: Arc<Hub>,
    pub(super) engine: Arc<Engine>,
    pub(super) capabilities: Capabilities,
}

impl LoopbackBackend {
    pub(super) fn new(hub: Arc<Hub>, engine: Arc<Engine>) -> Self {
        Self { hub, engine, capabilities: capabilities() }
    }

    fn connection(&self, operation: &'static str, peer: PeerId) -> Result<Arc<Connection>> {
        Ok(Arc::clone(&self.engine.tables().peer(operation, peer)?.connection))
    }
}

/// As the `rc` preset's, which promises most.
pub(crate) fn capabilities() -> Capabilities {
    Preset::rc().capabilities().clone()
}

impl fmt::Debug for LoopbackBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoopbackBackend")
            .field("incarnation", &self.engine.incarnation)
            .field("transport", &TRANSPORT)
            .finish_non_exhaustive()
    }
}

impl Drop for LoopbackBackend {
    fn drop(&mut self) {
        self.hub.withdraw(&self.engine, Life::Closed, "the peer is gone");
    }
}

#[async_trait]
impl TransferBackend for LoopbackBackend {
    fn name(&self) -> &'static str {
        BACKEND
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(
        &self,
        id: TransferId,
        peer: PeerId,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Result<Submit> {
        let operation = "submit";
        let tables = self.engine.tables();
        tables.check_open(operation)?;
        let side = tables.peer(operation, peer)?;
        let (mine, other) = (side.mine(), side.other());
        // Held until all is moved and reported: whoever closes the lane waits for that.
        let lane = lock(&mine.lane);
        let over = || down(operation, "the connection is over").with_context("peer", peer);
        if *lane == Lane::Closed {
            return Err(over());
        }
        if !mine.ready.load(Acquire) {
            return Err(misuse(operation, "the handshake with this peer is not complete"));
        }
        check(&self.capabilities, mode, segments, notify)?;
        tables.check_handles(peer, segments)?;
        if mine.in_flight.load(Relaxed) >= self.capabilities.limits.max_in_flight {
            return Ok(Submit::Full);
        }
        let note = match notify {
            None => None,
            Some(payload) => {
                let receiver = other.engine.upgrade().zip(other.peer.get());
                let (receiver, peer) = receiver.ok_or_else(over)?;
                if !receiver.inbox.claim() {
                    return Ok(Submit::Full);
                }
                Some((receiver, *peer, payload))
            }
        };
        mine.in_flight.fetch_add(1, Relaxed);
        let copied = tables.copy(peer, mode, segments);
        if let Some((receiver, peer, payload)) = note {
            match copied {
                Ok(()) => receiver.inbox.notified(peer, payload.to_vec()),
                Err(_) => receiver.inbox.unclaim(),
            }
        }
        let outcome = copied.map_or_else(Outcome::Failed, |()| Outcome::done());
        self.engine.inbox.settled(id, outcome, &side.connection, side.end);
        Ok(Submit::Submitted)
    }

    fn poll(&self, events: &mut Events) {
        for peer in self.engine.inbox.give(events) {
            self.engine.forget(peer);
        }
    }

    /// Every transfer settles within the call that posts it, so there is never one to cancel.
    fn cancel(&self, id: TransferId) -> Result<()> {
        Err(stale("cancel", "transfer", id))
    }

    fn sever(&self, peer: PeerId) -> Result<()> {
        let connection = self.connection("sever", peer)?;
        self.hub.end(&connection, self.engine.incarnation, "the peer severed the connection");
        Ok(())
    }

    fn revoke(&self, peer: PeerId) -> Result<()> {
        let connection = self.connection("revoke", peer)?;
        let reason = "the peer has ended this side's access";
        self.hub.end(&connection, self.engine.incarnation, reason);
        Ok(())
    }

    fn peer_info(&self, peer: PeerId) -> Result<PeerInfo> {
        self.connection("peer_info", peer)?;
        Ok(PeerInfo::new(TRANSPORT))
    }

    async fn connect(&self, peer: PeerId) -> Result<()> {
        let tables = self.engine.tables();
        tables.check_open("connect")?;
        let mine = tables.peer("connect", peer)?.mine();
        if *lock(&mine.lane) == Lane::Closed {
            return Err(down("connect", "the connection is over").with_context("peer", peer));
        }
        if !mine.ready.load(Acquire) {
            return Err(misuse("connect", "the handshake with this peer is not complete"));
        }
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        self.hub.withdraw(&self.engine, Life::Closed, "the peer closed");
        Ok(())
    }
}
