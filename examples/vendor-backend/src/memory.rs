//! Registered memory, and the keys with which peers reach it.

use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId};
use kvx_core::memory::{KeyBlob, MemoryKind, MemoryRegistry, Region};
use kvx_core::{Error, Result, wire};
use serde::{Deserialize, Serialize};

use crate::NAME;
use crate::backend::PlainTcp;
use crate::error::stale;
use crate::state::{Imported, Registered};

/// A key to a region of the side that published it. Whoever has it can reach the memory, so it cannot be guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Key {
    magic: u32,
    pub(crate) owner: Incarnation,
    slot: u32,
    generation: u32,
    pub(crate) secret: u64,
}

const MAGIC: u32 = 0x9a17_7c90;

impl Key {
    pub(crate) const fn region(&self) -> RegionId {
        RegionId::new(self.slot, self.generation)
    }

    fn encode(&self) -> Result<KeyBlob> {
        KeyBlob::new(wire::to_bytes("key_blob", self)?)
    }

    fn decode(blob: &KeyBlob) -> Result<Self> {
        let key: Self = wire::from_bytes("import_key", "the key blob", blob.as_bytes())?;
        if key.magic == MAGIC {
            return Ok(key);
        }
        Err(Error::peer("import_key", "the key blob is of another fabric").with_backend(NAME))
    }
}

/// A number that cannot be guessed.
pub(crate) fn secret() -> Result<u64> {
    let random = *Incarnation::random()?.as_bytes();
    Ok(u64::from_le_bytes(std::array::from_fn(|at| random[at])))
}

impl MemoryRegistry for PlainTcp {
    fn register(&self, region: &Region) -> Result<RegionId> {
        if region.kind() != MemoryKind::Host {
            return Err(Error::unsupported("register", "host memory only")
                .with_backend(NAME)
                .with_context("memory", region.kind()));
        }
        let secret = secret()?;
        self.shared.with(|state| {
            state.check_open("register")?;
            let handle = RegionId::new(state.slot()?, 0);
            state.regions.insert(handle, Registered { region: region.clone(), secret });
            Ok(handle)
        })
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        let ended = self.shared.with(|state| state.regions.remove(&region));
        // The memory is freed here, if this was its last use: not under the lock.
        ended.map(drop).ok_or_else(|| stale("deregister", region))
    }

    fn key_blob(&self, region: RegionId) -> Result<KeyBlob> {
        let owner = self.shared.incarnation;
        let secret = self.shared.with(|state| {
            let known = state.regions.get(&region).ok_or_else(|| stale("key_blob", region))?;
            Ok(known.secret)
        })?;
        let (slot, generation) = (region.slot(), region.generation());
        Key { magic: MAGIC, owner, slot, generation, secret }.encode()
    }

    fn import_key(&self, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        let key = Key::decode(blob);
        self.shared.with(|state| {
            state.check_open("import_key")?;
            let owner = state.live("import_key", peer)?.incarnation;
            let key = key?;
            if key.owner != owner {
                return Err(Error::peer("import_key", "the key is of another incarnation")
                    .with_backend(NAME)
                    .with_context("key", key.owner)
                    .with_context("peer", owner));
            }
            let handle = RemoteRegionId::new(state.slot()?, 0);
            state.keys.insert(handle, Imported { peer, key });
            Ok(handle)
        })
    }

    fn release_key(&self, peer: PeerId, region: RemoteRegionId) -> Result<()> {
        self.shared.with(|state| {
            match state.keys.get(&region).filter(|known| known.peer == peer) {
                Some(_) => drop(state.keys.remove(&region)),
                None => return Err(stale("release_key", region)),
            }
            Ok(())
        })
    }
}
