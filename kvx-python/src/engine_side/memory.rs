//! The engine's memory, kept as long as a device may reach it.

use std::fmt;
use std::ptr::NonNull;

use kvx_core::memory::{Backing, MemoryKind, Region};
use kvx_core::{Error, Result};
use pyo3::prelude::*;

/// Memory of the host that a Python object owns.
struct Owned {
    address: NonNull<u8>,
    bytes: u64,
    /// Held for what its end would do: give the memory back.
    _owner: Py<PyAny>,
}

impl fmt::Debug for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owned({} bytes at {:p})", self.bytes, self.address)
    }
}

// SAFETY: it is an address, a size, and a handle on the owner that any thread may drop; whoever calls `region` vouches that any thread may
// use the memory.
unsafe impl Send for Owned {}
// SAFETY: as for Send: `&Owned` gives nothing but the address.
unsafe impl Sync for Owned {}

// SAFETY: the caller of `region` promised this for as long as the owner lives, and the value keeps the owner.
unsafe impl Backing for Owned {
    fn address(&self) -> NonNull<u8> {
        self.address
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

/// A region over memory of the host that `owner` keeps.
///
/// # Safety
///
/// `address .. address + bytes` must be memory that any thread may read and write, at that place and of that size until `owner` is gone, and
/// no Rust reference to it may exist.
pub(super) unsafe fn region(address: usize, bytes: u64, owner: Py<PyAny>) -> Result<Region> {
    let address = NonNull::new(std::ptr::with_exposed_provenance_mut(address))
        .ok_or_else(|| Error::misuse("region", "there is no memory at address 0"))?;
    Region::new(Owned { address, bytes, _owner: owner })
}
