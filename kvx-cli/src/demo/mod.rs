//! `kvx demo`: a trace's requests, prefilled by one engine and decoded by another, with every element checked.

use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use kvx_core::facts::Facts;
use kvx_core::layout::RankLayout;
use kvx_core::transfer::Mode;
use kvx_core::{Error, Result};

use crate::args::{Damage, DemoArgs};
use crate::engine::live::{LocalSetup, Secret};
use crate::engine::place::Place;
use crate::engine::{Engine, initiator};
use crate::fabric::{self, Fabric};
use crate::failure::{self, Failure};
use crate::memory;
use crate::output::Output;
use crate::remarks;
use crate::remote::Memory;
use crate::shape::Shape;
use crate::size;
use crate::trace::{self, Entry, Generator};

mod leased;
mod link;
mod moving;
mod replay;
mod report;
mod scale;

use link::Link;
use replay::{Options, Replay, Through, Totals};
use report::Report;
use scale::{Budget, Load, Pools, Scale};

/// How much faster than its timestamps a trace may be replayed.
const SPEEDS: std::ops::RangeInclusive<f64> = 1e-6..=1e6;
/// Most requests of one run.
const MAX_REQUESTS: u32 = 1_000_000;
/// Most wrong elements that are told apart.
const MAX_TOLD: usize = 8;
/// Longest prompt of a generated trace, in tokens.
const LONGEST: u64 = 16_384;
/// Requests that decode at the same time, where they hold a state each.
const DECODING: u32 = 16;

/// Runs `kvx demo`; gives the exit code.
///
/// # Errors
///
/// Those of the options, the trace, the shapes, the fabric; and when the result cannot be written.
pub(crate) fn run(args: &DemoArgs, out: &mut Output) -> Result<u8, Failure> {
    let begun = Instant::now();
    if args.speed.is_some_and(|speed| !SPEEDS.contains(&speed)) {
        return Err(Error::config("--speed", "must be from 0.000001 to 1000000").into());
    }
    if args.requests > MAX_REQUESTS {
        return Err(Error::config("--requests", format!("at most {MAX_REQUESTS}")).into());
    }
    let engines = args.engines.read()?;
    let trace = load(args)?;
    let shapes = [&engines.producer, &engines.consumer];
    let pools = pools(shapes, &trace, args.in_flight)?;
    let memory = match &args.memory {
        Some(text) => memory::asked(size::parse("--memory", text)?),
        None => scale::default_memory(),
    };
    let volume = if args.full_size { None } else { Some(size::parse("--volume", &args.volume)?) };
    let tokens = trace.iter().map(|entry| entry.input_length).sum();
    let longest = trace.iter().map(|entry| entry.input_length).max().unwrap_or(0);
    let at_once = replay::STEP_TOKENS.min(longest.saturating_mul(args.in_flight.into()));
    let load = Load {
        requests: trace.len() as u64,
        tokens,
        longest,
        at_once: at_once.max(longest).min(tokens),
    };
    let scale = Scale::new(&engines.model, shapes, pools, load, Budget { memory, volume })?;
    let fabric = Fabric::choose(args.backend.as_deref(), args.seed)?;

    out.line(format!("model     {}, {}", engines.model.name(), scale.about()))?;
    out.line(format!("producer  {}", engines.producer))?;
    out.line(format!("consumer  {}", engines.consumer))?;
    out.line(format!("trace     {}, {} requests", source(args), size::count(load.requests)))?;
    out.line(format!("backend   {}", fabric.about()))?;
    out.line(format!(
        "mode      transfers are started by the {}, which {}s",
        initiator(engines.mode),
        engines.mode
    ))?;

    // Which segments are posted is this program's business only where nothing stands between it and the ports.
    let bare = args.bare || args.corrupt == Some(Damage::Segment);
    let through = if bare { Through::Port } else { Through::Connector };
    let integrity = !bare && !args.no_integrity && engines.mode == Mode::Read;
    out.line(format!("through   {}", about(through, integrity)))?;
    let options = Options {
        mode: engines.mode,
        through,
        seed: args.seed,
        in_flight: args.in_flight.into(),
        speed: args.speed,
        damage: args.corrupt,
    };
    let mut replay = build(&scale, shapes, pools, &fabric, (options, integrity))?;
    for (option, engine) in [("--producer", &replay.producers), ("--consumer", &replay.consumers)] {
        engine.replicas.iter().try_for_each(|replica| replica.pool.check(option, longest))?;
    }
    let progress = progress(load.requests);
    let done = replay.run(&trace, &progress);
    progress.finish_and_clear();
    done?;
    let remarks = remarks(&replay);
    let totals = replay.close(&fabric)?;
    if args.corrupt.is_some() && !totals.has_damage() {
        return Err(Error::config("--corrupt", "nothing was moved that could be damaged")
            .with_remedy("give more requests")
            .into());
    }
    let verified = totals.is_good();
    let report = Report {
        requests: totals.requests,
        bytes: totals.bytes,
        segments: totals.segments,
        mean_segment: totals.bytes.checked_div(totals.segments).unwrap_or_default(),
        backend: fabric.name(),
        seconds: totals.moving.as_secs_f64(),
        gbps: gbps(&totals),
        transport: totals.transport,
        verified,
        elements: totals.elements,
        wrong: totals.wrong,
        mismatches: totals.mismatches,
        watched: totals.watched,
        changed: totals.changed,
        tokens: totals.tokens,
        tokens_moved: totals.tokens - totals.reused,
        tokens_reused: totals.reused,
        through,
        integrity,
        digests: totals.traffic.iter().map(|side| side.digests_equal).sum(),
        messages_with_data: totals.traffic.iter().map(|side| side.by_fabric).sum(),
        messages_by_channel: totals.traffic.iter().map(|side| side.by_channel).sum(),
        notifications: totals.notifications,
        in_process: fabric.is_in_process(),
        model: engines.model.name().to_owned(),
        scale,
        producer: engines.producer,
        consumer: engines.consumer,
        mode: engines.mode,
        initiator: initiator(engines.mode),
        seed: args.seed,
        trace: source(args),
        fill_seconds: totals.filling.as_secs_f64(),
        check_seconds: totals.checking.as_secs_f64(),
        remarks,
        total_seconds: begun.elapsed().as_secs_f64(),
    };
    report.print(out)?;
    out.document(&report)?;
    Ok(if verified { failure::OK } else { failure::FAILED })
}

