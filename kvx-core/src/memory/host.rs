//! Host memory: allocated here, or borrowed from somebody else.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use super::{Backing, MemoryKind};
use crate::{Error, ErrorKind, Result, limits};

const PAGE: usize = 4096;
const WORD: usize = size_of::<u64>();

/// Zeroed host memory, aligned to a page, freed when dropped.
#[derive(Debug)]
pub struct HostMemory {
    /// What the allocator gave.
    allocated: NonNull<u8>,
    layout: Layout,
    /// The first page in it.
    address: NonNull<u8>,
    bytes: usize,
}

impl HostMemory {
    /// `bytes` bytes of zeroed memory. The operating system gives the pages when they are first touched.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`] for zero bytes, [`ErrorKind::Resources`] when the memory cannot be had.
    pub fn zeroed(bytes: u64) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::misuse("host_memory", "zero bytes asked for"));
        }
        let too_much = || {
            Error::new(ErrorKind::Resources, "host_memory", "not enough memory")
                .with_context("bytes", bytes)
        };
        let bytes = usize::try_from(bytes).map_err(|_| too_much())?;
        // Not by asking the allocator for a page's alignment: it would then write the zeros itself, and so touch every
        // page.
        let size = bytes.checked_add(PAGE).ok_or_else(too_much)?;
        let layout = Layout::from_size_align(size, WORD).map_err(|_| too_much())?;
        // SAFETY: the size is not zero.
        let allocated = NonNull::new(unsafe { alloc_zeroed(layout) })
            .ok_or_else(|| limits::explain_memory(too_much(), size as u64))?;
        let before = allocated.as_ptr().addr().wrapping_neg() % PAGE;
        // SAFETY: less than a page, and there is a page more than `bytes`.
        let address = unsafe { allocated.add(before) };
        Ok(Self { allocated, layout, address, bytes })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout, and dropped once.
        unsafe { dealloc(self.allocated.as_ptr(), self.layout) };
    }
}

// SAFETY: the value owns its memory and hands out no references; all access is through raw pointers or atomics.
unsafe impl Send for HostMemory {}
// SAFETY: as for Send: `&HostMemory` gives nothing but the address.
unsafe impl Sync for HostMemory {}

// SAFETY: the allocation lives, in place, as long as the value; it is host memory; no reference to it is ever made.
unsafe impl Backing for HostMemory {
    fn address(&self) -> NonNull<u8> {
        self.address
    }

    fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

/// Memory that somebody else owns: see [`Region::borrowed`](super::Region::borrowed).
#[derive(Debug)]
pub(super) struct Borrowed {
    address: NonNull<u8>,
    bytes: u64,
    kind: MemoryKind,
}

impl Borrowed {
    /// The caller vouches for the memory, by calling the unsafe `Region::borrowed`.
    pub(super) const fn new(address: NonNull<u8>, bytes: u64, kind: MemoryKind) -> Self {
        Self { address, bytes, kind }
    }
}

// SAFETY: it is an address and a size; whoever made it vouched for use by any thread.
unsafe impl Send for Borrowed {}
// SAFETY: as for Send.
unsafe impl Sync for Borrowed {}

// SAFETY: `Region::borrowed` is the only maker, and its caller promised exactly this.
unsafe impl Backing for Borrowed {
    fn address(&self) -> NonNull<u8> {
        self.address
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of memory that this process has in use.
    #[cfg(target_os = "linux")]
    fn resident() -> usize {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * PAGE
    }

    #[test]
    fn it_begins_with_a_page() {
        for bytes in [1, 100, 4096, 4097, 1 << 20] {
            let memory = HostMemory::zeroed(bytes).unwrap();
            assert!(memory.address.as_ptr().addr().is_multiple_of(PAGE));
            assert_eq!(memory.bytes(), bytes);
        }
        assert!(HostMemory::zeroed(0).is_err());
        assert!(HostMemory::zeroed(u64::MAX).is_err());
        assert!(HostMemory::zeroed(u64::MAX / 2).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_that_nobody_touched_takes_no_pages() {
        const BYTES: usize = 512 << 20;
        let before = resident();
        let memory = HostMemory::zeroed(BYTES as u64).unwrap();
        let taken = resident().saturating_sub(before);
        assert!(taken < BYTES / 4, "{taken} of {BYTES} bytes");
        drop(memory);
    }
}
