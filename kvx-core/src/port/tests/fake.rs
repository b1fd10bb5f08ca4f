//! A backend that does what the test's script says, and checks what a port may never do.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;

use crate::backend::{Event, Events, Outcome, PeerInfo, Submit, TransferBackend};
use crate::capability::Capabilities;
use crate::error::{Error, ErrorKind, Result, Retry};
use crate::handshake::{Handshake, HandshakeBytes};
use crate::id::{Incarnation, PeerId, RegionId, RemoteRegionId, TransferId};
use crate::memory::{KeyBlob, MemoryRegistry, Region};
use crate::transfer::{Mode, PostedSegment};

/// What the fake says to one `submit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Say {
    /// Takes it, and holds its completion until the test settles it.
    Hold,
    /// Takes it, and it completes within the call: an event says so.
    Inline,
    /// Takes it, and says that it is done.
    Done,
    /// Takes it, and it fails within the call.
    InlineFailure,
    /// Has no room.
    Full,
    /// Refuses it with an error.
    Refuse,
}

/// A batch that the fake took.
#[derive(Clone, Debug)]
pub(crate) struct Post {
    pub(crate) id: TransferId,
    pub(crate) peer: PeerId,
    pub(crate) mode: Mode,
    pub(crate) segments: Vec<PostedSegment>,
    pub(crate) notify: Option<Vec<u8>>,
}

type Hook = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(crate) struct Inside {
    regions: BTreeMap<RegionId, Region>,
    keys: BTreeMap<(PeerId, RemoteRegionId), u64>,
    handles: u32,
    peers: BTreeSet<PeerId>,
    pub(crate) posts: Vec<Post>,
    pub(crate) in_flight: BTreeMap<TransferId, PeerId>,
    events: VecDeque<Event>,
    /// Answers to the next submits; `otherwise` follows.
    pub(crate) script: VecDeque<Say>,
    pub(crate) otherwise: Option<Say>,
    pub(crate) submits: usize,
    pub(crate) polls: usize,
    pub(crate) cancelled: Vec<TransferId>,
    pub(crate) severed: Vec<PeerId>,
    pub(crate) released: usize,
    pub(crate) closes: usize,
    /// Severing settles what is in flight and reports the peer down. Off: the test does.
    pub(crate) manual_sever: bool,
    /// Run once within the next handshake step, or submit, with no lock of the fake held.
    pub(crate) in_handshake: Option<Hook>,
    pub(crate) in_submit: Option<Hook>,
}

pub(crate) struct Fake {
    capabilities: Capabilities,
    inside: Mutex<Inside>,
    descriptor: Option<(UnixStream, UnixStream)>,
}

/// A fake that can do everything to host memory, within `limits` that the test sets.
pub(crate) fn capabilities() -> Capabilities {
    let mut capabilities = Capabilities::none();
    capabilities.read = true;
    capabilities.write = true;
    capabilities.host_memory = true;
    capabilities.limits.max_notification_bytes = 64;
    capabilities
}

impl Fake {
    pub(crate) fn new(capabilities: Capabilities) -> Arc<Self> {
        let descriptor = capabilities.event_fd.then(|| {
            let (here, there) = UnixStream::pair().unwrap();
            here.set_nonblocking(true).unwrap();
            there.set_nonblocking(true).unwrap();
            (here, there)
        });
        Arc::new(Self { capabilities, inside: Mutex::default(), descriptor })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap()
    }

    /// Says this to every submit from now on.
    pub(crate) fn always(&self, say: Say) {
        self.lock().otherwise = Some(say);
    }

    pub(crate) fn script(&self, says: impl IntoIterator<Item = Say>) {
        self.lock().script.extend(says);
    }

    pub(crate) fn event(&self, event: Event) {
        self.lock().events.push_back(event);
        self.signal();
    }

    fn signal(&self) {
        if let Some((_, there)) = &self.descriptor {
            // Full means that it is readable already.
            let _ = (&*there).write(&[1]);
        }
    }

    pub(crate) fn settle(&self, id: TransferId, outcome: Outcome) {
        assert!(self.lock().in_flight.remove(&id).is_some(), "{id} is not in flight");
        self.event(Event::Settled { id, outcome });
    }

    pub(crate) fn done(&self, id: TransferId) {
        self.settle(id, Outcome::done());
    }

    pub(crate) fn fail(&self, id: TransferId) {
        self.settle(id, Outcome::Failed(broken()));
    }