/// What is so without being asked for.
fn remarks(replay: &Replay) -> Vec<String> {
    let first = |engine: &Engine| {
        engine.replicas.first().map(|replica| replica.layouts.clone()).unwrap_or_default()
    };
    let (producers, consumers) = (first(&replay.producers), first(&replay.consumers));
    let pairs = replay.links.iter().flat_map(|link| &link.pairs);
    let givers = pairs.map(|pair| pair.pair.producer).collect();
    [
        remarks::uneven("producer", &producers),
        remarks::uneven("consumer", &consumers),
        remarks::idle(producers.len(), &givers),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The trace that is replayed.
fn load(args: &DemoArgs) -> Result<Vec<Entry>> {
    let requests = args.requests as usize;
    let mut entries = match &args.trace {
        Some(path) => trace::read(path, requests)?,
        None => {
            let longest = args.max_tokens.unwrap_or(LONGEST).min(LONGEST);
            trace::generate(Generator { seed: args.seed, longest }, requests)
        }
    };
    if let Some(most) = args.max_tokens {
        entries.iter_mut().for_each(|entry| entry.cut(most));
    }
    Ok(entries)
}

fn source(args: &DemoArgs) -> String {
    match &args.trace {
        Some(path) => path.display().to_string(),
        None => format!("generated from seed {}", args.seed),
    }
}

/// How many blocks each engine has: as its shape says, or enough for the longest request and some more.
fn pools(shapes: [&Shape; 2], trace: &[Entry], in_flight: u16) -> Result<Pools> {
    let longest = trace.iter().map(|entry| entry.input_length).max().unwrap_or(0);
    let all: u64 = trace.iter().map(|entry| entry.input_length).sum();
    // The producer holds a cache until it is read, the consumer until its answer is done, and longer for its prefix.
    let spare = [32_768, 400_000];
    let mut blocks = [0; 2];
    for (index, shape) in shapes.into_iter().enumerate() {
        let size = u64::from(shape.block_tokens);
        let tokens = (2 * longest + spare[index]).min(all);
        // Every request may leave its last block half empty.
        let needed = tokens.div_ceil(size) + trace.len() as u64 + 1;
        let needed =
            needed.min(all / size + trace.len() as u64 + 1).max(longest.div_ceil(size) + 1);
        let most =
            u32::try_from(needed).map_err(|_| Error::config("--trace", "prompts too long"))?;
        blocks[index] = shape.blocks.unwrap_or(most);
    }
    let in_flight = u32::from(in_flight);
    Ok(Pools { blocks, states: [in_flight + 1, DECODING + in_flight + 1] })
}

/// Makes both engines, and lets their ranks meet.
fn build(
    scale: &Scale,
    shapes: [&Shape; 2],
    pools: Pools,
    fabric: &Fabric,
    (options, integrity): (Options, bool),
) -> Result<Replay> {
    let engine = |index: usize| {
        let shape = shapes[index];
        let ranks =
            |dp| shape.ranks(&scale.model, pools.blocks[index], Some(pools.states[index]), dp);
        (0..shape.grid.dp).map(ranks).collect::<Result<Vec<_>>>()
    };
    let (producers, consumers) = (engine(0)?, engine(1)?);
    // Before any memory is made: what cannot be mapped is refused.
    let links = (0_u32..)
        .zip(&consumers)
        .map(|(rotation, consumer)| Link::new(&producers[0], consumer, rotation))
        .collect::<Result<Vec<_>>>()?;
    let starts = [options.mode == Mode::Write, options.mode == Mode::Read];
    let here = |engine: usize| starts[engine] || fabric.is_in_process();
    let (mut producers, mut consumers) = if options.through == Through::Connector {
        let secret = Secret::draw()?;
        // Both keep one model: what two shapes may differ in, plans have looked at.
        let facts = scale.model.facts()?.with(Facts::MODEL, scale.model.name())?;
        let place = |name: &str, replicas: &[Vec<RankLayout>], here: bool| {
            let (name, secret, facts) = (name.to_owned(), secret.clone(), facts.clone());
            let setup = LocalSetup { name, secret, facts, integrity };
            Place::live(fabric, replicas.to_vec(), setup, here)
        };
        let producer_place = place("producer", &producers, here(0))?;
        let consumer_place = place("consumer", &consumers, here(1))?;
        (Engine::new(producers, producer_place), Engine::new(consumers, consumer_place))
    } else {
        let place = |replicas: &[Vec<RankLayout>], here: bool| match here {
            true => Place::here(fabric, replicas.concat(), Memory::Backend),
            false => Place::there(fabric, replicas.concat(), Memory::Backend),
        };
        let (producer_place, consumer_place) =
            (place(&producers, here(0))?, place(&consumers, here(1))?);
        (Engine::new(producers, producer_place), Engine::new(consumers, consumer_place))
    };
    if options.through == Through::Port {
        for from in 0..producers.replicas.len() {
            for (to, link) in links.iter().enumerate() {
                let (producer, consumer) = ((&mut producers, from), (&mut consumers, to));
                link::join(fabric, link, options.mode, producer, consumer)?;
            }
        }
    }
    let running = consumers.replicas.iter().map(|_| Vec::new()).collect();
    let runtime = fabric::runtime()?;
    Ok(Replay { options, runtime, producers, consumers, links, running, totals: Totals::default() })
}

/// By which way, for people.
const fn about(through: Through, integrity: bool) -> &'static str {
    match (through, integrity) {
        (Through::Port, _) => "a port of each rank alone",
        (Through::Connector, true) => {
            "the whole connector: leases, an encrypted control channel, digests"
        }
        (Through::Connector, false) => {
            "the whole connector: leases, an encrypted control channel; no digests"
        }
    }
}

/// A bar on standard error, where that is a terminal.
fn progress(requests: u64) -> ProgressBar {
    let bar = ProgressBar::new(requests);
    let style = ProgressStyle::with_template(
        "{bar:32} {pos}/{len} requests, {elapsed} elapsed, {eta} to go",
    );
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn gbps(totals: &Totals) -> f64 {
    let seconds = totals.moving.as_secs_f64();
    if seconds > 0.0 { totals.bytes as f64 / seconds / 1e9 } else { 0.0 }
}
