//! Offsets, sizes and numbers of segments, around every limit.

use kvx_core::transfer::Mode;

use super::Group;
use super::offsets::offsets;
use super::regions::{many_regions, neighbours};
use crate::suite::clause::{
    Clause, Point, Verdict, bounded_batches, bounded_segments, ensure, huge_memory, large_segments,
    limits_differ, notes,
};
use crate::suite::lane::Lane;
use crate::suite::world::World;

const MIB: u64 = 1 << 20;

/// Bytes of the longest segment that is tried.
const LONG: u64 = 8 * MIB + 3;

pub(crate) const GROUP: Group = Group {
    title: "Shapes of transfers",
    about: "Every offset, size and number of segments that the limits allow.",
    clauses: &[
        Clause::new(
            "shape.alignment",
            Point::Visible,
            "Any offset and any size will do: one byte, odd ones, and those at the edges of pages.",
            &["offsets_aligned_down", "last_byte_missing", "page_begins_a_byte_early"],
            alignment,
        ),
        Clause::new(
            "shape.segment_limit",
            Point::Claims,
            "A segment may have as many bytes as the limit says, or one less.",
            &["limit_cut"],
            segment_limit,
        )
        .needs(&[bounded_segments]),
        Clause::new(
            "shape.batch_limit",
            Point::Claims,
            "A batch may have as many segments as the limit says, or one less.",
            &["full_batch_cut"],
            batch_limit,
        )
        .needs(&[bounded_batches]),
        Clause::new(
            "shape.scattered",
            Point::Visible,
            "Segments of a batch may lie anywhere in several regions of both sides, in any order.",
            &["second_segment_off_by_one", "segments_swapped"],
            scattered,
        ),
        Clause::new(
            "shape.many_regions",
            Point::Visible,
            "A batch may name as many different regions of both sides as it has segments, all of them for the first time.",
            &["third_region_dropped", "seventeenth_region_lost"],
            many_regions,
        ),
        Clause::new(
            "shape.neighbours",
            Point::Visible,
            "Segments that touch each other on this side only, on the peer's only, or on both, each go where they say.",
            &["merged_where_local_touches", "merged_where_remote_touches", "merged_in_threes"],
            neighbours,
        ),
        Clause::new(
            "shape.large",
            Point::Visible,
            "A transfer of megabytes brings every byte, in a region larger than what one registration of a network card may \
             hold, and across the places where such a region is split (known failure 101: Mooncake#640).",
            &["wraps_at_a_mebibyte", "cut_at_four_mebibytes"],
            large,
        )
        .needs(&[large_segments]),
        Clause::new(
            "shape.offsets",
            Point::Visible,
            "Offsets are of 64 bits: beyond 16 MiB, 2 GiB and 4 GiB a transfer reaches the bytes that it names, and none at \
             the place to which a shorter offset would wrap.",
            &["offsets_of_24_bits", "offsets_of_32_bits", "local_offsets_of_32_bits"],
            offsets,
        )
        .needs(&[huge_memory])
        .once(),
        Clause::new(
            "shape.unequal_limits",
            Point::Claims,
            "Sides whose limits differ meet, and each transfers within the smaller of both (known failure 108: nixl#1161).",
            &["unequal_limits_refused"],
            unequal_limits,
        )
        .needs(&[limits_differ, notes]),
    ],
};

/// The modes that both sides have.
pub(super) fn modes(lane: &Lane) -> Verdict<Vec<Mode>> {
    let capabilities = lane.pair.one.capabilities()?;
    Ok([Mode::Read, Mode::Write].into_iter().filter(|mode| capabilities.mode(*mode)).collect())
}

fn alignment(world: &World) -> Verdict {
    const PLACES: [u64; 8] = [0, 1, 7, 64, 4095, 4096, 4097, 8191];
    const SIZES: [u64; 10] = [1, 2, 3, 8, 63, 64, 65, 4095, 4096, 4097];
    let pair = world.pair()?;
    let mut lane = world.lane(&pair, 16 * 1024)?;
    for mode in modes(&lane)? {
        for (index, bytes) in SIZES.into_iter().enumerate() {
            let place = |first: usize| {
                let more = world.dice().below(8 - first as u64);
                PLACES[first + usize::try_from(more).unwrap_or(0)]
            };
            // Each size somewhere, and once where neither side begins at nought.
            for (local, remote) in [(place(0), PLACES[index % 8]), (place(1), place(1))] {
                match mode {
                    Mode::Read => lane.remote.refill(world.dice().next())?,
                    Mode::Write => lane.local.refill(world.dice().next())?,
                }
                let segment = lane.segment(local, remote, bytes);
                world.transfer(&mut lane, mode, &[segment], None)?;
                lane.check(&format!(
                    "{mode} of {bytes} bytes, local offset {local}, remote {remote}"
                ))?;
            }
        }
    }
    Ok(())
}

fn segment_limit(world: &World) -> Verdict {
    let pair = world.pair()?;
    let limit = pair.one.capabilities()?.limits.max_segment_bytes;
    let mut lane = world.lane(&pair, limit + 2)?;
    for mode in modes(&lane)? {
        for bytes in [limit.saturating_sub(1).max(1), limit] {
            let segments = [lane.segment(1, 2, bytes)];
            let id = world.post(&pair.one, pair.at_one, mode, &segments, None)?;
            world.done(&pair.one, &[id])?;
            lane.apply(mode, &segments);
            lane.check(&format!("{mode} of one segment of {bytes} bytes, the limit is {limit}"))?;
        }
    }
    Ok(())
}

