//! How large a model the demo runs: layers and head dims are taken away until it fits; heads, tokens and blocks never are.

use kvx_core::layout::{GroupKind, LayerKind, ModelGeometry, RankLayout};
use kvx_core::plan::{Pairing, Request};
use kvx_core::transfer::{PostedSegment, Segment};
use kvx_core::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::args::Order;
use crate::memory;
use crate::pairs;
use crate::shape::Shape;
use crate::size;
use crate::tables::{Side, Tables};

/// Fewest elements of a head.
const MIN_DIM: u32 = 16;
/// Memory to use where nobody says how much: this, or half of what is free.
const MEMORY: u64 = 4 << 30;

/// How many blocks each engine's pool has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pools {
    /// Attention blocks of the producer and of the consumer.
    pub(crate) blocks: [u32; 2],
    /// State blocks, likewise.
    pub(crate) states: [u32; 2],
}

/// The requests, as far as their memory goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) requests: u64,
    /// Tokens of all of them.
    pub(crate) tokens: u64,
    /// Tokens of the longest.
    pub(crate) longest: u64,
    /// Most tokens of those that are moved at the same time.
    pub(crate) at_once: u64,
}

/// What may be used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// Bytes of both engines' pools, and of the segments of what is moved at the same time.
    pub(crate) memory: u64,
    /// Bytes of all requests' caches. A wish: a model as small as can be may have more.
    pub(crate) volume: Option<u64>,
}

/// A model made to fit, and how.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Scale {
    /// How many times smaller the requests' caches are.
    pub(crate) factor: f64,
    /// Layers before and after.
    pub(crate) layers: [u32; 2],
    /// Elements per head before and after, where all layers have as many.
    pub(crate) head_dim: Option<[u32; 2]>,
    /// Bytes of both engines' pools.
    pub(crate) pool_bytes: u64,
    /// Bytes that the segments of what is moved at the same time may take besides.
    pub(crate) segment_bytes: u64,
    #[serde(skip)]
    pub(crate) model: ModelGeometry,
}

impl Scale {
    /// The largest model that fits: first layers go, then head dims.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Resources`]: not even the smallest fits into the memory.
    pub(crate) fn new(
        model: &ModelGeometry,
        shapes: [&Shape; 2],
        pools: Pools,
        load: Load,
        budget: Budget,
    ) -> Result<Self> {
        let full = volume(model, load);
        let mut smallest = None;
        for candidate in candidates(model, shapes, budget.volume.is_some()) {
            let candidate = candidate?;
            let wished = budget.volume.unwrap_or(u64::MAX);
            // Without looking at layouts, which takes a while for many layers.
            if volume(&candidate, load) > wished {
                smallest = Some(candidate);
                continue;
            }
            let needed = Needed::of(&candidate, shapes, pools, load)?;
            if needed.all() <= budget.memory {
                return Ok(Self::of(model, candidate, needed, full, load));
            }
            smallest = Some(candidate);
        }
        let Some(smallest) = smallest else {
            return Err(Error::new(ErrorKind::Internal, "scale", "no model to choose from"));
        };
        let needed = Needed::of(&smallest, shapes, pools, load)?;
        if needed.all() <= budget.memory {
            return Ok(Self::of(model, smallest, needed, full, load));
        }
        Err(Error::new(
            ErrorKind::Resources,
            "demo",
            format!(
                "the pools of both engines take {}, lists of segments {}; {} may be used",
                size::bytes(needed.pools),
                size::bytes(needed.segments),
                size::bytes(budget.memory)
            ),
        )
        .with_context("layers", smallest.num_layers())
        .with_context("producer blocks", pools.blocks[0])
        .with_context("consumer blocks", pools.blocks[1])
        .with_remedy(memory::remedy(
            budget.memory,
            "raise --memory, ",
            "give fewer blocks= or a lower --in-flight, or cut prompts with --max-tokens",
        )))
    }

    fn of(from: &ModelGeometry, to: ModelGeometry, needed: Needed, full: u64, load: Load) -> Self {
        let dims = from.head_dim().zip(to.head_dim());
        Self {
            factor: float(full) / float(volume(&to, load)).max(1.0),
            layers: [from.num_layers(), to.num_layers()],
            head_dim: dims.map(|(from, to)| [from, to]),
            pool_bytes: needed.pools,
            segment_bytes: needed.segments,
            model: to,
        }
    }

    /// In words.
    pub(crate) fn about(&self) -> String {
        let [from, to] = self.layers;
        let same_dim = self.head_dim.is_none_or(|[from, to]| from == to);
        if from == to && same_dim {
            return format!("geometry in full: {from} layers");
        }
        let dims = match self.head_dim {
            Some([from, to]) if from != to => format!(", head dim {from} → {to}"),
            _ => String::new(),
        };
        format!(
            "geometry scaled 1/{:.1}: layers {from} → {to}{dims}; heads, tokens and blocks as they are",
            self.factor
        )
    }
}

