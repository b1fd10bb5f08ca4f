//! `kvx plan`: what moving a request between two shapes of engine costs.

use std::collections::BTreeMap;

use kvx_core::capability::Limits;
use kvx_core::layout::{GroupKind, NamedLayout, RankLayout};
use kvx_core::plan::{Cost, Pairing, Request, SegmentList, count_lengths};
use kvx_core::transfer::Mode;
use kvx_core::{Error, Result};
use serde::Serialize;

use crate::args::{Engines, Order, PlanArgs};
use crate::failure::Failure;
use crate::output::{self, Output};
use crate::pairs::{self, PairPlan};
use crate::picture;
use crate::remarks;
use crate::shape::Shape;
use crate::size;
use crate::tables::{self, Side, Tables};

/// Most segments that are listed: the longest list takes 32 bytes for each.
const MAX_SEGMENTS: u64 = 20_000_000;
/// Most runs that are gone through: some seconds. Where most of them merge, there are fewer segments by far.
const MAX_RUNS: u64 = 1 << 28;
/// Most runs of the shorter request by which it is told how many of the runs merge.
const MAX_SAMPLED: u64 = 1 << 20;
/// Most rows of the table of pairs.
const MAX_ROWS: usize = 40;
/// Most segments of a plan for which a hint is worked out: it lists about as many again, twice.
const MAX_HINTED: u64 = 2_000_000;

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
    /// What that means for a fabric.
    pub(crate) verdict: Verdict,
    /// Why: what one block comes to. `None` where no rank has anything for another.
    pub(crate) reason: Option<String>,
    /// A layout with which both sides would do better, where they differ.
    pub(crate) hint: Option<Hint>,
    /// What is so without being asked for.
    pub(crate) remarks: Vec<String>,
}

/// Whether runs are long enough for a fabric's full rate: by the median run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// Below 4 KiB: a fabric is busy with runs rather than bytes.
    Costly,
    /// Below 64 KiB.
    Fair,
    /// 64 KiB and more.
    Cheap,
}

impl Verdict {
    /// That of runs half of which are at most `median_run` bytes.
    #[must_use]
    pub(crate) const fn of(median_run: u64) -> Self {
        match median_run {
            0..4096 => Self::Costly,
            4096..65_536 => Self::Fair,
            _ => Self::Cheap,
        }
    }

    /// As a sentence begins.
    #[must_use]
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Costly => "Costly",
            Self::Fair => "Fair",
            Self::Cheap => "Cheap",
        }
    }
}

