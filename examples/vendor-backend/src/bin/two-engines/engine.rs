//! An engine of one rank: a layout, the memory of its regions, and a port.

use kvx_connector::{Choice, Policy, open};
use kvx_core::id::{PeerId, RegionId};
use kvx_core::layout::{
    Dtype, Grid, LayoutBuilder, ModelGeometry, NamedLayout, RankLayout, Role, Tensor,
};
use kvx_core::memory::{KeyBlob, Region};
use kvx_core::port::{Port, RegionSet};
use kvx_core::{Error, ErrorKind, Result};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use crate::PATIENCE;

/// What memory holds that nothing was written to.
const UNTOUCHED: u8 = 0xee;

pub(crate) struct Engine {
    pub(crate) layout: RankLayout,
    pub(crate) port: Port,
    pub(crate) set: RegionSet,
    regions: Vec<Region>,
    ids: Vec<RegionId>,
    runtime: Runtime,
}

impl Engine {
    /// Opens the backend that was chosen, and registers the memory of a small cache with it.
    pub(crate) fn open(choice: &Choice, named: NamedLayout, block_tokens: u32) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_time().build().map_err(|error| {
            Error::new(ErrorKind::Resources, "engine", "no runtime").with_source(error)
        })?;
        let policy = Policy::from_env()?.with_name(Some(choice.registration.name));
        let backend = runtime.block_on(open(choice, &policy.options))?;
        let port = Port::new(backend)?;

        let model = ModelGeometry::llama_like(4, 4, 64, Dtype::Bf16)?;
        let builder = LayoutBuilder::new(&model, named).blocks(64).block_tokens(block_tokens);
        let layout = builder.build_replica(Grid::new(1, 1, 1)?, 0)?.remove(0);
        let (mut regions, mut ids) = (Vec::new(), Vec::new());
        for spec in layout.regions() {
            let region = Region::host(spec.bytes)?;
            let untouched = vec![UNTOUCHED; usize::try_from(spec.bytes).unwrap_or_default()];
            region.write_at(0, &untouched)?;
            ids.push(port.register(&region)?);
            regions.push(region);
        }
        let set = port.region_set(&ids)?;
        Ok(Self { layout, port, set, regions, ids, runtime })
    }

    /// What the other engine needs to reach this one's memory.
    pub(crate) fn keys(&self) -> Result<Vec<KeyBlob>> {
        self.ids.iter().map(|id| self.port.key_blob(*id)).collect()
    }

    pub(crate) fn connect(&self, peer: PeerId) -> Result<()> {
        self.in_time("connect", self.port.connect(peer))
    }

    pub(crate) fn close(&self) -> Result<()> {
        self.in_time("close", self.port.close())
    }

    fn in_time(&self, what: &'static str, done: impl Future<Output = Result<()>>) -> Result<()> {
        self.runtime.block_on(async { timeout(PATIENCE, done).await }).map_err(|_| {
            Error::new(ErrorKind::Fabric, what, "it did not end in time")
                .with_context("seconds", PATIENCE.as_secs())
        })?
    }

    /// Writes the request's elements: each has a value of its own.
    pub(crate) fn fill(&self, blocks: &[u32], tokens: u32) -> Result<()> {
        for tensor in self.layout.tensors() {
            let region = &self.regions[tensor.region as usize];
            for (element, offset) in elements(&self.layout, tensor, blocks, tokens) {
                region.write_at(offset, &element.value())?;
            }
        }
        Ok(())
    }

    /// Compares all memory: the request's elements, and that nothing else was touched. Returns how many elements there are.
    pub(crate) fn check(&self, blocks: &[u32], tokens: u32) -> Result<u64> {
        let mut images = Vec::new();
        for region in &self.regions {
            let mut image = vec![0; usize::try_from(region.bytes()).unwrap_or_default()];
            region.read_at(0, &mut image)?;
            images.push(image);
        }
        let mut count = 0;
        for tensor in self.layout.tensors() {
            let image = &mut images[tensor.region as usize];
            for (element, offset) in elements(&self.layout, tensor, blocks, tokens) {
                let at = usize::try_from(offset).unwrap_or(usize::MAX);
                let found = image.get_mut(at..at.saturating_add(2)).unwrap_or_default();
                if *found != element.value() {
                    return Err(wrong("an element is not the producer's")
                        .with_context("element", format!("{element:?}")));
                }
                found.fill(UNTOUCHED);
                count += 1;
            }
        }
        if images.iter().flatten().any(|byte| *byte != UNTOUCHED) {
            return Err(wrong("memory was written that is not the request's"));
        }
        Ok(count)
    }
}

fn wrong(message: &'static str) -> Error {
    Error::new(ErrorKind::Fabric, "check", message)
}

/// A logical element of the cache: the same on both sides, wherever it lies.
#[derive(Clone, Copy, Debug)]
struct Element {
    layer: u32,
    key: bool,
    head: u32,
    token: u32,
    dim: u32,
}

impl Element {
    fn value(self) -> [u8; 2] {
        let Self { layer, key, head, token, dim } = self;
        let mut mixed = 0x9e37_79b9_u32;
        for part in [layer, key.into(), head, token, dim] {
            mixed = (mixed ^ part).wrapping_mul(0x85eb_ca6b).rotate_left(13);
        }
        [(mixed >> 8) as u8, (mixed >> 24) as u8]
    }
}

/// A request's elements in a tensor, and where each lies in the tensor's region.
fn elements<'a>(
    layout: &RankLayout,
    tensor: &'a Tensor,
    blocks: &'a [u32],
    tokens: u32,
) -> impl Iterator<Item = (Element, u64)> + 'a {
    let block_tokens = layout.groups()[tensor.group as usize].block_tokens;
    let key = tensor.role == Role::Key;
    (0..tokens).flat_map(move |token| {
        let block = blocks[(token / block_tokens) as usize];
        let row = tensor.base
            + u64::from(block) * tensor.block.stride
            + u64::from(token % block_tokens) * tensor.token.stride;
        (0..tensor.head.extent).flat_map(move |head| {
            (0..tensor.dim.extent).map(move |dim| {
                let offset =
                    u64::from(head) * tensor.head.stride + u64::from(dim) * tensor.dim.stride;
                let head = tensor.heads.first + head;
                (Element { layer: tensor.layer, key, head, token, dim }, row + offset)
            })
        })
    })
}
