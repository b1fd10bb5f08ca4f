//! Goes over the elements of one tensor in one block, in pieces that are read or written at once.

use kvx_core::layout::Tensor;

/// Largest piece, in bytes.
const MAX_PIECE: u64 = 1 << 20;
/// A piece may be this many times as long as what it holds of the tensor.
const MAX_SPARSE: u64 = 4;

/// Positions along an axis, and the distance between two of them in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Steps {
    pub(crate) count: u32,
    pub(crate) stride: u64,
}

impl Steps {
    const ONE: Self = Self { count: 1, stride: 0 };
}

/// How to go over some token positions of a block of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sweep {
    /// Steps from piece to piece, by axis: token, head, dim.
    outer: [Steps; 3],
    /// Steps inside a piece, likewise. Of each axis, one of the two has more than one step.
    pub(crate) inner: [Steps; 3],
    /// Bytes from the first to one past the last of a piece.
    pub(crate) span: u64,
}

/// One piece: where it begins, counted from the first element, and which element that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) token: u32,
    pub(crate) head: u32,
    pub(crate) dim: u32,
}

impl Sweep {
    /// Over `tokens` token positions of one block, all heads and all dims.
    pub(crate) fn new(tensor: &Tensor, tokens: u32) -> Self {
        let axes = [
            Steps { count: tokens, stride: tensor.token.stride },
            Steps { count: tensor.head.extent, stride: tensor.head.stride },
            Steps { count: tensor.dim.extent, stride: tensor.dim.stride },
        ];
        let mut order: Vec<usize> = (0..3).filter(|axis| axes[*axis].count > 1).collect();
        order.sort_by_key(|axis| axes[*axis].stride);
        let (mut outer, mut inner) = ([Steps::ONE; 3], [Steps::ONE; 3]);
        let (mut span, mut held) = (tensor.dtype.bytes(), tensor.dtype.bytes());
        let mut fits = true;
        for axis in order {
            let steps = axes[axis];
            let longer = steps.stride * u64::from(steps.count - 1) + span;
            let more = held * u64::from(steps.count);
            fits &= longer <= MAX_PIECE && longer <= more * MAX_SPARSE;
            if fits {
                (span, held) = (longer, more);
                inner[axis] = steps;
            } else {
                outer[axis] = steps;
            }
        }
        Self { outer, inner, span }
    }

    /// The pieces.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece> {
        let [tokens, heads, dims] = self.outer;
        let at = |steps: Steps, index: u32| steps.stride * u64::from(index);
        (0..tokens.count).flat_map(move |token| {
            (0..heads.count).flat_map(move |head| {
                (0..dims.count).map(move |dim| Piece {
                    offset: at(tokens, token) + at(heads, head) + at(dims, dim),
                    token,
                    head,
                    dim,
                })
            })
        })
    }

    /// Bytes of the tensor in a piece.
    pub(crate) fn held(&self, element: u64) -> u64 {
        self.inner.iter().map(|steps| u64::from(steps.count)).product::<u64>() * element
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kvx_core::layout::{
        ConvOrder, ConvPart, Dtype, Grid, LayerKind, LayoutBuilder, ModelGeometry, NamedLayout,
        RegionPolicy, SsmGeometry, StateGeometry,
    };

    use super::*;

    /// Every element once, and nothing else, for every layout and model.
    #[test]
    fn every_element_is_met_once() {
        let state = StateGeometry {
            conv: vec![ConvPart { heads: 4, channels: 3 }, ConvPart { heads: 2, channels: 5 }],
            taps: 3,
            conv_dtype: Dtype::Bf16,
            ssm: Some(SsmGeometry { heads: 4, dim: 30, dtype: Dtype::F32 }),
        };
        let models = [
            ModelGeometry::llama_like(3, 8, 16, Dtype::Bf16).unwrap(),
            ModelGeometry::mla_like(2, 24, Dtype::Fp8E4m3).unwrap(),
            ModelGeometry::new("state", vec![LayerKind::State(state)]).unwrap(),
        ];
        for model in &models {
            for (number, named) in NamedLayout::ALL.into_iter().enumerate() {
                let orders = [ConvOrder::ChannelsOutside, ConvOrder::TapsOutside];
                let layout = LayoutBuilder::new(model, named)
                    .conv_order(orders[number % 2])
                    .block_tokens(8)
                    .blocks(3)
                    .regions(RegionPolicy::Single)
                    .build_replica(Grid::new(2, 1, 1).unwrap(), 0)
                    .unwrap()
                    .remove(1);
                for tensor in layout.tensors() {
                    for tokens in [1, tensor.token.extent] {
                        check(tensor, tokens);
                    }
                }
            }
        }
    }

    fn check(tensor: &Tensor, tokens: u32) {
        let sweep = Sweep::new(tensor, tokens);
        let mut seen = BTreeSet::new();
        for piece in sweep.pieces() {
            let [t, h, d] = sweep.inner;
            for token in 0..t.count {
                for head in 0..h.count {
                    for dim in 0..d.count {
                        let place = piece.offset
                            + t.stride * u64::from(token)
                            + h.stride * u64::from(head)
                            + d.stride * u64::from(dim);
                        let inside = place - piece.offset + tensor.dtype.bytes();
                        assert!(inside <= sweep.span);
                        let (token, head, dim) =
                            (piece.token + token, piece.head + head, piece.dim + dim);
                        let formula = tensor.token.stride * u64::from(token)
                            + tensor.head.stride * u64::from(head)
                            + tensor.dim.stride * u64::from(dim);
                        assert_eq!(place, formula);
                        assert!(seen.insert((token, head, dim)));
                    }
                }
            }
        }
        let all = u64::from(tokens) * u64::from(tensor.head.extent) * u64::from(tensor.dim.extent);
        assert_eq!(seen.len() as u64, all);
    }
}
