//! A backend around another one, with one deliberate fault.

use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use async_trait::async_trait;
use kvx_core::backend::{Events, PeerInfo, Submit, TransferBackend};
use kvx_core::capability::Capabilities;
use kvx_core::handshake::{Handshake, HandshakeBytes};
use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{KeyBlob, MemoryRegistry, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::{Error, Result};

/// One side's honest backend.
pub(crate) struct At {
    pub(crate) backend: Arc<dyn TransferBackend>,
    /// How many sides were opened before it.
    pub(crate) index: usize,
}

/// A call of `submit`.
#[derive(Clone, Copy)]
pub(crate) struct Post<'a> {
    pub(crate) id: TransferId,
    pub(crate) peer: PeerId,
    pub(crate) mode: Mode,
    pub(crate) segments: &'a [PostedSegment],
    pub(crate) notify: Option<&'a [u8]>,
}

impl Post<'_> {
    pub(crate) fn to(&self, at: &At) -> Result<Submit> {
        at.backend.submit(self.id, self.peer, self.mode, self.segments, self.notify)
    }

    pub(crate) fn held(&self) -> Held {
        Held {
            id: self.id,
            peer: self.peer,
            mode: self.mode,
            segments: self.segments.to_vec(),
            notify: self.notify.map(Vec::from),
        }
    }
}

/// A call of `submit` that is kept for later.
#[derive(Clone)]
pub(crate) struct Held {
    pub(crate) id: TransferId,
    pub(crate) peer: PeerId,
    pub(crate) mode: Mode,
    pub(crate) segments: Vec<PostedSegment>,
    pub(crate) notify: Option<Vec<u8>>,
}

impl Held {
    pub(crate) fn post(&self) -> Post<'_> {
        Post {
            id: self.id,
            peer: self.peer,
            mode: self.mode,
            segments: &self.segments,
            notify: self.notify.as_deref(),
        }
    }

    /// Posts it, if that is possible. What comes of it is nobody's business.
    pub(crate) fn try_to(&self, at: &At) -> bool {
        matches!(self.post().to(at), Ok(Submit::Submitted))
    }
}

/// How closing goes.
pub(crate) enum Closing {
    Honest,
    Nothing,
    Hang,
    Fail,
}

/// One deliberate fault, shared by all sides of a stage. What is not overridden is honest.
pub(crate) trait Sabotage: Send + Sync {
    fn opened(&self, _at: &At) {}

    fn capabilities(&self, _at: &At, _honest: &mut Capabilities) {}

    /// What it says of itself when it is asked again.
    fn later_capabilities(&self, _honest: &Capabilities) -> Option<Capabilities> {
        None
    }

    fn incarnation(&self, at: &At) -> Incarnation {
        at.backend.incarnation()
    }

    fn allocate(&self, at: &At, bytes: u64) -> Result<Region> {
        at.backend.allocate(bytes)
    }

    fn register(&self, at: &At, region: &Region) -> Result<RegionId> {
        at.backend.register(region)
    }

    fn deregister(&self, at: &At, region: RegionId) -> Result<()> {
        at.backend.deregister(region)
    }

    fn key_blob(&self, at: &At, region: RegionId) -> Result<KeyBlob> {
        at.backend.key_blob(region)
    }

    fn import_key(&self, at: &At, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        at.backend.import_key(peer, blob)
    }

    fn release_key(&self, at: &At, peer: PeerId, key: RemoteRegionId) -> Result<()> {
        at.backend.release_key(peer, key)
    }

    fn offer(&self, at: &At) -> Result<HandshakeBytes> {
        at.backend.offer()
    }

    fn accept(&self, at: &At, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        at.backend.accept(offer)
    }

    fn complete(&self, at: &At, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        at.backend.complete(reply)
    }

    fn finish(&self, at: &At, completion: &HandshakeBytes) -> Result<PeerId> {
        at.backend.finish(completion)
    }

    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        post.to(at)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        at.backend.poll(events);
    }

    fn cancel(&self, at: &At, id: TransferId) -> Result<()> {
        at.backend.cancel(id)
    }

    fn sever(&self, at: &At, peer: PeerId) -> Result<()> {
        at.backend.sever(peer)
    }

    fn revoke(&self, at: &At, peer: PeerId) -> Result<()> {
        at.backend.revoke(peer)
    }

    fn peer_info(&self, at: &At, peer: PeerId) -> Result<PeerInfo> {
        at.backend.peer_info(peer)
    }

    /// The answer to `connect`, if it is not the honest one.
    fn connect(&self, _at: &At, _peer: PeerId) -> Option<Result<()>> {
        None
    }

    fn closing(&self, _at: &At) -> Closing {
        Closing::Honest
    }

    /// Whether the descriptor becomes readable when it should.
    fn descriptor_speaks(&self) -> bool {
        true
    }

    /// Whether there is a descriptor though none is claimed.
    fn descriptor_unclaimed(&self) -> bool {
        false
    }
}

