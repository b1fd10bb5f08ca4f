//! Memory that is filled, looked at, and says when it was let go of.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use kvx_core::memory::{Backing, MemoryKind, Region};
use kvx_shm::SharedMemory;

use crate::pair::BYTES;

/// Of either kind.
pub(crate) fn memory(shared: bool) -> Region {
    if shared { SharedMemory::region(BYTES).unwrap() } else { Region::host(BYTES).unwrap() }
}

pub(crate) fn fill(region: &Region, byte: u8) {
    region.write_at(0, &vec![byte; usize::try_from(BYTES).unwrap()]).unwrap();
}

/// How many of its bytes are not this one.
pub(crate) fn others(region: &Region, byte: u8) -> usize {
    content(region).iter().filter(|found| **found != byte).count()
}

pub(crate) fn content(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(BYTES).unwrap()];
    region.read_at(0, &mut bytes).unwrap();
    bytes
}

/// Another region's memory. Once nobody has this one any more it is filled with a byte, which nobody may overwrite.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) region: Region,
    pub(crate) last: u8,
    pub(crate) gone: Arc<AtomicBool>,
}

// SAFETY: the memory is that of a region, which this keeps.
unsafe impl Backing for Watched {
    fn address(&self) -> NonNull<u8> {
        self.region.address()
    }

    fn bytes(&self) -> u64 {
        self.region.bytes()
    }

    fn kind(&self) -> MemoryKind {
        self.region.kind()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        fill(&self.region, self.last);
        self.gone.store(true, SeqCst);
    }
}
