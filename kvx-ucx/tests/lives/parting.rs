//! Connections that one side ends, or both, at any moment from the handshake on.

use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, Outcome, SEVER_BOUND, Submit, TransferBackend as _};
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_ucx::UcxBackend;

use crate::count::Left;
use crate::pair::{Dice, Pair, Way, alone, open_with, times};

/// Transfers that a side has under way at most.
const UNDER_WAY: u64 = 12;

/// One of the two.
struct Side<'a> {
    backend: &'a UcxBackend,
    peer: PeerId,
    local: RegionId,
    remote: RemoteRegionId,
    posted: u64,
    settled: u64,
    down: bool,
}

impl Side<'_> {
    fn post(&mut self) {
        if self.posted - self.settled >= UNDER_WAY {
            return;
        }
        let (local, remote, bytes) = (self.local, self.remote, 1 << (self.posted % 20));
        let segment = PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes };
        let mode = if self.posted.is_multiple_of(2) { Mode::Read } else { Mode::Write };
        let note = self.posted.is_multiple_of(3).then_some(&b"note"[..]);
        let id = TransferId(self.posted);
        let said = self.backend.submit(id, self.peer, mode, &[segment], note).unwrap();
        self.posted += u64::from(said.is_posted());
        self.settled += u64::from(matches!(said, Submit::Done { .. }));
    }

    /// Whether either side has ended it decides what may happen.
    fn poll(&mut self, ended: bool, events: &mut Events) {
        self.backend.poll(events);
        for event in events.drain() {
            match event {
                Event::Settled { outcome, .. } => {
                    self.settled += 1;
                    assert!(ended || matches!(outcome, Outcome::Done { .. }), "{outcome:?}");
                }
                Event::PeerDown { peer, error } => {
                    assert!(ended && peer == self.peer, "{error:?}");
                    assert_eq!(
                        self.settled, self.posted,
                        "all has settled before the peer is down"
                    );
                    self.down = true;
                }
                Event::Notified { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Both post. One severs, or both do: also the one that does not is told within the bound, however young the connection is. Then
/// they meet again.
pub(crate) fn whoever_is_severed_is_told_and_met_again() {
    alone("whoever_is_severed_is_told_and_met_again", Way::Cma.variables(), || {
        for way in [Way::Tcp, Way::Cma] {
            many_partings(way, times(60));
        }
    });
}

fn many_partings(way: Way, count: u64) {
    let open = || open_with(&way.options()).unwrap();
    let (one, other) = (open(), open());
    let memory = Region::host(1 << 20).unwrap();
    let mut dice = Dice::new(&format!("parting over {way}"));
    let (mut before, mut slowest) = (None, Duration::ZERO);
    for round in 0..count {
        // What UCX keeps is there after some.
        if round == count / 2 {
            before = Some(Left::at_rest());
        }
        let pair = Pair::meet(&one, &other);
        let regions = [&one, &other].map(|backend| backend.register(&memory).unwrap());
        let side = |at: usize| {
            let all = [(&one, pair.at_one), (&other, pair.at_other)];
            let ((backend, peer), theirs) = (all[at], all[1 - at].0);
            let blob = theirs.key_blob(regions[1 - at]).unwrap();
            let remote = backend.import_key(peer, &blob).unwrap();
            let local = regions[at];
            Side { backend, peer, local, remote, posted: 0, settled: 0, down: false }
        };
        let mut sides = [side(0), side(1)];
        slowest = slowest.max(one_parting(&mut sides, &format!("{way}, round {round}"), &mut dice));
        for (backend, region) in [&one, &other].into_iter().zip(regions) {
            backend.deregister(region).unwrap();
        }
    }
    before.unwrap().is_all_that_is_left(&format!("{count} partings"));
    eprintln!("{count} partings over {way}: both sides knew within {slowest:?}");
}

/// How long it took until both sides knew.
fn one_parting(sides: &mut [Side<'_>; 2], what: &str, dice: &mut Dice) -> Duration {
    let moment = Duration::from_micros(dice.below(4000));
    // The first, the second, or both.
    let who = dice.below(3);
    let (begin, mut ended) = (Instant::now(), None::<Instant>);
    let mut events = Events::with_limit(64);
    while !sides.iter().all(|side| side.down) {
        if ended.is_none() && begin.elapsed() >= moment {
            ended = Some(Instant::now());
            for (side, at) in sides.iter().zip(0..) {
                if who == at || who == 2 {
                    side.backend.sever(side.peer).unwrap();
                }
            }
        }
        for side in &mut *sides {
            if ended.is_none() {
                side.post();
            }
            side.poll(ended.is_some(), &mut events);
        }
        let late = ended.is_some_and(|ended| ended.elapsed() > SEVER_BOUND);
        let states = || sides.each_ref().map(|side| (side.posted, side.settled, side.down));
        assert!(!late, "{what}, by {who}: posted, settled, down: {:?}", states());
    }
    ended.map_or(Duration::ZERO, |ended| ended.elapsed())
}
