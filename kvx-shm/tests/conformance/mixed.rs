//! The backend, but for what it allocates: memory of the heap, which is borrowed.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use async_trait::async_trait;
use kvx_core::Result;
use kvx_core::backend::{Events, PeerInfo, Submit, TransferBackend};
use kvx_core::capability::Capabilities;
use kvx_core::handshake::{Handshake, HandshakeBytes};
use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{KeyBlob, MemoryRegistry, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_shm::ShmBackend;

#[derive(Debug)]
pub(crate) struct Heap(pub(crate) Arc<ShmBackend>);

impl MemoryRegistry for Heap {
    fn allocate(&self, bytes: u64) -> Result<Region> {
        Region::host(bytes)
    }

    fn register(&self, region: &Region) -> Result<RegionId> {
        self.0.register(region)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.0.deregister(region)
    }

    fn key_blob(&self, region: RegionId) -> Result<KeyBlob> {
        self.0.key_blob(region)
    }

    fn import_key(&self, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        self.0.import_key(peer, blob)
    }

    fn release_key(&self, peer: PeerId, region: RemoteRegionId) -> Result<()> {
        self.0.release_key(peer, region)
    }
}

impl Handshake for Heap {
    fn incarnation(&self) -> Incarnation {
        self.0.incarnation()
    }

    fn offer(&self) -> Result<HandshakeBytes> {
        self.0.offer()
    }

    fn accept(&self, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        self.0.accept(offer)
    }

    fn complete(&self, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        self.0.complete(reply)
    }

    fn finish(&self, completion: &HandshakeBytes) -> Result<PeerId> {
        self.0.finish(completion)
    }
}

#[async_trait]
impl TransferBackend for Heap {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn capabilities(&self) -> &Capabilities {
        self.0.capabilities()
    }

    fn submit(
        &self,
        id: TransferId,
        peer: PeerId,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Result<Submit> {
        self.0.submit(id, peer, mode, segments, notify)
    }

    fn poll(&self, events: &mut Events) {
        self.0.poll(events);
    }

    fn cancel(&self, id: TransferId) -> Result<()> {
        self.0.cancel(id)
    }

    fn sever(&self, peer: PeerId) -> Result<()> {
        self.0.sever(peer)
    }

    fn revoke(&self, peer: PeerId) -> Result<()> {
        self.0.revoke(peer)
    }

    fn peer_info(&self, peer: PeerId) -> Result<PeerInfo> {
        self.0.peer_info(peer)
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.event_fd()
    }

    async fn connect(&self, peer: PeerId) -> Result<()> {
        self.0.connect(peer).await
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}
