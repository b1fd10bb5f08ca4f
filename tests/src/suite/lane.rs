//! Memory with a model of what must be in it, and lanes between two memories.

use kvx_core::id::{RegionId, RemoteRegionId};
use kvx_core::transfer::{Mode, PostedSegment};

use super::clause::{Breach, Verdict};
use super::dice::pattern;
use super::side::Side;
use super::world::{Pair, World};

/// Bytes on each side of a region that nobody may touch.
pub(crate) const GUARD: u64 = 4096;

/// A registered region between two guards, and what must be in all three.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) side: Side,
    pub(crate) arena: u64,
    pub(crate) region: RegionId,
    pub(crate) bytes: u64,
    expected: Vec<u8>,
}

impl Memory {
    pub(crate) fn new(side: &Side, bytes: u64, seed: u64) -> Verdict<Self> {
        let all = bytes + 2 * GUARD;
        let arena = side.arena(all, seed)?;
        let region = side.register(arena, GUARD, bytes)?;
        let expected = pattern(seed, all);
        Ok(Self { side: side.clone(), arena, region, bytes, expected })
    }

    /// A region of memory that the backend allocates, which must be zeroed, and as large as was asked.
    pub(crate) fn allocated(side: &Side, bytes: u64, seed: u64) -> Verdict<Self> {
        let all = bytes + 2 * GUARD;
        let arena = side.allocate(all)?;
        let found = side.read(arena, 0, all)?;
        if let Some(at) = found.iter().position(|byte| *byte != 0) {
            return Err(Breach::new(format!("byte {at} of memory just allocated is not 0")));
        }
        let expected = pattern(seed, all);
        side.write(arena, 0, &expected)?;
        let region = side.register(arena, GUARD, bytes)?;
        Ok(Self { side: side.clone(), arena, region, bytes, expected })
    }

    fn range(&self, offset: u64, bytes: u64) -> std::ops::Range<usize> {
        let at = |position: u64| usize::try_from(GUARD + position).unwrap_or(usize::MAX);
        at(offset)..at(offset + bytes)
    }

    /// What must be in a range of the region.
    pub(crate) fn expected(&self, offset: u64, bytes: u64) -> &[u8] {
        &self.expected[self.range(offset, bytes)]
    }

    /// From now on this must be at an offset of the region.
    pub(crate) fn expect(&mut self, offset: u64, bytes: &[u8]) {
        let range = self.range(offset, bytes.len() as u64);
        self.expected[range].copy_from_slice(bytes);
    }

    /// The application writes into the region.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> Verdict {
        self.side.write(self.arena, GUARD + offset, bytes)?;
        self.expect(offset, bytes);
        Ok(())
    }

    /// The application fills the region anew.
    pub(crate) fn refill(&mut self, seed: u64) -> Verdict {
        self.write(0, &pattern(seed, self.bytes))
    }

    /// What is in a range of the region.
    pub(crate) fn read(&self, offset: u64, bytes: u64) -> Verdict<Vec<u8>> {
        self.side.read(self.arena, GUARD + offset, bytes)
    }

    /// Whether a range of the region holds what it must.
    pub(crate) fn holds(&self, offset: u64, bytes: u64) -> Verdict<bool> {
        Ok(self.read(offset, bytes)? == self.expected(offset, bytes))
    }

    /// Everything, guards too, holds what it must.
    pub(crate) fn check(&self, when: &str) -> Verdict {
        let found = self.side.read(self.arena, 0, self.expected.len() as u64)?;
        if found == self.expected {
            return Ok(());
        }
        let Some(at) = found.iter().zip(&self.expected).position(|(found, must)| found != must)
        else {
            return Ok(());
        };
        let wrong = found.iter().zip(&self.expected).filter(|(found, must)| found != must).count();
        let (found, must) = (found[at], self.expected[at]);
        let position = at as u64;
        let place = if position < GUARD {
            format!("{} bytes before its region", GUARD - position)
        } else if position < GUARD + self.bytes {
            format!("at byte {} of its region of {}", position - GUARD, self.bytes)
        } else {
            format!("{} bytes past the end of its region", position - GUARD - self.bytes)
        };
        Err(Breach::new(format!(
            "{when}: memory of {} is wrong in {wrong} bytes, first {place}: {found:#04x}, must be {must:#04x}",
            self.side.name()
        )))
    }
}

/// Memory at both ends of a pair: `local` at the one, who posts, `remote` at the other, with its key.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) pair: Pair,
    pub(crate) local: Memory,
    pub(crate) remote: Memory,
    pub(crate) key: RemoteRegionId,
}

impl Lane {
    pub(crate) const fn segment(
        &self,
        local_offset: u64,
        remote_offset: u64,
        bytes: u64,
    ) -> PostedSegment {
        let (local, remote) = (self.local.region, self.key);
        PostedSegment { local, remote, local_offset, remote_offset, bytes }
    }

    /// What must be in both memories once these segments were moved.
    pub(crate) fn apply(&mut self, mode: Mode, segments: &[PostedSegment]) {
        for segment in segments {
            let (from, to) = (segment.local_offset, segment.remote_offset);
            match mode {
                Mode::Write => {
                    let bytes = self.local.expected(from, segment.bytes).to_vec();
                    self.remote.expect(to, &bytes);
                }
                Mode::Read => {
                    let bytes = self.remote.expected(to, segment.bytes).to_vec();
                    self.local.expect(from, &bytes);
                }
            }
        }
    }

    /// Both memories hold what they must.
    pub(crate) fn check(&self, when: &str) -> Verdict {
        self.local.check(when)?;
        self.remote.check(when)
    }
}

impl World {
    /// Posts segments in batches within the limits; the notification goes with the last, after the others settled. Returns
    /// once all have settled as done; the lane then expects what was moved.
    pub(crate) fn transfer(
        &self,
        lane: &mut Lane,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Verdict {
        let side = lane.pair.one.clone();
        let batches = self.batches(&side, segments)?;
        let peer = lane.pair.at_one;
        let mut ids = Vec::new();
        for (index, batch) in batches.iter().enumerate() {
            let last = index + 1 == batches.len();
            if last && notify.is_some() {
                self.done(&side, &ids)?;
            }
            ids.push(self.post(&side, peer, mode, batch, notify.filter(|_| last))?);
        }
        self.done(&side, &ids)?;
        lane.apply(mode, segments);
        Ok(())
    }

    /// Segments cut to the limits of a side, in batches.
    pub(crate) fn batches(
        &self,
        side: &Side,
        segments: &[PostedSegment],
    ) -> Verdict<Vec<Vec<PostedSegment>>> {
        let limits = side.capabilities()?.limits;
        let mut cut = Vec::new();
        for segment in segments {
            let mut done = 0;
            while done < segment.bytes {
                let bytes = limits.max_segment_bytes.min(segment.bytes - done);
                let (local_offset, remote_offset) =
                    (segment.local_offset + done, segment.remote_offset + done);
                cut.push(PostedSegment { local_offset, remote_offset, bytes, ..*segment });
                done += bytes;
            }
        }
        Ok(cut.chunks(limits.max_batch_segments as usize).map(<[_]>::to_vec).collect())
    }
}
