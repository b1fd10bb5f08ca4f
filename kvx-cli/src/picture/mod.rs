//! The picture of a plan: two ranks' memory of one block, and the runs between them.

use std::collections::BTreeSet;
use std::path::Path;

use kvx_core::capability::Limits;
use kvx_core::layout::{GroupKind, RankLayout, TensorKey};
use kvx_core::plan::{Cost, Request, SegmentList};
use kvx_core::transfer::{Mode, Segment};
use kvx_core::{Error, ErrorKind, Result};

use crate::file;
use crate::pairs::PairPlan;
use crate::plan::{Planned, Report};
use crate::tables::{Side, Tables};
use cells::Cell;
use strip::Strip;

mod cells;
mod draw;
mod strip;
#[cfg(test)]
mod tests;
mod words;

/// Most tokens that are drawn.
const MAX_TOKENS: u64 = 64;
/// Most cells of the consumer's strip.
const MAX_CELLS: usize = 128;
/// Most cells of the producer's strip.
const MAX_SOURCE_CELLS: usize = 256;
/// Most runs that are drawn.
const MAX_RUNS: usize = 256;
/// Cells left out of the producer's strip: only where more than this many in a row are not moved here.
const MIN_LEFT_OUT: usize = 4;

/// What is drawn.
#[derive(Debug)]
struct Scene<'a> {
    report: &'a Report,
    planned: &'a Planned,
    pair: &'a PairPlan,
    /// Tokens of the block that is drawn.
    tokens: u64,
    /// Tensors that are drawn.
    keys: Vec<TensorKey>,
    producer: Vec<Cell>,
    consumer: Vec<Cell>,
    /// Parts of runs that are drawn: local is the consumer's side.
    runs: Vec<Segment>,
    /// Runs of these tokens and tensors in all.
    cost: Cost,
    /// Not all cells of the consumer's block are drawn.
    cut: bool,
    /// Nor are the last cells of the producer's.
    source_cut: bool,
}

/// Draws the first pair of `planned` and writes the picture to `path`.
///
/// # Errors
///
/// [`ErrorKind::Misuse`] when the file cannot be written.
pub(crate) fn save(planned: &Planned, report: &Report, path: &Path) -> Result<()> {
    let scene = Scene::new(planned, report)?;
    file::replace(path, &draw::document(&scene).to_string()).map_err(|source| {
        Error::new(ErrorKind::Misuse, "--svg", format!("{} cannot be written", path.display()))
            .with_source(source)
    })
}

/// What a block of the first pair of `planned` comes to, in words; `None` where there is no pair.
///
/// # Errors
///
/// Those of listing the segments of a block.
pub(crate) fn reason(planned: &Planned, report: &Report) -> Result<Option<String>> {
    if planned.pairs.is_empty() {
        return Ok(None);
    }
    Ok(Some(words::reason(&Scene::new(planned, report)?)))
}

impl<'a> Scene<'a> {
    fn new(planned: &'a Planned, report: &'a Report) -> Result<Self> {
        let pair = planned
            .pairs
            .iter()
            .find(|pair| shares_attention(pair, planned))
            .or_else(|| planned.pairs.first())
            .ok_or_else(|| Error::unsupported("--svg", "no rank has anything for another"))?;
        let from = &planned.producers[pair.pair.producer];
        let to = &planned.consumers[pair.pair.consumer];
        let keys = keys(pair, from, to);
        let tokens = block_tokens(&keys, from, to).min(report.tokens);
        let tables = [(from, Side::Producer), (to, Side::Consumer)]
            .map(|(rank, side)| Tables::new(rank.groups(), tokens, planned.order, side));
        let [from_table, to_table] = [tables[0].as_tables(), tables[1].as_tables()];

        let mut list = SegmentList::new();
        let layers = (keys.iter().map(|key| key.layer).min().unwrap_or(0))
            ..keys.iter().map(|key| key.layer + 1).max().unwrap_or(0);
        let request = Request::whole(tokens, &from_table, &to_table).with_layers(layers);
        pair.plan.segments(&request, Mode::Read, &Limits::unlimited(), &mut list)?;

        let mut consumer = cells::cells(to, &keys, &pair.pair, &to_table, tokens);
        let all = list.as_slice().iter().flat_map(|segment| parts(segment, &consumer));
        let cost = Cost::of(all.map(|run| run.bytes));
        let whole = consumer.len();
        consumer.truncate(MAX_CELLS);
        let mut runs: Vec<Segment> =
            list.as_slice().iter().flat_map(|segment| parts(segment, &consumer)).collect();
        runs.truncate(MAX_RUNS);
        if (runs.len() as u64) < cost.segments {
            consumer.truncate(end_of(&runs, &consumer) + MIN_LEFT_OUT);
        }
        let cut = consumer.len() < whole;
        let producer = cells::cells(from, &keys, &pair.pair, &from_table, tokens);
        let last = producer.last().cloned();
        let producer = leave_out(producer, &runs);
        let source_cut = producer.last() != last.as_ref();
        let strip = Strip::new(&producer, 0.0, 1.0);
        runs.retain(|run| !strip.drawn(run.remote_region, run.remote_offset, run.bytes).is_empty());
        Ok(Self {
            report,
            planned,
            pair,
            tokens,
            keys,
            producer,
            consumer,
            runs,
            cost,
            cut,
            source_cut,
        })
    }

