//! `kvx bench --connector`: what leases, peers and confirmations cost beside a bare port, between two processes. Caches are so small
//! that moving them costs little.

use std::time::{Duration, Instant};

use kvx_connector::ticket::Ticket;
use kvx_core::facts::Facts;
use kvx_core::layout::{Dtype, ModelGeometry, NamedLayout, RankLayout};
use kvx_core::transfer::Mode;
use kvx_core::{Error, ErrorKind, Result};

use super::connector_report::{Costs, Latencies, Report};
use super::rig::Rig;
use super::room::Beside;
use super::stats::Quantiles;
use crate::args::{BenchArgs, Engines, Order};
use crate::engine::live::{Live, LocalSetup, Secret};
use crate::engine::ranks::Piece;
use crate::engine::tags::Prompt;
use crate::fabric::Fabric;
use crate::failure::{self, Failure};
use crate::output::Output;
use crate::remote::pinned::{self, Pinned};
use crate::remote::{PATIENCE, Process, Publish, processor_time};
use crate::shape::Shape;
use crate::tables::{Side, Tables};
use crate::trace::HASH_TOKENS;

/// Tokens of a block.
const BLOCK: u32 = 16;
/// Blocks of the request whose processor time is taken.
const BLOCKS: u64 = 64;
/// Requests under way at the same time, where it is not one after the other. The consumer has blocks for each of them.
const SLOTS: u32 = 64;
const AT_ONCE: usize = SLOTS as usize;
/// Requests that are leased ahead, at most.
const AHEAD: u32 = 512;
/// Requests before those that count.
const WARM_UP: u32 = 50;
/// How many times as many requests are counted for a rate as for a time.
const MORE: u32 = 10;

/// The producer in a process of its own, the consumer in this one, a rank each.
struct Pair<'a> {
    fabric: &'a Fabric,
    live: Live,
    process: Process,
    tokens: u64,
    /// Blocks of the producer.
    theirs: Vec<Vec<u32>>,
    /// Blocks of the consumer: those of each request that is under way at the same time.
    ours: Vec<Vec<Vec<u32>>>,
    /// How many of these were fetched into.
    used: usize,
    next: u64,
}

/// Runs it; gives the exit code.
pub(super) fn run(args: &BenchArgs, fabric: &Fabric, out: &mut Output) -> Result<u8, Failure> {
    let (mut costs, mut wrong) = (Costs::default(), 0);
    let times = args.small;

    // Processor time, at 64 blocks.
    let mut pair = Pair::new(fabric, BLOCKS, None)?;
    // Each of the places that are fetched into at the same time is touched.
    pair.round(SLOTS, AT_ONCE)?;
    let (mut publish, mut fetch, mut one_by_one) = (0, 0, 0);
    let mut left = times;
    while left > 0 {
        let some = left.min(AHEAD);
        let before = pair.processor_time()?;
        let tickets = pair.lease(some)?;
        let leased = pair.processor_time()?;
        pair.fetch(&tickets, AT_ONCE)?;
        pair.over(tickets.len())?;
        let fetched = pair.processor_time()?;
        let tickets = pair.lease(some)?;
        let alone = pair.processor_time()?;
        pair.fetch(&tickets, 1)?;
        pair.over(tickets.len())?;
        let ended = pair.processor_time()?;
        publish += leased - before;
        fetch += fetched - leased;
        one_by_one += ended - alone;
        left -= some;
    }
    costs.publish = per(publish, times);
    costs.fetch = per(fetch, times);
    costs.fetch_one_by_one = per(one_by_one, times);
    wrong += pair.check()?;
    let traffic = pair.live.traffic();
    pair.close()?;
    let mut rig = rig(fabric, args, BLOCKS, SLOTS)?;
    for _ in 0..WARM_UP {
        rig.round()?;
    }
    rig.begin_counting(times)?;
    for _ in 0..times {
        rig.round()?;
    }
    let bare = rig.end_counting()?;
    costs.bare_one_by_one = bare.initiator + bare.target;
    // The first warms up.
    for times in [SLOTS, times] {
        rig.begin_counting(times)?;
        let mut left = times;
        while left > 0 {
            let some = left.min(SLOTS);
            rig.rounds(some)?;
            left -= some;
        }
        let bare = rig.end_counting()?;
        costs.bare = bare.initiator + bare.target;
    }
    let transport = rig.transport()?;
    rig.close()?;

    // Requests a second, on one core.
    let cpu = pinned::any();
    let rate = {
        let _pinned = Pinned::to(cpu);
        let mut pair = Pair::new(fabric, 1, cpu)?;
        pair.round(WARM_UP, AT_ONCE)?;
        let begun = Instant::now();
        let mut left = times.saturating_mul(MORE);
        while left > 0 {
            let some = left.min(AHEAD);
            pair.round(some, AT_ONCE)?;
            left -= some;
        }
        let elapsed = begun.elapsed();
        wrong += pair.check()?;
        pair.close()?;
        f64::from(times) * f64::from(MORE) / elapsed.as_secs_f64()
    };

    // Times of one request after the other, beside the bare port's.
    let latencies = latencies(fabric, args, &mut wrong)?;
    let report = Report::new(fabric, transport, args, (costs, rate, latencies), traffic, wrong);
    report.print(out)?;
    out.document(&report)?;
    Ok(if wrong == 0 { failure::OK } else { failure::FAILED })
}

