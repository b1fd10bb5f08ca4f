//! What is copied into this side's registered memory: from where, and into which regions.
//!
//! A list holds the regions into which it goes, and a run is in a list only if it lies inside one of them. So whoever has the list
//! may have its runs filled, from memory of a peer's or by the kernel, without saying anything about addresses.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use kvx_core::memory::Region;

use super::copy::copy;
use super::memfd::Foreign;
use super::vm::Vectors;

/// Part of a job: from a place of the peer's to this side's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// Index of the place.
    place: u32,
    /// First byte there.
    offset: u64,
    /// First byte here: with `bytes` bytes inside a region that the run's list holds.
    to: Target,
    bytes: usize,
}

/// An address of this side's registered memory.
#[derive(Clone, Copy, Debug)]
struct Target(NonNull<u8>);

// SAFETY: an address, which is used only by `Runs`: into memory that it holds, and that any thread may write (`Backing`'s
// contract).
unsafe impl Send for Target {}
// SAFETY: as for Send.
unsafe impl Sync for Target {}

impl Run {
    pub(crate) const fn place(&self) -> u32 {
        self.place
    }

    pub(crate) const fn offset(&self) -> u64 {
        self.offset
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it goes, to compare with others.
    pub(crate) fn address(&self) -> u64 {
        self.to.0.addr().get() as u64
    }

    /// One that is in no list, and so is never filled.
    #[cfg(test)]
    pub(crate) fn alone(place: u32, offset: u64, address: usize, bytes: usize) -> Self {
        let to = Target(NonNull::without_provenance(address.try_into().unwrap()));
        Self { place, offset, to, bytes }
    }
}

/// Runs, and the regions into which they go.
#[derive(Debug)]
pub(crate) struct Runs {
    /// Kept as long as there are runs into them.
    _hold: Vec<Region>,
    /// Of the regions: first byte and size.
    bases: Vec<(Target, u64)>,
    runs: Vec<Run>,
    /// Of all runs.
    bytes: u64,
}

impl Runs {
    /// None yet, of so many, into these regions.
    pub(crate) fn new(hold: Vec<Region>, count: usize) -> Self {
        let bases = hold.iter().map(|region| (Target(region.address()), region.bytes())).collect();
        Self { _hold: hold, bases, runs: Vec::with_capacity(count), bytes: 0 }
    }

    /// Adds a run into a region, from its byte `at` on. `None`: it is not inside the region.
    pub(crate) fn push(
        &mut self,
        (place, offset): (u32, u64),
        (region, at): (usize, u64),
        bytes: u64,
    ) -> Option<()> {
        let (base, size) = self.bases.get(region)?;
        let end = at.checked_add(bytes)?;
        let (at, bytes) = (usize::try_from(at).ok()?, usize::try_from(bytes).ok()?);
        if end > *size {
            return None;
        }
        // SAFETY: `at` is at most the region's size.
        let to = Target(unsafe { base.0.add(at) });
        self.runs.push(Run { place, offset, to, bytes });
        self.bytes = self.bytes.saturating_add(bytes as u64);
        Some(())
    }

    pub(crate) fn list(&self) -> &[Run] {
        &self.runs
    }

    /// All of them, whole: their indices and bytes.
    pub(crate) fn whole(&self) -> impl Iterator<Item = (usize, Range<usize>)> + Clone {
        self.runs.iter().enumerate().map(|(index, run)| (index, 0..run.bytes))
    }

    /// Bytes of all.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Fills part of a run from mapped memory, from its byte `from` on.
    ///
    /// # Panics
    ///
    /// Where the part is not in the run, or the mapping has not as many bytes.
    pub(crate) fn fill(&self, index: usize, part: Range<usize>, memory: &Foreign, from: usize) {
        let run = &self.runs[index];
        assert!(part.start <= part.end && part.end <= run.bytes);
        assert!(from.checked_add(part.len()).is_some_and(|end| end <= memory.bytes()));
        // SAFETY: inside the mapping, as was just checked.
        let from = unsafe { memory.address().add(from) };
        // SAFETY: inside the run, as was checked before.
        let to = unsafe { run.to.0.add(part.start) };
        // SAFETY: the source is inside a mapping that `memory` keeps; the target is inside a region that this list holds, to whose
        // bytes nobody refers (`Backing`'s contract). They are different mappings, so they do not overlap.
        unsafe { copy(from, to, part.len()) };
    }