    pub(crate) fn notify(&self, peer: PeerId, payload: &[u8]) {
        self.event(Event::Notified { peer, payload: payload.to_vec() });
    }

    /// The peer dies: what is in flight to it fails, then it is down.
    pub(crate) fn kill(&self, peer: PeerId) {
        self.end(peer, Some(Error::peer("fake", "the peer died")));
    }

    /// The peer is down from here on, and that is all that is said: what is in flight stays so.
    pub(crate) fn down_too_early(&self, peer: PeerId) {
        let mut inside = self.lock();
        inside.peers.remove(&peer);
        inside.keys.retain(|(owner, _), _| *owner != peer);
        inside.events.push_back(Event::PeerDown { peer, error: None });
        drop(inside);
        self.signal();
    }

    pub(crate) fn end(&self, peer: PeerId, error: Option<Error>) {
        let mut inside = self.lock();
        inside.peers.remove(&peer);
        inside.keys.retain(|(owner, _), _| *owner != peer);
        let ids: Vec<_> =
            inside.in_flight.iter().filter(|(_, to)| **to == peer).map(|(id, _)| *id).collect();
        for id in ids {
            inside.in_flight.remove(&id);
            inside.events.push_back(Event::Settled { id, outcome: Outcome::Failed(broken()) });
        }
        inside.events.push_back(Event::PeerDown { peer, error });
        drop(inside);
        self.signal();
    }

    pub(crate) fn posts(&self) -> Vec<Post> {
        self.lock().posts.clone()
    }

    /// Knows `peer` again, with no keys.
    pub(crate) fn meet_again(&self, peer: PeerId) {
        let mut inside = self.lock();
        inside.peers.insert(peer);
        let region = RemoteRegionId::new(2002, 0);
        inside.keys.insert((peer, region), u64::MAX);
    }

    /// Lets go of every registered region, as no backend may.
    pub(crate) fn forget_regions(&self) {
        let regions = std::mem::take(&mut self.lock().regions);
        drop(regions);
    }

    /// The ids of what is in flight, oldest first.
    pub(crate) fn held(&self) -> Vec<TransferId> {
        self.lock().in_flight.keys().copied().collect()
    }

    fn met(&self, bytes: &HandshakeBytes) -> Result<PeerId> {
        let hook = self.lock().in_handshake.take();
        let [slot, generation] = bytes.as_bytes() else {
            return Err(Error::peer("fake.handshake", "two bytes expected"));
        };
        let peer = PeerId::new((*slot).into(), (*generation).into());
        self.lock().peers.insert(peer);
        if let Some(hook) = hook {
            hook();
        }
        Ok(peer)
    }

    fn known(&self, peer: PeerId) -> Result<()> {
        if self.lock().peers.contains(&peer) { Ok(()) } else { Err(stale()) }
    }

    /// What a port must have seen to.
    fn check(
        &self,
        inside: &Inside,
        id: TransferId,
        peer: PeerId,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) {
        let limits = &self.capabilities.limits;
        assert!(!segments.is_empty() || notify.is_some(), "a batch of nothing");
        assert!(segments.len() as u64 <= limits.max_batch_segments.into());
        assert!(notify.map_or(0, <[u8]>::len) as u64 <= limits.max_notification_bytes.into());
        assert!(!inside.in_flight.contains_key(&id), "{id} is in flight");
        let in_flight = inside.in_flight.values().filter(|to| **to == peer).count();
        assert!((in_flight as u64) < limits.max_in_flight.into(), "{in_flight} in flight");
        for segment in segments {
            assert!(0 < segment.bytes && segment.bytes <= limits.max_segment_bytes);
            let local = inside.regions[&segment.local].bytes();
            assert!(segment.local_offset.checked_add(segment.bytes).unwrap() <= local);
            let remote = inside.keys[&(peer, segment.remote)];
            assert!(segment.remote_offset.checked_add(segment.bytes).unwrap() <= remote);
        }
    }
}

pub(crate) fn broken() -> Error {
    Error::new(ErrorKind::Fabric, "fake", "broken cable").with_native(-5)
}

fn stale() -> Error {
    Error::misuse("fake", "stale")
}

impl fmt::Debug for Fake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fake")
    }
}

/// The key blob of a region of `bytes` bytes.
pub(crate) fn key(bytes: u64) -> KeyBlob {
    KeyBlob::new(bytes.to_le_bytes().to_vec()).unwrap()
}

