//! One block of one layer: which tensors are in it, and where.

use super::{ConvOrder, NamedLayout};
use crate::layout::geometry::{AttentionGeometry, LayerKind, MlaGeometry, ScalePer, StateGeometry};
use crate::layout::{Axis, Dtype, Granularity, HeadShard, RankCoords, Role};
use crate::{Error, Result};

/// Elements to which a TPU pads a row.
const PALLAS_ROW: u64 = 128;
/// Bytes of one lane of a TPU, which elements narrower than that share.
const PALLAS_LANE: u64 = 4;

/// A tensor within one kernel block.
#[derive(Clone, Debug)]
pub(in crate::layout) struct View {
    pub(in crate::layout) role: Role,
    pub(in crate::layout) dtype: Dtype,
    /// Of its first element in the page, in bytes.
    pub(in crate::layout) offset: u64,
    pub(in crate::layout) token: Axis,
    pub(in crate::layout) head: Axis,
    pub(in crate::layout) dim: Axis,
    pub(in crate::layout) heads: HeadShard,
    pub(in crate::layout) granularity: Granularity,
}

/// One kernel block of one area of memory; an area is `[blocks, page]`.
#[derive(Clone, Debug)]
pub(in crate::layout) struct Page {
    /// Bytes from one block to the next.
    pub(in crate::layout) bytes: u64,
    pub(in crate::layout) views: Vec<View>,
}

/// How one rank's blocks are laid out.
#[derive(Clone, Copy, Debug)]
pub(in crate::layout) struct Style {
    pub(in crate::layout) layout: NamedLayout,
    pub(in crate::layout) conv: ConvOrder,
    pub(in crate::layout) coords: RankCoords,
    /// Tokens per kernel block.
    pub(in crate::layout) tokens: u32,
}

/// Multiplies, or says that a layout is too large.
pub(in crate::layout) fn product(factors: &[u64]) -> Result<u64> {
    factors.iter().try_fold(1_u64, |all, factor| all.checked_mul(*factor)).ok_or_else(too_large)
}

/// Adds, or says that a layout is too large.
pub(in crate::layout) fn sum(a: u64, b: u64) -> Result<u64> {
    a.checked_add(b).ok_or_else(too_large)
}

/// The next multiple of `step`.
pub(in crate::layout) fn align(bytes: u64, step: u64) -> Result<u64> {
    bytes.checked_next_multiple_of(step).ok_or_else(too_large)
}

fn too_large() -> Error {
    Error::config("layout", "the cache is larger than 2^64 bytes")
}

impl Style {
    /// The areas of one layer, in their order in memory.
    pub(in crate::layout) fn pages(self, kind: &LayerKind) -> Result<Vec<Page>> {
        match kind {
            LayerKind::Attention(attention) => self.attention(attention),
            LayerKind::Mla(mla) => self.mla(mla),
            LayerKind::State(state) => Ok(vec![self.state(state)?]),
            LayerKind::Empty => Ok(Vec::new()),
        }
    }

    fn shard(self, total: u32) -> (Axis, HeadShard) {
        let range = self.coords.heads(total);
        (Axis::new(range.end - range.start, 0), HeadShard { first: range.start, total })
    }

    fn attention(self, attention: &AttentionGeometry) -> Result<Vec<Page>> {
        use NamedLayout as Named;
        let (head, heads) = self.shard(attention.kv_heads);
        let count = u64::from(head.extent);
        let tokens = u64::from(self.tokens);
        let element = attention.dtype.bytes();
        let (key, value) =
            (u64::from(attention.key_dim) * element, u64::from(attention.value_dim) * element);
        let view = |role, extent, [offset, token, head_stride, dim]: [u64; 4]| View {
            role,
            dtype: attention.dtype,
            offset,
            token: Axis::new(self.tokens, token),
            head: Axis::new(head.extent, head_stride),
            dim: Axis::new(extent, dim),
            heads,
            granularity: Granularity::Token,
        };
        let k = |at| view(Role::Key, attention.key_dim, at);
        let v = |at| view(Role::Value, attention.value_dim, at);
        let (key_plane, value_plane) =
            (product(&[tokens, count, key])?, product(&[tokens, count, value])?);
        let row = key + value;
        let block = sum(key_plane, value_plane)?;
        let together = |views: [View; 2], bytes| vec![Page { bytes, views: views.into() }];
        let nhd = |at: u64, row: u64| [at, count * row, row, element];
        let hnd = |at: u64, row: u64| [at, row, tokens * row, element];
        let apart = |key_at, value_at| {
            vec![
                Page { bytes: key_plane, views: vec![k(key_at)] },
                Page { bytes: value_plane, views: vec![v(value_at)] },
            ]
        };
        let mut pages = match self.layout {
            Named::FlashAttentionNhd => apart(nhd(0, key), nhd(0, value)),
            Named::FlashAttentionHnd => apart(hnd(0, key), hnd(0, value)),
            // In a cross-layer block, the layer's share; heads move outside when the layers are put together.
            Named::FlashInferNhd | Named::CrossLayerNhd => {
                together([k(nhd(0, key)), v(nhd(key_plane, value))], block)
            }
            Named::FlashInferHnd | Named::CrossLayerHnd => {
                together([k(hnd(0, key)), v(hnd(key_plane, value))], block)
            }
            Named::PackedNhd | Named::CrossLayerPackedNhd => {
                together([k(nhd(0, row)), v(nhd(key, row))], block)
            }
            Named::PackedHnd | Named::CrossLayerPackedHnd => {
                together([k(hnd(0, row)), v(hnd(key, row))], block)
            }
            Named::Pallas => {
                let lanes = (PALLAS_LANE / element).max(1);
                let half = PALLAS_ROW / 2;
                let (rows, value_at, head, wide) =
                    if [attention.key_dim, attention.value_dim].map(u64::from) == [half, half] {
                        // A key and its value fill one row.
                        (align(count, lanes)?, key, row, row)
                    } else {
                        let wide = align(key.max(value), PALLAS_ROW * element)?;
                        (align(2 * count, lanes)?, wide, 2 * wide, wide)
                    };
                let token = product(&[rows, wide])?;
                together(
                    [k([0, token, head, element]), v([value_at, token, head, element])],
                    product(&[tokens, token])?,
                )
            }
            Named::CpuTransposed => {
                let head = product(&[tokens, row])?;
                together(
                    [
                        k([0, element, head, tokens * element]),
                        v([tokens * key, value, head, element]),
                    ],
                    block,
                )
            }
        };
        if let Some(scales) = attention.scales {
            for role in [Role::KeyScale, Role::ValueScale] {
                let (token, granularity) = match scales.per {
                    ScalePer::TokenHead => (self.tokens, Granularity::Token),
                    ScalePer::BlockHead => (1, Granularity::Block),
                };
                let size = scales.dtype.bytes();
                pages.push(Page {
                    bytes: product(&[token.into(), count, size])?,
                    views: vec![View {
                        role,
                        dtype: scales.dtype,
                        offset: 0,
                        token: Axis::new(token, count * size),
                        head: Axis::new(head.extent, size),
                        dim: Axis::new(1, size),
                        heads,
                        granularity,
                    }],
                });
            }
        }
        Ok(pages)
    }

