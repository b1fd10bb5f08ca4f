//! Peers that die, and peers that stand still, in the midst of transfers; a third is served all the while.

use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, Outcome, SEVER_BOUND, Submit, TransferBackend as _};
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::registry::Probe;
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_ucx::UcxBackend;

use crate::count::Left;
use crate::pair::{block, lasting_interface, open, times};
use crate::peer::Process;

/// The survivor, and the third side that it serves.
struct Survivor {
    one: std::sync::Arc<UcxBackend>,
    third: PeerId,
    local: RegionId,
    key: RemoteRegionId,
    next: u64,
    served: u64,
    events: Events,
    /// Keeps the third side's process.
    _process: Process,
}

/// Ids of transfers to the third.
const THIRD: u64 = 1 << 40;

impl Survivor {
    fn new() -> Self {
        let one = open();
        let memory = Region::host(1 << 20).unwrap();
        let local = one.register(&memory).unwrap();
        let mut process = Process::start(&format!("devices={}", lasting_interface()));
        let (third, key) = process.meet(&one).unwrap();
        let events = Events::with_limit(64);
        Self { one, third, local, key, next: THIRD, served: 0, events, _process: process }
    }

    fn segment(&self, remote: RemoteRegionId, bytes: u64) -> PostedSegment {
        PostedSegment { local: self.local, remote, local_offset: 0, remote_offset: 0, bytes }
    }

    /// One more transfer to the third, then what happened to others.
    fn turn(&mut self) -> Vec<Event> {
        if self.next - THIRD == self.served {
            let segment = self.segment(self.key, 1000);
            let mode = if self.next.is_multiple_of(2) { Mode::Read } else { Mode::Write };
            let said = self.one.submit(TransferId(self.next), self.third, mode, &[segment], None);
            let said = said.unwrap();
            assert!(said.is_posted());
            self.served += u64::from(matches!(said, Submit::Done { .. }));
            self.next += 1;
        }
        self.one.poll(&mut self.events);
        let mut others = Vec::new();
        for event in self.events.drain() {
            match event {
                Event::Settled { id, outcome } if id.0 >= THIRD => {
                    assert!(outcome.is_done(), "a transfer of the third: {outcome:?}");
                    self.served += 1;
                }
                other => others.push(other),
            }
        }
        others
    }
}

/// Ends a peer in some way at a random moment of transfers, `count` times. `end` says whether this side severs it.
fn many_ends(count: u64, end: fn(&mut Process) -> bool) {
    let mut survivor = Survivor::new();
    // UCX 1.13 may end the process when a peer ends while the two connect: see docs/ucx.md.
    let probe = (kvx_ucx::REGISTRATION.probe)(&kvx_core::config::BackendConfig::new());
    let connects_first =
        matches!(probe, Probe::Available { detail, .. } if detail.contains("UCX 1.13."));
    let mut before = None;
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..count {
        if round == count / 2 {
            before = Some(Left::count());
        }
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut process = Process::start(&format!("devices={}", lasting_interface()));
        let (peer, key) = process.meet(&survivor.one).unwrap();
        if connects_first {
            block(survivor.one.connect(peer)).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        let moment = Duration::from_micros((random >> 33) % 20_000);
        let (begin, mut posted, mut settled, mut ended, mut down) =
            (Instant::now(), 0, 0, None, false);
        while !down {
            if ended.is_none() && begin.elapsed() >= moment {
                let sever = end(&mut process);
                ended = Some(Instant::now());
                if sever {
                    survivor.one.sever(peer).unwrap();
                }
            }
            if ended.is_none() && posted - settled < 20 {
                let mode = if posted % 2 == 0 { Mode::Read } else { Mode::Write };
                let segment = survivor.segment(key, 1 << (posted % 21));
                let id = TransferId(round << 20 | posted);
                let said = survivor.one.submit(id, peer, mode, &[segment], Some(b"note")).unwrap();
                posted += u64::from(said.is_posted());
                settled += u64::from(matches!(said, Submit::Done { .. }));
            }
            for event in survivor.turn() {
                match event {
                    Event::Settled { outcome, .. } => {
                        settled += 1;
                        assert!(ended.is_some() || outcome.is_done(), "{outcome:?}");
                        assert!(
                            !matches!(outcome, Outcome::Failed(ref e) if e.kind() == kvx_core::ErrorKind::Misuse)
                        );
                    }
                    Event::PeerDown { peer: whose, .. } if whose == peer => {
                        assert_eq!(settled, posted, "all has settled before the peer is down");
                        down = true;
                    }
                    other => panic!("{other:?}"),
                }
            }
            if let Some(ended) = ended {
                assert!(
                    ended.elapsed() < SEVER_BOUND,
                    "round {round}: {settled} of {posted} settled {:?} after the end",
                    ended.elapsed()
                );
            }
        }
    }
    assert!(survivor.served > count, "the third was served {} times", survivor.served);
    before.unwrap().is_all_that_is_left(&format!("{count} peers that ended"));
}

pub(crate) fn killed_peers() {
    many_ends(times(10), |process| {
        process.kill();
        false
    });
}

pub(crate) fn stopped_peers() {
    many_ends(times(10), |process| {
        process.stop();
        true
    });
}
