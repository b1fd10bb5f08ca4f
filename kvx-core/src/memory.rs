//! Registered memory.
//!
//! Memory that a device may reach is never a Rust slice while it is registered: a [`Region`] hands out bytes by copying
//! ([`Region::read_at`], [`Region::write_at`]) and its address only as a raw pointer. A region owns what backs it
//! ([`Backing`]), and every transfer in flight holds its regions, so memory cannot go away under a device. Registering
//! memory that somebody else owns is the one `unsafe fn` here ([`Region::borrowed`]).

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::id::{PeerId, RegionId, RemoteRegionId};
use crate::{Error, Result, wire};

mod copy;
mod host;
#[cfg(test)]
mod tests;

pub use host::HostMemory;

/// What kind of memory a region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MemoryKind {
    /// Memory of the host, reachable by the processor.
    Host,
    /// Memory of a CUDA device, by its ordinal.
    Cuda(u32),
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(device) => write!(f, "cuda:{device}"),
        }
    }
}

/// What backs a region.
///
/// # Safety
///
/// From the first call of [`address`](Self::address) until the value is dropped, `address() .. address() + bytes()` must
/// be memory of kind [`kind`](Self::kind), valid for reads and writes by any thread and by devices, at the same address
/// and of the same size; and no reference (`&` or `&mut`) to any byte of it may exist while the value does.
pub unsafe trait Backing: Send + Sync + fmt::Debug {
    /// First byte.
    fn address(&self) -> NonNull<u8>;
    /// Size in bytes.
    fn bytes(&self) -> u64;
    /// Kind of memory.
    fn kind(&self) -> MemoryKind;
}

/// Memory that may be registered with a backend. Shared by reference count: see the [module documentation](self).
#[derive(Clone, Debug)]
pub struct Region {
    backing: Arc<dyn Backing>,
}

impl Region {
    /// A region over `backing`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) when it is empty or wraps around the address space.
    pub fn new(backing: impl Backing + 'static) -> Result<Self> {
        let backing: Arc<dyn Backing> = Arc::new(backing);
        let (address, bytes) = (backing.address().as_ptr().addr() as u64, backing.bytes());
        if bytes == 0 {
            return Err(Error::misuse("region", "the region is empty")
                .with_remedy("a region must have at least one byte"));
        }
        if address.checked_add(bytes).is_none() || usize::try_from(bytes).is_err() {
            return Err(Error::misuse("region", "the region wraps around the address space")
                .with_context("bytes", bytes));
        }
        Ok(Self { backing })
    }

    /// Zeroed host memory of `bytes` bytes, aligned to a page.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) for zero bytes, [`ErrorKind::Resources`](crate::ErrorKind::Resources)
    /// when the memory cannot be had.
    pub fn host(bytes: u64) -> Result<Self> {
        Self::new(HostMemory::zeroed(bytes)?)
    }

    /// A region over memory that somebody else owns, such as a framework's tensor.
    ///
    /// # Safety
    ///
    /// As for [`Backing`]: `address .. address + bytes` must be memory of `kind`, valid for reads and writes by any
    /// thread and by devices, and no reference to it may be in use, until the last clone of the returned region is
    /// dropped. Backends and transfers in flight hold such clones.
    ///
    /// # Errors
    ///
    /// As for [`Region::new`].
    pub unsafe fn borrowed(address: NonNull<u8>, bytes: u64, kind: MemoryKind) -> Result<Self> {
        Self::new(host::Borrowed::new(address, bytes, kind))
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.backing.bytes()
    }

    /// Kind of memory.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.backing.kind()
    }

    /// First byte. What is done through the pointer is the business of whoever does it.
    #[must_use]
    pub fn address(&self) -> NonNull<u8> {
        self.backing.address()
    }

    /// Copies bytes out of a host region. What a device writes meanwhile is seen in part or not at all.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) when the range is outside the region,
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) when it is not host memory.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let from = self.host_range("region.read_at", offset, out.len())?;
        // SAFETY: `from` is valid for `out.len()` bytes (checked above, `Backing`'s contract), and `out` is exclusive.
        unsafe { copy::from_shared(from, out) };
        Ok(())
    }

    /// Copies bytes into a host region. A device that reads meanwhile sees them in part or not at all.
    ///
    /// # Errors
    ///
    /// As for [`read_at`](Self::read_at).
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let to = self.host_range("region.write_at", offset, bytes.len())?;
        // SAFETY: `to` is valid for `bytes.len()` bytes (checked above, `Backing`'s contract).
        unsafe { copy::to_shared(bytes, to) };
        Ok(())
    }

    /// Copies `bytes` bytes from one host region to another (or within one, where the ranges do not overlap).
    ///
    /// # Errors
    ///
    /// As for [`read_at`](Self::read_at), and [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) when the ranges overlap.
    pub fn copy_to(&self, offset: u64, to: &Self, to_offset: u64, bytes: u64) -> Result<()> {
        let len = usize::try_from(bytes)
            .map_err(|_| Error::misuse("region.copy_to", "more bytes than the address space"))?;
        let source = self.host_range("region.copy_to", offset, len)?;
        let target = to.host_range("region.copy_to", to_offset, len)?;
        let apart = source.as_ptr().addr().abs_diff(target.as_ptr().addr());
        if apart < len {
            return Err(Error::misuse("region.copy_to", "source and target overlap"));
        }
        // SAFETY: both are valid for `len` bytes (checked above, `Backing`'s contract) and do not overlap.
        unsafe { copy::between_shared(source, target, len) };
        Ok(())
    }

    fn host_range(&self, operation: &'static str, offset: u64, len: usize) -> Result<NonNull<u8>> {
        if self.kind() != MemoryKind::Host {
            return Err(Error::unsupported(operation, "the processor cannot reach this memory")
                .with_context("memory", self.kind()));
        }
        let end = offset.checked_add(len as u64);
        let at = usize::try_from(offset).ok().filter(|_| end.is_some_and(|e| e <= self.bytes()));
        let Some(at) = at else {
            return Err(Error::misuse(operation, "outside the region")
                .with_context("offset", offset)
                .with_context("bytes", len)
                .with_context("region", self.bytes()));
        };
        // SAFETY: `at` is at most the region's size, so the result is in it or one past its end.
        Ok(unsafe { self.address().add(at) })
    }
}

