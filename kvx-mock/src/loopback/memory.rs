//! Registrations and key blobs.

use std::sync::{Arc, Weak};

use kvx_core::id::{PeerId, RegionId, RemoteRegionId};
use kvx_core::memory::{KeyBlob, MemoryRegistry, Region};
use kvx_core::{Error, Result};

use super::backend::LoopbackBackend;
use super::connection::Lane;
use super::engine::{Imported, Registered};
use super::{lock, random};
use crate::engine::RemoteKey;
use crate::error::{BACKEND, down, malformed, stale};
use crate::memory::too_many;

impl MemoryRegistry for LoopbackBackend {
    fn register(&self, region: &Region) -> Result<RegionId> {
        let operation = "register";
        let kind = region.kind();
        if !self.capabilities.memory(kind) {
            return Err(Error::unsupported(operation, "this fabric cannot reach this memory")
                .with_backend(BACKEND)
                .with_context("memory", kind)
                .with_remedy("use host memory with the mock"));
        }
        let secret = secret()?;
        let mut tables = self.engine.tables_mut();
        tables.check_open(operation)?;
        let registered = Arc::new(Registered { region: region.clone(), secret });
        tables.regions.insert(registered).ok_or_else(|| too_many(operation))
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        let removed = self.engine.tables_mut().regions.remove(region);
        // Dropped once nothing is locked: what backs it is somebody else's code.
        removed.map(drop).ok_or_else(|| stale("deregister", "region", region))
    }

    fn key_blob(&self, region: RegionId) -> Result<KeyBlob> {
        let tables = self.engine.tables();
        let registered = tables.regions.get(region);
        let registered = registered.ok_or_else(|| stale("key_blob", "region", region))?;
        let (incarnation, bytes) = (self.engine.incarnation, registered.region.bytes());
        RemoteKey { incarnation, region, bytes, secret: registered.secret }.encode()
    }

    fn import_key(&self, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        let operation = "import_key";
        let (incarnation, owner) = {
            let tables = self.engine.tables();
            tables.check_open(operation)?;
            let side = tables.peer(operation, peer)?;
            if *lock(&side.mine().lane) == Lane::Closed {
                return Err(down(operation, "the connection is over").with_context("peer", peer));
            }
            (side.other().incarnation, side.other().engine.upgrade())
        };
        let key = RemoteKey::decode(blob.as_bytes())?;
        if key.incarnation != incarnation {
            return Err(malformed(operation, "the key blob is of another incarnation")
                .with_context("peer", incarnation)
                .with_context("key_blob", key.incarnation));
        }
        let region = owner.map_or_else(Weak::new, |owner| {
            let tables = owner.tables();
            let registered = tables.regions.get(key.region);
            registered.filter(|r| r.secret == key.secret).map_or_else(Weak::new, Arc::downgrade)
        });
        let mut tables = self.engine.tables_mut();
        tables.peer(operation, peer)?;
        let handle = tables.keys.insert(Imported { peer, region });
        let handle = handle.ok_or_else(|| too_many(operation))?;
        if let Some(side) = tables.peers.get_mut(peer) {
            side.keys.insert(handle);
        }
        Ok(handle)
    }

    fn release_key(&self, peer: PeerId, region: RemoteRegionId) -> Result<()> {
        let mut tables = self.engine.tables_mut();
        let known = tables.peers.get_mut(peer).is_some_and(|side| side.keys.remove(&region));
        if !known || tables.keys.remove(region).is_none() {
            return Err(stale("release_key", "remote region", region));
        }
        Ok(())
    }
}

/// What a peer must know to reach a region.
fn secret() -> Result<u64> {
    let bytes = random()?;
    let first = bytes.as_bytes().first_chunk().copied().unwrap_or_default();
    Ok(u64::from_le_bytes(first))
}
