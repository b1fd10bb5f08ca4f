//! `kvx plan`: what moving a request between two shapes of engine costs.

use kvx_core::capability::Limits;
use kvx_core::layout::{GroupKind, RankLayout};
use kvx_core::plan::{Cost, Pairing, Request, SegmentList};
use kvx_core::transfer::Mode;
use kvx_core::{Error, Result};
use serde::Serialize;

use crate::args::{Engines, Order, PlanArgs};
use crate::failure::Failure;
use crate::output::{self, Output};
use crate::pairs::{self, PairPlan};
use crate::picture;
use crate::shape::Shape;
use crate::size;
use crate::tables::{self, Side, Tables};

/// Most segments that are listed: more would take minutes and gigabytes.
const MAX_SEGMENTS: u64 = 20_000_000;
/// Tokens of the sample from which the number of segments is foretold.
const SAMPLE: u64 = 2048;
/// Most rows of the table of pairs.
const MAX_ROWS: usize = 40;

/// What `kvx plan --json` prints.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// The model's name.
    pub(crate) model: String,
    /// Tokens of the request.
    pub(crate) tokens: u64,
    /// How its blocks lie in both pools.
    pub(crate) blocks: &'static str,
    /// Who starts transfers.
    pub(crate) mode: Mode,
    /// The engine that filled the cache.
    pub(crate) producer: Shape,
    /// The engine that needs it.
    pub(crate) consumer: Shape,
    /// Pairs of ranks that talk to each other, and what each costs.
    pub(crate) pairs: Vec<PairCost>,
    /// All pairs together.
    #[serde(flatten)]
    pub(crate) total: Cost,
    /// Memory that the compiled plans of all pairs take, in bytes.
    pub(crate) plan_bytes: u64,
}

/// What one pair of ranks costs.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct PairCost {
    /// Number of the producer rank in its replica.
    pub(crate) producer: usize,
    /// Number of the consumer rank in its replica.
    pub(crate) consumer: usize,
    /// What it costs.
    #[serde(flatten)]
    pub(crate) cost: Cost,
}

/// The two engines' ranks and plans, and a request.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) engines: Engines,
    pub(crate) producers: Vec<RankLayout>,
    pub(crate) consumers: Vec<RankLayout>,
    pub(crate) pairs: Vec<PairPlan>,
    pub(crate) order: Order,
}

/// Runs `kvx plan`.
///
/// # Errors
///
/// Those of the model, the shapes and the plan; and when the result cannot be written.
pub(crate) fn run(args: &PlanArgs, out: &mut Output) -> Result<(), Failure> {
    let planned = Planned::new(args.engines.read()?, args.tokens, args.blocks)?;
    let report = planned.report(args.tokens)?;
    if let Some(path) = &args.svg {
        picture::save(&planned, &report, path)?;
    }
    out.document(&report)?;
    print(&report, &planned, out)?;
    if let Some(path) = &args.svg {
        out.line(format!("\npicture: {}", path.display()))?;
    }
    Ok(())
}

impl Planned {
    /// Lays out and pairs the ranks of one replica of each engine, for requests of up to `tokens` tokens.
    pub(crate) fn new(engines: Engines, tokens: u64, order: Order) -> Result<Self> {
        let ranks = |option, shape: &Shape| {
            let needed = tables::pool_blocks(option, tokens, shape.block_tokens)?;
            let layouts = shape
                .ranks(&engines.model, shape.blocks.unwrap_or(needed), None, 0)
                .map_err(|error| error.with_context("option", option))?;
            if let Some(first) = layouts.first() {
                tables::check_pool(option, first, tokens, order)?;
            }
            Ok::<_, Error>(layouts)
        };
        let producers = ranks("--producer", &engines.producer)?;
        let consumers = ranks("--consumer", &engines.consumer)?;
        let pairing = Pairing::new(&producers, &consumers, 0)?;
        let pairs = pairs::compile(&pairing, &producers, &consumers)?;
        Ok(Self { engines, producers, consumers, pairs, order })
    }

    /// Lists the segments of one pair for a request of `tokens` tokens.
    pub(crate) fn list(&self, pair: &PairPlan, tokens: u64, list: &mut SegmentList) -> Result<()> {
        let (from, to) = (&self.producers[pair.pair.producer], &self.consumers[pair.pair.consumer]);
        let from = Tables::new(from.groups(), tokens, self.order, Side::Producer);
        let to = Tables::new(to.groups(), tokens, self.order, Side::Consumer);
        let (from, to) = (from.as_tables(), to.as_tables());
        let request = Request::whole(tokens, &from, &to);
        pair.plan.segments(&request, self.engines.mode, &Limits::unlimited(), list)
    }

