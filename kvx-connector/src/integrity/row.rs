//! One row: its bytes, and their digest.

use kvx_core::Result;
use kvx_core::layout::{Role, Tensor, TensorKey};
use kvx_core::memory::Region;
use twox_hash::XxHash3_128;

/// Reads the row that begins at `at` of `region`: the elements of one head at one position.
pub(super) fn read(region: &Region, tensor: &Tensor, at: u64, row: &mut Vec<u8>) -> Result<()> {
    let element = tensor.dtype.bytes();
    let bytes = u64::from(tensor.dim.extent) * element;
    row.resize(usize::try_from(bytes).unwrap_or(usize::MAX), 0);
    if tensor.dim.extent <= 1 || tensor.dim.stride == element {
        return region.read_at(at, row);
    }
    let width = usize::try_from(element).unwrap_or(usize::MAX);
    for (index, element) in (0_u64..).zip(row.chunks_exact_mut(width)) {
        region.read_at(at + index * tensor.dim.stride, element)?;
    }
    Ok(())
}

/// Digest of a row under its logical name.
pub(super) fn digest(key: TensorKey, head: u32, logical: u64, row: &[u8]) -> u128 {
    let name =
        mixed(mixed(u64::from(key.layer) << 32 | u64::from(code(key.role))) ^ u64::from(head));
    let name = mixed(name ^ mixed(logical));
    let bytes = XxHash3_128::oneshot(row);
    #[expect(clippy::cast_possible_truncation, reason = "its lower half")]
    let (low, high) = (bytes as u64, (bytes >> 64) as u64);
    // Each half depends on all bytes and on the name, and not linearly: in a sum, rows that changed places do not cancel out.
    u128::from(mixed(low ^ name)) | u128::from(mixed(high.wrapping_add(name))) << 64
}

/// A number of its own for each role: part of what both sides must agree on.
const fn code(role: Role) -> u32 {
    match role {
        Role::Key => 1,
        Role::Value => 2,
        Role::Latent => 3,
        Role::IndexKey => 4,
        Role::IndexScale => 5,
        Role::KeyScale => 6,
        Role::ValueScale => 7,
        Role::LatentScale => 8,
        Role::SsmState => 9,
        Role::ConvState(part) => 0x1_0000 | part as u32,
        Role::Aux(item) => 0x2_0000 | item as u32,
        // A role that this version does not know is in no layout that it has read.
        _ => u32::MAX,
    }
}

/// The finaliser of `SplitMix64`.
const fn mixed(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
