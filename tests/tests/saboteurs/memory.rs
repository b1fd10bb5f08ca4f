//! Registrations and keys.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, Submit};
use kvx_core::id::{PeerId, RegionId, RemoteRegionId};
use kvx_core::memory::{KeyBlob, MemoryKind, Region};
use kvx_core::{Error, ErrorKind, Result};

use crate::tools::{InFlight, Queue, lock};
use crate::wrapper::{At, Post, Sabotage};

/// `register` is another.
pub(crate) struct Registers(pub(crate) fn(&At, &Region) -> Result<RegionId>);

impl Sabotage for Registers {
    fn register(&self, at: &At, region: &Region) -> Result<RegionId> {
        (self.0)(at, region)
    }
}

/// `allocate` is another.
pub(crate) struct Allocates(pub(crate) fn(&At, u64) -> Result<Region>);

impl Sabotage for Allocates {
    fn allocate(&self, at: &At, bytes: u64) -> Result<Region> {
        (self.0)(at, bytes)
    }
}

pub(crate) fn dirty(at: &At, bytes: u64) -> Result<Region> {
    let region = at.backend.allocate(bytes)?;
    region.write_at(bytes - 1, &[1])?;
    Ok(region)
}

pub(crate) fn too_little(at: &At, bytes: u64) -> Result<Region> {
    at.backend.allocate(if bytes == 0 { 0 } else { bytes - 1 })
}

pub(crate) fn nothing_for_something(at: &At, bytes: u64) -> Result<Region> {
    at.backend.allocate(bytes.max(1))
}

/// Every allocation of a size is the same memory.
#[derive(Default)]
pub(crate) struct AllocatesShared {
    known: Mutex<BTreeMap<u64, Region>>,
}

impl Sabotage for AllocatesShared {
    fn allocate(&self, at: &At, bytes: u64) -> Result<Region> {
        let mut known = lock(&self.known);
        if let Some(region) = known.get(&bytes) {
            // Zeroed, as it must be.
            region.write_at(0, &vec![0; usize::try_from(bytes).unwrap_or(0)])?;
            return Ok(region.clone());
        }
        let region = at.backend.allocate(bytes)?;
        known.insert(bytes, region.clone());
        Ok(region)
    }
}

pub(crate) fn small_refused(at: &At, region: &Region) -> Result<RegionId> {
    if region.bytes() < 64 {
        return Err(Error::new(ErrorKind::Resources, "register", "too small"));
    }
    at.backend.register(region)
}

pub(crate) fn device_for_host(at: &At, region: &Region) -> Result<RegionId> {
    match region.kind() {
        MemoryKind::Host => at.backend.register(region),
        _ => at.backend.register(&Region::host(region.bytes())?),
    }
}

/// First and last byte of a region.
fn range(region: &Region) -> (usize, usize) {
    let first = region.address().as_ptr().addr();
    (first, first + usize::try_from(region.bytes() - 1).unwrap_or(usize::MAX))
}

/// What each side has registered, by range.
type Ranges = Mutex<Vec<(usize, (usize, usize), RegionId)>>;

fn overlaps(one: (usize, usize), other: (usize, usize)) -> bool {
    one.0 <= other.1 && other.0 <= one.1
}

/// One registration for all ranges that overlap.
#[derive(Default)]
pub(crate) struct Shared {
    ranges: Ranges,
}

impl Sabotage for Shared {
    fn register(&self, at: &At, region: &Region) -> Result<RegionId> {
        let mut ranges = lock(&self.ranges);
        let range = range(region);
        let same =
            ranges.iter().find(|(index, other, _)| *index == at.index && overlaps(*other, range));
        if let Some((_, _, handle)) = same {
            return Ok(*handle);
        }
        let handle = at.backend.register(region)?;
        ranges.push((at.index, range, handle));
        Ok(handle)
    }
}

/// Ends all registrations of overlapping ranges together.
#[derive(Default)]
pub(crate) struct EndsOverlapping {
    ranges: Ranges,
}

impl Sabotage for EndsOverlapping {
    fn register(&self, at: &At, region: &Region) -> Result<RegionId> {
        let handle = at.backend.register(region)?;
        lock(&self.ranges).push((at.index, range(region), handle));
        Ok(handle)
    }

    fn deregister(&self, at: &At, region: RegionId) -> Result<()> {
        at.backend.deregister(region)?;
        let ranges = lock(&self.ranges);
        let ended =
            ranges.iter().find(|(index, _, handle)| *index == at.index && *handle == region);
        let Some((_, ended, _)) = ended else { return Ok(()) };
        for (index, range, handle) in &*ranges {
            if *index == at.index && *handle != region && overlaps(*range, *ended) {
                let _ = at.backend.deregister(*handle);
            }
        }
        Ok(())
    }
}

