//! The kit's own choices: all from one seed.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A stream of numbers (SplitMix64). Shared by reference, so that a script need not carry it about.
#[derive(Debug)]
pub(crate) struct Dice(AtomicU64);

impl Dice {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    pub(crate) fn next(&self) -> u64 {
        mixed(self.0.fetch_add(GOLDEN, Relaxed).wrapping_add(GOLDEN))
    }

    /// A number below `limit`, which is not zero.
    pub(crate) fn below(&self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// A number from `low` to `high`, both included.
    pub(crate) fn between(&self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    pub(crate) fn bytes(&self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next().to_le_bytes()[0]).collect()
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

const fn mixed(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// The first bytes of a memory filled from `seed`: neighbours differ, and so do memories.
pub(crate) fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    let count = usize::try_from(bytes).unwrap_or(0);
    let mut all = Vec::with_capacity(count + 8);
    for index in 0..bytes.div_ceil(8) {
        let word = mixed(seed.wrapping_mul(GOLDEN).wrapping_add(index));
        all.extend_from_slice(&word.to_le_bytes());
    }
    all.truncate(count);
    all
}
