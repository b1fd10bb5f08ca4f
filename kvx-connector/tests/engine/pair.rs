//! Two engines in one process, over a real control channel and a real backend.

use std::sync::Arc;

use kvx_connector::Policy;
use kvx_connector::control::{Key, Security};
use kvx_connector::engine::{Engine, EngineSetup, RankParts};
use kvx_connector::ticket::Table;
use kvx_core::backend::TransferBackend;
use kvx_core::card::EngineName;
use kvx_core::config::BackendConfig;
use kvx_core::layout::{
    Granularity, Grid, GroupKind, LayoutBuilder, ModelGeometry, NamedLayout, RankLayout, Tensor,
};
use kvx_core::memory::Region;

/// What an engine is like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) layout: NamedLayout,
    pub(crate) tp: u32,
    pub(crate) pp: u32,
    pub(crate) block: u32,
}

impl Shape {
    pub(crate) const fn new(layout: NamedLayout, tp: u32, pp: u32, block: u32) -> Self {
        Self { layout, tp, pp, block }
    }
}

/// An engine, and the memory of its ranks.
pub(crate) struct Side {
    pub(crate) engine: Engine,
    pub(crate) layouts: Vec<RankLayout>,
    pub(crate) regions: Vec<Vec<Region>>,
}

/// Which backend, and with which options.
#[derive(Clone, Debug)]
pub(crate) struct Over {
    pub(crate) backend: &'static str,
    pub(crate) options: Vec<(&'static str, String)>,
}

impl Over {
    pub(crate) fn new(backend: &'static str) -> Self {
        Self { backend, options: Vec::new() }
    }

    async fn open(&self) -> Arc<dyn TransferBackend> {
        let mut config = BackendConfig::new();
        for (name, value) in &self.options {
            config = config.with(*name, value.clone());
        }
        kvx_core::registry::find(self.backend).unwrap().opener.open(&config).await.unwrap()
    }
}

pub(crate) fn model() -> ModelGeometry {
    ModelGeometry::llama_like(6, 8, 16, kvx_core::layout::Dtype::Bf16).unwrap()
}

/// Starts an engine with blocks for `tokens` tokens twice over.
pub(crate) async fn side(
    name: &str,
    model: &ModelGeometry,
    shape: Shape,
    tokens: u64,
    (key, over): (&Key, &Over),
    change: impl FnOnce(&mut EngineSetup),
) -> Side {
    let security = Security::with_key(key.clone());
    let (mut setup, layouts, regions) = setup(name, model, shape, tokens, (security, over)).await;
    change(&mut setup);
    Side { engine: Engine::start(setup).unwrap(), layouts, regions }
}

/// An engine that is not started, the layouts of its ranks, and their memory.
pub(crate) async fn setup(
    name: &str,
    model: &ModelGeometry,
    shape: Shape,
    tokens: u64,
    (security, over): (Security, &Over),
) -> (EngineSetup, Vec<RankLayout>, Vec<Vec<Region>>) {
    let blocks = u32::try_from(tokens.div_ceil(shape.block.into()) * 2 + 2).unwrap();
    let builder = LayoutBuilder::new(model, shape.layout).block_tokens(shape.block).blocks(blocks);
    let layouts = builder.build_replica(Grid::new(shape.tp, shape.pp, 1).unwrap(), 0).unwrap();
    let (mut ranks, mut regions) = (Vec::new(), Vec::new());
    for layout in &layouts {
        let backend = over.open().await;
        let memory: Vec<Region> =
            layout.regions().iter().map(|spec| backend.allocate(spec.bytes).unwrap()).collect();
        regions.push(memory.clone());
        ranks.push(RankParts {
            layout: layout.clone(),
            regions: memory,
            backends: vec![backend],
            choosing: Box::new(Policy::default().with_name(Some(over.backend))),
        });
    }
    let facts = model.facts().unwrap();
    let engine = EngineName::new(name).unwrap();
    let setup = EngineSetup::new(engine, "127.0.0.1:0".parse().unwrap(), security, facts, ranks);
    (setup, layouts, regions)
}

impl Side {
    /// Block tables for a request: every second block, from `first` on, backwards.
    pub(crate) fn tables(&self, tokens: u64, first: u32) -> Vec<Table> {
        let groups = self.layouts[0].groups();
        let table = |group: &kvx_core::layout::CacheGroup| {
            let count = u32::try_from(tokens.div_ceil(group.block_tokens.into())).unwrap();
            Table { first: 0, ids: (0..count).rev().map(|id| first + 2 * id).collect() }
        };
        groups.iter().map(table).collect()
    }

    /// Calls `each` with every byte of the request's tokens: rank, region, offset, and its logical name.
    fn each(
        &self,
        tables: &[Table],
        tokens: std::ops::Range<u64>,
        mut each: impl FnMut(&Region, u64, u8),
    ) {
        for (layout, regions) in self.layouts.iter().zip(&self.regions) {
            for tensor in layout.tensors() {
                let group = &layout.groups()[tensor.group as usize];
                assert_eq!(group.kind, GroupKind::Attention);
                assert_eq!(tensor.granularity, Granularity::Token);
                for token in tokens.clone() {
                    let ids = &tables[tensor.group as usize].ids;
                    let id = ids[usize::try_from(token / u64::from(group.block_tokens)).unwrap()];
                    let within = token % u64::from(group.block_tokens);
                    let kernel = u64::from(group.kernel_block_tokens);
                    let block = u64::from(id) * u64::from(group.kernel_ratio()) + within / kernel;
                    for head in 0..tensor.head.extent {
                        for dim in 0..tensor.dim.extent {
                            let at = tensor.base
                                + block * tensor.block.stride
                                + within % kernel * tensor.token.stride
                                + u64::from(head) * tensor.head.stride
                                + u64::from(dim) * tensor.dim.stride;
                            let name = tag(tensor, token, tensor.heads.first + head, dim);
                            for byte in 0..tensor.dtype.bytes() {
                                let value = name.wrapping_add(u8::try_from(byte).unwrap());
                                each(&regions[tensor.region as usize], at + byte, value);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Fills a request's blocks with tags.
    pub(crate) fn fill(&self, tables: &[Table], tokens: std::ops::Range<u64>) {
        self.each(tables, tokens, |region, at, value| region.write_at(at, &[value]).unwrap());
    }

    /// How many bytes of a request's blocks are not the tags.
    pub(crate) fn wrong(&self, tables: &[Table], tokens: std::ops::Range<u64>) -> u64 {
        let mut wrong = 0;
        self.each(tables, tokens, |region, at, value| {
            let mut byte = [0];
            region.read_at(at, &mut byte).unwrap();
            wrong += u64::from(byte != [value]);
        });
        wrong
    }
}

/// A byte that depends on the whole name of an element.
fn tag(tensor: &Tensor, token: u64, head: u32, dim: u32) -> u8 {
    let role = u64::from(tensor.role == kvx_core::layout::Role::Value);
    let name = (u64::from(tensor.layer) << 40)
        ^ (role << 36)
        ^ (token << 16)
        ^ (u64::from(head) << 8)
        ^ u64::from(dim);
    let mixed = (name ^ (name >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8 | 1
}