/// No fault at all.
pub(crate) struct Honest;

impl Sabotage for Honest {}

/// A backend with a fault.
pub(crate) struct Sabotaged {
    at: At,
    fault: Arc<dyn Sabotage>,
    capabilities: Capabilities,
    later: Option<Capabilities>,
    asked: AtomicU32,
    /// A descriptor that is always readable, and one that never is.
    descriptors: [(UnixStream, UnixStream); 2],
}

impl Sabotaged {
    pub(crate) fn new(
        backend: Arc<dyn TransferBackend>,
        index: usize,
        fault: Arc<dyn Sabotage>,
        claim: fn(&mut Capabilities),
    ) -> Result<Self> {
        let failed = |error: std::io::Error| {
            Error::new(kvx_core::ErrorKind::Resources, "open", "no descriptor").with_source(error)
        };
        let readable = UnixStream::pair().map_err(failed)?;
        std::io::Write::write_all(&mut &readable.1, &[1]).map_err(failed)?;
        let silent = UnixStream::pair().map_err(failed)?;
        let at = At { backend, index };
        let mut capabilities = at.backend.capabilities().clone();
        claim(&mut capabilities);
        fault.capabilities(&at, &mut capabilities);
        let later = fault.later_capabilities(&capabilities);
        fault.opened(&at);
        Ok(Self {
            at,
            fault,
            capabilities,
            later,
            asked: AtomicU32::new(0),
            descriptors: [readable, silent],
        })
    }
}

impl fmt::Debug for Sabotaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sabotaged").field("at", &self.at.backend).finish_non_exhaustive()
    }
}

impl MemoryRegistry for Sabotaged {
    fn allocate(&self, bytes: u64) -> Result<Region> {
        self.fault.allocate(&self.at, bytes)
    }

    fn register(&self, region: &Region) -> Result<RegionId> {
        self.fault.register(&self.at, region)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.fault.deregister(&self.at, region)
    }

    fn key_blob(&self, region: RegionId) -> Result<KeyBlob> {
        self.fault.key_blob(&self.at, region)
    }

    fn import_key(&self, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        self.fault.import_key(&self.at, peer, blob)
    }

    fn release_key(&self, peer: PeerId, region: RemoteRegionId) -> Result<()> {
        self.fault.release_key(&self.at, peer, region)
    }
}

impl Handshake for Sabotaged {
    fn incarnation(&self) -> Incarnation {
        self.fault.incarnation(&self.at)
    }

    fn offer(&self) -> Result<HandshakeBytes> {
        self.fault.offer(&self.at)
    }

    fn accept(&self, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        self.fault.accept(&self.at, offer)
    }

    fn complete(&self, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        self.fault.complete(&self.at, reply)
    }

    fn finish(&self, completion: &HandshakeBytes) -> Result<PeerId> {
        self.fault.finish(&self.at, completion)
    }
}

#[async_trait]
impl TransferBackend for Sabotaged {
    fn name(&self) -> &'static str {
        self.at.backend.name()
    }

    fn capabilities(&self) -> &Capabilities {
        match &self.later {
            Some(later) if self.asked.fetch_add(1, SeqCst) >= 1 => later,
            _ => &self.capabilities,
        }
    }

    fn submit(
        &self,
        id: TransferId,
        peer: PeerId,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Result<Submit> {
        self.fault.submit(&self.at, Post { id, peer, mode, segments, notify })
    }

    fn poll(&self, events: &mut Events) {
        self.fault.poll(&self.at, events);
    }

    fn cancel(&self, id: TransferId) -> Result<()> {
        self.fault.cancel(&self.at, id)
    }

    fn sever(&self, peer: PeerId) -> Result<()> {
        self.fault.sever(&self.at, peer)
    }

    fn revoke(&self, peer: PeerId) -> Result<()> {
        self.fault.revoke(&self.at, peer)
    }

    fn peer_info(&self, peer: PeerId) -> Result<PeerInfo> {
        self.fault.peer_info(&self.at, peer)
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        if !self.capabilities.event_fd && !self.fault.descriptor_unclaimed() {
            return None;
        }
        let [readable, silent] = &self.descriptors;
        let chosen = if self.fault.descriptor_speaks() { readable } else { silent };
        Some(chosen.0.as_fd())
    }

    async fn connect(&self, peer: PeerId) -> Result<()> {
        match self.fault.connect(&self.at, peer) {
            Some(answer) => answer,
            None => self.at.backend.connect(peer).await,
        }
    }

    async fn close(&self) -> Result<()> {
        match self.fault.closing(&self.at) {
            Closing::Honest => self.at.backend.close().await,
            Closing::Nothing => Ok(()),
            Closing::Hang => std::future::pending().await,
            Closing::Fail => Err(Error::new(kvx_core::ErrorKind::Fabric, "close", "sabotage")),
        }
    }
}
