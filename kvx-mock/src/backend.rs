//! One engine's end of a fabric.

use std::fmt;

use async_trait::async_trait;
use kvx_core::backend::{Events, PeerInfo, Submit, TransferBackend};
use kvx_core::capability::{Capabilities, Revoke};
use kvx_core::id::{Incarnation, PeerId, TransferId};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::{Error, Result};

use crate::engine::PeerState;
use crate::error::{BACKEND, down, misuse};
use crate::fabric::Fabric;
use crate::net::{EngineId, Net};
use crate::schedule::Lane;
use crate::trace::What;

/// One engine's end of a [`Fabric`]. Dropping it ends the engine.
pub struct MockBackend {
    fabric: Fabric,
    engine: EngineId,
    pub(crate) incarnation: Incarnation,
    capabilities: Capabilities,
    transport: &'static str,
}

impl MockBackend {
    pub(crate) const fn new(
        fabric: Fabric,
        engine: EngineId,
        incarnation: Incarnation,
        capabilities: Capabilities,
        transport: &'static str,
    ) -> Self {
        Self { fabric, engine, incarnation, capabilities, transport }
    }

    /// The fabric to which it belongs.
    #[must_use]
    pub const fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut Net, EngineId) -> R) -> R {
        self.fabric.with(|net| act(net, self.engine))
    }
}

impl fmt::Debug for MockBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MockBackend")
            .field("fabric", &self.fabric)
            .field("incarnation", &self.incarnation)
            .field("transport", &self.transport)
            .finish_non_exhaustive()
    }
}

impl Drop for MockBackend {
    fn drop(&mut self) {
        self.with(Net::forget);
    }
}

#[async_trait]
impl TransferBackend for MockBackend {
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
        self.with(|net, engine| net.submit(engine, id, peer, mode, segments, notify))
    }

    fn poll(&self, events: &mut Events) {
        self.with(|net, engine| net.poll(engine, events));
    }

    fn cancel(&self, id: TransferId) -> Result<()> {
        self.with(|net, engine| net.cancel(engine, id))
    }

    fn sever(&self, peer: PeerId) -> Result<()> {
        self.with(|net, engine| {
            net.engine("sever", engine)?.peer("sever", peer)?;
            net.record(engine, What::Severed(peer));
            net.end(Lane { engine, peer }, None, "the peer severed the connection");
            Ok(())
        })
    }

    fn revoke(&self, peer: PeerId) -> Result<()> {
        if self.capabilities.revoke != Revoke::PerPeer {
            return Err(Error::unsupported("revoke", "this preset cannot end a peer's access")
                .with_backend(BACKEND));
        }
        self.with(|net, engine| {
            net.engine("revoke", engine)?.peer("revoke", peer)?;
            net.record(engine, What::Revoked(peer));
            let lane = Lane { engine, peer };
            net.end(lane, None, "the peer has ended this side's access");
            net.end_access(lane);
            Ok(())
        })
    }

    fn peer_info(&self, peer: PeerId) -> Result<PeerInfo> {
        self.with(|net, engine| {
            net.engine("peer_info", engine)?.peer("peer_info", peer)?;
            Ok(PeerInfo::new(self.transport))
        })
    }

    async fn connect(&self, peer: PeerId) -> Result<()> {
        self.with(|net, engine| {
            let entry = net.engine("connect", engine)?;
            entry.check_open("connect")?;
            let side = entry.peer("connect", peer)?;
            if side.state != PeerState::Open {
                return Err(down("connect", "the connection is over").with_context("peer", peer));
            }
            if !side.ready {
                return Err(misuse("connect", "the handshake with this peer is not complete"));
            }
            if net.is_cut(&entry.name, &side.name) {
                return Err(down("connect", "the peer does not answer").with_context("peer", peer));
            }
            Ok(())
        })
    }

    async fn close(&self) -> Result<()> {
        self.with(|net, engine| net.close(engine, "the peer closed"));
        Ok(())
    }
}
