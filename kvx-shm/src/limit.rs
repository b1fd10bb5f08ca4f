//! What this machine can do at most: the same segments without a backend, for benchmarks.

use std::ptr::NonNull;

use kvx_core::memory::Region;
use kvx_core::transfer::{Mode, Segment};
use kvx_core::{Error, ErrorKind, Result};

use crate::segment::SharedMemory;
use crate::sys::limit::{self, Run, Vectors};

/// Plain copies between two shared mappings, on the calling thread.
#[derive(Debug)]
pub struct Memcpy {
    /// Kept for as long as runs point into them.
    _regions: Vec<Region>,
    runs: Vec<Run>,
}

impl Memcpy {
    /// Makes two sides of shared memory with regions of these sizes, and prepares to move `segments` between them.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`] for a segment outside its regions, [`ErrorKind::Resources`] when the memory cannot be had.
    pub fn new(local: &[u64], remote: &[u64], mode: Mode, segments: &[Segment]) -> Result<Self> {
        let make = |sizes: &[u64]| -> Result<Vec<Region>> {
            let regions = sizes.iter().map(|bytes| SharedMemory::region(*bytes));
            regions.collect()
        };
        let (local, remote) = (make(local)?, make(remote)?);
        let runs = segments.iter().map(|segment| {
            let here = place(&local, segment.local_region, segment.local_offset, segment.bytes)?;
            let there = place(&remote, segment.remote_region, segment.remote_offset, segment.bytes)?;
            let bytes = usize::try_from(segment.bytes).unwrap_or(usize::MAX);
            Ok(match mode {
                Mode::Read => Run { from: there, to: here, bytes },
                Mode::Write => Run { from: here, to: there, bytes },
            })
        });
        let runs = runs.collect::<Result<Vec<_>>>()?;
        // Every page is there before anything is timed.
        for region in local.iter().chain(&remote) {
            touch(region)?;
        }
        let regions = local.into_iter().chain(remote).collect();
        Ok(Self { _regions: regions, runs })
    }

    /// Moves all segments once.
    pub fn run(&mut self) {
        // SAFETY: every run was checked to lie inside a region that is kept; the two sides are different memory, which
        // nobody else knows; and `&mut self` keeps two calls apart.
        unsafe { limit::copy(&self.runs) };
    }
}

/// `process_vm_readv` or `process_vm_writev` with vectors of as many segments as a call takes, on the calling thread.
#[derive(Debug)]
pub struct ProcessVm {
    _regions: Vec<Region>,
    pid: i32,
    mode: Mode,
    calls: Vec<Vectors>,
}

impl ProcessVm {
    /// Prepares to move `segments` between these regions and memory of process `pid`, whose regions begin at `remote`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`] for a segment outside its local region, or of a remote one that has no address.
    pub fn new(
        pid: u32,
        local: &[Region],
        remote: &[u64],
        mode: Mode,
        segments: &[Segment],
    ) -> Result<Self> {
        let mut calls = vec![Vectors::default()];
        for segment in segments {
            let here = place(local, segment.local_region, segment.local_offset, segment.bytes)?;
            let there = remote.get(segment.remote_region as usize);
            let there = there.and_then(|first| first.checked_add(segment.remote_offset));
            let there = there.ok_or_else(|| outside(segment.remote_region))?;
            let bytes = usize::try_from(segment.bytes).unwrap_or(usize::MAX);
            // The kernel moves no more at once than one call takes.
            for at in (0..bytes).step_by(limit::MOST_BYTES) {
                let part = (bytes - at).min(limit::MOST_BYTES);
                if calls.last().is_none_or(|call| !call.takes(part)) {
                    calls.push(Vectors::default());
                }
                if let Some(call) = calls.last_mut() {
                    call.push(limit::inside(here, at), there.saturating_add(at as u64), part);
                }
            }
        }
        let pid = i32::try_from(pid).map_err(|_| Error::misuse("limit", "no such process"))?;
        Ok(Self { _regions: local.to_vec(), pid, mode, calls })
    }

