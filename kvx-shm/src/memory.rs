//! Registered memory, and keys to it.

use std::sync::{Arc, OnceLock};

use kvx_core::id::{PeerId, RegionId, RemoteRegionId};
use kvx_core::memory::{KeyBlob, MemoryKind, MemoryRegistry, Region};
use kvx_core::{Error, ErrorKind, Result};

use crate::backend::ShmBackend;
use crate::bytes::{Reader, Writer, checksum};
use crate::engine::random;
use crate::error::{BACKEND, closed, malformed, stale};
use crate::link::MOST_REGIONS;
use crate::segment::{Segment, SharedMemory};
use crate::state::{Imported, Key, Phase, Registered};

const MAGIC: [u8; 8] = *b"kvx-shmk";

/// What a key blob says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Blob {
    owner: [u8; 16],
    slot: u32,
    generation: u32,
    /// Nobody guesses it.
    secret: u64,
    bytes: u64,
}

impl Blob {
    const BYTES: usize = 8 + 16 + 4 + 4 + 8 + 8 + 8;

    fn encode(&self) -> Result<KeyBlob> {
        let mut to = Writer::default();
        to.bytes(&MAGIC).bytes(&self.owner).u32(self.slot).u32(self.generation);
        to.u64(self.secret).u64(self.bytes);
        let sum = checksum(&to.0);
        to.u64(sum);
        KeyBlob::new(to.0)
    }

    fn decode(blob: &KeyBlob) -> Option<Self> {
        let bytes = blob.as_bytes();
        if bytes.len() != Self::BYTES {
            return None;
        }
        let mut from = Reader(bytes);
        if from.array() != Some(MAGIC) {
            return None;
        }
        let found = Self {
            owner: from.array()?,
            slot: from.u32()?,
            generation: from.u32()?,
            secret: from.u64()?,
            bytes: from.u64()?,
        };
        (from.u64()? == checksum(&bytes[..Self::BYTES - 8])).then_some(found)
    }
}

impl MemoryRegistry for ShmBackend {
    fn allocate(&self, bytes: u64) -> Result<Region> {
        Region::new(SharedMemory::placed(bytes, &self.shared.options.placement)?)
    }

    fn register(&self, region: &Region) -> Result<RegionId> {
        if region.kind() != MemoryKind::Host {
            return Err(Error::unsupported("register", "memory of the host only")
                .with_backend(BACKEND)
                .with_context("memory", region.kind()));
        }
        let shared = Segment::around(region.address(), region.bytes());
        let registered = Registered { region: region.clone(), secret: random()?, shared };
        let used = registered.shared.as_ref().map(|(segment, _)| Arc::clone(segment));
        let mut state = self.shared.lock();
        if state.closed {
            return Err(closed("register"));
        }
        let full = || {
            Error::new(ErrorKind::Resources, "register", "as many regions as there is room for")
                .with_backend(BACKEND)
                .with_context("regions", MOST_REGIONS)
                .with_remedy("register larger regions, or deregister some")
        };
        let handle = state.regions.insert(registered).ok_or_else(full)?;
        if handle.slot() >= MOST_REGIONS {
            state.regions.remove(handle);
            return Err(full());
        }
        if let Some(segment) = used {
            state.uses(&segment);
        }
        self.shared.table.set(handle.slot(), Some(handle.generation()));
        Ok(handle)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        let mut state = self.shared.lock();
        let registered =
            state.regions.remove(region).ok_or_else(|| stale("deregister", "region", region))?;
        self.shared.table.set(region.slot(), None);
        if let Some((segment, _)) = &registered.shared {
            state.uses_no_more(segment.number);
        }
        drop(state);
        // Its owner may have something to do, with which the lock has nothing to do.
        drop(registered);
        Ok(())
    }

    fn key_blob(&self, region: RegionId) -> Result<KeyBlob> {
        let state = self.shared.lock();
        let known = state.regions.get(region).ok_or_else(|| stale("key_blob", "region", region))?;
        let blob = Blob {
            owner: self.shared.incarnation,
            slot: region.slot(),
            generation: region.generation(),
            secret: known.secret,
            bytes: known.region.bytes(),
        };
        blob.encode()
    }

    fn import_key(&self, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        let mut state = self.shared.lock();
        let known = state.peer("import_key", peer)?;
        if known.phase != Phase::Open {
            return Err(known.phase.over("import_key").with_context("peer", peer));
        }
        let blob = Blob::decode(blob)
            .ok_or_else(|| malformed("import_key", "no key of shared memory, or a damaged one"))?;
        if blob.owner != known.incarnation {
            return Err(malformed("import_key", "the key is of another incarnation"));
        }
        let Blob { slot, generation, secret, bytes, .. } = blob;
        let place = OnceLock::new();
        let imported = Arc::new(Imported { slot, generation, secret, bytes, place });
        let key = state.keys.insert(Key { peer, imported: Arc::clone(&imported) });
        let key = key.ok_or_else(|| {
            Error::new(ErrorKind::Resources, "import_key", "as many keys as can be named")
                .with_backend(BACKEND)
        })?;
        if let Some(known) = state.peers.get_mut(peer) {
            known.keys.insert(key);
            known.locate(&imported);
        }
        self.shared.flush(&mut state, peer);
        Ok(key)
    }

    fn release_key(&self, peer: PeerId, region: RemoteRegionId) -> Result<()> {
        let mut state = self.shared.lock();
        state.peer("release_key", peer)?;
        if state.keys.get(region).is_none_or(|key| key.peer != peer) {
            return Err(stale("release_key", "key", region));
        }
        state.keys.remove(region);
        if let Some(known) = state.peers.get_mut(peer) {
            known.keys.remove(&region);
        }
        Ok(())
    }
}
