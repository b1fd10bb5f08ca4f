//! Backends with one deliberate fault each.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use kvx_core::backend::{Event, Events, Outcome, PeerInfo, Submit, TransferBackend};
use kvx_core::capability::{Capabilities, Ordering};
use kvx_core::handshake::{Handshake, HandshakeBytes};
use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{KeyBlob, MemoryRegistry, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::{Error, ErrorKind, Result};
use kvx_mock::MockBackend;

/// What is wrong with a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The notification does not wait for the data.
    NotifiedBeforeData,
    /// A read that has settled is done once more.
    ReadAgainAfterSettled,
    /// One in eight transfers is reported twice.
    SettledTwice,
    /// One in eight is never reported.
    SettledNever,
    /// The last byte of a batch is left out.
    LastByteMissing,
    /// One byte more is moved.
    OneByteTooMany,
    /// A peer is down before its last transfer has settled.
    DownBeforeSettled,
    /// A notification comes twice.
    NotifiedTwice,
    /// A notification is lost though the connection lives.
    NotifiedNever,
    /// What failed is called done.
    FailedCalledDone,
    /// A cancelled transfer is called settled at once.
    CancelledCalledSettled,
    /// Revoking only severs.
    RevokedInNameOnly,
    /// Revoking stops writes only: a read that it should have stopped is done all the same.
    ReadDespiteRevoke,
    /// It says full, and has posted.
    FullButPosted,
    /// A peer that is down may be severed.
    StalePeerAccepted,
    /// Nobody is told that a peer is down.
    DownNever,
    /// Source and target of a read are mixed up with a write's.
    WrittenForRead,
    /// An order of batches is claimed, and there is none.
    OrderClaimed,
    /// What is over a limit is taken.
    LimitsIgnored,
    /// A key of another incarnation can be imported.
    ForeignKeyAccepted,
    /// One in eight is reported as failed, and nothing was wrong.
    FailedForNothing,
}

impl Fault {
    pub(crate) const ALL: [Self; 21] = [
        Self::NotifiedBeforeData,
        Self::ReadAgainAfterSettled,
        Self::SettledTwice,
        Self::SettledNever,
        Self::LastByteMissing,
        Self::OneByteTooMany,
        Self::DownBeforeSettled,
        Self::NotifiedTwice,
        Self::NotifiedNever,
        Self::FailedCalledDone,
        Self::CancelledCalledSettled,
        Self::RevokedInNameOnly,
        Self::FullButPosted,
        Self::StalePeerAccepted,
        Self::DownNever,
        Self::WrittenForRead,
        Self::OrderClaimed,
        Self::ReadDespiteRevoke,
        Self::LimitsIgnored,
        Self::ForeignKeyAccepted,
        Self::FailedForNothing,
    ];
}

/// A mock with a fault.
pub(crate) struct Saboteur {
    inner: Arc<MockBackend>,
    fault: Fault,
    capabilities: Capabilities,
    state: Mutex<State>,
    keys: Keys,
}

/// Which key is of which memory: shared by all engines of a run, so that one can reach the others' behind their backs.
pub(crate) type Keys = Arc<Mutex<BTreeMap<Vec<u8>, Region>>>;

#[derive(Default)]
struct State {
    /// Ids of its own, of which nobody is to hear.
    own: BTreeSet<u64>,
    next_own: u64,
    regions: BTreeMap<RegionId, Region>,
    remotes: BTreeMap<RemoteRegionId, Region>,
    reads: BTreeMap<u64, (PeerId, Vec<PostedSegment>)>,
    waiting: VecDeque<Event>,
    settled: u64,
}

impl State {
    fn own_id(&mut self) -> TransferId {
        self.next_own += 1;
        let id = u64::MAX - self.next_own;
        self.own.insert(id);
        TransferId(id)
    }

