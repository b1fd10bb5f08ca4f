//! The memory of an engine's ranks, filled with bytes that say whose they are.

use std::ops::Range;

use kvx_connector::ticket::Table;
use kvx_core::layout::{
    Dtype, Granularity, Grid, GroupKind, LayoutBuilder, ModelGeometry, NamedLayout, RankLayout,
    Role,
};
use kvx_core::memory::Region;

/// What is in blocks that nobody uses.
pub(crate) const FREE: u64 = u64::MAX;

/// What is in blocks that a request is to be read into.
pub(crate) const EMPTY: u64 = u64::MAX - 1;

/// Tokens of a block.
pub(crate) const BLOCK: u32 = 16;

/// The model of all engines here: 2 KiB a token.
pub(crate) fn model() -> ModelGeometry {
    ModelGeometry::llama_like(4, 2, 64, Dtype::Bf16).unwrap()
}

/// The layouts of all ranks of a replica.
pub(crate) fn layouts(layout: NamedLayout, tp: u32, blocks: u32) -> Vec<RankLayout> {
    let model = model();
    let builder = LayoutBuilder::new(&model, layout).block_tokens(BLOCK).blocks(blocks);
    builder.build_replica(Grid::new(tp, 1, 1).unwrap(), 0).unwrap()
}

/// The memory of all ranks.
pub(crate) struct Cache {
    pub(crate) layouts: Vec<RankLayout>,
    pub(crate) regions: Vec<Vec<Region>>,
}

/// How many blocks hold so many tokens.
pub(crate) const fn blocks(tokens: u64) -> u64 {
    tokens.div_ceil(BLOCK as u64)
}

impl Cache {
    /// Calls `each` with every run of bytes of these tokens: where it is, and its name.
    fn runs(
        &self,
        table: &Table,
        tokens: Range<u64>,
        mut each: impl FnMut(&Region, u64, usize, u64),
    ) {
        for (layout, regions) in self.layouts.iter().zip(&self.regions) {
            assert_eq!(layout.groups().len(), 1);
            let group = &layout.groups()[0];
            assert_eq!((group.kind, group.kernel_ratio()), (GroupKind::Attention, 1));
            for tensor in layout.tensors() {
                assert_eq!(tensor.granularity, Granularity::Token);
                assert_eq!(
                    tensor.dim.stride,
                    tensor.dtype.bytes(),
                    "a head's elements lie together"
                );
                let bytes =
                    usize::try_from(u64::from(tensor.dim.extent) * tensor.dtype.bytes()).unwrap();
                for token in tokens.clone() {
                    let entry = usize::try_from(token / u64::from(BLOCK)).unwrap();
                    let id = u64::from(table.ids[entry]);
                    for head in 0..tensor.head.extent {
                        let at = tensor.base
                            + id * tensor.block.stride
                            + token % u64::from(BLOCK) * tensor.token.stride
                            + u64::from(head) * tensor.head.stride;
                        let role = u64::from(tensor.role == Role::Value);
                        let name = (u64::from(tensor.layer) << 48)
                            | (role << 40)
                            | (u64::from(tensor.heads.first + head) << 32)
                            | token;
                        each(&regions[tensor.region as usize], at, bytes, name);
                    }
                }
            }
        }
    }

    /// Fills tokens of a request with its bytes.
    pub(crate) fn fill(&self, table: &Table, tokens: Range<u64>, whose: u64) {
        let mut bytes = Vec::new();
        self.runs(table, tokens, |region, at, len, name| {
            stream(whose, name, len, &mut bytes);
            region.write_at(at, &bytes).unwrap();
        });
    }

    /// How many runs of bytes of these tokens are not those of this request.
    pub(crate) fn wrong(&self, table: &Table, tokens: Range<u64>, whose: u64) -> u64 {
        let (mut wrong, mut right, mut found) = (0, Vec::new(), Vec::new());
        self.runs(table, tokens, |region, at, len, name| {
            stream(whose, name, len, &mut right);
            found.resize(len, 0);
            region.read_at(at, &mut found).unwrap();
            wrong += u64::from(found != right);
        });
        wrong
    }
}

/// The bytes of one run: of this request, with this name.
fn stream(whose: u64, name: u64, len: usize, bytes: &mut Vec<u8>) {
    bytes.clear();
    let mut state = mix(whose ^ mix(name));
    while bytes.len() < len {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        bytes.extend_from_slice(&mix(state).to_le_bytes());
    }
    bytes.truncate(len);
}

const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
