//! What this machine can do at most: the same segments without a backend, by copies and system calls as plain as can be, for
//! benchmarks.

use std::io;
use std::ptr::NonNull;

use kvx_core::memory::Region;
use kvx_core::transfer::{Mode, Segment};
use kvx_core::{Error, ErrorKind, Result};

use super::vm::MOST;
use crate::segment::SharedMemory;

/// Most bytes of one call: the kernel moves no more than 2 GiB at once.
const MOST_BYTES: usize = 1 << 30;

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
        unsafe { copy(&self.runs) };
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
            for at in (0..bytes).step_by(MOST_BYTES) {
                let part = (bytes - at).min(MOST_BYTES);
                if calls.last().is_none_or(|call| !call.takes(part)) {
                    calls.push(Vectors::default());
                }
                if let Some(call) = calls.last_mut() {
                    call.push(inside(here, at), there.saturating_add(at as u64), part);
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
    Ok(inside(known.address(), at))
}

fn refused(source: io::Error, pid: i32) -> Error {
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

/// One copy.
#[derive(Clone, Copy, Debug)]
struct Run {
    from: NonNull<u8>,
    to: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the addresses are used only in `copy`, for which its caller vouches.
unsafe impl Send for Run {}

/// Copies every run with `memcpy`.
///
/// # Safety
///
/// Every run's two ranges must be valid and must not overlap, and nobody else may use either during the call.
unsafe fn copy(runs: &[Run]) {
    for run in runs {
        // SAFETY: what the caller vouches for.
        unsafe { std::ptr::copy_nonoverlapping(run.from.as_ptr(), run.to.as_ptr(), run.bytes) };
    }
}

/// The byte `offset` bytes after `first`.
fn inside(first: NonNull<u8>, offset: usize) -> NonNull<u8> {
    NonNull::new(first.as_ptr().wrapping_add(offset)).unwrap_or(first)
}

/// The vectors of one system call.
#[derive(Debug, Default)]
struct Vectors {
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
    bytes: usize,
}

// SAFETY: the addresses are used only in `call`, for which its caller vouches.
unsafe impl Send for Vectors {}

impl Vectors {
    /// Whether there is room for a segment of so many bytes.
    const fn takes(&self, bytes: usize) -> bool {
        self.local.len() < MOST && self.bytes + bytes <= MOST_BYTES
    }

    fn push(&mut self, local: NonNull<u8>, remote: u64, bytes: usize) {
        let remote = usize::try_from(remote).unwrap_or(usize::MAX);
        let remote = std::ptr::without_provenance_mut::<libc::c_void>(remote);
        self.local.push(libc::iovec { iov_base: local.as_ptr().cast(), iov_len: bytes });
        self.remote.push(libc::iovec { iov_base: remote, iov_len: bytes });
        self.bytes += bytes;
    }

    const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Moves them from process `pid`, or to it. Says how many bytes.
    ///
    /// # Safety
    ///
    /// The local ranges must be valid for reads and writes, and no reference to them may exist.
    unsafe fn call(&self, pid: i32, write: bool) -> io::Result<usize> {
        let call = if write { libc::process_vm_writev } else { libc::process_vm_readv };
        let count = self.local.len() as libc::c_ulong;
        // SAFETY: both lists have `count` entries; the caller vouches for the local ranges, and the kernel checks the
        // remote ones.
        let moved = unsafe { call(pid, self.local.as_ptr(), count, self.remote.as_ptr(), count, 0) };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }
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
