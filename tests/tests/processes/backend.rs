//! A small complete backend over TCP. The target is software: a thread carries out what peers ask for.

use std::fmt;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use async_trait::async_trait;
use kvx_core::backend::{Event, Events, Outcome, PeerInfo, Submit, TransferBackend};
use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::handshake::{Handshake, HandshakeBytes};
use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{KeyBlob, MemoryKind, MemoryRegistry, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::{Error, ErrorKind, Result};

use crate::connection::Shared;
use crate::message::{Bytes, Hand, Key, Piece, Request, Step};
use crate::state::{Flight, Peer, State, gone};

pub(crate) struct Plain {
    shared: Arc<Shared>,
    capabilities: Capabilities,
}

impl Plain {
    /// Listens on a free port of `address`.
    pub(crate) fn open(address: IpAddr) -> Result<Arc<Self>> {
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::Resources, "open", "no socket to be had").with_source(error)
        };
        let listener = TcpListener::bind((address, 0)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let signal = UnixStream::pair().map_err(failed)?;
        signal.0.set_nonblocking(true).map_err(failed)?;
        signal.1.set_nonblocking(true).map_err(failed)?;
        let incarnation = *Incarnation::random()?.as_bytes();
        let shared = Arc::new(Shared::new(incarnation, address, signal));
        shared.listen(listener);
        let mut capabilities = Capabilities::none();
        capabilities.read = true;
        capabilities.write = true;
        capabilities.host_memory = true;
        capabilities.limits.max_segment_bytes = 1 << 20;
        capabilities.limits.max_batch_segments = 64;
        capabilities.limits.max_notification_bytes = 1024;
        capabilities.limits.max_in_flight = 32;
        capabilities.ordering = Ordering::PerPeer;
        capabilities.revoke = Revoke::PerPeer;
        capabilities.event_fd = true;
        Ok(Arc::new(Self { shared, capabilities }))
    }

    /// Acts on the state of a backend that is open.
    fn open_state<R>(
        &self,
        operation: &'static str,
        act: impl FnOnce(&mut State) -> Result<R>,
    ) -> Result<R> {
        self.shared.with(|state| {
            if state.closed {
                return Err(Error::new(ErrorKind::Closed, operation, "the backend is closed"));
            }
            act(state)
        })
    }

    /// The peer of a message, known from now on.
    fn meet(&self, state: &mut State, hand: &Hand) -> PeerId {
        if let Some(known) = state.known(hand.from) {
            return known;
        }
        let handle = PeerId::new(state.handle(), 0);
        let peer = Peer {
            incarnation: hand.from,
            address: hand.address,
            word: handle.slot().into(),
            their_word: 0,
            outgoing: None,
            incoming: None,
            outbox: Default::default(),
            ready: false,
            over: false,
        };
        state.peers.insert(handle, peer);
        handle
    }

    fn hand(&self, step: Step, to: [u8; 16], word: u64) -> Result<HandshakeBytes> {
        Hand::new(step, self.shared.incarnation, to, self.shared.address, word).encode()
    }

    /// Reads a message to this side.
    fn read(&self, operation: &'static str, bytes: &HandshakeBytes, step: Step) -> Result<Hand> {
        let hand = Hand::decode(operation, bytes, step)?;
        if step != Step::Offer && hand.to != self.shared.incarnation {
            return Err(Error::peer(operation, "a message to another incarnation"));
        }
        Ok(hand)
    }

    /// From now on this side may post to a peer.
    fn ready(&self, operation: &'static str, peer: PeerId, word: u64) -> Result<()> {
        self.shared.with(|state| {
            if let Some(known) = state.peers.get_mut(&peer) {
                known.their_word = word;
            }
        });
        self.shared.dial(peer)?;
        self.open_state(operation, |state| {
            let known = state.peers.get_mut(&peer).ok_or_else(|| gone("it is over already"))?;
            known.ready = true;
            Ok(())
        })
    }
}