/// `deregister` does nothing.
#[derive(Default)]
pub(crate) struct DeregistersNothing;

impl Sabotage for DeregistersNothing {
    fn deregister(&self, _: &At, _: RegionId) -> Result<()> {
        Ok(())
    }
}

#[derive(Default)]
pub(crate) struct UnknownAccepted;

impl Sabotage for UnknownAccepted {
    fn deregister(&self, at: &At, region: RegionId) -> Result<()> {
        let _ = at.backend.deregister(region);
        Ok(())
    }
}

/// The more there are, the longer it takes.
#[derive(Default)]
pub(crate) struct SlowsDown {
    count: Mutex<u32>,
}

impl Sabotage for SlowsDown {
    fn register(&self, at: &At, region: &Region) -> Result<RegionId> {
        let mut count = lock(&self.count);
        *count += 1;
        let (begin, takes) = (Instant::now(), Duration::from_nanos(150) * *count);
        while begin.elapsed() < takes {
            std::hint::spin_loop();
        }
        at.backend.register(region)
    }
}

/// Lets go of memory when it is deregistered, whatever is in flight.
#[derive(Default)]
pub(crate) struct DroppedInFlight {
    held: Mutex<BTreeMap<(usize, RegionId), Region>>,
}

impl Sabotage for DroppedInFlight {
    fn register(&self, at: &At, region: &Region) -> Result<RegionId> {
        // SAFETY: the kit's memory lives as long as the run of a clause, and so does the fabric that uses it here.
        let borrowed =
            unsafe { Region::borrowed(region.address(), region.bytes(), region.kind()) }?;
        let handle = at.backend.register(&borrowed)?;
        lock(&self.held).insert((at.index, handle), region.clone());
        Ok(handle)
    }

    fn deregister(&self, at: &At, region: RegionId) -> Result<()> {
        at.backend.deregister(region)?;
        lock(&self.held).remove(&(at.index, region));
        Ok(())
    }
}

#[derive(Default)]
pub(crate) struct NeverReleased {
    held: Mutex<Vec<Region>>,
}

impl Sabotage for NeverReleased {
    fn register(&self, at: &At, region: &Region) -> Result<RegionId> {
        lock(&self.held).push(region.clone());
        at.backend.register(region)
    }
}

/// Forgets what is in flight over a region that is deregistered.
#[derive(Default)]
pub(crate) struct LosesTransfers {
    in_flight: InFlight,
    lost: Mutex<BTreeSet<u64>>,
    queue: Queue,
}

impl Sabotage for LosesTransfers {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        self.in_flight.submit(at, post)
    }

    fn deregister(&self, at: &At, region: RegionId) -> Result<()> {
        let uses = self.in_flight.list(at, |held| held.segments.iter().any(|s| s.local == region));
        lock(&self.lost).extend(uses.iter().map(|held| held.id.0));
        at.backend.deregister(region)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.queue.give(at, events, |event| match event {
            Event::Settled { id, .. } if lock(&self.lost).contains(&id.0) => Vec::new(),
            other => vec![other],
        });
    }
}

/// The key blobs that were published, and by which side.
#[derive(Default)]
pub(crate) struct Published(Mutex<Vec<(usize, RegionId, Vec<u8>)>>);

impl Published {
    fn key_blob(&self, at: &At, region: RegionId) -> Result<KeyBlob> {
        let blob = at.backend.key_blob(region)?;
        lock(&self.0).push((at.index, region, blob.as_bytes().to_vec()));
        Ok(blob)
    }

    fn find(&self, which: impl Fn(&[u8]) -> bool) -> Option<(usize, RegionId, Vec<u8>)> {
        lock(&self.0).iter().find(|(_, _, blob)| which(blob)).cloned()
    }
}

/// What becomes of a key blob that is not right.
pub(crate) struct Imports {
    how: Import,
    published: Published,
}

#[derive(Clone, Copy)]
pub(crate) enum Import {
    PanicsOnShort,
    PanicsOnFlipped,
    FillsUpCut,
    BlamesCaller,
    AcceptsForeign,
    AcceptsPublished,
}

impl Imports {
    pub(crate) fn new(how: Import) -> Self {
        Self { how, published: Published::default() }
    }
}

impl Sabotage for Imports {
    fn key_blob(&self, at: &At, region: RegionId) -> Result<KeyBlob> {
        self.published.key_blob(at, region)
    }