    /// Copies what a read should have, and says whether all of it could be.
    fn read_anyway(&self, segments: &[PostedSegment]) -> bool {
        segments.iter().all(|segment| {
            let (remote, local) =
                (self.remotes.get(&segment.remote), self.regions.get(&segment.local));
            let (Some(remote), Some(local)) = (remote, local) else { return false };
            let (from, into) = (segment.remote_offset, segment.local_offset);
            remote.copy_to(from, local, into, segment.bytes).is_ok()
        })
    }
}

impl Saboteur {
    pub(crate) fn new(inner: Arc<MockBackend>, fault: Fault, keys: Keys) -> Self {
        let mut capabilities = inner.capabilities().clone();
        if fault == Fault::OrderClaimed {
            capabilities.ordering = Ordering::PerPeer;
        }
        Self { inner, fault, capabilities, state: Mutex::default(), keys }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// What becomes of an event.
    fn pass(&self, event: Event) {
        let mut state = self.state();
        match (&event, self.fault) {
            (Event::Settled { id, .. }, _) if state.own.remove(&id.0) => return,
            (Event::Settled { id, .. }, Fault::ReadAgainAfterSettled) => {
                if let Some((peer, segments)) = state.reads.remove(&id.0) {
                    let own = state.own_id();
                    let again = self.inner.submit(own, peer, Mode::Read, &segments, None);
                    if !matches!(again, Ok(Submit::Submitted)) {
                        state.own.remove(&own.0);
                    }
                }
            }
            (Event::Settled { id, outcome }, Fault::SettledTwice | Fault::SettledNever) => {
                state.settled += 1;
                if state.settled.is_multiple_of(8) {
                    if self.fault == Fault::SettledNever {
                        return;
                    }
                    let outcome =
                        if outcome.is_done() { Outcome::done() } else { Outcome::Cancelled };
                    state.waiting.push_back(Event::Settled { id: *id, outcome });
                }
            }
            (Event::Settled { id, outcome }, Fault::ReadDespiteRevoke) => {
                let read = state.reads.remove(&id.0);
                if let (Outcome::Failed(error), Some((_, segments))) = (outcome, read)
                    && error.to_string().contains("ended this side's access")
                    && state.read_anyway(&segments)
                {
                    let outcome = Outcome::done();
                    state.waiting.push_back(Event::Settled { id: *id, outcome });
                    return;
                }
            }
            (Event::Settled { id, .. }, Fault::FailedForNothing) if id.0.is_multiple_of(8) => {
                let error = Error::new(ErrorKind::Fabric, "transfer", "for nothing");
                let outcome = Outcome::Failed(error);
                state.waiting.push_back(Event::Settled { id: *id, outcome });
                return;
            }
            (Event::Settled { id, outcome: Outcome::Failed(_) }, Fault::FailedCalledDone) => {
                let outcome = Outcome::done();
                state.waiting.push_back(Event::Settled { id: *id, outcome });
                return;
            }
            (Event::PeerDown { .. }, Fault::DownBeforeSettled) => {
                let last = state.waiting.pop_back();
                state.waiting.push_back(event);
                state.waiting.extend(last);
                return;
            }
            (Event::PeerDown { .. }, Fault::DownNever) => return,
            (Event::Notified { peer, payload }, Fault::NotifiedTwice) => {
                let (peer, payload) = (*peer, payload.clone());
                state.waiting.push_back(Event::Notified { peer, payload });
            }
            (Event::Notified { .. }, Fault::NotifiedNever) => return,
            _ => {}
        }
        state.waiting.push_back(event);
    }
}

impl fmt::Debug for Saboteur {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saboteur").field("fault", &self.fault).finish_non_exhaustive()
    }
}

impl Handshake for Saboteur {
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

impl MemoryRegistry for Saboteur {
    fn register(&self, region: &Region) -> Result<RegionId> {
        let id = self.inner.register(region)?;
        self.state().regions.insert(id, region.clone());
        Ok(id)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.inner.deregister(region)
    }

    fn key_blob(&self, region: RegionId) -> Result<KeyBlob> {
        let blob = self.inner.key_blob(region)?;
        if let Some(region) = self.state().regions.get(&region) {
            self.keys.lock().unwrap().insert(blob.as_bytes().to_vec(), region.clone());
        }
        Ok(blob)
    }

