//! Engines, and what they have been told.

use std::sync::Arc;

use kvx_core::ErrorKind;
use kvx_core::backend::{Event, Events, Outcome, Submit, TransferBackend as _};
use kvx_core::handshake::Handshake as _;
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_mock::{Fabric, MockBackend, Preset};

/// The seeds to run: `count` of them, or the one that `KVX_SEED` names.
#[expect(clippy::disallowed_methods, reason = "it chooses which runs are made, not what happens")]
pub(crate) fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("KVX_SEED") {
        Ok(seed) => vec![seed.parse().expect("KVX_SEED is a number")],
        Err(_) => (0..count).collect(),
    }
}

/// Every named preset, and one with tiny limits.
pub(crate) fn presets() -> Vec<Preset> {
    let mut tiny = Preset::efa().capabilities().clone();
    tiny.limits.max_segment_bytes = 48;
    tiny.limits.max_batch_segments = 2;
    tiny.limits.max_notification_bytes = 8;
    tiny.limits.max_in_flight = 1;
    let named = Preset::NAMES.into_iter().map(|name| Preset::by_name(name).unwrap());
    named.chain([Preset::custom(tiny).unwrap()]).collect()
}

/// Two engines that have met: `(first, second, first's handle of second, second's handle of first)`.
pub(crate) fn pair(
    fabric: &Fabric,
    preset: &Preset,
) -> (Arc<MockBackend>, Arc<MockBackend>, PeerId, PeerId) {
    let first = fabric.backend(preset.clone(), "first");
    let second = fabric.backend(preset.clone(), "second");
    let (at_first, at_second) = meet(&first, &second);
    (first, second, at_first, at_second)
}

/// Two engines that have met, where `first` can reach memory of `second`.
pub(crate) struct Reach {
    pub(crate) fabric: Fabric,
    pub(crate) first: Arc<MockBackend>,
    pub(crate) second: Arc<MockBackend>,
    /// `second`, as `first` knows it.
    pub(crate) peer: PeerId,
    /// Of `first`: all bytes 2.
    pub(crate) source: Region,
    /// Of `second`: all bytes 1.
    pub(crate) target: Region,
    pub(crate) local: RegionId,
    pub(crate) remote: RemoteRegionId,
}

pub(crate) fn reach(fabric: Fabric, preset: &Preset) -> Reach {
    let (first, second, peer, _) = pair(&fabric, preset);
    let (source, local) = memory(&first, 64, 2);
    let (target, handle) = memory(&second, 64, 1);
    let remote = import(&second, handle, &first, peer);
    Reach { fabric, first, second, peer, source, target, local, remote }
}

impl Reach {
    /// Posts a write of the 16 bytes at `16 * id`, with the id as notification.
    pub(crate) fn write(&self, id: u8) {
        assert_eq!(self.try_write(id).unwrap(), Submit::Submitted);
    }

    pub(crate) fn try_write(&self, id: u8) -> kvx_core::Result<Submit> {
        let segment = segment(self.local, self.remote, u64::from(id) * 16, 16);
        self.first.submit(TransferId(id.into()), self.peer, Mode::Write, &[segment], Some(&[id]))
    }

    /// Which of the four writes have arrived, whole.
    pub(crate) fn arrived(&self) -> Vec<u8> {
        let bytes = bytes(&self.target);
        let parts = bytes.chunks(16).map(|part| {
            assert!(part.iter().all(|byte| *byte == part[0]), "torn: {part:?}");
            part[0] == 2
        });
        (0..).zip(parts).filter(|(_, arrived)| *arrived).map(|(id, _)| id).collect()
    }
}

/// What an engine was told, in a form that can be compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Told {
    Done(u64),
    Cancelled(u64),
    Failed(u64, ErrorKind),
    Notified(Vec<u8>),
    /// Whether this side ended it.
    Down(bool),
}

