//! Memory under test: a registered range in the middle of a larger one, so that what is written beside it is seen.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use kvx_core::Result;
use kvx_core::memory::{Backing, MemoryKind, Region};

/// Memory of which ranges can be registered. It outlives all of them, so a backend that uses memory after it let go of it
/// is found out, not crashed.
#[derive(Debug)]
pub(crate) struct Arena {
    shared: Arc<Shared>,
    whole: Region,
}

#[derive(Debug)]
struct Shared {
    memory: Region,
    /// Ranges that somebody still holds.
    held: AtomicU64,
}

impl Arena {
    /// An arena of this host memory, as it is.
    pub(crate) fn new(memory: Region) -> Result<Self> {
        let bytes = memory.bytes();
        let shared = Arc::new(Shared { memory, held: AtomicU64::new(0) });
        let whole = Region::new(Range::new(&shared, 0, bytes, MemoryKind::Host))?;
        Ok(Self { shared, whole })
    }

    /// An arena of this host memory, with this content from its beginning.
    pub(crate) fn filled(memory: Region, content: &[u8]) -> Result<Self> {
        let arena = Self::new(memory)?;
        arena.write(0, content)?;
        Ok(arena)
    }

    /// A range of it, to register. Inside the arena, or an error.
    pub(crate) fn range(&self, offset: u64, bytes: u64) -> Result<Region> {
        self.checked(offset, bytes)?;
        Region::new(Range::new(&self.shared, offset, bytes, MemoryKind::Host))
    }

    /// A range that says that it is memory of a CUDA device: for backends that claim none, and must refuse it unseen.
    pub(crate) fn foreign_range(&self, offset: u64, bytes: u64) -> Result<Region> {
        self.checked(offset, bytes)?;
        Region::new(Range::new(&self.shared, offset, bytes, MemoryKind::Cuda(0)))
    }

    /// How many ranges somebody still holds.
    pub(crate) fn held(&self) -> u64 {
        // The arena itself holds one.
        self.shared.held.load(SeqCst) - 1
    }

    pub(crate) fn read(&self, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        self.checked(offset, bytes)?;
        let mut out = vec![0; usize::try_from(bytes).unwrap_or(0)];
        self.whole.read_at(offset, &mut out)?;
        Ok(out)
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.whole.write_at(offset, bytes)
    }

    fn checked(&self, offset: u64, bytes: u64) -> Result<()> {
        if offset.checked_add(bytes).is_some_and(|end| end <= self.whole.bytes()) {
            return Ok(());
        }
        Err(kvx_core::Error::misuse("arena", "outside the arena")
            .with_context("offset", offset)
            .with_context("bytes", bytes))
    }
}

/// Part of an arena.
#[derive(Debug)]
struct Range {
    shared: Arc<Shared>,
    address: usize,
    bytes: u64,
    kind: MemoryKind,
}

impl Range {
    /// The range must lie in the arena.
    fn new(shared: &Arc<Shared>, offset: u64, bytes: u64, kind: MemoryKind) -> Self {
        shared.held.fetch_add(1, SeqCst);
        let address = usize::try_from(offset).unwrap_or(0);
        Self { shared: Arc::clone(shared), address, bytes, kind }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        self.shared.held.fetch_sub(1, SeqCst);
    }
}

// SAFETY: the range lies in host memory that it keeps alive, at one address, and to which no reference is ever made. One
// that calls itself memory of a device is host memory all the same: it is given only to backends that claim none of that
// kind and thus must not touch it; one that does touch it touches valid memory.
unsafe impl Backing for Range {
    fn address(&self) -> NonNull<u8> {
        // SAFETY: whoever made the range checked that it is inside the arena's memory.
        unsafe { self.shared.memory.address().add(self.address) }
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

    #[test]
    fn ranges_are_counted_and_checked() {
        let memory = Region::host(100).unwrap();
        let arena = Arena::filled(memory, &(0..100).collect::<Vec<u8>>()).unwrap();
        let range = arena.range(10, 20).unwrap();
        let clone = range.clone();
        assert_eq!(arena.held(), 1);
        drop((range, clone));
        assert_eq!(arena.held(), 0);
        assert_eq!(arena.read(98, 2).unwrap(), [98, 99]);
        arena.write(98, &[7]).unwrap();
        let mut byte = [0];
        arena.range(98, 1).unwrap().read_at(0, &mut byte).unwrap();
        assert_eq!(byte, [7]);
        assert!(arena.range(90, 11).is_err() && arena.range(u64::MAX, 2).is_err());
        assert_eq!(arena.foreign_range(0, 8).unwrap().kind(), MemoryKind::Cuda(0));
    }
}
