//! Registered memory, and keys to it.

use std::sync::Arc;

use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId};
use kvx_core::memory::{KeyBlob, MemoryKind, MemoryRegistry, Region};
use kvx_core::wire;
use kvx_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::backend::UcxBackend;
use crate::core::Imported;
use crate::error::{BACKEND, closed, down, failed, malformed, stale};
use crate::handshake::checksum;
use crate::reach::of_versions;
use crate::sys::{Key, Memory};

/// Most pieces of a region, and most bytes of UCX's key to one.
const MOST_PIECES: usize = 256;
const MOST_KEY: usize = 2048;

/// What a key blob says.
#[derive(Debug, Serialize, Deserialize)]
struct Blob {
    fabric: wire::Text<16>,
    owner: Incarnation,
    /// The owner's number for the region: slot and generation.
    region: (u32, u32),
    address: u64,
    bytes: u64,
    /// Bytes of each piece but the last.
    stride: u64,
    /// UCX's, for each piece, or one for all.
    #[serde(deserialize_with = "wire::list::<_, _, MOST_PIECES>")]
    keys: Vec<UcxKey>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(transparent)]
struct UcxKey(
    #[serde(
        serialize_with = "wire::serialize_bytes",
        deserialize_with = "wire::bytes::<_, MOST_KEY>"
    )]
    Vec<u8>,
);

/// Another name, so that no message of the handshake is taken for a key.
const FABRIC: &str = "ucx key";

impl Blob {
    fn encode(&self) -> Result<KeyBlob> {
        let mut bytes = wire::to_bytes("key_blob", self)?;
        bytes.extend(checksum(&bytes).to_le_bytes());
        KeyBlob::new(bytes)
    }

    fn decode(blob: &KeyBlob) -> Result<Self> {
        let damaged = || malformed("import_key", "no key of UCX, or a damaged one");
        let (body, sum) = blob.as_bytes().split_last_chunk().ok_or_else(damaged)?;
        if checksum(body) != u64::from_le_bytes(*sum) {
            return Err(damaged());
        }
        let found: Self = wire::from_bytes("import_key", "the key blob", body)
            .map_err(|error| error.with_backend(BACKEND))?;
        if found.fabric.as_str() != FABRIC || found.keys.is_empty() {
            return Err(damaged());
        }
        Ok(found)
    }
}

impl MemoryRegistry for UcxBackend {
    fn register(&self, region: &Region) -> Result<RegionId> {
        let shared = &self.shared;
        let library = shared.context.library();
        if shared.look(|core| core.closed) {
            return Err(closed("register"));
        }
        if !shared.context.knows(region.kind()) {
            let mut error = Error::unsupported("register", "this UCX cannot reach memory of this kind")
                .with_backend(BACKEND)
                .with_context("memory", region.kind())
                .with_context("library", &library.path)
                .with_context("version", library.version_text());
            if let MemoryKind::Cuda(_) = region.kind() {
                error = error.with_remedy("use a UCX that was built with CUDA, where CUDA's driver is installed");
            }
            return Err(error);
        }
        // Not under the lock: pinning takes its time.
        let memory = Memory::map(&shared.context, region, shared.options.piece_bytes).map_err(|status| {
            failed("register", "the memory cannot be registered", library, status)
                .with_context("bytes", region.bytes())
                .with_remedy("raise the limit on locked memory (ulimit -l), or register smaller pieces: piece_bytes=...")
        })?;
        let memory = Arc::new(memory);
        shared.look(|core| {
            if core.closed {
                return Err(closed("register"));
            }
            core.regions.insert(memory).ok_or_else(|| {
                Error::new(ErrorKind::Resources, "register", "as many regions as can be named")
                    .with_backend(BACKEND)
            })
        })
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        let removed = self.shared.look(|core| core.regions.remove(region));
        // Ended here, if nothing in flight uses it: not under the lock.
        removed.map(drop).ok_or_else(|| stale("deregister", "region", region))
    }

    fn key_blob(&self, region: RegionId) -> Result<KeyBlob> {
        let memory = self.shared.look(|core| core.regions.get(region).cloned());
        let memory = memory.ok_or_else(|| stale("key_blob", "region", region))?;
        let library = self.shared.context.library();
        let packed = memory
            .pack()
            .map_err(|status| failed("key_blob", "UCX gives no key", library, status))?;
        let blob = Blob {
            fabric: wire::Text::new(FABRIC)?,
            owner: Incarnation::from_bytes(self.shared.incarnation),
            region: (region.slot(), region.generation()),
            address: packed.address,
            bytes: packed.bytes,
            stride: packed.stride,
            keys: packed.keys.into_iter().map(UcxKey).collect(),
        };
        blob.encode().map_err(|error| {
            error
                .with_kind(ErrorKind::Resources)
                .with_backend(BACKEND)
                .with_context("pieces", blob.keys.len())
                .with_remedy("register smaller regions, or in larger pieces: piece_bytes=...")
        })
    }

    fn import_key(&self, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        self.shared.with(|core| {
            if core.closed {
                return Err(closed("import_key"));
            }
            let known = core.peer("import_key", peer)?;
            if !known.is_open() {
                return Err(known.over("import_key").with_context("peer", peer));
            }
            let owner = known.incarnation;
            let blob = Blob::decode(blob)?;
            if *blob.owner.as_bytes() != owner {
                return Err(malformed("import_key", "the key is of another incarnation"));
            }
            core.way("import_key", peer)?;
            let way = core.peers.get(peer).and_then(|known| known.way.as_ref());
            let way = way.ok_or_else(|| down("import_key", "the connection is over"))?;
            let keys = blob.keys.iter().map(|key| key.0.as_slice());
            let place = (blob.address, blob.bytes, blob.stride);
            let key = Key::new(&way.endpoint, blob.region, place, keys);
            let key = key.map_err(|status| {
                let error = malformed("import_key", "UCX does not take the key")
                    .with_native(status.0.into())
                    .with_context("ucx", core.library.words(status.0));
                match core.peers.get(peer) {
                    Some(known) => of_versions(error, core.library, known)
                        .with_remedy("use the same version of UCX on both sides"),
                    None => error,
                }
            })?;
            let handle = core.keys.insert(Imported { peer, key: Arc::new(key) }).ok_or_else(|| {
                Error::new(ErrorKind::Resources, "import_key", "as many keys as can be named")
                    .with_backend(BACKEND)
            })?;
            if let Some(known) = core.peers.get_mut(peer) {
                known.keys.insert(handle);
            }
            Ok(handle)
        })
    }

    fn release_key(&self, peer: PeerId, region: RemoteRegionId) -> Result<()> {
        self.shared.look(|core| {
            core.peer("release_key", peer)?;
            if core.keys.get(region).is_none_or(|key| key.peer != peer) {
                return Err(stale("release_key", "key", region));
            }
            core.keys.remove(region);
            if let Some(known) = core.peers.get_mut(peer) {
                known.keys.remove(&region);
            }
            Ok(())
        })
    }
}
