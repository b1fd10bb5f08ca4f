//! Regions of this side: the port's own table of handles, and ordered sets of them.

use std::fmt;
use std::sync::Arc;

use super::Port;
use crate::error::{Error, Result, Retry};
use crate::id::RegionId;
use crate::memory::{KeyBlob, MemoryKind, Region};

/// A registered region.
#[derive(Debug)]
pub(super) struct LocalRegion {
    /// The backend's name for it.
    pub(super) backend: RegionId,
    pub(super) region: Region,
    /// Unsettled transfers that use it.
    pub(super) users: usize,
    /// It is being deregistered: no new users.
    pub(super) leaving: bool,
}

/// Handles of this port: a slot's generation rises whenever its handle ends.
#[derive(Debug, Default)]
pub(super) struct RegionTable {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    entry: Option<LocalRegion>,
}

impl RegionTable {
    /// Gives out a handle. `None` when all 2³² slots are in use.
    pub(super) fn insert(&mut self, backend: RegionId, region: Region) -> Option<RegionId> {
        let entry = Some(LocalRegion { backend, region, users: 0, leaving: false });
        if let Some(index) = self.free.pop() {
            let slot = self.slots.get_mut(index as usize)?;
            slot.entry = entry;
            return Some(RegionId::new(index, slot.generation));
        }
        let index = u32::try_from(self.slots.len()).ok()?;
        self.slots.push(Slot { generation: 0, entry });
        Some(RegionId::new(index, 0))
    }

    /// The region that `id` names, unless it is stale or unknown.
    pub(super) fn get(&self, id: RegionId) -> Option<&LocalRegion> {
        self.slots
            .get(id.slot() as usize)
            .filter(|slot| slot.generation == id.generation())
            .and_then(|slot| slot.entry.as_ref())
    }

    /// Like [`get`](Self::get).
    pub(super) fn get_mut(&mut self, id: RegionId) -> Option<&mut LocalRegion> {
        self.slots
            .get_mut(id.slot() as usize)
            .filter(|slot| slot.generation == id.generation())
            .and_then(|slot| slot.entry.as_mut())
    }

    /// Ends a handle. A slot whose generations are used up is never given out again.
    pub(super) fn remove(&mut self, id: RegionId) -> Option<LocalRegion> {
        self.get(id)?;
        let slot = self.slots.get_mut(id.slot() as usize)?;
        let entry = slot.entry.take();
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.free.push(id.slot());
        }
        entry
    }
}

/// The regions of a rank's layout in order: what [`Segment::local_region`](crate::transfer::Segment::local_region)
/// indexes. Made once with [`Port::region_set`]; cheap to clone. It does not keep the regions alive.
#[derive(Clone)]
pub struct RegionSet {
    pub(super) port: u64,
    pub(super) members: Arc<[SetMember]>,
}

/// One region of a set. What it says is true as long as the handle is not stale.
#[derive(Clone, Copy, Debug)]
pub(super) struct SetMember {
    pub(super) id: RegionId,
    pub(super) backend: RegionId,
    pub(super) bytes: u64,
}

impl RegionSet {
    /// How many regions it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The regions, in order.
    pub fn ids(&self) -> impl Iterator<Item = RegionId> + '_ {
        self.members.iter().map(|member| member.id)
    }
}

impl fmt::Debug for RegionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.ids()).finish()
    }
}

impl Port {
    /// Zeroed memory that the backend moves fastest. It is not registered yet.
    ///
    /// # Errors
    ///
    /// Those of [`MemoryRegistry::allocate`](crate::memory::MemoryRegistry::allocate), and
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) when the port was closed.
    pub fn allocate(&self, bytes: u64) -> Result<Region> {
        self.inner.lock().open("port.allocate")?;
        self.inner.backend.allocate(bytes)
    }

    /// Registers a region. The port keeps a clone of it until it is deregistered.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): the backend cannot reach memory of this kind; the error
    ///   names the kind and those that it can.
    /// - [`ErrorKind::Closed`](crate::ErrorKind::Closed): the port was closed.
    /// - Those of [`MemoryRegistry::register`](crate::memory::MemoryRegistry::register).
    pub fn register(&self, region: &Region) -> Result<RegionId> {
        const OPERATION: &str = "port.register";
        self.inner.lock().open(OPERATION)?;
        let capabilities = self.capabilities();
        if !capabilities.memory(region.kind()) {
            let host = capabilities.memory(MemoryKind::Host).then_some("host");
            let cuda = capabilities.memory(MemoryKind::Cuda(0)).then_some("cuda");
            let known: Vec<_> = host.into_iter().chain(cuda).collect();
            return Err(Error::unsupported(OPERATION, "the backend cannot reach this memory")
                .with_backend(self.backend_name())
                .with_context("memory", region.kind())
                .with_context("supported", known.join(", "))
                .with_remedy("choose a backend that can, or copy through memory of that kind"));
        }
        let backend = self.inner.backend.register(region)?;
        let inserted = self.inner.lock().regions.insert(backend, region.clone());
        if let Some(id) = inserted {
            return Ok(id);
        }
        self.inner.backend.deregister(backend)?;
        Err(Error::new(crate::ErrorKind::Resources, OPERATION, "all region handles are in use"))
    }

    /// Ends a registration.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse):
    ///
    /// - a stale or unknown handle;
    /// - with [`Retry::Backoff`]: transfers that have not settled use it; the error says how many.
    pub fn deregister(&self, region: RegionId) -> Result<()> {
        const OPERATION: &str = "port.deregister";
        let backend = {
            let mut state = self.inner.lock();
            let entry = state
                .regions
                .get_mut(region)
                .filter(|entry| !entry.leaving)
                .ok_or_else(|| stale(OPERATION, region))?;
            if entry.users > 0 {
                return Err(Error::misuse(OPERATION, "transfers in flight use the region")
                    .with_retry(Retry::Backoff)
                    .with_context("region", region)
                    .with_context("transfers", entry.users)
                    .with_remedy("wait until they settle, or cancel them first"));
            }
            entry.leaving = true;
            entry.backend
        };
        let result = self.inner.backend.deregister(backend);
        let mut state = self.inner.lock();
        let gone = if result.is_ok() {
            state.regions.remove(region)
        } else {
            if let Some(entry) = state.regions.get_mut(region) {
                entry.leaving = false;
            }
            None
        };
        // What backs the region may be freed here: that is nobody's business under the lock.
        drop(state);
        drop(gone);
        result
    }

    /// What a peer needs in order to reach a region.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) for a stale or unknown handle.
    pub fn key_blob(&self, region: RegionId) -> Result<KeyBlob> {
        let backend = {
            let state = self.inner.lock();
            let entry = state.regions.get(region);
            entry.ok_or_else(|| stale("port.key_blob", region))?.backend
        };
        self.inner.backend.key_blob(backend)
    }

    /// The regions of this rank's layout, in the layout's order. One region may be named more than once.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) for a stale or unknown handle.
    pub fn region_set(&self, regions: &[RegionId]) -> Result<RegionSet> {
        let state = self.inner.lock();
        let members = regions
            .iter()
            .map(|&id| {
                let entry = state.regions.get(id).ok_or_else(|| stale("port.region_set", id))?;
                Ok(SetMember { id, backend: entry.backend, bytes: entry.region.bytes() })
            })
            .collect::<Result<_>>()?;
        Ok(RegionSet { port: self.inner.number, members })
    }
}

pub(super) fn stale(operation: &'static str, region: RegionId) -> Error {
    Error::misuse(operation, "the region is stale or unknown")
        .with_context("region", region)
        .with_remedy("use the handle that the latest registration gave")
}