    pub(crate) fn report(&self, tokens: u64) -> Result<Report> {
        self.refuse_too_many(tokens)?;
        let mut list = SegmentList::new();
        let mut runs = Vec::new();
        let mut pairs = Vec::new();
        for pair in &self.pairs {
            self.list(pair, tokens, &mut list)?;
            runs.extend(list.as_slice().iter().map(|segment| segment.bytes));
            pairs.push(PairCost {
                producer: pair.pair.producer,
                consumer: pair.pair.consumer,
                cost: list.cost(),
            });
        }
        let plan_bytes = self.pairs.iter().map(|pair| pair.plan.memory_bytes() as u64).sum();
        Ok(Report {
            model: self.engines.model.name().to_owned(),
            tokens,
            blocks: match self.order {
                Order::Contiguous => "contiguous",
                Order::Permuted => "permuted",
            },
            mode: self.engines.mode,
            producer: self.engines.producer,
            consumer: self.engines.consumer,
            pairs,
            total: Cost::of(runs),
            plan_bytes,
        })
    }

    /// Foretells the number of segments from a shorter request, and refuses what would take too long.
    fn refuse_too_many(&self, tokens: u64) -> Result<()> {
        if tokens <= SAMPLE {
            return Ok(());
        }
        let mut list = SegmentList::new();
        let mut sampled = 0;
        for pair in &self.pairs {
            self.list(pair, SAMPLE, &mut list)?;
            sampled += list.len() as u64;
        }
        let foretold = sampled.saturating_mul(tokens / SAMPLE);
        if foretold > MAX_SEGMENTS {
            return Err(Error::config(
                "--tokens",
                format!("{tokens} tokens would be about {foretold} segments"),
            )
            .with_context("limit", MAX_SEGMENTS)
            .with_remedy("ask for fewer tokens; cost grows with them evenly"));
        }
        Ok(())
    }
}

fn print(report: &Report, planned: &Planned, out: &mut Output) -> std::io::Result<()> {
    if out.is_json() {
        return Ok(());
    }
    let starter = match report.mode {
        Mode::Read => "the consumer reads",
        Mode::Write => "the producer writes",
    };
    out.line(format!(
        "{}: {} tokens, blocks {}, {starter}",
        report.model,
        size::count(report.tokens),
        report.blocks
    ))?;
    out.line(format!("  producer  {}", report.producer))?;
    out.line(format!("  consumer  {}\n", report.consumer))?;
    let heads = [
        "producer", "consumer", "layers", "heads", "segments", "bytes", "shortest", "median",
        "longest",
    ];
    let mut table = output::table(&heads, 4);
    for (pair, cost) in planned.pairs.iter().zip(&report.pairs).take(MAX_ROWS) {
        let rank = |layouts: &[RankLayout], index: usize| rank(&layouts[index]);
        let mut row = vec![
            rank(&planned.producers, cost.producer),
            rank(&planned.consumers, cost.consumer),
            layers(pair),
            held(pair, &planned.consumers[cost.consumer]),
        ];
        row.extend(cells(&cost.cost));
        table.add_row(row);
    }
    let left = report.pairs.len().saturating_sub(MAX_ROWS);
    if left > 0 {
        table.add_row([format!("and {left} more")]);
    }
    let count = report.pairs.len();
    let mut row = vec![
        if count == 1 { "1 pair".to_owned() } else { format!("{count} pairs") },
        String::new(),
        String::new(),
        String::new(),
    ];
    row.extend(cells(&report.total));
    table.add_row(row);
    out.table(&table)
}

/// A rank's number, and where it stands where that is not the same.
pub(crate) fn rank(layout: &RankLayout) -> String {
    let coords = layout.coords();
    if coords.grid.pp == 1 {
        format!("rank {}", coords.tp)
    } else {
        format!("rank {} (tp {}, pp {})", coords.replica_index(), coords.tp, coords.pp)
    }
}

fn cells(cost: &Cost) -> [String; 5] {
    [
        size::count(cost.segments),
        size::bytes(cost.bytes),
        size::bytes(cost.shortest_run),
        size::bytes(cost.median_run),
        size::bytes(cost.longest_run),
    ]
}

/// The layers of a pair: first and last.
fn layers(pair: &PairPlan) -> String {
    let layers = pair.pair.shares.iter().map(|share| share.key.layer);
    span(layers.clone().min(), layers.max())
}

/// The attention heads of a pair, where there are any.
fn held(pair: &PairPlan, consumer: &RankLayout) -> String {
    let attention = |share: &&kvx_core::plan::Share| {
        consumer.tensor(share.key).is_some_and(|tensor| {
            consumer.groups()[tensor.group as usize].kind == GroupKind::Attention
        })
    };
    let shares: Vec<_> = pair.pair.shares.iter().filter(attention).collect();
    span(
        shares.iter().map(|share| share.first_head).min(),
        shares.iter().map(|share| share.end_head - 1).max(),
    )
}

fn span(first: Option<u32>, last: Option<u32>) -> String {
    match (first, last) {
        (Some(first), Some(last)) if first == last => first.to_string(),
        (Some(first), Some(last)) => format!("{first}–{last}"),
        _ => "–".to_owned(),
    }
}