fn latencies(fabric: &Fabric, args: &BenchArgs, wrong: &mut u64) -> Result<Latencies> {
    let mut pair = Pair::new(fabric, 1, None)?;
    let mut rig = rig(fabric, args, 1, 1)?;
    pair.round(WARM_UP, 1)?;
    let (mut whole, mut bare) = (Vec::new(), Vec::new());
    let mut left = args.small;
    while left > 0 {
        let some = left.min(AHEAD);
        for ticket in pair.lease(some)? {
            whole.push(pair.fetch_one(&ticket)?);
            // By turns, so that whatever disturbs the machine disturbs both.
            bare.push(rig.round()?.settled);
        }
        pair.over(some as usize)?;
        left -= some;
    }
    let raw = raw(&mut rig, args.small)?;
    *wrong += pair.check()? + rig.check()?;
    rig.close()?;
    pair.close()?;
    Ok(Latencies::new(whole, bare, raw))
}

#[cfg(target_os = "linux")]
fn raw(rig: &mut Rig<'_>, times: u32) -> Result<Option<Quantiles>> {
    kvx_core::thread::runs_briefly();
    Ok(Quantiles::of(rig.process.raw(times, None)?))
}

#[cfg(not(target_os = "linux"))]
fn raw(_: &mut Rig<'_>, _: u32) -> Result<Option<Quantiles>> {
    Ok(None)
}

/// The model, as small as can be, and one rank on each side.
fn engines() -> Result<Engines> {
    let shape = Shape::new(1, NamedLayout::FlashAttentionNhd, BLOCK)?;
    let model = ModelGeometry::llama_like(1, 1, 16, Dtype::Bf16)?;
    Ok(Engines { model, producer: shape, consumer: shape, mode: Mode::Read })
}

/// The same request over bare ports, to so many places.
fn rig<'a>(fabric: &'a Fabric, args: &BenchArgs, blocks: u64, places: u32) -> Result<Rig<'a>> {
    let args =
        BenchArgs { tokens: blocks * u64::from(BLOCK), blocks: Order::Permuted, ..args.clone() };
    Rig::with_places(fabric, engines()?, &args, places, Beside::Nothing)
}

impl<'a> Pair<'a> {
    fn new(fabric: &'a Fabric, blocks: u64, cpu: Option<u32>) -> Result<Self> {
        let engines = engines()?;
        let tokens = blocks * u64::from(BLOCK);
        let pool = crate::tables::pool_blocks("blocks", tokens, BLOCK)?;
        let ranks = |pool| engines.producer.ranks(&engines.model, pool, None, 0);
        let layouts = ranks(pool)?;
        let groups = layouts.first().map(RankLayout::groups).unwrap_or_default();
        let [theirs, first] = [Side::Producer, Side::Consumer]
            .map(|side| Tables::new(groups, tokens, Order::Permuted, side).into_ids());
        let ours = (0..SLOTS).map(|slot| {
            let moved = |ids: &Vec<u32>| ids.iter().map(|id| id + slot * pool).collect();
            first.iter().map(moved).collect()
        });
        let ours = ours.collect();
        let facts = engines.model.facts()?.with(Facts::MODEL, "bench")?;
        let secret = Secret::draw()?;
        let setup = |name: &str| LocalSetup {
            name: name.to_owned(),
            secret: secret.clone(),
            facts: facts.clone(),
            integrity: false,
        };
        let process = Process::start_live(&fabric.spec(), vec![layouts], setup("producer"), cpu)?;
        let wide = vec![ranks(pool.saturating_mul(SLOTS))?];
        let live = Live::start(&setup("consumer").setup()?, wide, || fabric.open())?;
        let mut pair = Self { fabric, live, process, tokens, theirs, ours, used: 0, next: 0 };
        pair.process.fill(vec![pair.piece(&pair.theirs)])?;
        Ok(pair)
    }