fn batch_limit(world: &World) -> Verdict {
    let pair = world.pair()?;
    let limit = u64::from(pair.one.capabilities()?.limits.max_batch_segments);
    let mut lane = world.lane(&pair, 3 * limit)?;
    for mode in modes(&lane)? {
        for count in [limit.saturating_sub(1).max(1), limit] {
            let segments: Vec<_> = (0..count).map(|i| lane.segment(3 * i, 3 * i, 2)).collect();
            let id = world.post(&pair.one, pair.at_one, mode, &segments, None)?;
            world.done(&pair.one, &[id])?;
            lane.apply(mode, &segments);
            lane.check(&format!("{mode} of {count} segments in one batch, the limit is {limit}"))?;
        }
    }
    Ok(())
}

fn scattered(world: &World) -> Verdict {
    const STEP: u64 = 64;
    let pair = world.pair()?;
    let mut lanes = [world.lane(&pair, 32 * STEP)?, world.lane(&pair, 32 * STEP)?];
    for mode in modes(&lanes[0])? {
        // Every slot of both regions once, in a random order, each to another random slot.
        let mut slots: [Vec<u64>; 2] = [(0..64).collect(), (0..64).collect()];
        for list in &mut slots {
            for index in (1..list.len()).rev() {
                list.swap(
                    index,
                    usize::try_from(world.dice().below(index as u64 + 1)).unwrap_or(0),
                );
            }
        }
        let mut segments = Vec::new();
        for (local, remote) in slots[0].iter().zip(&slots[1]) {
            let bytes = world.dice().between(1, 40);
            let (at, from) = (usize::from(*local >= 32), usize::from(*remote >= 32));
            let mut segment =
                lanes[at].segment(local % 32 * STEP + 5, remote % 32 * STEP + 9, bytes);
            segment.remote = lanes[from].key;
            segments.push((at, from, segment));
        }
        let all: Vec<_> = segments.iter().map(|(_, _, segment)| *segment).collect();
        let mut ids = Vec::new();
        for batch in world.batches(&pair.one, &all)? {
            ids.push(world.post(&pair.one, pair.at_one, mode, &batch, None)?);
        }
        world.done(&pair.one, &ids)?;
        for (at, from, segment) in segments {
            let (to, out) = (segment.local_offset, segment.remote_offset);
            if mode == Mode::Read {
                let bytes = lanes[from].remote.expected(out, segment.bytes).to_vec();
                lanes[at].local.expect(to, &bytes);
            } else {
                let bytes = lanes[at].local.expected(to, segment.bytes).to_vec();
                lanes[from].remote.expect(out, &bytes);
            }
        }
        for lane in &lanes {
            lane.check(&format!("{mode} of 64 scattered segments in two regions"))?;
        }
    }
    Ok(())
}

fn large(world: &World) -> Verdict {
    let pair = world.pair()?;
    let bytes = 3 * MIB + MIB / 2 + 13;
    let mut lane = world.lane(&pair, bytes)?;
    for mode in modes(&lane)? {
        let whole = lane.segment(0, 0, bytes);
        world.transfer(&mut lane, mode, &[whole], None)?;
        lane.check(&format!("{mode} of {bytes} bytes"))?;
        match mode {
            Mode::Read => lane.remote.refill(world.dice().next())?,
            Mode::Write => lane.local.refill(world.dice().next())?,
        }
        let edges: Vec<_> =
            (1..=3).map(|at| lane.segment(at * MIB - 700, at * MIB - 33, 1400)).collect();
        world.transfer(&mut lane, mode, &edges, None)?;
        lane.check(&format!("{mode} across the boundaries of megabytes"))?;
    }
    // Once more with one segment of so many bytes, where the limits allow it.
    let most = pair.one.capabilities()?.limits.max_segment_bytes;
    if most < LONG {
        return Ok(());
    }
    let mut lane = world.lane(&pair, LONG)?;
    for mode in modes(&lane)? {
        let whole = lane.segment(0, 0, LONG);
        world.transfer(&mut lane, mode, &[whole], None)?;
        lane.check(&format!("{mode} of one segment of {LONG} bytes"))?;
        lane.local.refill(world.dice().next())?;
    }
    Ok(())
}

fn unequal_limits(world: &World) -> Verdict {
    let pair = world.pair()?;
    let (one, other) = (pair.one.capabilities()?.limits, pair.other.capabilities()?.limits);
    let bytes = one.max_segment_bytes.min(other.max_segment_bytes).min(MIB);
    let count = u64::from(one.max_batch_segments.min(other.max_batch_segments)).min(256);
    let note = one.max_notification_bytes.min(other.max_notification_bytes).min(4096);
    let payload = world.dice().bytes(note as usize);
    for pair in [pair.clone(), pair.flipped()] {
        let mut lane = world.lane(&pair, bytes + count)?;
        for mode in modes(&lane)? {
            let mut segments = vec![lane.segment(0, 0, bytes)];
            segments.extend((1..count).map(|i| lane.segment(bytes + i, bytes + i, 1)));
            let heard = pair.other.notes().len();
            let id = world.post(&pair.one, pair.at_one, mode, &segments, Some(&payload))?;
            world.done(&pair.one, &[id])?;
            lane.apply(mode, &segments);
            lane.check(&format!("{mode} by {} at the smaller limits", pair.one.name()))?;
            let both = [&pair.one, &pair.other];
            world.wait(&both, "the notification", || Ok(pair.other.notes().len() > heard))?;
            let last = pair.other.notes().pop();
            ensure!(
                last.is_some_and(|(_, bytes)| bytes == payload),
                "a notification of {note} bytes, the smaller limit, did not arrive whole"
            );
        }
    }
    Ok(())
}