/// Models to try, the largest first; only the model itself where it may not be changed.
fn candidates(
    model: &ModelGeometry,
    shapes: [&Shape; 2],
    may_change: bool,
) -> impl Iterator<Item = Result<ModelGeometry>> {
    let all = model.num_layers();
    let least = if may_change { least_layers(model, shapes) } else { all };
    let fewer = (least..=all).rev().map(|layers| model.clone().with_layers(layers));
    let dims =
        std::iter::successors(model.head_dim(), |dim| Some(dim / 2).filter(|d| *d >= MIN_DIM));
    let narrower = dims
        .skip(1)
        .filter(move |_| may_change)
        .map(move |dim| model.clone().with_layers(least)?.with_head_dim(dim));
    fewer.chain(narrower)
}

/// Layers that a scaled model must have: two, one for each pipeline stage, and enough for every kind of layer.
fn least_layers(model: &ModelGeometry, shapes: [&Shape; 2]) -> u32 {
    let mut kinds: Vec<&LayerKind> = Vec::new();
    let mut last_new = 0;
    for (number, kind) in (1_u32..).zip(model.layers()) {
        if !kinds.contains(&kind) {
            kinds.push(kind);
            last_new = number;
        }
    }
    let stages = shapes.iter().map(|shape| shape.grid.pp).max().unwrap_or(1);
    last_new.max(2).max(stages).min(model.num_layers())
}

/// Bytes of all requests' caches, each head counted once.
fn volume(model: &ModelGeometry, load: Load) -> u64 {
    let tokens = model.bytes_per_token().saturating_mul(load.tokens);
    tokens.saturating_add(model.state_bytes().saturating_mul(load.requests))
}

/// What a model takes.
#[derive(Clone, Copy, Debug)]
struct Needed {
    /// Bytes of the regions of all ranks of both engines.
    pools: u64,
    /// Bytes of the segments of what is moved at the same time, if none of them merge across blocks.
    segments: u64,
}

impl Needed {
    const fn all(self) -> u64 {
        self.pools.saturating_add(self.segments)
    }

    fn of(model: &ModelGeometry, shapes: [&Shape; 2], pools: Pools, load: Load) -> Result<Self> {
        let ranks = |i: usize| shapes[i].ranks(model, pools.blocks[i], Some(pools.states[i]), 0);
        let engines = [ranks(0)?, ranks(1)?];
        let mut bytes = 0_u64;
        for (shape, ranks) in shapes.into_iter().zip(&engines) {
            let replica: u64 = ranks.iter().flat_map(RankLayout::regions).map(|r| r.bytes).sum();
            bytes = bytes.saturating_add(replica.saturating_mul(shape.grid.dp.into()));
        }
        Ok(Self { pools: bytes, segments: segment_bytes(&engines, load)? })
    }
}

/// Bytes that the segments of `load.at_once` tokens may take: one pair's at a time in the plan's list, those of all pairs in
/// the port, and again in the fabric.
fn segment_bytes(engines: &[Vec<RankLayout>; 2], load: Load) -> Result<u64> {
    // A list grows by doubling.
    const LISTED: u64 = 2 * size_of::<Segment>() as u64;
    const POSTED: u64 = 2 * size_of::<PostedSegment>() as u64;
    let [producers, consumers] = engines;
    // A pool too small for the longest request is refused elsewhere, by name.
    let room = engines.iter().flatten().flat_map(RankLayout::groups);
    let room = room.filter(|group| group.kind == GroupKind::Attention);
    let room = room.map(|group| u64::from(group.blocks - 1) * u64::from(group.block_tokens));
    let longest = load.longest.min(room.min().unwrap_or(u64::MAX));
    let tables = |ranks: &[RankLayout], side| {
        let groups = ranks.first().map_or(&[][..], RankLayout::groups);
        Tables::new(groups, longest, Order::Contiguous, side)
    };
    let (from, to) = (tables(producers, Side::Producer), tables(consumers, Side::Consumer));
    let (from, to) = (from.as_tables(), to.as_tables());
    let request = Request::whole(longest, &from, &to);
    let pairing = Pairing::new(producers, consumers, 0)?;
    let (mut all, mut most) = (0_u64, 0);
    for pair in pairs::compile(&pairing, producers, consumers)? {
        let runs = pair.plan.runs(&request)?;
        all = all.saturating_add(runs);
        most = most.max(runs);
    }
    // Of several requests of together so many tokens, each may have a block that is not full.
    let posted = u128::from(all) * u128::from(load.at_once) / u128::from(longest.max(1));
    let posted = u64::try_from(posted).unwrap_or(u64::MAX);
    Ok(most.saturating_mul(LISTED).saturating_add(posted.saturating_mul(POSTED)))
}

