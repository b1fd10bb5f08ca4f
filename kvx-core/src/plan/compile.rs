//! One pair of ranks, prepared once.

use super::fold::{AxisPair, Shape};
use super::pairing::{Pair, Share};
use super::pieces::Side;
use crate::layout::{CacheGroup, Granularity, GroupKind, RankLayout, Tensor, TokenShard, Window};
use crate::{Error, Result};

const OPERATION: &str = "plan.compile";
/// Most runs of a block that are looked at in order to see whether they merge.
const MAX_BLOCK_RUNS: u64 = 4096;

/// A plan for one producer rank and one consumer rank. See the [module documentation](super).
///
/// Its size depends on the number of tensors that the two share, not on the number of blocks.
#[derive(Clone, Debug)]
pub struct PeerPlan {
    pub(super) classes: Vec<Class>,
    /// Sorted by where they are written.
    pub(super) bands: Vec<Band>,
    pub(super) shapes: Vec<Shape>,
    /// First and one past the last layer.
    pub(super) layers: (u32, u32),
    shares: Vec<Share>,
}

/// Tensors that take the same pieces of a request: those of one cache group of the producer and one of the consumer whose
/// layers need the same tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Class {
    pub(super) kind: GroupKind,
    pub(super) to: Side,
    pub(super) from: Side,
    pub(super) window: Window,
    /// Something is kept once per block, so blocks cannot be taken in part.
    pub(super) per_block: bool,
}

/// Tensors of a class that interleave in the consumer's memory, block by block. The memory of different bands of a class does
/// not meet.
#[derive(Clone, Debug)]
pub(super) struct Band {
    /// Index into [`PeerPlan::classes`].
    pub(super) class: usize,
    pub(super) nests: Vec<Nest>,
    /// The runs of a whole block, over all tensors of the band, where they are few.
    pub(super) whole: Option<Vec<Nest>>,
}

/// Some heads of one tensor: where its elements lie on both sides, up to the block tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nest {
    pub(super) to: Place,
    pub(super) from: Place,
    pub(super) layer: u32,
    /// Index into [`PeerPlan::shapes`].
    pub(super) shape: usize,
    /// Bytes of a whole run, in [`Band::whole`].
    pub(super) run: u64,
}

/// Where a tensor's heads lie on one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) region: u32,
    pub(super) base: u64,
    pub(super) block: u64,
    pub(super) token: u64,
}

impl PeerPlan {
    /// Prepares what `pair` says for the layouts of its two ranks.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported), naming the tensor, the field and both values, when the two
    /// cannot be mapped onto each other: another dtype, row width, window, granularity or kind of group; block sizes that
    /// differ where something is kept once per block; context parallelism on either side.
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) when the pair was made for other layouts.
    pub fn compile(producer: &RankLayout, consumer: &RankLayout, pair: &Pair) -> Result<Self> {
        let mut builder = Builder { producer, consumer, shapes: Vec::new(), classes: Vec::new() };
        for share in &pair.shares {
            builder.add(share)?;
        }
        let layers = pair.shares.iter().map(|share| share.key.layer);
        let first = layers.clone().min().unwrap_or(0);
        let end = layers.max().map_or(0, |last| last.saturating_add(1));
        let Builder { mut shapes, classes, .. } = builder;
        let mut bands = Vec::new();
        for (index, (class, nests)) in classes.iter().enumerate() {
            bands.extend(class.bands(index, nests, consumer, &mut shapes));
        }
        bands.sort_by_key(|band| (band.nests[0].to.region, band.nests[0].to.base));
        let classes = classes.into_iter().map(|(class, _)| class).collect();
        let shares = pair.shares.clone();
        Ok(Self { classes, bands, shapes, layers: (first, end), shares })
    }

    /// What is moved: some heads of each of these tensors, sorted by tensor and head.
    #[must_use]
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// Memory that the plan takes, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let shapes = self.shapes.iter().map(|shape| size_of_val(shape) + size_of_val(&*shape.axes));
        let bands = self.bands.iter().map(|band| {
            let whole = band.whole.as_deref().map_or(0, size_of_val);
            size_of_val(band) + size_of_val(&*band.nests) + whole
        });
        size_of_val(self)
            + size_of_val(&*self.classes)
            + size_of_val(&*self.shares)
            + shapes.sum::<usize>()
            + bands.sum::<usize>()
    }
}

struct Builder<'a> {
    producer: &'a RankLayout,
    consumer: &'a RankLayout,
    shapes: Vec<Shape>,
    classes: Vec<(Class, Vec<Nest>)>,
}

