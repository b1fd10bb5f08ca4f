//! Registering memory.

use std::time::{Duration, Instant};

use kvx_core::ErrorKind;
use kvx_core::id::RegionId;
use kvx_core::transfer::Mode;

use super::Group;
use super::shapes::modes;
use crate::suite::clause::{Clause, Point, Verdict, ensure, no_cuda, refused, writes};
use crate::suite::lane::{GUARD, Lane, Memory};
use crate::suite::world::World;

pub(crate) const GROUP: Group = Group {
    title: "Registered memory",
    about: "What can be registered, how often, and for how long the backend holds it.",
    clauses: &[
        Clause::new(
            "memory.smallest",
            Point::Memory,
            "A region may have as little as one byte, at any address; less than that is no region (known failure 102: \
             Mooncake#701).",
            &["small_regions_refused"],
            smallest,
        ),
        Clause::new(
            "memory.repeated",
            Point::Memory,
            "The same memory may be registered again: each registration has a handle of its own and ends alone.",
            &["registrations_shared"],
            repeated,
        ),
        Clause::new(
            "memory.overlapping",
            Point::Memory,
            "Ranges that overlap may be registered: each reaches its own bytes, and ends alone.",
            &["registrations_shared", "deregister_ends_overlapping"],
            overlapping,
        ),
        Clause::new(
            "memory.stale_handle",
            Point::Stale,
            "A handle that was deregistered is refused as misuse wherever it is used, also after its slot was given out again.",
            &["stale_region_accepted"],
            stale_handle,
        ),
        Clause::new(
            "memory.unknown_handle",
            Point::Stale,
            "A handle that was never given out is refused as misuse.",
            &["unknown_region_accepted"],
            unknown_handle,
        ),
        Clause::new(
            "memory.foreign_kind",
            Point::Claims,
            "Memory of a kind that is not claimed is refused as unsupported, never taken for host memory (known failure 96: \
             nixl#1385).",
            &["device_memory_taken_for_host"],
            foreign_kind,
        )
        .needs(&[no_cuda]),
        Clause::new(
            "memory.many_ranges",
            Point::Memory,
            "A thousand ranges of one region can be registered, and the time for one does not grow with their number (known \
             failure 103: nixl#1392).",
            &["registering_slows_down"],
            many_ranges,
        ),
        Clause::new(
            "memory.allocated",
            Point::Memory,
            "Memory that the backend allocates is zeroed, as large as was asked, and as good as any other: registered in parts, \
             moved to and from memory of either origin, still there after the backend is gone. No bytes are refused.",
            &["allocates_dirty_memory", "allocates_too_little", "allocates_what_it_shares", "allocates_nothing"],
            allocated,
        ),
        Clause::new(
            "memory.kept_in_flight",
            Point::Memory,
            "Memory stays alive as long as a transfer uses it, whoever else lets go of it (known failure 94: nixl#2067).",
            &["memory_dropped_in_flight"],
            kept_in_flight,
        ),
        Clause::new(
            "memory.released",
            Point::Memory,
            "Once it is deregistered and nothing is in flight, the backend holds the memory no longer.",
            &["memory_never_released"],
            released,
        ),
        Clause::new(
            "memory.deregistered_in_flight",
            Point::Memory,
            "Transfers that use a region settle though it is deregistered meanwhile, on whichever side; others are unharmed.",
            &["deregistering_loses_transfers"],
            deregistered_in_flight,
        )
        .needs(&[writes]),
    ],
};

fn smallest(world: &World) -> Verdict {
    ensure!(kvx_core::memory::Region::host(0).is_err(), "a region of no bytes can be made");
    let pair = world.pair()?;
    for round in 0..3 {
        let mut lane = world.lane(&pair, 1)?;
        for mode in modes(&lane)? {
            let segment = lane.segment(0, 0, 1);
            world.transfer(&mut lane, mode, &[segment], None)?;
            lane.check(&format!("{mode} {round} of regions of one byte"))?;
        }
        // One byte at an odd address.
        let odd = pair.one.register(lane.local.arena, GUARD - 3, 1)?;
        pair.one.deregister(odd)?;
    }
    Ok(())
}

/// A transfer over a lane still works.
fn works(world: &World, lane: &mut Lane, when: &str) -> Verdict {
    let mode = modes(lane)?[0];
    let segment = lane.segment(3, 5, 50);
    world.transfer(lane, mode, &[segment], None)?;
    lane.check(when)
}

