//! Offsets that need many bits, in memory that is hardly touched.

use kvx_core::ErrorKind;
use kvx_core::id::RegionId;
use kvx_core::transfer::{Mode, PostedSegment};

use super::shapes::modes;
use crate::suite::clause::{Breach, HUGE, Verdict, ensure, refused};
use crate::suite::side::Side;
use crate::suite::world::{Pair, World};

/// Places to which offsets of fewer bits would wrap.
const WRAPS: [u64; 3] = [1 << 24, 1 << 31, 1 << 32];

/// Bytes of one transfer.
const BYTES: u64 = 200;

/// A large region of zeros, of which only what was written is not zero.
struct Sparse {
    side: Side,
    arena: u64,
    region: RegionId,
    bytes: u64,
    written: Vec<(u64, Vec<u8>)>,
}

impl Sparse {
    /// As large as the side may have it: one that must pin its memory may have too little of that.
    fn new(side: &Side) -> Verdict<Self> {
        let smaller = [HUGE, (1 << 31) + (1 << 16), (1 << 24) + (1 << 16)];
        let mut last = Breach::new("no size was tried");
        for bytes in smaller {
            let arena = side.untouched(bytes);
            match arena.and_then(|arena| Ok((arena, side.register(arena, 0, bytes)?))) {
                Ok((arena, region)) => {
                    let side = side.clone();
                    return Ok(Self { side, arena, region, bytes, written: Vec::new() });
                }
                Err(breach) => {
                    let what = format!("a region of {bytes} bytes");
                    refused::<()>(&what, Err(breach.clone()), &[ErrorKind::Resources])?;
                    last = breach;
                }
            }
        }
        Err(last)
    }

    fn expected(&self, offset: u64, bytes: u64) -> Vec<u8> {
        let mut all = vec![0; usize::try_from(bytes).unwrap_or(0)];
        for (at, written) in &self.written {
            for (position, byte) in (*at..).zip(written) {
                if (offset..offset + bytes).contains(&position) {
                    all[usize::try_from(position - offset).unwrap_or(0)] = *byte;
                }
            }
        }
        all
    }

    fn expect(&mut self, offset: u64, bytes: Vec<u8>) {
        self.written.push((offset, bytes));
    }

    /// What lies around each place to which an offset may have wrapped, and around where it belongs.
    fn check(&self, offset: u64, when: &str) -> Verdict {
        const AROUND: u64 = 1000;
        let wrapped = WRAPS.into_iter().map(|wrap| offset % wrap);
        for place in wrapped.chain([offset]).filter(|place| *place < self.bytes) {
            let begin = place.saturating_sub(AROUND);
            let bytes = (2 * AROUND + BYTES).min(self.bytes - begin);
            let found = self.side.read(self.arena, begin, bytes)?;
            let must = self.expected(begin, bytes);
            if let Some(at) = found.iter().zip(&must).position(|(found, must)| found != must) {
                return Err(Breach::new(format!(
                    "{when}: byte {} of a region of {} at {} is {:#04x}, must be {:#04x}",
                    begin + at as u64,
                    self.bytes,
                    self.side.name(),
                    found[at],
                    must[at]
                )));
            }
        }
        Ok(())
    }
}

/// Transfers around every place at which an offset needs one bit more, first in large memory of the peer's, then in large
/// memory of this side's.
pub(super) fn offsets(world: &World) -> Verdict {
    let pair = world.pair()?;
    let mut small = world.lane(&pair, 1024)?;
    for mode in modes(&small)? {
        for far in [true, false] {
            let mut large = Sparse::new(if far { &pair.other } else { &pair.one })?;
            let key = if far {
                let blob = pair.other.key_blob(large.region)?;
                pair.one.import_key(pair.at_one, &blob)?
            } else {
                small.key
            };
            let inside: Vec<_> =
                WRAPS.into_iter().filter(|wrap| wrap + (1 << 15) < large.bytes).collect();
            ensure!(!inside.is_empty(), "the kit's own region is too small");
            // Across the place, and past it.
            for offset in inside.into_iter().flat_map(|wrap| [wrap - 77, wrap + 500]) {
                let when = format!("{mode}, offset {offset}, of {BYTES} bytes");
                let out = matches!(mode, Mode::Write) != far;
                if out {
                    // The large memory is where the bytes come from.
                    let bytes = world.dice().bytes(usize::try_from(BYTES).unwrap_or(0));
                    large.side.write(large.arena, offset, &bytes)?;
                    large.expect(offset, bytes);
                } else if far {
                    small.local.refill(world.dice().next())?;
                } else {
                    small.remote.refill(world.dice().next())?;
                }
                let segment = if far {
                    let (local, remote) = (small.local.region, key);
                    let (local_offset, remote_offset) = (11, offset);
                    PostedSegment { local, remote, local_offset, remote_offset, bytes: BYTES }
                } else {
                    let (local, remote) = (large.region, key);
                    let (local_offset, remote_offset) = (offset, 11);
                    PostedSegment { local, remote, local_offset, remote_offset, bytes: BYTES }
                };
                move_all(world, &pair, mode, segment)?;
                let memory = if far { &mut small.local } else { &mut small.remote };
                if out {
                    let bytes = large.expected(offset, BYTES);
                    memory.expect(11, &bytes);
                } else {
                    let bytes = memory.expected(11, BYTES).to_vec();
                    large.expect(offset, bytes);
                }
                small.check(&when)?;
                large.check(offset, &when)?;
            }
            large.side.deregister(large.region)?;
        }
    }
    Ok(())
}

fn move_all(world: &World, pair: &Pair, mode: Mode, segment: PostedSegment) -> Verdict {
    let mut ids = Vec::new();
    for batch in world.batches(&pair.one, &[segment])? {
        ids.push(world.post(&pair.one, pair.at_one, mode, &batch, None)?);
    }
    world.done(&pair.one, &ids)
}
