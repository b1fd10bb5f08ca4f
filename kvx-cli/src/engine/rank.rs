//! One rank: its memory, and its port to the fabric.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_core::id::PeerId;
use kvx_core::layout::RankLayout;
use kvx_core::memory::{KeyBlob, Region};
use kvx_core::port::{Port, RegionSet};
use kvx_core::{Error, ErrorKind, Result};

use crate::remote::Memory;

/// One rank of an engine. Its number counts over all replicas.
#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) layout: RankLayout,
    pub(crate) regions: Vec<Region>,
    pub(crate) port: Port,
    pub(crate) set: RegionSet,
    keys: Vec<(KeyBlob, u64)>,
    /// Ranks of the other engine that it has met, by number.
    peers: BTreeMap<usize, PeerId>,
    /// Notifications that arrived and were not asked for yet: from which rank, and what.
    notes: BTreeMap<(usize, u64), u32>,
}

impl Rank {
    /// Makes the rank's memory and registers it with `port`.
    pub(crate) fn new(layout: RankLayout, port: Port, memory: Memory) -> Result<Self> {
        let make = |bytes| match memory {
            Memory::Heap => Region::host(bytes),
            Memory::Backend => port.allocate(bytes),
        };
        let regions =
            layout.regions().iter().map(|region| make(region.bytes)).collect::<Result<Vec<_>>>()?;
        let ids = regions.iter().map(|region| port.register(region)).collect::<Result<Vec<_>>>()?;
        let keys = ids
            .iter()
            .zip(&regions)
            .map(|(id, region)| Ok((port.key_blob(*id)?, region.bytes())))
            .collect::<Result<Vec<_>>>()?;
        let set = port.region_set(&ids)?;
        let (peers, notes) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self { layout, regions, port, set, keys, peers, notes })
    }

    /// Keys and sizes of its regions.
    pub(crate) fn keys(&self) -> &[(KeyBlob, u64)] {
        &self.keys
    }

    /// From now on, rank `number` of the other engine is this peer.
    pub(crate) fn meets(&mut self, number: usize, peer: PeerId) {
        self.peers.insert(number, peer);
    }

    /// The peer that rank number `rank` of the other engine is.
    pub(crate) fn peer(&self, rank: usize) -> Result<PeerId> {
        self.peers.get(&rank).copied().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "demo", "two ranks that are paired have not met")
                .with_context("rank", rank)
        })
    }

    /// Takes the notifications that have arrived.
    pub(crate) fn listen(&mut self) -> Result<()> {
        self.port.poll();
        while let Some((peer, bytes)) = self.port.next_notification() {
            let rank = self.peers.iter().find(|(_, known)| **known == peer).map(|(rank, _)| *rank);
            let request = <[u8; 8]>::try_from(&*bytes).ok().map(u64::from_le_bytes);
            let (Some(rank), Some(request)) = (rank, request) else {
                return Err(Error::peer("demo", "a notification that nobody sent")
                    .with_context("peer", peer)
                    .with_context("bytes", bytes.len()));
            };
            *self.notes.entry((rank, request)).or_default() += 1;
        }
        if let Some((peer, error)) = self.port.next_peer_down() {
            let lost = Error::peer("demo", "a peer went down").with_context("peer", peer);
            return Err(match error {
                Some(error) => lost.with_source(error),
                None => lost,
            });
        }
        Ok(())
    }

    /// Notifications that came and that nobody waited for.
    pub(crate) fn strays(&self) -> usize {
        self.notes.len()
    }

    /// Whether rank `from` has told about `request`, exactly once. Forgets it.
    pub(crate) fn told(&mut self, from: usize, request: u64) -> Result<bool> {
        match self.notes.remove(&(from, request)) {
            None => Ok(false),
            Some(1) => Ok(true),
            Some(times) => Err(Error::peer("demo", "a notification came more than once")
                .with_context("request", request)
                .with_context("times", times)),
        }
    }
}

/// Text of the notification for a request.
pub(crate) const fn note(request: u64) -> [u8; 8] {
    request.to_le_bytes()
}

/// Lets two ranks meet: the whole handshake, with `initiator` beginning, and then the keys of `target`'s memory.
pub(crate) async fn meet(
    initiator: (&mut Rank, usize),
    target: (&mut Rank, usize),
    bound: Duration,
) -> Result<()> {
    let ((one, one_number), (other, other_number)) = (initiator, target);
    let offer = one.port.offer()?;
    let (of_one, reply) = other.port.accept(&offer)?;
    let (of_other, completion) = one.port.complete(&reply)?;
    other.port.finish(&completion)?;
    let connected = async {
        one.port.connect(of_other).await?;
        other.port.connect(of_one).await
    };
    tokio::time::timeout(bound, connected).await.map_err(|_| {
        Error::new(ErrorKind::Fabric, "connect", "two ranks could not connect in time")
            .with_context("seconds", bound.as_secs())
    })??;
    one.port.add_regions(of_other, &other.keys)?;
    one.peers.insert(other_number, of_other);
    other.peers.insert(one_number, of_one);
    Ok(())
}