    fn import_key(&self, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        let imported = match self.inner.import_key(peer, blob) {
            Err(error)
                if self.fault == Fault::ForeignKeyAccepted
                    && error.to_string().contains("another incarnation") =>
            {
                return Ok(RemoteRegionId::new(u32::MAX, 0));
            }
            imported => imported?,
        };
        if let Some(region) = self.keys.lock().unwrap().get(blob.as_bytes()) {
            self.state().remotes.insert(imported, region.clone());
        }
        Ok(imported)
    }

    fn release_key(&self, peer: PeerId, region: RemoteRegionId) -> Result<()> {
        self.inner.release_key(peer, region)
    }
}

#[async_trait]
impl TransferBackend for Saboteur {
    fn name(&self) -> &'static str {
        "saboteur"
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
        mut notify: Option<&[u8]>,
    ) -> Result<Submit> {
        let (mut segments, mut mode) = (segments.to_vec(), mode);
        match self.fault {
            Fault::NotifiedBeforeData if notify.is_some() && !segments.is_empty() => {
                let own = self.state().own_id();
                let sent = self.inner.submit(own, peer, mode, &[], notify);
                if matches!(sent, Ok(Submit::Submitted)) {
                    notify = None;
                } else {
                    self.state().own.remove(&own.0);
                }
            }
            Fault::LastByteMissing => {
                if let Some(last) = segments.last_mut().filter(|last| last.bytes > 1) {
                    last.bytes -= 1;
                }
            }
            Fault::OneByteTooMany => {
                let most = self.capabilities().limits.max_segment_bytes;
                if let Some(last) = segments.last_mut().filter(|last| last.bytes < most) {
                    last.bytes += 1;
                }
            }
            Fault::WrittenForRead if id.0.is_multiple_of(8) => mode = Mode::Write,
            _ => {}
        }
        let submitted = match self.inner.submit(id, peer, mode, &segments, notify) {
            Err(error)
                if self.fault == Fault::LimitsIgnored && error.to_string().contains("too ") =>
            {
                return Ok(Submit::Submitted);
            }
            submitted => submitted?,
        };
        if submitted == Submit::Submitted {
            let read = [Fault::ReadAgainAfterSettled, Fault::ReadDespiteRevoke];
            if mode == Mode::Read && read.contains(&self.fault) {
                self.state().reads.insert(id.0, (peer, segments));
            } else if self.fault == Fault::FullButPosted && id.0.is_multiple_of(8) {
                self.state().own.insert(id.0);
                return Ok(Submit::Full);
            }
        }
        Ok(submitted)
    }

    fn poll(&self, events: &mut Events) {
        let mut given = Events::with_limit(events.room());
        self.inner.poll(&mut given);
        given.drain().for_each(|event| self.pass(event));
        while events.room() > 0 {
            let Some(event) = self.state().waiting.pop_front() else { return };
            events.push(event);
        }
    }

    fn cancel(&self, id: TransferId) -> Result<()> {
        self.inner.cancel(id)?;
        if self.fault == Fault::CancelledCalledSettled {
            let mut state = self.state();
            if state.own.insert(id.0) {
                let outcome = Outcome::Cancelled;
                state.waiting.push_back(Event::Settled { id, outcome });
            }
        }
        Ok(())
    }

    fn sever(&self, peer: PeerId) -> Result<()> {
        let severed = self.inner.sever(peer);
        if self.fault == Fault::StalePeerAccepted { Ok(()) } else { severed }
    }

    fn revoke(&self, peer: PeerId) -> Result<()> {
        if self.fault == Fault::RevokedInNameOnly {
            return self.inner.sever(peer);
        }
        self.inner.revoke(peer)
    }

    fn peer_info(&self, peer: PeerId) -> Result<PeerInfo> {
        self.inner.peer_info(peer)
    }

    async fn connect(&self, peer: PeerId) -> Result<()> {
        self.inner.connect(peer).await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}