impl MemoryRegistry for Fake {
    fn register(&self, region: &Region) -> Result<RegionId> {
        let mut inside = self.lock();
        inside.handles += 1;
        // Numbers that are not the port's: a mix-up is seen.
        let id = RegionId::new(1000 + inside.handles, 7);
        inside.regions.insert(id, region.clone());
        Ok(id)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        let gone = self.lock().regions.remove(&region);
        gone.map(drop).ok_or_else(stale)
    }

    fn key_blob(&self, region: RegionId) -> Result<KeyBlob> {
        let inside = self.lock();
        Ok(key(inside.regions.get(&region).ok_or_else(stale)?.bytes()))
    }

    fn import_key(&self, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        self.known(peer)?;
        let bytes = <[u8; 8]>::try_from(blob.as_bytes())
            .map_err(|_| Error::peer("fake.import_key", "malformed"))?;
        let mut inside = self.lock();
        inside.handles += 1;
        let id = RemoteRegionId::new(2000 + inside.handles, 0);
        inside.keys.insert((peer, id), u64::from_le_bytes(bytes));
        Ok(id)
    }

    fn release_key(&self, peer: PeerId, region: RemoteRegionId) -> Result<()> {
        let mut inside = self.lock();
        inside.keys.remove(&(peer, region)).ok_or_else(stale)?;
        inside.released += 1;
        Ok(())
    }
}

impl Handshake for Fake {
    fn incarnation(&self) -> Incarnation {
        Incarnation::from_bytes([7; 16])
    }

    fn offer(&self) -> Result<HandshakeBytes> {
        HandshakeBytes::new(vec![0, 0])
    }

    fn accept(&self, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        Ok((self.met(offer)?, offer.clone()))
    }

    fn complete(&self, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        self.accept(reply)
    }

    fn finish(&self, completion: &HandshakeBytes) -> Result<PeerId> {
        self.met(completion)
    }
}

#[async_trait]
impl TransferBackend for Fake {
    fn name(&self) -> &'static str {
        "fake"
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
        let hook = self.lock().in_submit.take();
        if let Some(hook) = hook {
            hook();
        }
        self.known(peer)?;
        let mut inside = self.lock();
        inside.submits += 1;
        self.check(&inside, id, peer, segments, notify);
        let say = inside.script.pop_front().or(inside.otherwise).unwrap_or(Say::Hold);
        match say {
            Say::Full => return Ok(Submit::Full),
            Say::Refuse => return Err(broken()),
            Say::Hold | Say::Inline | Say::Done | Say::InlineFailure => {}
        }
        let (segments, notify) = (segments.to_vec(), notify.map(<[u8]>::to_vec));
        inside.posts.push(Post { id, peer, mode, segments, notify });
        let outcome = match say {
            Say::Done => return Ok(Submit::Done { route: None }),
            Say::Inline => Outcome::done(),
            Say::InlineFailure => Outcome::Failed(broken()),
            _ => {
                inside.in_flight.insert(id, peer);
                return Ok(Submit::Submitted);
            }
        };
        inside.events.push_back(Event::Settled { id, outcome });
        drop(inside);
        self.signal();
        Ok(Submit::Submitted)
    }

    fn poll(&self, events: &mut Events) {
        if let Some((here, _)) = &self.descriptor {
            let mut bytes = [0; 1024];
            while (&*here).read(&mut bytes).is_ok_and(|count| count > 0) {}
        }
        let mut inside = self.lock();
        inside.polls += 1;
        while events.room() > 0 {
            let Some(event) = inside.events.pop_front() else { break };
            events.push(event);
        }
    }

    fn cancel(&self, id: TransferId) -> Result<()> {
        let mut inside = self.lock();
        if !inside.in_flight.contains_key(&id) {
            return Err(stale());
        }
        inside.cancelled.push(id);
        Ok(())
    }

    fn sever(&self, peer: PeerId) -> Result<()> {
        self.known(peer)?;
        self.lock().severed.push(peer);
        if !self.lock().manual_sever {
            self.end(peer, None);
        }
        Ok(())
    }

    fn peer_info(&self, peer: PeerId) -> Result<PeerInfo> {
        self.known(peer)?;
        Ok(PeerInfo::new("wire"))
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(|(here, _)| here.as_fd())
    }

    async fn connect(&self, peer: PeerId) -> Result<()> {
        self.known(peer)
            .map_err(|error| error.with_kind(ErrorKind::Peer).with_retry(Retry::Reconnect))
    }

    async fn close(&self) -> Result<()> {
        self.lock().closes += 1;
        Ok(())
    }
}
