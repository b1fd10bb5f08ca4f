//! Two backends of this process that have met, each with one region.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, Outcome, Submit, TransferBackend as _};
use kvx_core::handshake::Handshake as _;
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_shm::{Options, ShmBackend};

use crate::dice::Dice;

/// Of each region.
pub(crate) const BYTES: u64 = 3 << 20;

/// Waits until it holds.
pub(crate) fn wait(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(20), "waited for {what}, in vain");
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// One end.
pub(crate) struct Side {
    pub(crate) backend: Arc<ShmBackend>,
    pub(crate) peer: PeerId,
    pub(crate) region: RegionId,
    pub(crate) settled: Vec<(TransferId, Outcome)>,
    pub(crate) down: bool,
}

impl Side {
    fn new(backend: Arc<ShmBackend>, peer: PeerId, memory: &Region) -> Self {
        let region = backend.register(memory).unwrap();
        Self { backend, peer, region, settled: Vec::new(), down: false }
    }

    pub(crate) fn poll(&mut self) {
        let mut events = Events::with_limit(64);
        self.backend.poll(&mut events);
        for event in events.drain() {
            match event {
                Event::Settled { id, outcome } => {
                    assert!(!self.down, "{id:?} settles after its peer is down");
                    self.settled.push((id, outcome));
                }
                Event::PeerDown { .. } => self.down = true,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Two sides that have met. The first starts transfers.
pub(crate) struct Pair {
    pub(crate) one: Side,
    pub(crate) other: Side,
    key: RemoteRegionId,
}

impl Pair {
    /// With so many threads that copy on each side.
    pub(crate) fn new(threads: usize, mine: &Region, theirs: &Region) -> Self {
        let options =
            format!("copy_threads={threads},inline_bytes=0,together_bytes=0").parse().unwrap();
        let options = Options::read(&options).unwrap();
        let [one, other] = [0, 1].map(|_| ShmBackend::open(&options).unwrap());
        let (at_other, reply) = other.accept(&one.offer().unwrap()).unwrap();
        let (at_one, completion) = one.complete(&reply).unwrap();
        assert_eq!(other.finish(&completion).unwrap(), at_other);
        let (one, other) = (Side::new(one, at_one, mine), Side::new(other, at_other, theirs));
        let blob = other.backend.key_blob(other.region).unwrap();
        let key = one.backend.import_key(at_one, &blob).unwrap();
        Self { one, other, key }
    }

    /// All of the other's region, cut into pieces of many sizes, in any order.
    pub(crate) fn segments(&self, dice: &mut Dice) -> Vec<PostedSegment> {
        let (mut offset, mut segments) = (0, Vec::new());
        while offset < BYTES {
            let most = if dice.below(3) == 0 { 500_000 } else { 20_000 };
            let bytes = (1 + dice.below(most)).min(BYTES - offset);
            let (local, remote) = (self.one.region, self.key);
            segments.push(PostedSegment {
                local,
                remote,
                local_offset: offset,
                remote_offset: offset,
                bytes,
            });
            offset += bytes;
        }
        for at in (1..segments.len()).rev() {
            segments.swap(at, usize::try_from(dice.below(at as u64 + 1)).unwrap());
        }
        segments
    }

    pub(crate) fn post(&self, id: u64, mode: Mode, segments: &[PostedSegment]) {
        let one = &self.one;
        let posted = one.backend.submit(TransferId(id), one.peer, mode, segments, None).unwrap();
        assert_eq!(posted, Submit::Submitted);
    }

    /// Polls both sides until so many transfers have settled.
    pub(crate) fn settle(&mut self, count: usize) {
        wait("transfers to settle", || {
            self.one.poll();
            self.other.poll();
            self.one.settled.len() >= count
        });
    }
}