/// A layout for both sides, and what the same request costs then.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Hint {
    /// The layout.
    pub(crate) layout: NamedLayout,
    /// Segments, all pairs together.
    pub(crate) segments: u64,
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
    if let Some(path) = &args.svg {
        output::refuse_dash("--svg", path)?;
    }
    let planned = Planned::new(args.engines.read()?, args.tokens, args.blocks)?;
    let mut report = planned.report(args.tokens)?;
    report.reason = picture::reason(&planned, &report)?;
    report.hint = planned.hint(&report);
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

    /// Calls `work` with what is asked of one pair for a request of `tokens` tokens.
    fn ask<T>(&self, pair: &PairPlan, tokens: u64, work: impl FnOnce(&Request<'_>) -> T) -> T {
        let (from, to) = (&self.producers[pair.pair.producer], &self.consumers[pair.pair.consumer]);
        let from = Tables::new(from.groups(), tokens, self.order, Side::Producer);
        let to = Tables::new(to.groups(), tokens, self.order, Side::Consumer);
        let (from, to) = (from.as_tables(), to.as_tables());
        work(&Request::whole(tokens, &from, &to))
    }

    /// Lists the segments of one pair for a request of `tokens` tokens.
    pub(crate) fn list(&self, pair: &PairPlan, tokens: u64, list: &mut SegmentList) -> Result<()> {
        self.ask(pair, tokens, |request| {
            pair.plan.segments(request, self.engines.mode, &Limits::unlimited(), list)
        })
    }

    /// Runs of all pairs for a request of `tokens` tokens, before any merge.
    fn runs(&self, tokens: u64) -> Result<u64> {
        self.pairs.iter().try_fold(0_u64, |all, pair| {
            let runs = self.ask(pair, tokens, |request| pair.plan.runs(request))?;
            Ok(all.saturating_add(runs))
        })
    }

    pub(crate) fn report(&self, tokens: u64) -> Result<Report> {
        self.refuse_too_many(tokens)?;
        let mut list = SegmentList::new();
        let mut lengths = BTreeMap::new();
        let mut pairs = Vec::new();
        for pair in &self.pairs {
            self.list(pair, tokens, &mut list)?;
            count_lengths(list.as_slice().iter().map(|segment| segment.bytes), &mut lengths);
            pairs.push(PairCost {
                producer: pair.pair.producer,
                consumer: pair.pair.consumer,
                cost: list.cost(),
            });
        }
        let plan_bytes = self.pairs.iter().map(|pair| pair.plan.memory_bytes() as u64).sum();
        let total = Cost::of_counts(&lengths);
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
            total,
            plan_bytes,
            verdict: Verdict::of(total.median_run),
            reason: None,
            hint: None,
            remarks: self.remarks(),
        })
    }

    /// The better of both sides' layouts, where that would take fewer segments on both than the two do now. `None` as well
    /// where it is not worth the time, or where one side cannot have the other's layout.
    fn hint(&self, report: &Report) -> Option<Hint> {
        let layouts = [self.engines.producer.layout, self.engines.consumer.layout];
        let differ = layouts[0] != layouts[1];
        if !differ || report.verdict == Verdict::Cheap || report.total.segments > MAX_HINTED {
            return None;
        }
        let hint = |layout| {
            let mut engines = self.engines.clone();
            engines.producer.layout = layout;
            engines.consumer.layout = layout;
            let other = Self::new(engines, report.tokens, self.order).ok()?;
            let segments = other.report(report.tokens).ok()?.total.segments;
            (segments < report.total.segments).then_some(Hint { layout, segments })
        };
        layouts.into_iter().filter_map(hint).min_by_key(|hint| hint.segments)
    }

    fn remarks(&self) -> Vec<String> {
        let givers = self.pairs.iter().map(|pair| pair.pair.producer).collect();
        let Engines { producer, consumer, .. } = &self.engines;
        [
            remarks::uneven("producer", &self.producers),
            remarks::uneven("consumer", &self.consumers),
            remarks::idle(self.producers.len(), &givers),
            remarks::replicas("producer", producer.grid.dp),
            remarks::replicas("consumer", consumer.grid.dp),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Refuses what would take too long or too much memory, before anything is listed.
    fn refuse_too_many(&self, tokens: u64) -> Result<()> {
        let runs = self.runs(tokens)?;
        if runs <= MAX_SEGMENTS {
            return Ok(());
        }
        let segments = self.foretell(tokens, runs)?;
        if segments <= MAX_SEGMENTS && runs <= MAX_RUNS {
            return Ok(());
        }
        let (what, count, limit) = match segments > MAX_SEGMENTS {
            true => (format!("about {} segments", size::count(segments)), segments, MAX_SEGMENTS),
            false => (format!("{} runs to merge", size::count(runs)), runs, MAX_RUNS),
        };
        let asked = size::count(tokens);
        let error =
            Error::config("--tokens", format!("a request of {asked} tokens would be {what}"))
                .with_context("limit", size::count(limit));
        let most = u128::from(tokens) * u128::from(limit) / u128::from(count);
        Err(match u64::try_from(most).unwrap_or(u64::MAX) {
            0 => error.with_remedy("give layouts that have longer runs in common"),
            most => error.with_remedy(format!(
                "ask for at most about {} tokens, or give layouts that have longer runs in common",
                size::count(most)
            )),
        })
    }

    /// About how many segments the `runs` of a request of `tokens` tokens merge into: the same share as those of a shorter
    /// one, which is listed.
    fn foretell(&self, tokens: u64, runs: u64) -> Result<u64> {
        let share = u128::from(tokens) * u128::from(MAX_SAMPLED) / u128::from(runs.max(1));
        let mut sample = u64::try_from(share).unwrap_or(tokens).clamp(1, tokens);
        let sampled = loop {
            let sampled = self.runs(sample)?;
            if sampled <= MAX_SAMPLED || sample == 1 {
                break sampled;
            }
            sample /= 2;
        };
        if sampled > MAX_SEGMENTS {
            // A single token's, in a block of many tokens that is moved whole.
            return Ok(runs);
        }
        let mut list = SegmentList::new();
        let mut segments = 0;
        for pair in &self.pairs {
            self.list(pair, sample, &mut list)?;
            segments += list.len() as u64;
        }
        let foretold = u128::from(segments) * u128::from(runs) / u128::from(sampled.max(1));
        Ok(u64::try_from(foretold).unwrap_or(u64::MAX))
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
    out.table(&table)?;
    out.line("")?;
    if let Some(reason) = &report.reason {
        out.line(format!("{}: {reason}", report.verdict.word()))?;
    }
    if let Some(Hint { layout, segments }) = report.hint {
        let segments = size::count(segments);
        out.line(format!("With layout={layout} on both sides: {segments} segments"))?;
    }
    report.remarks.iter().try_for_each(|remark| out.line(format!("Note: {remark}")))
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
