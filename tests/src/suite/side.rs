//! One side of a script, wherever it is.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvx_core::backend::{SEVER_BOUND, TransferBackend};
use kvx_core::capability::Capabilities;
use kvx_core::id::{PeerId, RegionId, RemoteRegionId};
use kvx_core::transfer::{Mode, PostedSegment};

use super::clause::{Breach, Verdict};
use super::command::{Answer, Command, End, Post, Posted, Refusal, Seen};
use super::host::Host;
use super::ledger::Ledger;
use super::peer::Child;
use super::watch::Watch;

/// One side. Clones are the same side.
#[derive(Clone)]
pub(crate) struct Side {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    link: Link,
    ledger: Mutex<Ledger>,
    watch: Arc<Watch>,
}

/// Where it is.
pub(crate) enum Link {
    Here(Host),
    There(Child),
}

impl fmt::Debug for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Side").field("name", &self.inner.name).finish_non_exhaustive()
    }
}

impl Side {
    pub(crate) fn new(name: &str, link: Link, watch: Arc<Watch>) -> Self {
        let name = name.to_owned();
        Self { inner: Arc::new(Inner { name, link, ledger: Mutex::default(), watch }) }
    }

    pub(crate) fn name(&self) -> &str {
        &self.inner.name
    }

    /// The peer's process, if that is where it is.
    pub(crate) fn child(&self) -> Option<&Child> {
        match &self.inner.link {
            Link::Here(_) => None,
            Link::There(child) => Some(child),
        }
    }

    /// The backend itself, where it is in this process.
    pub(crate) fn backend(&self) -> Verdict<Arc<dyn TransferBackend>> {
        match &self.inner.link {
            Link::Here(host) => host
                .backend()
                .map_err(|error| Breach::refused(self.name(), "backend", error.into())),
            Link::There(_) => Err(Breach::new("the side is in another process")),
        }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.inner.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, operation: &'static str, command: Command) -> Verdict<Answer> {
        let most = longest(&command);
        self.inner.watch.enters(self.name(), operation);
        let begin = Instant::now();
        let answer = match &self.inner.link {
            Link::Here(host) => host.execute(command).map_err(Refusal::from),
            Link::There(child) => child.execute(self.name(), operation, &command)?,
        };
        self.inner.watch.leaves();
        let took = begin.elapsed();
        if let Some(most) = most.filter(|most| took > *most) {
            return Err(Breach::new(format!(
                "`{operation}` of {} took {took:?}; it must not wait, and {most:?} are more than enough (law of \
                 progress.calls_return)",
                self.name()
            )));
        }
        answer.map_err(|refusal| Breach::refused(self.name(), operation, refusal))
    }

    fn nothing(&self, operation: &'static str, command: Command) -> Verdict {
        self.call(operation, command).map(|_| ())
    }

    pub(crate) fn backend_name(&self) -> Verdict<String> {
        text(self.call("name", Command::Name)?)
    }