impl Builder<'_> {
    fn add(&mut self, share: &Share) -> Result<()> {
        let find = |layout: &RankLayout| {
            layout.tensor(share.key).cloned().filter(|tensor| {
                let held = tensor.head_range();
                held.start <= share.first_head && share.end_head <= held.end
            })
        };
        let (Some(from), Some(to)) = (find(self.producer), find(self.consumer)) else {
            return Err(Error::misuse(OPERATION, "the pair was made for other layouts")
                .with_context("tensor", share.key)
                .with_context("heads", format!("{}..{}", share.first_head, share.end_head)));
        };
        let from_group = &self.producer.groups()[from.group as usize];
        let to_group = &self.consumer.groups()[to.group as usize];
        let window = check((&from, from_group), (&to, to_group))?;

        let shape = shape(&from, &to, share);
        let nest = Nest {
            to: place(&to, share),
            from: place(&from, share),
            layer: share.key.layer,
            shape: intern(&mut self.shapes, shape),
            run: 0,
        };
        let class = Class {
            kind: to_group.kind,
            to: Side::new("consumer", to.group, to_group),
            from: Side::new("producer", from.group, from_group),
            window,
            per_block: to_group.kind == GroupKind::Attention
                && to.granularity == Granularity::Block,
        };
        let same = |known: &Class| {
            (known.from, known.to, known.window) == (class.from, class.to, class.window)
        };
        match self.classes.iter_mut().find(|(known, _)| same(known)) {
            Some((known, nests)) => {
                known.per_block |= class.per_block;
                nests.push(nest);
            }
            None => self.classes.push((class, vec![nest])),
        }
        Ok(())
    }
}

/// Refuses two tensors that cannot be mapped onto each other; else says which tokens their layer needs.
fn check(
    (from, from_group): (&Tensor, &CacheGroup),
    (to, to_group): (&Tensor, &CacheGroup),
) -> Result<Window> {
    let refuse =
        |field: &str, producer: &dyn std::fmt::Display, consumer: &dyn std::fmt::Display| {
            Err(Error::mismatch(OPERATION, format!("{} {field}", to.key()), producer, consumer))
        };
    if from.dtype != to.dtype {
        return refuse("dtype", &from.dtype, &to.dtype);
    }
    if from.dim.extent != to.dim.extent {
        return refuse("dim", &from.dim.extent, &to.dim.extent);
    }
    if from_group.kind != to_group.kind {
        let name = |group: &CacheGroup| match group.kind {
            GroupKind::Attention => "attention",
            GroupKind::State => "state",
        };
        return refuse("group kind", &name(from_group), &name(to_group));
    }
    if from.granularity != to.granularity {
        let name = |tensor: &Tensor| match tensor.granularity {
            Granularity::Token => "per token",
            Granularity::Block => "per block",
        };
        return refuse("granularity", &name(from), &name(to));
    }
    let blocks = (from_group.kernel_block_tokens, to_group.kernel_block_tokens);
    if to_group.kind == GroupKind::Attention
        && to.granularity == Granularity::Block
        && blocks.0 != blocks.1
    {
        return refuse("block size (it is kept once per block)", &blocks.0, &blocks.1);
    }
    if (from.tokens, to.tokens) != (TokenShard::All, TokenShard::All) {
        let name = |tensor: &Tensor| match tensor.tokens {
            TokenShard::All => "none".to_owned(),
            TokenShard::Interleaved { run, ranks, .. } => format!("{ranks} ranks in runs of {run}"),
        };
        return refuse("context parallelism (not supported yet)", &name(from), &name(to));
    }
    match (from.window, to.window) {
        (Window::Full, window) | (window, Window::Full) => Ok(window),
        (left, right) if left == right => Ok(left),
        (left, right) => refuse("window", &left, &right),
    }
}

fn shape(from: &Tensor, to: &Tensor, share: &Share) -> Shape {
    let axis = |extent, to: u64, from: u64| AxisPair { extent, to, from };
    let token =
        (to.granularity == Granularity::Token).then_some((to.token.stride, from.token.stride));
    Shape::new(
        to.dtype.bytes(),
        token,
        vec![
            axis(share.end_head - share.first_head, to.head.stride, from.head.stride),
            axis(to.dim.extent, to.dim.stride, from.dim.stride),
        ],
    )
}