/// What a peer needs in order to reach a region: bytes that only the backend understands, bounded in size.
///
/// Printed only by length: whoever has a key can reach the memory.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct KeyBlob(
    #[serde(
        serialize_with = "wire::serialize_bytes",
        deserialize_with = "wire::bytes::<_, { KeyBlob::MAX_BYTES }>"
    )]
    Vec<u8>,
);

impl KeyBlob {
    /// Most bytes of a key blob. Several NICs and split registrations fit: the backend's business.
    pub const MAX_BYTES: usize = 4096;

    /// A blob of these bytes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) when there are more than [`MAX_BYTES`](Self::MAX_BYTES).
    pub fn new(bytes: Vec<u8>) -> Result<Self> {
        if bytes.len() > Self::MAX_BYTES {
            return Err(Error::misuse("key_blob", "the key blob is too long")
                .with_context("bytes", bytes.len())
                .with_context("limit", Self::MAX_BYTES));
        }
        Ok(Self(bytes))
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl TryFrom<Vec<u8>> for KeyBlob {
    type Error = Error;

    fn try_from(bytes: Vec<u8>) -> Result<Self> {
        Self::new(bytes)
    }
}

impl From<KeyBlob> for Vec<u8> {
    fn from(blob: KeyBlob) -> Self {
        blob.0
    }
}

impl fmt::Debug for KeyBlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyBlob({} bytes)", self.0.len())
    }
}

/// A backend's side of registered memory.
///
/// Registering the same memory twice, or overlapping ranges, is allowed and gives independent handles.
pub trait MemoryRegistry {
    /// Zeroed memory of the kind that this backend moves fastest: memory that peers on the same host can map, huge pages,
    /// memory near a device. It is registered like any other; on backends with no such kind it is
    /// [`Region::host`]. It belongs to whoever holds the region, and stays when the backend is closed.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Misuse`](crate::ErrorKind::Misuse): no bytes.
    /// - [`ErrorKind::Resources`](crate::ErrorKind::Resources): the memory cannot be had; the error names the limit and the
    ///   remedy.
    fn allocate(&self, bytes: u64) -> Result<Region> {
        Region::host(bytes)
    }

    /// Registers a region. The backend keeps a clone of it until it is deregistered and quiescent.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): memory of a kind that this backend cannot reach. It
    ///   is never taken for host memory.
    /// - [`ErrorKind::Resources`](crate::ErrorKind::Resources): the memory cannot be pinned; the error names the limit
    ///   and the remedy.
    fn register(&self, region: &Region) -> Result<RegionId>;

    /// Ends a registration. Transfers in flight that use it settle first or fail; once this returns `Ok`, no new access
    /// through the handle begins on this side.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) for a stale or unknown handle.
    fn deregister(&self, region: RegionId) -> Result<()>;

    /// What a peer needs in order to reach the region.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) for a stale or unknown handle.
    fn key_blob(&self, region: RegionId) -> Result<KeyBlob>;

    /// Imports a peer's key blob, so that transfers can name the region.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Peer`](crate::ErrorKind::Peer): the blob is malformed, or not of this backend. It came from a
    ///   peer: nothing in it may panic, hang or read out of bounds.
    /// - [`ErrorKind::Misuse`](crate::ErrorKind::Misuse): the peer is stale or unknown.
    fn import_key(&self, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId>;

    /// Forgets an imported key. All of a peer's keys are forgotten with the peer.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) for a stale or unknown handle.
    fn release_key(&self, peer: PeerId, region: RemoteRegionId) -> Result<()>;
}