/// Polls, without moving a manual fabric, until there is nothing more.
pub(crate) fn told(backend: &MockBackend) -> Vec<Told> {
    let mut all = Vec::new();
    loop {
        let events = poll(backend);
        if events.is_empty() {
            return all;
        }
        all.extend(events.into_iter().map(|event| match event {
            Event::Settled { id, outcome: Outcome::Done { .. } } => Told::Done(id.0),
            Event::Settled { id, outcome: Outcome::Cancelled } => Told::Cancelled(id.0),
            Event::Settled { id, outcome: Outcome::Failed(error) } => {
                Told::Failed(id.0, error.kind())
            }
            Event::Notified { payload, .. } => Told::Notified(payload),
            Event::PeerDown { error, .. } => Told::Down(error.is_none()),
            other => panic!("{other:?}"),
        }));
    }
}

/// Runs a handshake that `first` begins.
pub(crate) fn meet(first: &MockBackend, second: &MockBackend) -> (PeerId, PeerId) {
    let (at_second, reply) = second.accept(&first.offer().unwrap()).unwrap();
    let (at_first, completion) = first.complete(&reply).unwrap();
    assert_eq!(second.finish(&completion).unwrap(), at_second);
    (at_first, at_second)
}

/// Host memory in which every byte is `fill`, registered.
pub(crate) fn memory(backend: &MockBackend, bytes: usize, fill: u8) -> (Region, RegionId) {
    let region = Region::host(bytes as u64).unwrap();
    region.write_at(0, &vec![fill; bytes]).unwrap();
    let handle = backend.register(&region).unwrap();
    (region, handle)
}

/// All bytes of a region.
pub(crate) fn bytes(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(region.bytes()).unwrap()];
    region.read_at(0, &mut bytes).unwrap();
    bytes
}

/// Publishes a region of `owner` to `user`, who knows the owner as `peer`.
pub(crate) fn import(
    owner: &MockBackend,
    region: RegionId,
    user: &MockBackend,
    peer: PeerId,
) -> RemoteRegionId {
    user.import_key(peer, &owner.key_blob(region).unwrap()).unwrap()
}

/// A segment at the same offset on both sides.
pub(crate) fn segment(
    local: RegionId,
    remote: RemoteRegionId,
    offset: u64,
    bytes: u64,
) -> PostedSegment {
    PostedSegment { local, remote, local_offset: offset, remote_offset: offset, bytes }
}

/// Posts a write that must fit.
pub(crate) fn write(backend: &MockBackend, id: u64, peer: PeerId, segments: &[PostedSegment]) {
    let submitted = backend.submit(TransferId(id), peer, Mode::Write, segments, None).unwrap();
    assert_eq!(submitted, Submit::Submitted);
}

/// Polls once.
pub(crate) fn poll(backend: &MockBackend) -> Vec<Event> {
    let mut events = Events::with_limit(3);
    backend.poll(&mut events);
    events.drain().collect()
}

/// Polls until `enough` of what was polled holds, which must be within a bound.
pub(crate) fn poll_until(backend: &MockBackend, enough: impl Fn(&[Event]) -> bool) -> Vec<Event> {
    let mut all = Vec::new();
    for _ in 0..10_000 {
        if enough(&all) {
            return all;
        }
        all.extend(poll(backend));
    }
    panic!("not enough after 10,000 polls: {all:?}");
}

/// Polls until a transfer has settled.
pub(crate) fn outcome(backend: &MockBackend, id: u64) -> Outcome {
    let mut events = poll_until(backend, |all| all.iter().any(|event| settles(event, id)));
    let last = events.pop().unwrap();
    let Event::Settled { outcome, .. } = (if settles(&last, id) {
        last
    } else {
        events.into_iter().find(|event| settles(event, id)).unwrap()
    }) else {
        unreachable!()
    };
    outcome
}

fn settles(event: &Event, wanted: u64) -> bool {
    matches!(event, Event::Settled { id, .. } if id.0 == wanted)
}

/// Whether the last of these events is that a peer is down.
pub(crate) fn ends_down(events: &[Event]) -> bool {
    matches!(events.last(), Some(Event::PeerDown { .. }))
}
