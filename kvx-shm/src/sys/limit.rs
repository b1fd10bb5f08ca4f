//! Copies and system calls as plain as can be, to compare with.

use std::io;
use std::ptr::NonNull;

use super::vm::MOST;

/// Most bytes of one call: the kernel moves no more than 2 GiB at once.
pub(crate) const MOST_BYTES: usize = 1 << 30;

/// One copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) from: NonNull<u8>,
    pub(crate) to: NonNull<u8>,
    pub(crate) bytes: usize,
}

// SAFETY: the addresses are used only in `copy`, for which its caller vouches.
unsafe impl Send for Run {}

/// Copies every run with `memcpy`.
///
/// # Safety
///
/// Every run's two ranges must be valid and must not overlap, and nobody else may use either during the call.
pub(crate) unsafe fn copy(runs: &[Run]) {
    for run in runs {
        // SAFETY: what the caller vouches for.
        unsafe { std::ptr::copy_nonoverlapping(run.from.as_ptr(), run.to.as_ptr(), run.bytes) };
    }
}

/// The byte `offset` bytes after `first`.
pub(crate) fn inside(first: NonNull<u8>, offset: usize) -> NonNull<u8> {
    NonNull::new(first.as_ptr().wrapping_add(offset)).unwrap_or(first)
}

/// The vectors of one system call.
#[derive(Debug, Default)]
pub(crate) struct Vectors {
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
    bytes: usize,
}

// SAFETY: the addresses are used only in `call`, for which its caller vouches.
unsafe impl Send for Vectors {}

impl Vectors {
    /// Whether there is room for a segment of so many bytes.
    pub(crate) const fn takes(&self, bytes: usize) -> bool {
        self.local.len() < MOST && self.bytes + bytes <= MOST_BYTES
    }

    pub(crate) fn push(&mut self, local: NonNull<u8>, remote: u64, bytes: usize) {
        let remote = usize::try_from(remote).unwrap_or(usize::MAX);
        let remote = std::ptr::without_provenance_mut::<libc::c_void>(remote);
        self.local.push(libc::iovec { iov_base: local.as_ptr().cast(), iov_len: bytes });
        self.remote.push(libc::iovec { iov_base: remote, iov_len: bytes });
        self.bytes += bytes;
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Moves them from process `pid`, or to it. Says how many bytes.
    ///
    /// # Safety
    ///
    /// The local ranges must be valid for reads and writes, and no reference to them may exist.
    pub(crate) unsafe fn call(&self, pid: i32, write: bool) -> io::Result<usize> {
        let call = if write { libc::process_vm_writev } else { libc::process_vm_readv };
        let count = self.local.len() as libc::c_ulong;
        // SAFETY: both lists have `count` entries; the caller vouches for the local ranges, and the kernel checks the
        // remote ones.
        let moved = unsafe { call(pid, self.local.as_ptr(), count, self.remote.as_ptr(), count, 0) };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }
}