    /// Overwrites part of a run with zeros.
    ///
    /// # Panics
    ///
    /// Where the part is not in the run.
    pub(crate) fn wipe(&self, index: usize, part: Range<usize>) {
        let run = &self.runs[index];
        assert!(part.start <= part.end && part.end <= run.bytes);
        // SAFETY: inside the run, as was just checked.
        let to = unsafe { run.to.0.add(part.start) };
        // SAFETY: inside a region that this list holds, to whose bytes nobody refers (`Backing`'s contract).
        unsafe { to.write_bytes(0, part.len()) };
    }

    /// Fills runs through the kernel, many at once. The room is used again, as it has been used before.
    pub(crate) fn through_kernel<'a>(&'a self, room: &'a mut Vectors) -> ThroughKernel<'a> {
        room.clear();
        ThroughKernel { runs: self, vectors: room }
    }
}

/// Parts of a list's runs that one call to the kernel is to fill.
#[derive(Debug)]
pub(crate) struct ThroughKernel<'a> {
    runs: &'a Runs,
    /// Their local ranges lie in regions that `runs` holds.
    vectors: &'a mut Vectors,
}

impl ThroughKernel<'_> {
    /// Adds part of a run, from this address of the other process.
    ///
    /// # Panics
    ///
    /// Where the part is not in the run.
    pub(crate) fn push(&mut self, index: usize, part: Range<usize>, from: u64) {
        let run = &self.runs.runs[index];
        assert!(part.start <= part.end && part.end <= run.bytes);
        // SAFETY: inside the run, as was just checked.
        let to = unsafe { run.to.0.add(part.start) };
        self.vectors.push(from, to, part.len());
    }

    pub(crate) fn is_full(&self) -> bool {
        self.vectors.is_full()
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.vectors.bytes()
    }

    /// Fills what was added, out of process `pid`, and begins anew. Says how many bytes.
    pub(crate) fn read(&mut self, pid: i32) -> io::Result<usize> {
        // SAFETY: the local ranges lie in regions that the list holds, and nobody refers to their bytes (`Backing`'s contract).
        let read = unsafe { self.vectors.read(pid) };
        self.vectors.clear();
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memfd::{Own, Pages};

    #[test]
    fn only_what_lies_in_a_region_becomes_a_run() {
        let mut runs = Runs::new(vec![Region::host(100).unwrap(), Region::host(10).unwrap()], 4);
        for (region, at, bytes) in [(0, 0, 100), (0, 100, 0), (0, 40, 60), (1, 9, 1)] {
            assert!(runs.push((0, 0), (region, at), bytes).is_some(), "{region} {at} {bytes}");
        }
        for (region, at, bytes) in
            [(0, 0, 101), (0, 101, 0), (1, 9, 2), (0, u64::MAX, 2), (1, 1, u64::MAX), (2, 0, 1)]
        {
            assert!(runs.push((0, 0), (region, at), bytes).is_none(), "{region} {at} {bytes}");
        }
        assert_eq!((runs.list().len(), runs.bytes()), (4, 161));
    }

    #[test]
    fn parts_are_filled_from_mapped_memory_and_by_the_kernel() {
        let region = Region::host(64).unwrap();
        let mut runs = Runs::new(vec![region.clone()], 2);
        runs.push((0, 0), (0, 8), 16).unwrap();
        runs.push((0, 0), (0, 40), 8).unwrap();
        let own = Own::new("kvx-shm-test", 4096, Pages::Normal, |_, _| Ok(())).unwrap();
        // SAFETY: inside the mapping, which nobody else knows.
        unsafe { own.address().write_bytes(7, 4) };
        let memory = Foreign::map(&own.fd().try_clone_to_owned().unwrap()).unwrap();
        runs.fill(0, 2..6, &memory, 0);
        let from = [9_u8; 8];
        let mut room = Vectors::default();
        let mut kernel = runs.through_kernel(&mut room);
        kernel.push(1, 0..8, from.as_ptr().addr() as u64);
        assert_eq!(kernel.bytes(), 8);
        assert_eq!(kernel.read(std::process::id().cast_signed()).unwrap(), 8);
        assert_eq!(kernel.bytes(), 0);
        let mut seen = [0; 64];
        region.read_at(0, &mut seen).unwrap();
        let mut expected = [0; 64];
        expected[10..14].fill(7);
        expected[40..48].fill(9);
        assert_eq!(seen, expected);
    }

    #[test]
    #[should_panic(expected = "part.end <= run.bytes")]
    fn what_is_past_the_end_of_a_run_is_not_filled() {
        let mut runs = Runs::new(vec![Region::host(64).unwrap()], 1);
        runs.push((0, 0), (0, 0), 8).unwrap();
        runs.through_kernel(&mut Vectors::default()).push(0, 4..9, 0);
    }
}