    const fn from(&self) -> &'a RankLayout {
        &self.planned.producers.as_slice()[self.pair.pair.producer]
    }

    const fn to(&self) -> &'a RankLayout {
        &self.planned.consumers.as_slice()[self.pair.pair.consumer]
    }
}

fn shares_attention(pair: &PairPlan, planned: &Planned) -> bool {
    let to = &planned.consumers[pair.pair.consumer];
    pair.pair.shares.iter().any(|share| is_attention(to, share.key))
}

fn is_attention(layout: &RankLayout, key: TensorKey) -> bool {
    layout
        .tensor(key)
        .is_some_and(|tensor| layout.groups()[tensor.group as usize].kind == GroupKind::Attention)
}

/// The tensors that are drawn: those of the first attention layer; only the first where none of the others lies in the same
/// blocks; of two layers where blocks hold several.
fn keys(pair: &PairPlan, from: &RankLayout, to: &RankLayout) -> Vec<TensorKey> {
    let mut all: Vec<TensorKey> = pair
        .pair
        .shares
        .iter()
        .map(|share| share.key)
        .filter(|key| is_attention(to, *key))
        .collect();
    if all.is_empty() {
        all = pair.pair.shares.iter().map(|share| share.key).collect();
    }
    let Some(first) = all.first().copied() else { return all };
    let together = |layout: &RankLayout, key: TensorKey| {
        let (Some(a), Some(b)) = (layout.tensor(first), layout.tensor(key)) else { return false };
        (a.region, a.group) == (b.region, b.group) && b.base.abs_diff(a.base) < a.block.stride
    };
    let second = all.iter().map(|key| key.layer).find(|layer| *layer != first.layer);
    all.retain(|key| {
        let near = key.layer == first.layer || Some(key.layer) == second;
        *key == first || (near && (together(from, *key) || together(to, *key)))
    });
    all.dedup();
    all
}

/// Tokens of the larger side's kernel block.
fn block_tokens(keys: &[TensorKey], from: &RankLayout, to: &RankLayout) -> u64 {
    let size = |layout: &RankLayout| {
        let tensor = keys.first().and_then(|key| layout.tensor(*key));
        tensor.map_or(1, |tensor| layout.groups()[tensor.group as usize].kernel_block_tokens)
    };
    u64::from(size(from).max(size(to))).min(MAX_TOKENS)
}

/// The parts of a segment that lie in `cells`, neighbouring cells joined.
fn parts(segment: &Segment, cells: &[Cell]) -> Vec<Segment> {
    let mut parts: Vec<(u64, u64)> = Vec::new();
    let (start, end) = (segment.local_offset, segment.local_offset + segment.bytes);
    let first = cells.partition_point(|cell| {
        (cell.region, cell.at + cell.bytes) <= (segment.local_region, start)
    });
    for cell in &cells[first..] {
        if (cell.region, cell.at) >= (segment.local_region, end) {
            break;
        }
        let (low, high) = (cell.at.max(start), (cell.at + cell.bytes).min(end));
        match parts.last_mut() {
            Some(last) if last.1 == low => last.1 = high,
            _ => parts.push((low, high)),
        }
    }
    parts
        .into_iter()
        .map(|(low, high)| Segment {
            local_offset: low,
            remote_offset: segment.remote_offset + (low - start),
            bytes: high - low,
            ..*segment
        })
        .collect()
}

/// One past the last cell that a run ends in.
fn end_of(runs: &[Segment], cells: &[Cell]) -> usize {
    let ends = runs.iter().map(|run| (run.local_region, run.local_offset + run.bytes));
    let end = ends.max().unwrap_or_default();
    cells.partition_point(|cell| (cell.region, cell.at) < end)
}

/// Leaves out long stretches of cells that no run begins or ends in.
fn leave_out(cells: Vec<Cell>, runs: &[Segment]) -> Vec<Cell> {
    let mut used = BTreeSet::new();
    for run in runs {
        let (start, end) = (run.remote_offset, run.remote_offset + run.bytes);
        let first = cells.partition_point(|cell| {
            (cell.region, cell.at + cell.bytes) <= (run.remote_region, start)
        });
        for (index, cell) in cells.iter().enumerate().skip(first) {
            if (cell.region, cell.at) >= (run.remote_region, end) || used.len() > MAX_SOURCE_CELLS {
                break;
            }
            used.insert(index);
        }
    }
    let near = |index: usize| {
        let low = index.saturating_sub(MIN_LEFT_OUT / 2);
        used.range(low..=index + MIN_LEFT_OUT / 2).next().is_some()
    };
    let keep: Vec<bool> = (0..cells.len()).map(near).collect();
    cells.into_iter().zip(keep).filter(|(_, keep)| *keep).map(|(cell, _)| cell).collect()
}