    fn import_key(&self, at: &At, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        let bytes = blob.as_bytes();
        let accepted = Ok(RemoteRegionId::new(99, 0));
        match self.how {
            Import::PanicsOnShort => assert!(bytes.len() > 8, "index out of bounds"),
            Import::PanicsOnFlipped => {
                let flips = |known: &[u8]| -> u32 {
                    known.iter().zip(bytes).map(|(a, b)| (a ^ b).count_ones()).sum()
                };
                let near =
                    self.published.find(|known| known.len() == bytes.len() && flips(known) == 1);
                assert!(near.is_none(), "no such variant");
            }
            _ => {}
        }
        let import = at.backend.import_key(peer, blob);
        match (self.how, import) {
            (Import::FillsUpCut, Err(error)) => {
                match self.published.find(|all| all.starts_with(bytes)) {
                    Some((_, _, whole)) => at.backend.import_key(peer, &KeyBlob::new(whole)?),
                    None => Err(error),
                }
            }
            (Import::BlamesCaller, Err(error)) => Err(error.with_kind(ErrorKind::Misuse)),
            (Import::AcceptsForeign, Err(_)) => accepted,
            (Import::AcceptsPublished, Err(error)) => {
                self.published.find(|known| known == bytes).map_or(Err(error), |_| accepted)
            }
            (_, import) => import,
        }
    }
}

/// `release_key` answers `Ok`, whether it releases or not.
pub(crate) struct Releases {
    pub(crate) honest: bool,
}

impl Sabotage for Releases {
    fn release_key(&self, at: &At, peer: PeerId, key: RemoteRegionId) -> Result<()> {
        if self.honest {
            let _ = at.backend.release_key(peer, key);
        }
        Ok(())
    }
}

/// Imports a key anew when it is stale.
#[derive(Default)]
pub(crate) struct KeysOutlive {
    blobs: Mutex<BTreeMap<(usize, RemoteRegionId), Vec<u8>>>,
}

impl Sabotage for KeysOutlive {
    fn import_key(&self, at: &At, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        let key = at.backend.import_key(peer, blob)?;
        lock(&self.blobs).insert((at.index, key), blob.as_bytes().to_vec());
        Ok(key)
    }

    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        post.to(at).or_else(|error| {
            let mut segments = post.segments.to_vec();
            for segment in &mut segments {
                let known = lock(&self.blobs).get(&(at.index, segment.remote)).cloned();
                let Some(blob) = known else { return Err(error) };
                segment.remote = at.backend.import_key(post.peer, &KeyBlob::new(blob)?)?;
            }
            Post { segments: &segments, ..post }.to(at)
        })
    }
}

/// The key of a region that is gone reaches the newest one.
#[derive(Default)]
pub(crate) struct KeyNamesSlot {
    published: Published,
    imported: Mutex<BTreeMap<(usize, RemoteRegionId), (usize, RegionId)>>,
    gone: Mutex<BTreeSet<(usize, RegionId)>>,
    newest: Mutex<BTreeMap<usize, Vec<u8>>>,
}

impl Sabotage for KeyNamesSlot {
    fn register(&self, at: &At, region: &Region) -> Result<RegionId> {
        let handle = at.backend.register(region)?;
        let blob = at.backend.key_blob(handle)?;
        lock(&self.newest).insert(at.index, blob.as_bytes().to_vec());
        Ok(handle)
    }

    fn deregister(&self, at: &At, region: RegionId) -> Result<()> {
        lock(&self.gone).insert((at.index, region));
        at.backend.deregister(region)
    }

    fn key_blob(&self, at: &At, region: RegionId) -> Result<KeyBlob> {
        self.published.key_blob(at, region)
    }

    fn import_key(&self, at: &At, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        let key = at.backend.import_key(peer, blob)?;
        if let Some((owner, region, _)) = self.published.find(|known| known == blob.as_bytes()) {
            lock(&self.imported).insert((at.index, key), (owner, region));
        }
        Ok(key)
    }

    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        let mut segments = post.segments.to_vec();
        for segment in &mut segments {
            let named = lock(&self.imported).get(&(at.index, segment.remote)).copied();
            if let Some(named) = named.filter(|named| lock(&self.gone).contains(named))
                && let Some(newest) = lock(&self.newest).get(&named.0).cloned()
            {
                segment.remote = at.backend.import_key(post.peer, &KeyBlob::new(newest)?)?;
            }
        }
        Post { segments: &segments, ..post }.to(at)
    }
}