    /// The request on the one rank of a side.
    fn piece(&self, tables: &[Vec<u32>]) -> Piece {
        let ids: Vec<u64> = (0..self.tokens.div_ceil(HASH_TOKENS)).collect();
        let prompt = Prompt::new(1, self.tokens, &ids);
        Piece { rank: 0, prompt, tables: tables.to_vec(), from: 0 }
    }

    /// How many elements of the consumer's are wrong.
    fn check(&self) -> Result<u64> {
        let pieces: Vec<Piece> =
            self.ours.iter().take(self.used).map(|tables| self.piece(tables)).collect();
        let checked = self.live.memories.check(&pieces)?;
        if checked.is_empty() || checked.iter().any(|checked| checked.elements == 0) {
            return Err(Error::new(ErrorKind::Internal, "bench", "nothing was compared"));
        }
        Ok(checked.iter().map(|checked| checked.wrong).sum())
    }

    /// Leases the request so many times.
    fn lease(&mut self, times: u32) -> Result<Vec<Ticket>> {
        let publish = Publish {
            replica: 0,
            request: self.next,
            tokens: self.tokens,
            tables: self.theirs.clone(),
            mode: Mode::Read,
        };
        self.next += u64::from(times);
        self.process.publish_many(publish, times)
    }

    /// Waits until the last so many leases are over.
    fn over(&mut self, times: usize) -> Result<()> {
        let first = self.next - times as u64;
        self.process.expect_over((first..self.next).collect())?;
        self.process.over().map(drop)
    }

    /// Fetches what is leased, so many at a time.
    fn fetch(&mut self, tickets: &[Ticket], at_once: usize) -> Result<()> {
        for some in tickets.chunks(at_once) {
            self.used = self.used.max(some.len());
            let begun = some.iter().zip(&self.ours);
            let begun = begun.map(|(ticket, tables)| self.begin(ticket, tables));
            let fetches = begun.collect::<Result<Vec<_>>>()?;
            self.wait(async {
                for fetch in fetches {
                    fetch.over().await.map_err(|failed| failed.error.again())?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn begin(&self, ticket: &Ticket, tables: &[Vec<u32>]) -> Result<kvx_connector::engine::Fetch> {
        self.live.fetch(0, ticket, 0..self.tokens, tables, Mode::Read)
    }

    /// How long one fetch takes, its confirmation included.
    fn fetch_one(&mut self, ticket: &Ticket) -> Result<Duration> {
        let begun = Instant::now();
        self.used = self.used.max(1);
        let fetch = self.begin(ticket, &self.ours[0])?;
        self.wait(async { fetch.over().await.map(drop).map_err(|failed| failed.error.again()) })?;
        Ok(begun.elapsed())
    }

    fn wait(&mut self, done: impl Future<Output = Result<()>>) -> Result<()> {
        self.process.beside(&self.fabric.runtime, async {
            tokio::time::timeout(PATIENCE, done).await.unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::Fabric, "bench", "a request was not fetched in time")
                    .with_context("seconds", PATIENCE.as_secs()))
            })
        })
    }

    /// So many requests from their leases to the end of these.
    fn round(&mut self, times: u32, at_once: usize) -> Result<()> {
        let tickets = self.lease(times)?;
        self.fetch(&tickets, at_once)?;
        self.over(tickets.len())
    }

    /// Of both processes, in nanoseconds.
    fn processor_time(&mut self) -> Result<u64> {
        Ok(processor_time() + self.process.processor_time()?)
    }

    fn close(self) -> Result<()> {
        drop(self.live);
        self.process.close()
    }
}

/// Microseconds for each.
#[expect(clippy::cast_precision_loss, reason = "for people")]
fn per(nanoseconds: u64, count: u32) -> f64 {
    nanoseconds as f64 / 1e3 / f64::from(count.max(1))
}
