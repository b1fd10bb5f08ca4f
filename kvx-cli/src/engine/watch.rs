//! Watches memory that must not change.

use kvx_core::Result;
use kvx_core::layout::{GroupKind, RankLayout, Tensor};
use kvx_core::memory::Region;
use serde::{Deserialize, Serialize};

use super::tags::mix;

/// Sums of some blocks of a rank's memory.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Which tensor, which logical block, and the sum of its bytes.
    sums: Vec<(usize, u32, u64)>,
}

/// A block that changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Changed {
    pub(crate) layer: u32,
    pub(crate) role: String,
    pub(crate) block: u32,
}

impl Watch {
    /// Sums the blocks `blocks` (by group) of every tensor of a rank.
    pub(crate) fn new(
        layout: &RankLayout,
        regions: &[Region],
        blocks: &[Vec<u32>],
    ) -> Result<Self> {
        let mut sums = Vec::new();
        for (index, tensor) in layout.tensors().iter().enumerate() {
            for block in blocks.get(tensor.group as usize).into_iter().flatten() {
                sums.push((index, *block, sum(layout, tensor, regions, *block)?));
            }
        }
        Ok(Self { sums })
    }

    /// How many blocks of tensors are watched.
    pub(crate) const fn len(&self) -> usize {
        self.sums.len()
    }

    /// Sums them again, and says which changed.
    pub(crate) fn changed(self, layout: &RankLayout, regions: &[Region]) -> Result<Vec<Changed>> {
        let mut changed = Vec::new();
        for (index, block, before) in self.sums {
            let tensor = &layout.tensors()[index];
            if sum(layout, tensor, regions, block)? != before {
                let role = tensor.role.to_string();
                changed.push(Changed { layer: tensor.layer, role, block });
            }
        }
        Ok(changed)
    }
}

/// A sum over all bytes of a logical block of a tensor, from its first to its last element.
fn sum(layout: &RankLayout, tensor: &Tensor, regions: &[Region], block: u32) -> Result<u64> {
    let group = &layout.groups()[tensor.group as usize];
    let ratio = if group.kind == GroupKind::State { 1 } else { group.kernel_ratio() };
    let region = &regions[tensor.region as usize];
    let mut sum = 0;
    let mut buffer = [0; 4096];
    for kernel in 0..ratio {
        let number = u64::from(block) * u64::from(ratio) + u64::from(kernel);
        let stride = if tensor.block.extent == 1 { 0 } else { tensor.block.stride };
        let mut at = tensor.base + stride * number;
        let end = at + tensor.block_span().unwrap_or_default();
        while at < end {
            let part = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
            region.read_at(at, &mut buffer[..part])?;
            sum = buffer[..part].chunks(8).fold(sum, |sum: u64, bytes| {
                let mut word = [0; 8];
                word[..bytes.len()].copy_from_slice(bytes);
                mix(sum ^ u64::from_le_bytes(word)).wrapping_add(1)
            });
            at += part as u64;
        }
    }
    Ok(sum)
}
