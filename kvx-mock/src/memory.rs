//! Registrations and key blobs.

use std::sync::Arc;

use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId};
use kvx_core::memory::{KeyBlob, MemoryRegistry, Region};
use kvx_core::{Error, ErrorKind, Result};

use crate::backend::MockBackend;
use crate::engine::{Imported, PeerState, Registered, RemoteKey};
use crate::error::{BACKEND, down, malformed, misuse, ruled, stale};
use crate::net::{EngineId, Net};
use crate::rule::{Kind, Party, Verdict};
use crate::trace::What;

impl MemoryRegistry for MockBackend {
    fn register(&self, region: &Region) -> Result<RegionId> {
        self.with(|net, engine| net.register(engine, region))
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.with(|net, engine| net.deregister(engine, region))
    }

    fn key_blob(&self, region: RegionId) -> Result<KeyBlob> {
        self.with(|net, engine| {
            let entry = net.engine("key_blob", engine)?;
            let registered = entry.regions.get(region);
            let registered = registered.ok_or_else(|| stale("key_blob", "region", region))?;
            let (incarnation, bytes) = (entry.incarnation, registered.region.bytes());
            RemoteKey { incarnation, region, bytes, secret: registered.secret }.encode()
        })
    }

    fn import_key(&self, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        self.with(|net, engine| net.import_key(engine, peer, blob))
    }

    fn release_key(&self, peer: PeerId, region: RemoteRegionId) -> Result<()> {
        self.with(|net, engine| {
            let entry = net.engine_mut("release_key", engine)?;
            let known = entry.peers.get_mut(peer).is_some_and(|side| side.keys.remove(&region));
            if !known || entry.keys.remove(region).is_none() {
                return Err(stale("release_key", "remote region", region));
            }
            Ok(())
        })
    }
}

impl Net {
    fn register(&mut self, engine: EngineId, region: &Region) -> Result<RegionId> {
        let operation = "register";
        let entry = self.engine(operation, engine)?;
        entry.check_open(operation)?;
        let kind = region.kind();
        if !entry.preset.capabilities().memory(kind) {
            return Err(Error::unsupported(operation, "this fabric cannot reach this memory")
                .with_backend(BACKEND)
                .with_context("memory", kind)
                .with_remedy("use host memory with the mock"));
        }
        let me = Party { name: Arc::clone(&entry.name), incarnation: entry.incarnation };
        let asked = self.ask(Kind::Register, engine, (engine, me), None, None, region.bytes());
        if let Some((_, (Verdict::Fail(kind), _))) = asked {
            return Err(ruled(operation, kind).with_context("bytes", region.bytes()));
        }
        let secret = self.secret();
        let entry = self.engine_mut(operation, engine)?;
        let region = entry.regions.insert(Registered { region: region.clone(), secret });
        let region = region.ok_or_else(|| too_many(operation))?;
        self.record(engine, What::Registered(region));
        Ok(region)
    }

    fn deregister(&mut self, engine: EngineId, region: RegionId) -> Result<()> {
        let entry = self.engine_mut("deregister", engine)?;
        let Some(registered) = entry.regions.remove(region) else {
            return Err(stale("deregister", "region", region));
        };
        let peers: Vec<PeerId> = entry.peers.handles().collect();
        for peer in peers {
            let Some(side) = entry.peers.get_mut(peer) else { continue };
            for transfer in side.transfers.values_mut() {
                let uses = transfer.work.locals.iter().any(|(local, _)| *local == region);
                if uses && !transfer.work.jobs.is_empty() {
                    let error = misuse("transfer", "its local region was deregistered");
                    transfer.doomed = Some(error.with_context("region", region));
                }
            }
        }
        self.give_up([registered.region]);
        self.record(engine, What::Deregistered(region));
        Ok(())
    }

    fn import_key(
        &mut self,
        engine: EngineId,
        peer: PeerId,
        blob: &KeyBlob,
    ) -> Result<RemoteRegionId> {
        let operation = "import_key";
        let entry = self.engine_mut(operation, engine)?;
        entry.check_open(operation)?;
        let side = entry.peers.get_mut(peer).ok_or_else(|| stale(operation, "peer", peer))?;
        if side.state != PeerState::Open {
            return Err(down(operation, "the connection is over").with_context("peer", peer));
        }
        let key = RemoteKey::decode(blob.as_bytes())?;
        if key.incarnation != side.incarnation {
            return Err(malformed(operation, "the key blob is of another incarnation")
                .with_context("peer", side.incarnation)
                .with_context("key_blob", key.incarnation));
        }
        let region = entry.keys.insert(Imported { peer, key });
        let region = region.ok_or_else(|| too_many(operation))?;
        side.keys.insert(region);
        Ok(region)
    }
}

pub(crate) fn too_many(operation: &'static str) -> Error {
    Error::new(ErrorKind::Resources, operation, "no handle is left").with_backend(BACKEND)
}

/// `kvxm`, version, incarnation, slot, generation, bytes, secret; numbers in little endian.
const MAGIC: [u8; 5] = *b"kvxm\x01";
const BLOB_BYTES: usize = MAGIC.len() + 16 + 4 + 4 + 8 + 8;

impl RemoteKey {
    pub(crate) fn encode(&self) -> Result<KeyBlob> {
        let mut bytes = Vec::with_capacity(BLOB_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(self.incarnation.as_bytes());
        bytes.extend(self.region.slot().to_le_bytes());
        bytes.extend(self.region.generation().to_le_bytes());
        bytes.extend(self.bytes.to_le_bytes());
        bytes.extend(self.secret.to_le_bytes());
        KeyBlob::new(bytes)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let wrong = || malformed("import_key", "this is not a key blob of the mock");
        let rest = bytes.strip_prefix(&MAGIC).ok_or_else(wrong)?;
        let (incarnation, rest) = rest.split_first_chunk().ok_or_else(wrong)?;
        let (slot, rest) = rest.split_first_chunk().ok_or_else(wrong)?;
        let (generation, rest) = rest.split_first_chunk().ok_or_else(wrong)?;
        let (size, rest) = rest.split_first_chunk().ok_or_else(wrong)?;
        let (secret, rest) = rest.split_first_chunk().ok_or_else(wrong)?;
        if !rest.is_empty() {
            return Err(wrong());
        }
        Ok(Self {
            incarnation: Incarnation::from_bytes(*incarnation),
            region: RegionId::new(u32::from_le_bytes(*slot), u32::from_le_bytes(*generation)),
            bytes: u64::from_le_bytes(*size),
            secret: u64::from_le_bytes(*secret),
        })
    }
}
