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

// SAFETY: whoever calls `Region.at_address` vouches that the memory is there for as long as the owner lives, which this keeps alive.
// Python code has no Rust references to it.
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

/// A region of memory that `owner` keeps where it is.
pub(super) fn region(
    address: NonNull<u8>,
    bytes: u64,
    kind: MemoryKind,
    owner: Py<PyAny>,
) -> Result<Region> {
    Region::new(Lent { address, bytes, kind, _owner: owner })
}
