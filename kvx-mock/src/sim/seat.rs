//! An engine's place in the exchange: its newest life, what it holds, and whom it has met.

use std::sync::Arc;

use kvx_core::backend::TransferBackend;
use kvx_core::id::{PeerId, RegionId, RemoteRegionId};
use kvx_core::memory::{KeyBlob, Region};

use super::checker::LifeId;

/// Sources first, then targets.
pub(super) const SLOTS: u64 = 32;
/// From the beginning of one slot to the next; what is between two is nobody's.
pub(super) const STRIDE: u64 = 64;
pub(super) const GUARD: u64 = 8;
pub(super) const SLOT_BYTES: u64 = STRIDE - 2 * GUARD;
pub(super) const REGION_BYTES: u64 = SLOTS * STRIDE;

/// Where a slot begins.
pub(super) const fn slot(number: u64) -> u64 {
    number * STRIDE + GUARD
}

/// An engine.
pub(super) struct Seat {
    pub(super) name: Arc<str>,
    /// None while it is dead.
    pub(super) alive: Option<Alive>,
}

/// What one life of an engine has.
pub(super) struct Alive {
    pub(super) life: LifeId,
    pub(super) backend: Arc<dyn TransferBackend>,
    pub(super) region: Region,
    pub(super) local: RegionId,
    pub(super) key: KeyBlob,
    pub(super) links: Vec<Link>,
    /// Peers that are down.
    pub(super) stale: Vec<PeerId>,
}

/// An engine that another has met.
#[derive(Clone, Copy)]
pub(super) struct Link {
    pub(super) peer: PeerId,
    pub(super) other: LifeId,
    /// There once the handshake is complete.
    pub(super) key: Option<RemoteRegionId>,
    pub(super) severed: bool,
}

impl Alive {
    pub(super) fn link(&mut self, peer: PeerId) -> Option<&mut Link> {
        self.links.iter_mut().find(|link| link.peer == peer)
    }
}

/// Bytes that nobody else has: different for every life, place and version.
pub(super) fn tag(number: u64, bytes: usize) -> Vec<u8> {
    let mut state = number;
    let words = std::iter::repeat_with(|| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    });
    words.take(bytes.div_ceil(8)).flat_map(u64::to_le_bytes).take(bytes).collect()
}