    /// Moves all segments once.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Fabric`] when the kernel refuses, or moves less.
    pub fn run(&mut self) -> Result<()> {
        for call in &self.calls {
            // SAFETY: every local range was checked to lie inside a region that is kept, and regions are never referred to.
            // Remote ranges are the kernel's to check.
            let moved = unsafe { call.call(self.pid, self.mode == Mode::Write) }
                .map_err(|source| refused(source, self.pid))?;
            if moved != call.bytes() {
                return Err(Error::new(ErrorKind::Fabric, "limit", "the kernel moved less")
                    .with_context("bytes", call.bytes())
                    .with_context("moved", moved));
            }
        }
        Ok(())
    }
}

/// The first byte of a range that lies in a region.
fn place(regions: &[Region], region: u32, offset: u64, bytes: u64) -> Result<NonNull<u8>> {
    let known = regions.get(region as usize).ok_or_else(|| outside(region))?;
    let fits = offset.checked_add(bytes).is_some_and(|end| end <= known.bytes());
    let at = usize::try_from(offset).ok().filter(|_| fits).ok_or_else(|| outside(region))?;
    Ok(limit::inside(known.address(), at))
}

fn refused(source: std::io::Error, pid: i32) -> Error {
    Error::new(ErrorKind::Fabric, "limit", "the kernel refuses to move the segments")
        .with_context("process", pid)
        .with_native(source.raw_os_error().unwrap_or(0).into())
        .with_source(source)
}

fn outside(region: u32) -> Error {
    Error::misuse("limit", "a segment is outside its region").with_context("region", region)
}

fn touch(region: &Region) -> Result<()> {
    const PAGE: usize = 4096;
    (0..region.bytes()).step_by(PAGE).try_for_each(|at| region.write_at(at, &[1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(local_offset: u64, remote_offset: u64, bytes: u64) -> Segment {
        Segment { local_region: 0, remote_region: 0, local_offset, remote_offset, bytes }
    }

    #[test]
    fn the_kernel_moves_between_a_process_and_itself_in_both_modes() {
        let (local, remote) = (Region::host(4096).unwrap(), Region::host(4096).unwrap());
        let address = remote.address().as_ptr().addr() as u64;
        // More than fit into one call.
        let segments: Vec<Segment> = (0..1500).map(|at| segment(2 * at, 2 * (1499 - at), 2)).collect();
        let pid = std::process::id();
        let mut seen = [0; 4];
        remote.write_at(2996, &[1, 2, 3, 4]).unwrap();
        let locals = [local.clone()];
        ProcessVm::new(pid, &locals, &[address], Mode::Read, &segments).unwrap().run().unwrap();
        local.read_at(0, &mut seen).unwrap();
        assert_eq!(seen, [3, 4, 1, 2]);
        local.write_at(0, &[9, 8, 7, 6]).unwrap();
        ProcessVm::new(pid, &locals, &[address], Mode::Write, &segments).unwrap().run().unwrap();
        remote.read_at(2996, &mut seen).unwrap();
        assert_eq!(seen, [7, 6, 9, 8]);
        let mut gone = ProcessVm::new(pid, &locals, &[8], Mode::Read, &segments).unwrap();
        assert_eq!(gone.run().unwrap_err().kind(), ErrorKind::Fabric);
    }

    #[test]
    fn copies_are_made_and_what_is_outside_is_refused() {
        let segments = [segment(0, 100, 50), segment(60, 200, 10)];
        let mut copies = Memcpy::new(&[100], &[300], Mode::Read, &segments).unwrap();
        let Run { from, to, .. } = copies.runs[0];
        copies._regions[1].write_at(100, &[5; 50]).unwrap();
        copies.run();
        let mut seen = [0; 50];
        copies._regions[0].read_at(0, &mut seen).unwrap();
        assert_eq!(seen, [5; 50]);
        assert_ne!(from, to);
        for wrong in [segment(51, 0, 50), segment(0, 251, 50), segment(u64::MAX, 0, 2)] {
            let refused = Memcpy::new(&[100], &[300], Mode::Write, &[wrong]).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Misuse);
        }
    }
}