fn place(tensor: &Tensor, share: &Share) -> Place {
    let heads = u64::from(share.first_head - tensor.heads.first);
    // A stride has no meaning along an axis of one position, and may be anything.
    let stride = |axis: crate::layout::Axis| if axis.extent == 1 { 0 } else { axis.stride };
    Place {
        region: tensor.region,
        base: tensor.base + heads * stride(tensor.head),
        block: stride(tensor.block),
        token: stride(tensor.token),
    }
}

fn intern(shapes: &mut Vec<Shape>, shape: Shape) -> usize {
    shapes.iter().position(|known| *known == shape).unwrap_or_else(|| {
        shapes.push(shape);
        shapes.len() - 1
    })
}

impl Class {
    fn bands(
        &self,
        index: usize,
        nests: &[Nest],
        consumer: &RankLayout,
        shapes: &mut Vec<Shape>,
    ) -> Vec<Band> {
        let group = &consumer.groups()[self.to.group()];
        let blocks = u64::from(group.blocks * group.kernel_ratio());
        let mut nests = nests.to_vec();
        nests.sort_by_key(|nest| (nest.to.region, nest.to.base));
        let mut bands: Vec<Band> = Vec::new();
        let mut end = 0;
        for nest in nests {
            let reach = reach(&nest, &shapes[nest.shape], self.to.kernel_tokens, blocks);
            let meets =
                |band: &&mut Band| band.nests[0].to.region == nest.to.region && nest.to.base < end;
            if let Some(band) = bands.last_mut().filter(meets) {
                end = end.max(reach);
                band.add(nest, shapes);
            } else {
                end = reach;
                bands.push(Band { class: index, nests: vec![nest], whole: None });
            }
        }
        if self.to.kernel_tokens == self.from.kernel_tokens {
            for band in &mut bands {
                band.whole = band.whole_runs(shapes, self.to.kernel_tokens);
            }
        }
        bands
    }
}

/// One past the last byte that a nest can write.
fn reach(nest: &Nest, shape: &Shape, kernel_tokens: u32, blocks: u64) -> u64 {
    let axes: u64 = shape.axes.iter().map(|axis| axis.to * u64::from(axis.extent - 1)).sum();
    let tokens = shape.token.map_or(0, |_| nest.to.token * u64::from(kernel_tokens - 1));
    nest.to.base + nest.to.block * (blocks - 1) + axes + tokens + shape.unit
}

impl Band {
    /// Adds a nest that starts no lower than those before it. Where its rows continue those of the last one on both sides (packed
    /// K|V rows), the two become one.
    fn add(&mut self, nest: Nest, shapes: &mut Vec<Shape>) {
        if let Some(last) = self.nests.last_mut() {
            let (left, right) = (&shapes[last.shape], &shapes[nest.shape]);
            let unit = left.unit;
            let continues = |a: Place, b: Place| {
                (a.region, a.base + unit, a.block, a.token) == (b.region, b.base, b.block, b.token)
            };
            if last.layer == nest.layer
                && (left.token, &left.axes) == (right.token, &right.axes)
                && continues(last.to, nest.to)
                && continues(last.from, nest.from)
            {
                let shape = Shape::new(unit + right.unit, left.token, left.axes.clone());
                last.shape = intern(shapes, shape);
                return;
            }
        }
        self.nests.push(nest);
    }

    /// The runs of a whole block where they are about as few as the tensors, or fewer.
    fn whole_runs(&self, shapes: &[Shape], tokens: u32) -> Option<Vec<Nest>> {
        let mut runs: Vec<Nest> = Vec::with_capacity(self.nests.len());
        for nest in &self.nests {
            let folded = shapes[nest.shape].fold(tokens);
            // One tensor's runs have been merged as far as they go.
            let alone = self.nests.len() == 1 && folded.count() > 2;
            if alone || runs.len() as u64 + folded.count() > MAX_BLOCK_RUNS {
                return None;
            }
            folded.each(nest.to.base, nest.from.base, |to, from| {
                let mut run = Nest { run: folded.run, ..*nest };
                (run.to.base, run.from.base) = (to, from);
                runs.push(run);
            });
        }
        runs.sort_by_key(|nest| nest.to.base);
        runs.dedup_by(|next, last| {
            let continues = |a: Place, b: Place| {
                (a.region, a.base + last.run, a.block) == (b.region, b.base, b.block)
            };
            let joins = continues(last.to, next.to) && continues(last.from, next.from);
            if joins {
                last.run += next.run;
            }
            joins
        });
        runs.shrink_to_fit();
        Some(runs).filter(|runs| runs.len() <= 2 * self.nests.len())
    }
}