fn repeated(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 128)?;
    let (local, remote) = (lane.local.region, lane.remote.region);
    let again = pair.one.register(lane.local.arena, GUARD, 128)?;
    let remote_again = pair.other.register(lane.remote.arena, GUARD, 128)?;
    ensure!(again != local && remote_again != remote, "two registrations have one handle");
    works(world, &mut lane, "with the memory registered twice")?;
    pair.one.deregister(local)?;
    pair.other.deregister(remote)?;
    lane.local.region = again;
    lane.remote.region = remote_again;
    lane.key = pair.one.import_key(pair.at_one, &pair.other.key_blob(remote_again)?)?;
    works(world, &mut lane, "after the first of two registrations ended")
}

fn overlapping(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 256)?;
    // From inside the region to beyond its end, and all of the arena.
    let beyond = pair.one.register(lane.local.arena, GUARD + 100, 300)?;
    let whole = pair.other.register(lane.remote.arena, 0, 2 * GUARD + 256)?;
    works(world, &mut lane, "with overlapping ranges registered")?;
    let whole_key = pair.one.import_key(pair.at_one, &pair.other.key_blob(whole)?)?;
    pair.one.deregister(lane.local.region)?;
    pair.other.deregister(lane.remote.region)?;
    // The same bytes, by the offsets of the other ranges.
    let mut segment = lane.segment(120, 20, 60);
    for mode in modes(&lane)? {
        let moved = [segment];
        segment.local = beyond;
        segment.remote = whole_key;
        segment.local_offset = 20;
        segment.remote_offset = GUARD + 20;
        for batch in world.batches(&pair.one, &[segment])? {
            let id = world.post(&pair.one, pair.at_one, mode, &batch, None)?;
            world.done(&pair.one, &[id])?;
        }
        segment = moved[0];
        lane.apply(mode, &moved);
        lane.check(&format!("{mode} through overlapping ranges, after the first ended"))?;
    }
    Ok(())
}

fn stale_handle(world: &World) -> Verdict {
    let pair = world.pair()?;
    let lane = world.lane(&pair, 128)?;
    let stale = lane.local.region;
    pair.one.deregister(stale)?;
    for reused in [false, true] {
        if reused {
            pair.one.register(lane.local.arena, GUARD, 128)?;
        }
        let (one, misuse) = (&pair.one, &[ErrorKind::Misuse]);
        refused("deregistering a stale handle", one.deregister(stale), misuse)?;
        refused("asking for the key of a stale handle", one.key_blob(stale), misuse)?;
        for mode in modes(&lane)? {
            let segments = [lane.segment(0, 0, 16)];
            let post = one.submit(world.id(), pair.at_one, mode, &segments, None);
            refused(&format!("a {mode} with a stale local handle"), post, misuse)?;
        }
    }
    world.settle_down(&[&pair.one, &pair.other])?;
    lane.check("after stale handles were used")
}

fn unknown_handle(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    for unknown in [RegionId::new(0, 0), RegionId::new(3, 9), RegionId::new(u32::MAX, u32::MAX)] {
        let misuse = &[ErrorKind::Misuse];
        refused("deregistering an unknown handle", one.deregister(unknown), misuse)?;
        refused("asking for the key of an unknown handle", one.key_blob(unknown), misuse)?;
    }
    Ok(())
}

fn foreign_kind(world: &World) -> Verdict {
    let one = world.open_here("one")?;
    let arena = one.arena(256, 1)?;
    let registered = one.register_foreign(arena);
    refused("memory of a CUDA device", registered, &[ErrorKind::Unsupported])?;
    ensure!(one.held(arena)? == 0, "the backend holds memory that it refused");
    Ok(())
}

fn many_ranges(world: &World) -> Verdict {
    const COUNT: u64 = 1000;
    let one = world.open_here("one")?;
    let arena = one.arena(COUNT * 64, 1)?;
    let mut times = Vec::new();
    for round in 0..4 {
        let mut regions = Vec::new();
        for index in 0..COUNT {
            if index % 100 == 0 {
                times.push((Duration::ZERO, Instant::now()));
            }
            regions.push(one.register(arena, index * 64, 64)?);
            if index % 100 == 99
                && let Some((took, begin)) = times.last_mut()
            {
                *took = begin.elapsed();
            }
        }
        if round > 0 {
            for region in regions {
                one.deregister(region)?;
            }
        }
    }
    // Of hundreds with few registrations and with many, the fastest: the others were disturbed.
    let fastest = |from: usize| times[from..from + 3].iter().map(|(took, _)| *took).min();
    let (first, last) =
        (fastest(0).unwrap_or_default(), fastest(times.len() - 3).unwrap_or_default());
    ensure!(
        last < first * 4 + Duration::from_millis(2),
        "the first hundred took {first:?}, the last {last:?}"
    );
    Ok(())
}

