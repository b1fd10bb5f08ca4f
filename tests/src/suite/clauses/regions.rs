//! Batches over many regions, and over neighbours.

use kvx_core::transfer::{Mode, PostedSegment};

use super::shapes::modes;
use crate::suite::clause::Verdict;
use crate::suite::lane::Lane;
use crate::suite::world::World;

/// Bytes of each of the many regions.
const BYTES: u64 = 64;

/// A segment, with the lane of its local region, and that of its remote one.
struct Crossing {
    at: usize,
    from: usize,
    segment: PostedSegment,
}

pub(super) fn many_regions(world: &World) -> Verdict {
    const COUNT: usize = 100;
    let pair = world.pair()?;
    for mode in modes(&world.lane(&pair, BYTES)?)? {
        // New ones for each mode, so that a batch is the first that hears of them.
        let mut lanes =
            (0..COUNT).map(|_| world.lane(&pair, BYTES)).collect::<Verdict<Vec<Lane>>>()?;
        let shift = usize::try_from(world.dice().below(COUNT as u64)).unwrap_or(0);
        let crossing: Vec<_> = (0..COUNT)
            .map(|at| {
                let from = (at * 37 + shift) % COUNT;
                let mut segment = lanes[at].segment(3, 5, world.dice().between(1, 40));
                segment.remote = lanes[from].key;
                Crossing { at, from, segment }
            })
            .collect();
        let all: Vec<_> = crossing.iter().map(|crossing| crossing.segment).collect();
        let mut ids = Vec::new();
        for batch in world.batches(&pair.one, &all)? {
            ids.push(world.post(&pair.one, pair.at_one, mode, &batch, None)?);
        }
        world.done(&pair.one, &ids)?;
        for Crossing { at, from, segment } in crossing {
            let (to, out) = (segment.local_offset, segment.remote_offset);
            if mode == Mode::Read {
                let bytes = lanes[from].remote.expected(out, segment.bytes).to_vec();
                lanes[at].local.expect(to, &bytes);
            } else {
                let bytes = lanes[at].local.expected(to, segment.bytes).to_vec();
                lanes[from].remote.expect(out, &bytes);
            }
        }
        for (index, lane) in lanes.iter().enumerate() {
            lane.check(&format!("{mode} in {COUNT} regions on both sides, region {index}"))?;
        }
    }
    Ok(())
}

pub(super) fn neighbours(world: &World) -> Verdict {
    const BYTES: u64 = 50;
    const APART: u64 = 90;
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 1024)?;
    for mode in modes(&lane)? {
        for (what, local, remote) in [
            ("this side only", BYTES, APART),
            ("the peer's side only", APART, BYTES),
            ("both sides", BYTES, BYTES),
        ] {
            for count in [2, 3, 8] {
                for backwards in [false, true] {
                    match mode {
                        Mode::Read => lane.remote.refill(world.dice().next())?,
                        Mode::Write => lane.local.refill(world.dice().next())?,
                    }
                    let mut segments: Vec<_> = (0..count)
                        .map(|i| lane.segment(7 + i * local, 9 + i * remote, BYTES))
                        .collect();
                    if backwards {
                        segments.reverse();
                    }
                    world.transfer(&mut lane, mode, &segments, None)?;
                    lane.check(&format!("{mode} of {count} segments that touch on {what}"))?;
                }
            }
        }
    }
    Ok(())
}