fn stale(operation: &'static str, handle: impl fmt::Display) -> Error {
    Error::misuse(operation, "a stale or unknown handle").with_context("handle", handle)
}

impl fmt::Debug for Plain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plain").field("address", &self.shared.address).finish_non_exhaustive()
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        self.shared.shut(false);
    }
}

impl Handshake for Plain {
    fn incarnation(&self) -> Incarnation {
        Incarnation::from_bytes(self.shared.incarnation)
    }

    fn offer(&self) -> Result<HandshakeBytes> {
        self.open_state("offer", |state| {
            state.offered = true;
            self.hand(Step::Offer, [0; 16], 0)
        })
    }

    fn accept(&self, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        self.open_state("accept", |state| {
            let hand = self.read("accept", offer, Step::Offer)?;
            let peer = self.meet(state, &hand);
            Ok((peer, self.hand(Step::Reply, hand.from, peer.slot().into())?))
        })
    }

    fn complete(&self, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        let (peer, hand) = self.open_state("complete", |state| {
            let hand = self.read("complete", reply, Step::Reply)?;
            if !state.offered {
                return Err(Error::peer("complete", "a reply, but no offer was made"));
            }
            Ok((self.meet(state, &hand), hand))
        })?;
        self.ready("complete", peer, hand.word)?;
        Ok((peer, self.hand(Step::Completion, hand.from, peer.slot().into())?))
    }

    fn finish(&self, completion: &HandshakeBytes) -> Result<PeerId> {
        let (peer, word) = self.open_state("finish", |state| {
            let hand = self.read("finish", completion, Step::Completion)?;
            let peer = state.known(hand.from);
            let peer = peer.ok_or_else(|| gone("a completion, but no offer was accepted"))?;
            Ok((peer, hand.word))
        })?;
        self.ready("finish", peer, word)?;
        Ok(peer)
    }
}

impl MemoryRegistry for Plain {
    fn register(&self, region: &Region) -> Result<RegionId> {
        if region.kind() != MemoryKind::Host {
            return Err(Error::unsupported("register", "host memory only")
                .with_context("memory", region.kind()));
        }
        let random = Incarnation::random()?;
        let secret = u64::from_le_bytes(random.as_bytes()[..8].try_into().unwrap_or_default());
        self.open_state("register", |state| {
            let handle = RegionId::new(state.handle(), 0);
            state.regions.insert(handle, (region.clone(), secret));
            Ok(handle)
        })
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.shared.with(|state| {
            state.regions.remove(&region).map(drop).ok_or_else(|| stale("deregister", region))
        })
    }

    fn key_blob(&self, region: RegionId) -> Result<KeyBlob> {
        self.shared.with(|state| {
            let known = state.regions.get(&region).ok_or_else(|| stale("key_blob", region))?;
            let owner = self.shared.incarnation;
            Key::new(owner, region.slot(), region.generation(), known.1).encode()
        })
    }

    fn import_key(&self, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        self.open_state("import_key", |state| {
            let known = state.peers.get(&peer).ok_or_else(|| stale("import_key", peer))?;
            let key = Key::decode(blob)?;
            if key.owner != known.incarnation {
                return Err(Error::peer("import_key", "the key is of another incarnation"));
            }
            let handle = RemoteRegionId::new(state.handle(), 0);
            state.keys.insert(handle, (peer, key));
            Ok(handle)
        })
    }

    fn release_key(&self, peer: PeerId, region: RemoteRegionId) -> Result<()> {
        self.shared.with(|state| {
            state
                .keys
                .get(&region)
                .filter(|(owner, _)| *owner == peer)
                .ok_or_else(|| stale("release_key", region))?;
            state.keys.remove(&region);
            Ok(())
        })
    }
}

