//! That the right bytes arrive, and no others.

use kvx_core::transfer::Mode;

use super::Group;
use crate::suite::clause::{
    Clause, Point, Verdict, ensure, ordered, reads, several_in_flight, writes,
};
use crate::suite::world::World;

pub(crate) const GROUP: Group = Group {
    title: "Data",
    about: "Exact bytes, in the right memory, and nothing beside them.",
    clauses: &[
        Clause::new(
            "data.read.exact",
            Point::Visible,
            "A read brings exactly the peer's bytes, and touches nothing beside them on either side.",
            &["last_byte_missing", "one_byte_too_many", "read_as_write", "settled_before_data"],
            |world| exact(world, Mode::Read),
        )
        .needs(&[reads]),
        Clause::new(
            "data.write.exact",
            Point::Visible,
            "A write brings exactly this side's bytes, and touches nothing beside them on either side.",
            &["last_byte_missing", "one_byte_too_many", "settled_before_data"],
            |world| exact(world, Mode::Write),
        )
        .needs(&[writes]),
        Clause::new(
            "data.read.visible",
            Point::Visible,
            "Once a read is settled as done, its bytes are in this side's memory.",
            &["settled_before_data", "done_before_data"],
            |world| visible(world, Mode::Read),
        )
        .needs(&[reads]),
        Clause::new(
            "data.write.visible",
            Point::Visible,
            "Once a write is settled as done, its bytes are in the peer's memory.",
            &["settled_before_data", "done_before_data"],
            |world| visible(world, Mode::Write),
        )
        .needs(&[writes]),
        Clause::new(
            "data.right_peer",
            Point::Visible,
            "A transfer moves bytes of the peer that it names, and of no other.",
            &["wrong_peer"],
            right_peer,
        )
        .needs(&[writes]),
        Clause::new(
            "data.both_ways",
            Point::Visible,
            "Transfers of both sides, in both modes, many at once, all bring exact bytes.",
            &["last_byte_missing", "read_as_write"],
            both_ways,
        )
        .needs(&[reads, writes]),
        Clause::new(
            "data.order",
            Point::Claims,
            "Where an order per peer is claimed, of two writes to the same bytes the later one wins.",
            &["posts_reversed"],
            order,
        )
        .needs(&[writes, ordered, several_in_flight]),
    ],
};

fn exact(world: &World, mode: Mode) -> Verdict {
    const BYTES: u64 = 8 * 1024;
    let (pair, dice) = (world.pair()?, world.dice());
    for pair in [pair.clone(), pair.flipped()] {
        let mut lane = world.lane(&pair, BYTES)?;
        for round in 0..6 {
            let bytes = dice.between(1, 1500);
            let (local, remote) = (dice.below(BYTES - bytes), dice.below(BYTES - bytes));
            let segment = lane.segment(local, remote, bytes);
            world.transfer(&mut lane, mode, &[segment], None)?;
            lane.check(&format!("{mode} {round} by {}, of {bytes} bytes", pair.one.name()))?;
        }
    }
    Ok(())
}

/// Looks at the memory in the very moment in which the transfer is seen to settle.
fn visible(world: &World, mode: Mode) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 4096)?;
    for round in 0..10 {
        let seed = world.dice().next();
        match mode {
            Mode::Read => lane.remote.refill(seed)?,
            Mode::Write => lane.local.refill(seed)?,
        }
        let segments = [lane.segment(0, 0, 4096)];
        for batch in world.batches(&pair.one, &segments)? {
            let id = world.post(&pair.one, pair.at_one, mode, &batch, None)?;
            lane.apply(mode, &batch);
            world.done(&pair.one, &[id])?;
            let (local, remote) = (batch[0].local_offset, batch[0].remote_offset);
            let bytes = batch.iter().map(|segment| segment.bytes).sum();
            let arrived = match mode {
                Mode::Read => lane.local.holds(local, bytes)?,
                Mode::Write => lane.remote.holds(remote, bytes)?,
            };
            ensure!(arrived, "{mode} {round} settled as done, but its bytes are not there");
        }
    }
    lane.check("in the end")
}

fn right_peer(world: &World) -> Verdict {
    let first = world.pair()?;
    let second = world.meet(&first.one, &world.open("third")?)?;
    let mut lanes = [world.lane(&first, 1024)?, world.lane(&second, 1024)?];
    for round in 0..8_usize {
        let lane = &mut lanes[round % 2];
        lane.local.refill(world.dice().next())?;
        let segment = lane.segment(16, 100, 300);
        world.transfer(lane, Mode::Write, &[segment], None)?;
        lanes.iter().try_for_each(|lane| lane.check("after a write to one of two peers"))?;
    }
    Ok(())
}

fn both_ways(world: &World) -> Verdict {
    const STEP: u64 = 32;
    let pair = world.pair()?;
    let mut lanes = [world.lane(&pair, 4096)?, world.lane(&pair.flipped(), 4096)?];
    let mut posted = [Vec::new(), Vec::new()];
    for index in 0..64_u64 {
        // Every transfer has bytes of its own, so the order in which they are moved is of no consequence.
        let mode = if index % 2 == 0 { Mode::Read } else { Mode::Write };
        for (lane, posted) in lanes.iter_mut().zip(&mut posted) {
            let bytes = world.dice().between(1, STEP);
            let segments = [lane.segment(index * STEP, index * STEP, bytes)];
            let (side, peer) = (lane.pair.one.clone(), lane.pair.at_one);
            posted.push(world.post(&side, peer, mode, &segments, None)?);
            lane.apply(mode, &segments);
        }
    }
    for (lane, posted) in lanes.iter().zip(&posted) {
        world.done(&lane.pair.one, posted)?;
    }
    lanes.iter().try_for_each(|lane| lane.check("after 128 transfers"))
}

fn order(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 256)?;
    for round in 0..10 {
        let mut ids = Vec::new();
        for from in [0, 64, 128, 192] {
            let segments = [lane.segment(from, 8, 32)];
            ids.push(world.post(&pair.one, pair.at_one, Mode::Write, &segments, None)?);
            lane.apply(Mode::Write, &segments);
        }
        world.done(&pair.one, &ids)?;
        lane.check(&format!("round {round}, after four writes to the same bytes"))?;
        lane.local.refill(world.dice().next())?;
    }
    Ok(())
}
