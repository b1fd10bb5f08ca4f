//! Memory that kvx allocates, as what backs a region.

use std::ptr::NonNull;

use kvx_core::memory::{Backing, MemoryKind};

use crate::segment::SharedMemory;

// SAFETY: the segment is mapped at one address as long as the value lives; it is host memory that is readable and writable
// for this process; no reference to any byte of it is ever made.
unsafe impl Backing for SharedMemory {
    fn address(&self) -> NonNull<u8> {
        self.mapping().address()
    }

    fn bytes(&self) -> u64 {
        self.size()
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
}
