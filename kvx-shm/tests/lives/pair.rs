//! Two backends of this process that have met.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, Outcome, Submit, TransferBackend as _};
use kvx_core::handshake::Handshake as _;
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_shm::{Options, ShmBackend};

pub(crate) struct Pair {
    pub(crate) one: Arc<ShmBackend>,
    pub(crate) other: Arc<ShmBackend>,
    pub(crate) at_one: PeerId,
    pub(crate) at_other: PeerId,
    /// The other's region of the last lane.
    pub(crate) theirs: Cell<RegionId>,
}

pub(crate) fn open() -> Arc<ShmBackend> {
    open_with("")
}

pub(crate) fn open_with(options: &str) -> Arc<ShmBackend> {
    ShmBackend::open(&Options::read(&options.parse().unwrap()).unwrap()).unwrap()
}

pub(crate) fn wait(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(20), "waited for {what}, in vain");
        std::thread::sleep(Duration::from_micros(20));
    }
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self::meet(&open(), &open())
    }

    pub(crate) fn meet(one: &Arc<ShmBackend>, other: &Arc<ShmBackend>) -> Self {
        let (at_other, reply) = other.accept(&one.offer().unwrap()).unwrap();
        let (at_one, completion) = one.complete(&reply).unwrap();
        assert_eq!(other.finish(&completion).unwrap(), at_other);
        let (one, other) = (Arc::clone(one), Arc::clone(other));
        Self { one, other, at_one, at_other, theirs: Cell::new(RegionId::new(0, 0)) }
    }

    /// Registers memory on both sides.
    pub(crate) fn lane(&self, mine: &Region, theirs: &Region) -> (RegionId, RemoteRegionId) {
        let local = self.one.register(mine).unwrap();
        let remote = self.other.register(theirs).unwrap();
        self.theirs.set(remote);
        let blob = self.other.key_blob(remote).unwrap();
        (local, self.one.import_key(self.at_one, &blob).unwrap())
    }

    pub(crate) fn transfer(&self, id: TransferId, mode: Mode, segments: &[PostedSegment]) {
        match self.one.submit(id, self.at_one, mode, segments, None).unwrap() {
            Submit::Submitted => {}
            Submit::Done { .. } => return,
            Submit::Full => panic!("there is room"),
        }
        let mut events = Events::with_limit(8);
        wait("a transfer to settle", || {
            self.one.poll(&mut events);
            events.drain().any(|event| match event {
                Event::Settled { outcome: Outcome::Done { .. }, .. } => true,
                other => panic!("{other:?}"),
            })
        });
    }

    /// Ends the connection. Both sides hear of it.
    pub(crate) fn part(&self) {
        self.one.sever(self.at_one).unwrap();
        let mut events = Events::with_limit(8);
        for (side, peer) in [(&self.one, self.at_one), (&self.other, self.at_other)] {
            wait("the peer to be down", || {
                side.poll(&mut events);
                events
                    .drain()
                    .any(|event| matches!(event, Event::PeerDown { peer: p, .. } if p == peer))
            });
        }
    }
}
