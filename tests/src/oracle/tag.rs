//! Values: tags of logical elements, and noise for all other bytes.

use kvx_core::layout::{Role, TensorKey};

/// A thorough mix of 64 bits (the finalizer of SplitMix64).
const fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

fn join(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |all, part| mix(all ^ mix(*part)))
}

/// The value of a logical element: as many of its first bytes are used as the element has. `salt` is 0 for what all
/// replicas of a producer hold alike, and differs from rank to rank for slots that hold no token.
pub(super) fn tag(key: TensorKey, head: u32, number: u64, dim: u32, salt: u64) -> [u8; 8] {
    let role = match key.role {
        Role::Key => 1,
        Role::Value => 2,
        Role::Latent => 3,
        Role::IndexKey => 4,
        Role::IndexScale => 5,
        Role::KeyScale => 6,
        Role::ValueScale => 7,
        Role::LatentScale => 8,
        Role::SsmState => 9,
        Role::ConvState(part) => 0x100 + u64::from(part),
        Role::Aux(item) => 0x10000 + u64::from(item),
        _ => 0,
    };
    join(&[key.layer.into(), role, head.into(), number, dim.into(), salt]).to_le_bytes()
}

/// What a region holds before anything is put into it.
pub(super) fn noise(side: u64, rank: usize, region: usize, bytes: usize) -> Vec<u8> {
    let seed = join(&[side, rank as u64, region as u64]);
    let words = (0_u64..).flat_map(|word| mix(seed ^ word).to_le_bytes());
    words.take(bytes).collect()
}
