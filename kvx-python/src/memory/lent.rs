//! Memory that a Python object owns.

use std::ptr::NonNull;

use kvx_core::Result;
use kvx_core::memory::{Backing, MemoryKind, Region};
use pyo3::prelude::*;

/// An object's memory, and the object.
#[derive(Debug)]
struct Lent {
    address: NonNull<u8>,
    bytes: u64,
    kind: MemoryKind,
    /// Dropped with the last clone of the region, on whatever thread; Python then lets go of it when kvx is next called.
    _owner: Py<PyAny>,
}

// SAFETY: it is an address, a size and a reference to a Python object, which may be moved between threads.
unsafe impl Send for Lent {}
// SAFETY: as for Send: `&Lent` gives nothing but the address.
unsafe impl Sync for Lent {}

// SAFETY: the caller of `region` promised this for as long as the owner lives, and the value keeps the owner.
unsafe impl Backing for Lent {
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

/// A region of memory that `owner` keeps where it is. `None` for memory at address 0, where there is none.
///
/// # Safety
///
/// `address .. address + bytes` must be memory of that kind that any thread may read and write, at that place and of that size until
/// `owner` is gone, and no Rust reference to it may exist.
pub(crate) unsafe fn region(
    address: usize,
    bytes: u64,
    kind: MemoryKind,
    owner: Py<PyAny>,
) -> Option<Result<Region>> {
    let address = NonNull::new(std::ptr::with_exposed_provenance_mut(address))?;
    Some(Region::new(Lent { address, bytes, kind, _owner: owner }))
}