    fn mla(self, mla: &MlaGeometry) -> Result<Vec<Page>> {
        let plane = |role, dtype: Dtype, dim: u32, offset| {
            let row = u64::from(dim) * dtype.bytes();
            let view = View {
                role,
                dtype,
                offset,
                token: Axis::new(self.tokens, row),
                head: Axis::new(1, row),
                dim: Axis::new(dim, dtype.bytes()),
                heads: HeadShard { first: 0, total: 1 },
                granularity: Granularity::Token,
            };
            product(&[self.tokens.into(), row]).map(|bytes| (view, bytes))
        };
        let (latent, bytes) = plane(Role::Latent, mla.dtype, mla.latent_dim, 0)?;
        let mut pages = vec![Page { bytes, views: vec![latent] }];
        if let Some(index) = mla.index {
            let (keys, mut bytes) = plane(Role::IndexKey, index.dtype, index.dim, 0)?;
            let mut views = vec![keys];
            if let Some(scales) = index.scales {
                let at = align(bytes, scales.dtype.bytes())?;
                let (scale, more) = plane(Role::IndexScale, scales.dtype, scales.dim, at)?;
                views.push(scale);
                let widest = index.dtype.bytes().max(scales.dtype.bytes());
                bytes = align(sum(at, more)?, widest)?;
            }
            pages.push(Page { bytes, views });
        }
        Ok(pages)
    }

    fn state(self, state: &StateGeometry) -> Result<Page> {
        let element = state.conv_dtype.bytes();
        let taps = u64::from(state.taps);
        // Tensor parallelism deals out a part's heads; the tensor counts their channels.
        let parts: Vec<(u32, HeadShard)> = state
            .conv
            .iter()
            .map(|part| {
                let range = self.coords.heads(part.heads);
                let local = (range.end - range.start) * part.channels;
                let first = range.start * part.channels;
                (local, HeadShard { first, total: part.heads * part.channels })
            })
            .collect();
        let channels: u64 = parts.iter().map(|(local, _)| u64::from(*local)).sum();
        let mut views = Vec::new();
        let mut before = 0;
        for (part, (local, heads)) in (0_u8..).zip(parts) {
            let (offset, head, dim) = match self.conv {
                ConvOrder::ChannelsOutside => (before * taps * element, taps * element, element),
                ConvOrder::TapsOutside => (before * element, element, channels * element),
            };
            views.push(View {
                role: Role::ConvState(part),
                dtype: state.conv_dtype,
                offset,
                token: Axis::new(1, channels * taps * element),
                head: Axis::new(local, head),
                dim: Axis::new(state.taps, dim),
                heads,
                granularity: Granularity::Block,
            });
            before += u64::from(local);
        }
        let mut bytes = product(&[channels, taps, element])?;
        let mut widest = if channels == 0 { 1 } else { element };
        if let Some(ssm) = state.ssm {
            let (head, heads) = self.shard(ssm.heads);
            let size = ssm.dtype.bytes();
            let row = u64::from(ssm.dim) * size;
            let offset = align(bytes, size)?;
            let all = u64::from(head.extent) * row;
            views.push(View {
                role: Role::SsmState,
                dtype: ssm.dtype,
                offset,
                token: Axis::new(1, all),
                head: Axis::new(head.extent, row),
                dim: Axis::new(ssm.dim, size),
                heads,
                granularity: Granularity::Block,
            });
            bytes = sum(offset, all)?;
            widest = widest.max(size);
        }
        Ok(Page { bytes: align(bytes, widest)?, views })
    }
}