#[async_trait]
impl TransferBackend for Plain {
    fn name(&self) -> &'static str {
        "plain-tcp"
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
        let limits = self.capabilities.limits;
        self.open_state("submit", |state| {
            let known = state.peers.get(&peer).ok_or_else(|| stale("submit", peer))?;
            if known.over {
                return Err(gone("it is over"));
            }
            if !known.ready || state.in_flight.contains_key(&id) {
                return Err(Error::misuse("submit", "not ready, or the id is in flight"));
            }
            if notify.is_some_and(|note| note.len() > limits.max_notification_bytes as usize) {
                return Err(Error::misuse("submit", "the notification is too long"));
            }
            let (mut pieces, mut read, mut data) = (Vec::new(), Vec::new(), Vec::new());
            for segment in segments {
                let local = state.regions.get(&segment.local);
                let (local, _) = local.ok_or_else(|| stale("submit", segment.local))?;
                let remote = state.keys.get(&segment.remote).filter(|(owner, _)| *owner == peer);
                let (_, key) = remote.ok_or_else(|| stale("submit", segment.remote))?;
                let (offset, bytes) = (segment.remote_offset, segment.bytes);
                pieces.push(Piece { key: *key, offset, bytes });
                if mode == Mode::Read {
                    read.push((local.clone(), *segment));
                } else {
                    let at = data.len();
                    data.resize(at + usize::try_from(bytes).unwrap_or(usize::MAX), 0);
                    local.read_at(segment.local_offset, &mut data[at..])?;
                }
            }
            let busy = state.in_flight.values().filter(|flight| flight.peer == peer).count();
            if busy >= limits.max_in_flight as usize {
                return Ok(Submit::Full);
            }
            let (write, note) = (mode == Mode::Write, notify.map(Vec::from));
            let (note, later) = if write { (note, None) } else { (None, note) };
            state.in_flight.insert(id, Flight { peer, read, note: later, over: false });
            if let Some(known) = state.peers.get_mut(&peer) {
                let (data, notify) = (Bytes(data), note.map(Bytes));
                known.outbox.push_back(Request { id: id.0, write, pieces, data, notify });
            }
            Ok(Submit::Submitted)
        })
    }

    fn poll(&self, events: &mut Events) {
        self.shared.with(|state| {
            while events.room() > 0
                && let Some(event) = state.events.pop_front()
            {
                match &event {
                    Event::Settled { id, .. } => drop(state.in_flight.remove(id)),
                    Event::PeerDown { peer, .. } => {
                        state.peers.remove(peer);
                        state.keys.retain(|_, (owner, _)| owner != peer);
                    }
                    _ => {}
                }
                events.push(event);
            }
        });
    }

    fn cancel(&self, id: TransferId) -> Result<()> {
        self.shared.with(|state| {
            let flight = state.in_flight.get(&id).filter(|flight| !flight.over);
            let peer = flight.ok_or_else(|| stale("cancel", id))?.peer;
            if let Some(known) = state.peers.get_mut(&peer) {
                known.outbox.retain(|request| request.id != id.0);
            }
            state.settle(id, Outcome::Cancelled);
            Ok(())
        })
    }

    fn sever(&self, peer: PeerId) -> Result<()> {
        self.shared.with(|state| {
            state.peers.get(&peer).ok_or_else(|| stale("sever", peer))?;
            state.end(peer, None);
            Ok(())
        })
    }

    /// What a peer asks for is carried out under the lock, and only while the connection is there.
    fn revoke(&self, peer: PeerId) -> Result<()> {
        self.sever(peer)
    }

    fn peer_info(&self, peer: PeerId) -> Result<PeerInfo> {
        self.shared.with(|state| {
            state.peers.get(&peer).ok_or_else(|| stale("peer_info", peer))?;
            Ok(PeerInfo::new("tcp"))
        })
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.shared.signal.0.as_fd())
    }

    async fn connect(&self, peer: PeerId) -> Result<()> {
        self.open_state("connect", |state| {
            let known = state.peers.get(&peer).ok_or_else(|| stale("connect", peer))?;
            if known.over { Err(gone("it is over")) } else { Ok(()) }
        })
    }

    async fn close(&self) -> Result<()> {
        self.shared.shut(true);
        Ok(())
    }
}
