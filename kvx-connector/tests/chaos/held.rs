//! A backend that stops in the middle of each read, until it is let go on.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use kvx_core::Result;
use kvx_core::backend::{Event, Events, Outcome, PeerInfo, Submit, TransferBackend};
use kvx_core::capability::Capabilities;
use kvx_core::handshake::{Handshake, HandshakeBytes};
use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{KeyBlob, MemoryRegistry, Region};
use kvx_core::transfer::{Mode, PostedSegment};

/// The other backend, with a stop between the first half of each segment that is read and the second. A transfer `id` is the
/// other's `2 * id`, and its second half `2 * id + 1`.
#[derive(Debug)]
pub(crate) struct Held {
    inner: Arc<dyn TransferBackend>,
    capabilities: Capabilities,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Reads whose first half is posted, with what is left of them.
    reads: BTreeMap<TransferId, Rest>,
    /// What is to be polled.
    events: VecDeque<Event>,
    cancelled: u64,
    /// Second halves that are posted.
    going: usize,
}

impl State {
    /// Something happened to the other backend.
    fn happened(&mut self, event: Event) {
        match event {
            Event::Settled { id, outcome } => {
                let mine = TransferId(id.0 / 2);
                self.going -= usize::from(id.0 % 2 == 1);
                match self.reads.get_mut(&mine) {
                    Some(rest) if outcome.is_done() => rest.arrived = true,
                    _ => {
                        self.reads.remove(&mine);
                        self.events.push_back(Event::Settled { id: mine, outcome });
                    }
                }
            }
            Event::PeerDown { peer: down, .. } => {
                // What is half done is not done any more, and is over before its peer is.
                let of_peer = self.reads.iter().filter(|(_, rest)| rest.peer == down);
                for id in of_peer.map(|(id, _)| *id).collect::<Vec<_>>() {
                    self.reads.remove(&id);
                    self.events.push_back(Event::Settled { id, outcome: Outcome::Cancelled });
                }
                self.events.push_back(event);
            }
            other => self.events.push_back(other),
        }
    }
}

#[derive(Debug)]
struct Rest {
    peer: PeerId,
    segments: Vec<PostedSegment>,
    notify: Option<Vec<u8>>,
    /// The first half is there.
    arrived: bool,
}

impl Held {
    pub(crate) fn new(inner: Arc<dyn TransferBackend>) -> Arc<Self> {
        // What was held settles without the other's descriptor knowing of it.
        let mut capabilities = inner.capabilities().clone();
        capabilities.event_fd = false;
        let (state, changed) = Default::default();
        Arc::new(Self { inner, capabilities, state, changed })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Waits until so many reads are half done. Returns whether they are.
    pub(crate) fn wait(&self, reads: usize, timeout: Duration) -> bool {
        let half =
            |state: &mut State| state.reads.values().filter(|rest| rest.arrived).count() < reads;
        !self.changed.wait_timeout_while(self.lock(), timeout, half).unwrap().1.timed_out()
    }

    /// Lets all reads that are half done go on.
    pub(crate) fn go_on(&self) {
        let mut state = self.lock();
        let (half, others) =
            std::mem::take(&mut state.reads).into_iter().partition(|(_, rest)| rest.arrived);
        state.reads = others;
        let half: BTreeMap<TransferId, Rest> = half;
        for (id, rest) in half {
            let second = TransferId(2 * id.0 + 1);
            let notify = rest.notify.as_deref();
            let outcome =
                match self.inner.submit(second, rest.peer, Mode::Read, &rest.segments, notify) {
                    Ok(Submit::Submitted) => {
                        state.going += 1;
                        continue;
                    }
                    Ok(Submit::Done { route }) => Outcome::Done { route },
                    // Next time.
                    Ok(Submit::Full) => {
                        state.reads.insert(id, rest);
                        continue;
                    }
                    Err(error) => Outcome::Failed(error),
                };
            state.events.push_back(Event::Settled { id, outcome });
        }
    }

    /// Waits until nothing moves of what was let go on.
    pub(crate) fn is_quiet_within(&self, timeout: Duration) -> bool {
        let moves = |state: &mut State| state.going > 0;
        !self.changed.wait_timeout_while(self.lock(), timeout, moves).unwrap().1.timed_out()
    }

    /// Reads that somebody wanted cancelled.
    pub(crate) fn cancelled(&self) -> u64 {
        self.lock().cancelled
    }
}

#[async_trait]
impl TransferBackend for Held {
    fn name(&self) -> &'static str {
        self.inner.name()
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
        let first = TransferId(2 * id.0);
        if segments.is_empty() || mode != Mode::Read {
            return self.inner.submit(first, peer, mode, segments, notify);
        }
        let (halves, segments): (Vec<_>, Vec<_>) = segments.iter().map(halved).unzip();
        let mut state = self.lock();
        let submitted = self.inner.submit(first, peer, mode, &halves, None)?;
        if submitted.is_posted() {
            let arrived = matches!(submitted, Submit::Done { .. });
            let notify = notify.map(<[u8]>::to_vec);
            state.reads.insert(id, Rest { peer, segments, notify, arrived });
            self.changed.notify_all();
            return Ok(Submit::Submitted);
        }
        Ok(submitted)
    }

