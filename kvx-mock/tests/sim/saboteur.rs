//! Backends with one deliberate fault each.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use kvx_core::Result;
use kvx_core::backend::{Event, Events, Outcome, PeerInfo, Submit, TransferBackend};
use kvx_core::capability::{Capabilities, Ordering};
use kvx_core::handshake::{Handshake, HandshakeBytes};
use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{KeyBlob, MemoryRegistry, Region};
use kvx_core::transfer::{Mode, PostedSegment};
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
}

impl Fault {
    pub(crate) const ALL: [Self; 17] = [
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
    ];
}

/// A mock with a fault.
pub(crate) struct Saboteur {
    inner: Arc<MockBackend>,
    fault: Fault,
    capabilities: Capabilities,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Ids of its own, of which nobody is to hear.
    own: BTreeSet<u64>,
    next_own: u64,
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
}

impl Saboteur {
    pub(crate) fn new(inner: Arc<MockBackend>, fault: Fault) -> Self {
        let mut capabilities = inner.capabilities().clone();
        if fault == Fault::OrderClaimed {
            capabilities.ordering = Ordering::PerPeer;
        }
        Self { inner, fault, capabilities, state: Mutex::default() }
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
                        if outcome.is_done() { Outcome::Done } else { Outcome::Cancelled };
                    state.waiting.push_back(Event::Settled { id: *id, outcome });
                }
            }
            (Event::Settled { id, outcome: Outcome::Failed(_) }, Fault::FailedCalledDone) => {
                let outcome = Outcome::Done;
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
        let submitted = self.inner.submit(id, peer, mode, &segments, notify)?;
        if submitted == Submit::Submitted {
            if mode == Mode::Read && self.fault == Fault::ReadAgainAfterSettled {
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