    pub(crate) fn capabilities(&self) -> Verdict<Capabilities> {
        match self.call("capabilities", Command::Capabilities)? {
            Answer::Claims(stated) => Ok((&*stated).into()),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) fn incarnation(&self) -> Verdict<Vec<u8>> {
        bytes(self.call("incarnation", Command::Incarnation)?)
    }

    pub(crate) fn arena(&self, bytes: u64, seed: u64) -> Verdict<u64> {
        number(self.call("arena", Command::Arena { bytes, seed })?)
    }

    /// An arena of memory that the backend allocates, left as it came.
    pub(crate) fn allocate(&self, bytes: u64) -> Verdict<u64> {
        number(self.call("allocate", Command::Allocate { bytes })?)
    }

    /// An arena of zeros that nobody touches.
    pub(crate) fn untouched(&self, bytes: u64) -> Verdict<u64> {
        number(self.call("allocate", Command::Untouched { bytes })?)
    }

    pub(crate) fn read(&self, arena: u64, offset: u64, count: u64) -> Verdict<Vec<u8>> {
        bytes(self.call("read", Command::Read { arena, offset, bytes: count })?)
    }

    pub(crate) fn write(&self, arena: u64, offset: u64, bytes: &[u8]) -> Verdict {
        self.nothing("write", Command::Write { arena, offset, bytes: bytes.to_vec() })
    }

    /// How many ranges of an arena the backend still holds.
    pub(crate) fn held(&self, arena: u64) -> Verdict<u64> {
        number(self.call("held", Command::Held { arena })?)
    }

    pub(crate) fn register(&self, arena: u64, offset: u64, bytes: u64) -> Verdict<RegionId> {
        region(self.call("register", Command::Register { arena, offset, bytes })?)
    }

    pub(crate) fn register_foreign(&self, arena: u64) -> Verdict<RegionId> {
        region(self.call("register", Command::RegisterForeign { arena })?)
    }

    pub(crate) fn deregister(&self, region: RegionId) -> Verdict {
        self.ledger().deregistered();
        self.nothing("deregister", Command::Deregister(region))
    }

    pub(crate) fn key_blob(&self, region: RegionId) -> Verdict<Vec<u8>> {
        bytes(self.call("key_blob", Command::KeyBlob(region))?)
    }

    pub(crate) fn import_key(&self, peer: PeerId, blob: &[u8]) -> Verdict<RemoteRegionId> {
        match self.call("import_key", Command::ImportKey(peer, blob.to_vec()))? {
            Answer::Remote(key) => Ok(key),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) fn release_key(&self, peer: PeerId, key: RemoteRegionId) -> Verdict {
        self.nothing("release_key", Command::ReleaseKey(peer, key))
    }

    pub(crate) fn offer(&self) -> Verdict<Vec<u8>> {
        bytes(self.call("offer", Command::Offer)?)
    }

    pub(crate) fn accept(&self, offer: &[u8]) -> Verdict<(PeerId, Vec<u8>)> {
        met(self.call("accept", Command::Accept(offer.to_vec()))?)
    }

    pub(crate) fn complete(&self, reply: &[u8]) -> Verdict<(PeerId, Vec<u8>)> {
        met(self.call("complete", Command::Complete(reply.to_vec()))?)
    }

    pub(crate) fn finish(&self, completion: &[u8]) -> Verdict<PeerId> {
        match self.call("finish", Command::Finish(completion.to_vec()))? {
            Answer::Peer(peer) => Ok(peer),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) fn connect(&self, peer: PeerId) -> Verdict {
        self.nothing("connect", Command::Connect(peer))
    }

    /// Whether it was posted; if not, the queue was full.
    pub(crate) fn submit(
        &self,
        id: u64,
        peer: PeerId,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Verdict<bool> {
        let segments = segments.iter().map(|segment| (*segment).into()).collect();
        let post = Post { id, peer, mode, segments, notify: notify.map(Vec::from) };
        match self.call("submit", Command::Submit(post))? {
            Answer::Posted(posted) => {
                if posted != Posted::Full {
                    self.ledger().posted(id, peer);
                }
                if posted == Posted::Done {
                    self.ledger()
                        .event(Seen::Settled { id, end: End::Done })
                        .map_err(|breach| Breach::new(format!("at {}: {breach}", self.name())))?;
                }
                Ok(posted != Posted::Full)
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Polls once, and says how many events there were.
    pub(crate) fn poll(&self, room: u32) -> Verdict<usize> {
        let Answer::Events(events) = self.call("poll", Command::Poll { room })? else {
            return Err(Breach::new("the kit's own answer to `poll` is of another kind"));
        };
        let count = events.len();
        if count > room as usize {
            return Err(Breach::new(format!(
                "`poll` gave {count} events where there was room for {room} (law of poll.room)"
            )));
        }
        let mut ledger = self.ledger();
        events
            .into_iter()
            .try_for_each(|event| ledger.event(event))
            .map_err(|breach| Breach::new(format!("at {}: {breach}", self.name())))?;
        Ok(count)
    }

    pub(crate) fn cancel(&self, id: u64) -> Verdict {
        self.ledger().cancelled(id);
        self.nothing("cancel", Command::Cancel(id))
    }

    pub(crate) fn sever(&self, peer: PeerId) -> Verdict {
        self.ledger().ended(peer);
        self.nothing("sever", Command::Sever(peer))
    }

    pub(crate) fn revoke(&self, peer: PeerId) -> Verdict {
        self.ledger().ended(peer);
        self.nothing("revoke", Command::Revoke(peer))
    }

    pub(crate) fn peer_info(&self, peer: PeerId) -> Verdict<String> {
        text(self.call("peer_info", Command::PeerInfo(peer))?)
    }

    pub(crate) fn close(&self) -> Verdict {
        self.ledger().closed();
        self.nothing("close", Command::Close)
    }

    /// Drops the kit's reference to the backend: the last one, unless a script holds another.
    pub(crate) fn drop_backend(&self) -> Verdict {
        self.nothing("drop", Command::Drop)
    }

    /// How a transfer settled, if it has.
    pub(crate) fn settled(&self, id: u64) -> Option<End> {
        self.ledger().settled(id).cloned()
    }

    /// Notifications so far, oldest first.
    pub(crate) fn notes(&self) -> Vec<(PeerId, Vec<u8>)> {
        self.ledger().notes().to_vec()
    }

    /// Whether a peer is down, and with which error.
    pub(crate) fn down(&self, peer: PeerId) -> Option<Option<Refusal>> {
        self.ledger().down(peer).cloned()
    }

    /// When this side first severed or revoked a peer.
    pub(crate) fn ended_at(&self, peer: PeerId) -> Option<Instant> {
        self.ledger().ended_at(peer)
    }

    /// How many transfers have not settled.
    pub(crate) fn in_flight(&self) -> usize {
        self.ledger().in_flight()
    }

    /// Transfers to a peer that have not settled.
    pub(crate) fn in_flight_to(&self, peer: PeerId) -> Vec<u64> {
        self.ledger().to(peer)
    }
}

/// The longest that a call may take that must not wait for anybody: far more than it needs, so that a busy machine is not
/// taken for a fault. `revoke` and `deregister` may wait for a device.
const fn longest(command: &Command) -> Option<Duration> {
    match command {
        Command::Submit(_) | Command::Poll { .. } | Command::Cancel(_) | Command::Sever(_) => {
            Some(Duration::from_secs(1))
        }
        Command::Revoke(_) | Command::Deregister(_) => Some(SEVER_BOUND),
        _ => None,
    }
}

fn unexpected(answer: &Answer) -> Breach {
    Breach::new(format!("the kit's own answer is of another kind: {answer:?}"))
}

fn number(answer: Answer) -> Verdict<u64> {
    if let Answer::Number(number) = answer { Ok(number) } else { Err(unexpected(&answer)) }
}

fn text(answer: Answer) -> Verdict<String> {
    if let Answer::Text(text) = answer { Ok(text) } else { Err(unexpected(&answer)) }
}

fn bytes(answer: Answer) -> Verdict<Vec<u8>> {
    if let Answer::Bytes(bytes) = answer { Ok(bytes) } else { Err(unexpected(&answer)) }
}

fn region(answer: Answer) -> Verdict<RegionId> {
    if let Answer::Region(region) = answer { Ok(region) } else { Err(unexpected(&answer)) }
}

fn met(answer: Answer) -> Verdict<(PeerId, Vec<u8>)> {
    if let Answer::Met(peer, bytes) = answer { Ok((peer, bytes)) } else { Err(unexpected(&answer)) }
}