/// Memory that the pools may take where nobody says how much.
pub(crate) fn default_memory() -> u64 {
    memory::unasked(MEMORY)
}

#[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
const fn float(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use kvx_core::layout::NamedLayout;

    use super::*;

    const LOAD: Load = Load { requests: 10, tokens: 10_000, longest: 700, at_once: 1400 };
    const POOLS: Pools = Pools { blocks: [100, 50], states: [4, 8] };

    fn scale(model: &str, memory: u64, volume: Option<u64>) -> Result<Scale> {
        let model = ModelGeometry::preset(model).unwrap();
        let shape = |tp| Shape::new(tp, NamedLayout::FlashAttentionHnd, 16).unwrap();
        Scale::new(&model, [&shape(2), &shape(4)], POOLS, LOAD, Budget { memory, volume })
    }

    #[test]
    fn a_model_that_fits_stays_as_it_is() {
        let scale = scale("llama-3.1-8b", 1 << 40, Some(1 << 40)).unwrap();
        assert_eq!((scale.layers, scale.head_dim), ([32, 32], Some([128, 128])));
        assert!((scale.factor - 1.0).abs() < 1e-9);
        // 150 blocks of 16 tokens of 128 KiB.
        assert_eq!(scale.pool_bytes, 150 * 16 * 128 * 1024);
        assert_eq!(scale.about(), "geometry in full: 32 layers");
        // A quarter of 8 heads lies in one piece in a block of 16 tokens: a run for each block of 64 tensors and each of four
        // pairs. 700 tokens are 44 blocks, and two such requests are moved at once.
        let runs = 44 * 64 * 4_u64;
        assert_eq!(scale.segment_bytes, runs * 2 * 80 + runs / 4 * 64);
    }

    /// Rows taken apart, element by element: the lists would be larger than the cache.
    #[test]
    fn lists_of_segments_count_too() {
        let model = ModelGeometry::preset("llama-3.1-8b").unwrap();
        let shape = |layout| Shape::new(1, layout, 16).unwrap();
        let shapes = [shape(NamedLayout::FlashAttentionHnd), shape(NamedLayout::CpuTransposed)];
        let pools = 150 * 16 * 128 * 1024;
        let scale = |memory| {
            let budget = Budget { memory, volume: Some(1 << 40) };
            Scale::new(&model, [&shapes[0], &shapes[1]], POOLS, LOAD, budget)
        };
        let ample = scale(1 << 40).unwrap();
        assert_eq!((ample.layers[1], ample.pool_bytes), (32, pools));
        assert!(ample.segment_bytes > 10 * pools, "{ample:?}");
        let tight = scale(4 * pools).unwrap();
        assert!(tight.layers[1] < 16, "{tight:?}");
        assert!(tight.pool_bytes + tight.segment_bytes <= 4 * pools, "{tight:?}");
        let error = scale(1 << 20).unwrap_err().to_string();
        assert!(error.contains("lists of segments"), "{error}");
    }

    #[test]
    fn layers_go_first_and_then_dims() {
        let volume = 10_000 * 128 * 1024;
        let half = scale("llama-3.1-8b", 1 << 40, Some(volume / 2)).unwrap();
        assert_eq!((half.layers[1], half.head_dim), (16, Some([128, 128])));
        assert!((half.factor - 2.0).abs() < 1e-9);
        let small = scale("llama-3.1-8b", 1 << 40, Some(volume / 64)).unwrap();
        assert_eq!((small.layers[1], small.head_dim), (2, Some([128, 32])));
        assert!(
            small.about().contains("1/64.0: layers 32 → 2, head dim 128 → 32"),
            "{}",
            small.about()
        );
        // The volume is a wish; memory is not.
        let least = scale("llama-3.1-8b", 1 << 40, Some(1)).unwrap();
        assert_eq!((least.layers[1], least.head_dim), (2, Some([128, 16])));
        let error = scale("llama-3.1-8b", 1 << 20, Some(1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Resources);
        assert!(error.to_string().contains("1 MiB may be used"), "{error}");
        assert!(scale("llama-3.1-8b", 1 << 20, None).is_err());
    }

    #[test]
    fn every_kind_of_layer_stays() {
        for name in ModelGeometry::PRESETS {
            let model = ModelGeometry::preset(name).unwrap();
            let scale = scale(name, 1 << 40, Some(1)).unwrap();
            for kind in model.layers() {
                let same_sort = |other: &LayerKind| {
                    std::mem::discriminant(other) == std::mem::discriminant(kind)
                        && other.window() == kind.window()
                };
                assert!(scale.model.layers().iter().any(same_sort), "{name}: {kind:?}");
            }
            let heads = |model: &ModelGeometry| model.kv_heads();
            assert_eq!(heads(&scale.model), heads(&model), "{name}");
        }
    }

    #[test]
    fn the_default_memory_is_never_none() {
        assert!(default_memory() > 0);
    }
}