fn allocated(world: &World) -> Verdict {
    const BYTES: u64 = 3000;
    let pair = world.pair()?;
    refused("an allocation of no bytes", pair.one.allocate(0), &[ErrorKind::Misuse])?;
    let allocated = |side| Memory::allocated(side, BYTES, world.dice().next());
    let mut lanes = Vec::new();
    for (one, other) in [(true, true), (true, false), (false, true)] {
        let memory = |own, side| if own { allocated(side) } else { world.memory(side, BYTES) };
        let (local, remote) = (memory(one, &pair.one)?, memory(other, &pair.other)?);
        lanes.push(world.lane_between(&pair, local, remote)?);
    }
    for lane in &mut lanes {
        for mode in modes(lane)? {
            let segments = [lane.segment(0, BYTES - 700, 700), lane.segment(900, 3, 41)];
            world.transfer(lane, mode, &segments, None)?;
        }
    }
    for lane in &lanes {
        lane.check("after transfers between allocated memory and other")?;
    }
    pair.one.close()?;
    pair.one.drop_backend()?;
    lanes.iter().try_for_each(|lane| lane.local.check("after the backend was closed and dropped"))
}

fn kept_in_flight(world: &World) -> Verdict {
    let pair = world.pair()?;
    let limit = pair.one.capabilities()?.limits.max_segment_bytes;
    for round in 0..4 {
        let lane = world.lane(&pair, 64 * 1024)?;
        let mode = modes(&lane)?[0];
        let bytes = limit.min(16 * 1024);
        let segments: Vec<_> =
            (0..4).map(|i| lane.segment(i * 16 * 1024, i * 16 * 1024, bytes)).collect();
        let batch = world.batches(&pair.one, &segments)?.swap_remove(0);
        let id = world.post(&pair.one, pair.at_one, mode, &batch, None)?;
        pair.one.deregister(lane.local.region)?;
        // A fabric that moves only when it is polled has not moved; another may have come to the end by itself.
        let moved_only_by_polls = world.pace().quiet.is_zero();
        let dropped = format!("round {round}: the memory of a transfer in flight was let go of");
        ensure!(!moved_only_by_polls || pair.one.held(lane.local.arena)? > 0, "{dropped}");
        world.wait(&[], "the transfer to settle", || {
            let held = pair.one.held(lane.local.arena)?;
            pair.one.poll(1)?;
            let settled = pair.one.settled(id).is_some();
            ensure!(settled || held > 0, "{dropped}");
            Ok(settled)
        })?;
    }
    Ok(())
}

fn released(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 128)?;
    works(world, &mut lane, "before it is deregistered")?;
    let held = (pair.one.held(lane.local.arena)?, pair.other.held(lane.remote.arena)?);
    ensure!(held.0 > 0 && held.1 > 0, "a registration does not hold its memory");
    pair.one.deregister(lane.local.region)?;
    pair.other.deregister(lane.remote.region)?;
    let both = [&pair.one, &pair.other];
    world.wait(&both, "the memory to be let go of", || {
        Ok(pair.one.held(lane.local.arena)? == 0 && pair.other.held(lane.remote.arena)? == 0)
    })
}

fn deregistered_in_flight(world: &World) -> Verdict {
    let pair = world.pair()?;
    for remote in [false, true] {
        let lane = world.lane(&pair, 4096)?;
        let segments: Vec<_> = (0..4).map(|i| lane.segment(i * 1024, i * 1024, 900)).collect();
        let batches = world.batches(&pair.one, &segments)?;
        let mut ids = Vec::new();
        for batch in batches.iter().take(4) {
            let id = world.id();
            if pair.one.submit(id, pair.at_one, Mode::Write, batch, None)? {
                ids.push(id);
            }
        }
        if remote {
            pair.other.deregister(lane.remote.region)?;
        } else {
            pair.one.deregister(lane.local.region)?;
        }
        let both = [&pair.one, &pair.other];
        let settled = || Ok(ids.iter().all(|id| pair.one.settled(*id).is_some()));
        world.wait(&both, "transfers of a deregistered region to settle", settled)?;
        world.settle_down(&both)?;
        if pair.one.down(pair.at_one).is_some() {
            // A fabric may end the connection on such an access.
            return Ok(());
        }
        let mut unharmed = world.lane(&pair, 128)?;
        works(world, &mut unharmed, "over other regions, after a deregistration in flight")?;
    }
    Ok(())
}