    fn poll(&self, events: &mut Events) {
        let mut theirs = Events::with_limit(events.room());
        // Whoever submits holds the lock: what settles is known by then.
        let mut state = self.lock();
        self.inner.poll(&mut theirs);
        for event in theirs.drain() {
            state.happened(event);
        }
        while events.room() > 0
            && let Some(event) = state.events.pop_front()
        {
            events.push(event);
        }
        self.changed.notify_all();
    }

    /// Notes that it was asked for. It is best effort: a fabric may be unable to.
    fn cancel(&self, id: TransferId) -> Result<()> {
        let mut state = self.lock();
        if state.reads.contains_key(&id) {
            state.cancelled += 1;
            return Ok(());
        }
        drop(state);
        self.inner.cancel(TransferId(2 * id.0))
    }

    fn sever(&self, peer: PeerId) -> Result<()> {
        self.inner.sever(peer)
    }

    fn revoke(&self, peer: PeerId) -> Result<()> {
        self.inner.revoke(peer)
    }

    fn peer_info(&self, peer: PeerId) -> Result<PeerInfo> {
        self.inner.peer_info(peer)
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    async fn connect(&self, peer: PeerId) -> Result<()> {
        self.inner.connect(peer).await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

/// The first half of a segment, and the second.
fn halved(segment: &PostedSegment) -> (PostedSegment, PostedSegment) {
    let half = segment.bytes / 2;
    let first = PostedSegment { bytes: half, ..*segment };
    let second = PostedSegment {
        local_offset: segment.local_offset + half,
        remote_offset: segment.remote_offset + half,
        bytes: segment.bytes - half,
        ..*segment
    };
    (first, second)
}

impl MemoryRegistry for Held {
    fn allocate(&self, bytes: u64) -> Result<Region> {
        self.inner.allocate(bytes)
    }

    fn register(&self, region: &Region) -> Result<RegionId> {
        self.inner.register(region)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.inner.deregister(region)
    }

    fn key_blob(&self, region: RegionId) -> Result<KeyBlob> {
        self.inner.key_blob(region)
    }

    fn import_key(&self, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        self.inner.import_key(peer, blob)
    }

    fn release_key(&self, peer: PeerId, region: RemoteRegionId) -> Result<()> {
        self.inner.release_key(peer, region)
    }
}

impl Handshake for Held {
    fn incarnation(&self) -> Incarnation {
        self.inner.incarnation()
    }

    fn offer(&self) -> Result<HandshakeBytes> {
        self.inner.offer()
    }

    fn accept(&self, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        self.inner.accept(offer)
    }

    fn complete(&self, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)> {
        self.inner.complete(reply)
    }

    fn finish(&self, completion: &HandshakeBytes) -> Result<PeerId> {
        self.inner.finish(completion)
    }
}
