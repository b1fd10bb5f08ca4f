//! The two engines, the request, and its rounds.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvx_core::capability::Limits;
use kvx_core::id::PeerId;
use kvx_core::layout::RankLayout;
use kvx_core::plan::{Pairing, Request, SegmentList};
use kvx_core::port::Transfer;
use kvx_core::transfer::{Mode, Segment};
use kvx_core::{Error, ErrorKind, Result};
use tokio::task::JoinHandle;

use super::room::{self, Beside};
use crate::args::{BenchArgs, Engines, Order};
use crate::engine::initiator;
use crate::engine::rank::Rank;
use crate::engine::ranks::{Piece, Ranks};
use crate::engine::tags::Prompt;
use crate::fabric::Fabric;
use crate::pairs;
use crate::remote::{PATIENCE, Process, processor_time};
use crate::size;
use crate::tables::{self, Side, Tables};
use crate::trace::HASH_TOKENS;

/// Seed of the tags: any will do.
const SEED: u64 = 1;

/// Two engines that have met, and a request between them.
pub(crate) struct Rig<'a> {
    pub(crate) fabric: &'a Fabric,
    pub(crate) engines: Engines,
    /// Of the engine in this process.
    pub(crate) ranks: Ranks,
    pub(crate) process: Process,
    pub(crate) links: Vec<Link>,
    drivers: Vec<JoinHandle<Result<()>>>,
    tokens: u64,
    tables: [Vec<Vec<u32>>; 2],
    /// Segments where blocks are no neighbours: each its own.
    pub(crate) unmerged: u64,
    counting: Option<Counting>,
    /// Processor time of this process in rounds.
    spent: u64,
}

/// A rank here, one there, and what is moved between them.
pub(crate) struct Link {
    pub(crate) here: usize,
    pub(crate) there: usize,
    pub(crate) peer: PeerId,
    pub(crate) segments: Vec<Segment>,
    /// The same to each further place.
    elsewhere: Vec<Vec<Segment>>,
}

impl Link {
    /// What is moved the so-manieth time, of those that are under way at once: to a place of its own, as long as there are more.
    fn segments_of(&self, time: u32) -> &[Segment] {
        let at = time as usize % (1 + self.elsewhere.len());
        at.checked_sub(1).map_or(&self.segments, |at| &self.elsewhere[at])
    }
}

struct Counting {
    rounds: u32,
    target: u64,
}

/// What one round took.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    /// Until all was posted.
    pub(crate) posted: Duration,
    /// Until all had settled.
    pub(crate) settled: Duration,
    /// By which of the backend's ways the transfers went, where it says so.
    pub(crate) routes: BTreeSet<Cow<'static, str>>,
}

/// Processor time per request, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cpu {
    pub(crate) initiator: f64,
    pub(crate) target: f64,
}

impl<'a> Rig<'a> {
    pub(crate) fn new(fabric: &'a Fabric, engines: Engines, args: &BenchArgs) -> Result<Self> {
        Self::with_places(fabric, engines, args, 1, Beside::Limits)
    }

    /// With so many places at the consumer, each with room for the whole request: those that are under way at the same time go to
    /// one each.
    pub(crate) fn with_places(
        fabric: &'a Fabric,
        engines: Engines,
        args: &BenchArgs,
        places: u32,
        beside: Beside,
    ) -> Result<Self> {
        let tokens = args.tokens;
        let layouts = |option, shape: &crate::shape::Shape, places: u32| {
            let needed = tables::pool_blocks(option, tokens, shape.block_tokens)?;
            let blocks = shape.blocks.unwrap_or(needed).saturating_mul(places);
            let layouts = shape
                .ranks(&engines.model, blocks, None, 0)
                .map_err(|error| error.with_context("option", option))?;
            if let Some(first) = layouts.first() {
                tables::check_pool(option, first, tokens, args.blocks)?;
            }
            Ok::<_, Error>(layouts)
        };
        let producers = layouts("--producer", &engines.producer, 1)?;
        let consumers = layouts("--consumer", &engines.consumer, places)?;
        let pairing = Pairing::new(&producers, &consumers, 0)?;
        let pairs = pairs::compile(&pairing, &producers, &consumers)?;
        let ids = |order| {
            let of = |ranks: &[RankLayout], side| {
                let groups = ranks.first().map(RankLayout::groups).unwrap_or_default();
                Tables::new(groups, tokens, order, side).into_ids()
            };
            [of(&producers, Side::Producer), of(&consumers, Side::Consumer)]
        };
        let lists = |tables: &[Vec<Vec<u32>>; 2]| {
            let [from, to] = [0, 1].map(|side: usize| tables::borrowed(&tables[side]));
            let request = Request::whole(tokens, &from, &to);
            let mut list = SegmentList::new();
            let one = |pair: &pairs::PairPlan| {
                pair.plan.segments(&request, engines.mode, &Limits::unlimited(), &mut list)?;
                Ok(list.as_slice().to_vec())
            };
            pairs.iter().map(one).collect::<Result<Vec<Vec<Segment>>>>()
        };
        room::check(&producers, &consumers, &pairs, beside)?;
        let tables = ids(args.blocks);
        let lists_of = lists(&tables)?;
        let place = tables::pool_blocks("--consumer", tokens, engines.consumer.block_tokens)?;
        let elsewhere = (1..places).map(|at| {
            let moved = |ids: &Vec<u32>| ids.iter().map(|id| id + at * place).collect();
            lists(&[tables[0].clone(), tables[1].iter().map(moved).collect()])
        });
        let elsewhere = elsewhere.collect::<Result<Vec<_>>>()?;
        let unmerged = match args.blocks {
            Order::Permuted => lists_of.iter().map(Vec::len).sum::<usize>(),
            Order::Contiguous => {
                // With blocks that are no neighbours nothing is merged. A pool of a given size may have no room for these.
                let apart = [0, 1].map(|side: usize| spread_out(&tables[side]));
                lists(&apart)?.iter().map(Vec::len).sum()
            }
        };
        let (mine, others) = match engines.mode {
            Mode::Read => (consumers, producers),
            Mode::Write => (producers, consumers),
        };
        let memory = args.region.into();
        let process = Process::start(&fabric.spec(), others, memory)?;
        let ranks = mine.into_iter().map(|layout| Rank::new(layout, fabric.port()?, memory));
        let mut rig = Self {
            fabric,
            ranks: Ranks::new(ranks.collect::<Result<_>>()?),
            engines,
            process,
            links: Vec::new(),
            drivers: Vec::new(),
            tokens,
            tables,
            unmerged: unmerged as u64,
            counting: None,
            spent: 0,
        };
        for (at, (pair, segments)) in pairs.iter().zip(lists_of).enumerate() {
            let (producer, consumer) = (pair.pair.producer, pair.pair.consumer);
            let (here, there) = match rig.engines.mode {
                Mode::Read => (consumer, producer),
                Mode::Write => (producer, consumer),
            };
            let peer = rig.process.meet(fabric, (rig.ranks.get_mut(here)?, here), there)?;
            let elsewhere = elsewhere.iter().map(|lists| lists[at].clone()).collect();
            rig.links.push(Link { here, there, peer, segments, elsewhere });
        }
        for rank in rig.ranks.list() {
            let driver = fabric.runtime.spawn(rank.port.drive());
            rig.drivers.push(driver);
        }
        rig.fill()?;
        Ok(rig)
    }

    /// What the connection uses.
    pub(crate) fn transport(&self) -> Result<String> {
        let Some(link) = self.links.first() else { return Ok(String::new()) };
        Ok(self.ranks.list()[link.here].port.peer_info(link.peer)?.transport)
    }

    /// The request, for people.
    pub(crate) fn about(&self) -> String {
        format!(
            "{}, {}, {}, {}, started by the {}",
            self.engines.model.name(),
            size::of_many(self.tokens, "token"),
            size::bytes(self.bytes()),
            size::of_many(self.merged(), "segment"),
            initiator(self.engines.mode)
        )
    }

    /// Bytes of the request.
    pub(crate) fn bytes(&self) -> u64 {
        self.segments().map(|segment| segment.bytes).sum()
    }

    /// Segments of the request.
    pub(crate) fn merged(&self) -> u64 {
        self.segments().count() as u64
    }

    fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.links.iter().flat_map(|link| &link.segments)
    }

    /// The request on each of so many ranks.
    fn pieces(&self, ranks: usize, side: usize) -> Vec<Piece> {
        let hash_ids: Vec<u64> = (0..self.tokens.div_ceil(HASH_TOKENS)).collect();
        let prompt = Prompt::new(SEED, self.tokens, &hash_ids);
        let piece = |rank| Piece {
            rank,
            prompt: prompt.clone(),
            tables: self.tables[side].clone(),
            from: 0,
        };
        (0..ranks).map(piece).collect()
    }

    /// Writes the producer's tags.
    fn fill(&mut self) -> Result<()> {
        match self.engines.mode {
            Mode::Read => self.process.fill(self.pieces(self.process.ranks.len(), 0)),
            Mode::Write => self.ranks.memories.fill(&self.pieces(self.ranks.list().len(), 0)),
        }
    }

    /// Compares the consumer's elements with their tags: how many are wrong.
    pub(crate) fn check(&mut self) -> Result<u64> {
        let checked = match self.engines.mode {
            Mode::Write => self.process.check(self.pieces(self.process.ranks.len(), 1))?,
            Mode::Read => self.ranks.memories.check(&self.pieces(self.ranks.list().len(), 1))?,
        };
        Ok(checked.iter().map(|checked| checked.wrong).sum())
    }

    /// Whether the other engine listens for all counted rounds at once. Between those of writes it is asked for something else.
    const fn listens_for_all(&self) -> bool {
        matches!(self.engines.mode, Mode::Read)
    }

    /// Moves the request once, and tells the other engine, which may have to be told to listen.
    pub(crate) fn round(&mut self) -> Result<Round> {
        let alone = self.counting.is_none() || !self.listens_for_all();
        if alone {
            self.process.listen(self.notifications(1))?;
        }
        let before = processor_time();
        let round = self.moved(1);
        self.spent += processor_time() - before;
        let round = round?;
        if alone {
            self.process.finish()?;
        }
        Ok(round)
    }

    /// Moves the request so many times, all under way at once, while rounds are counted.
    pub(crate) fn rounds(&mut self, times: u32) -> Result<()> {
        let before = processor_time();
        let moved = self.moved(times);
        self.spent += processor_time() - before;
        moved.map(drop)
    }

    fn moved(&mut self, times: u32) -> Result<Round> {
        let begun = Instant::now();
        let (links, ranks, mode) = (&self.links, &self.ranks, self.engines.mode);
        self.process.beside(&self.fabric.runtime, async {
            let mut pending: Vec<Transfer> = Vec::with_capacity(links.len());
            let all = (0..times).flat_map(|time| links.iter().map(move |link| (time, link)));
            for (time, link) in all {
                let rank = &ranks.list()[link.here];
                let port = &rank.port;
                pending.push(port.transfer(
                    link.peer,
                    mode,
                    &rank.set,
                    link.segments_of(time),
                    Some(b"x"),
                )?);
            }
            let posted = begun.elapsed();
            let mut routes = BTreeSet::new();
            for transfer in pending {
                let report = tokio::time::timeout(PATIENCE, transfer).await.map_err(|_| {
                    Error::new(ErrorKind::Fabric, "bench", "a transfer did not settle in time")
                        .with_context("seconds", PATIENCE.as_secs())
                })??;
                routes.extend(report.route);
            }
            Ok(Round { posted, settled: begun.elapsed(), routes })
        })
    }

    /// How many notifications each rank of the other engine gets in this many rounds.
    fn notifications(&self, rounds: u32) -> Vec<u64> {
        let mut counts = vec![0; self.process.ranks.len()];
        for link in &self.links {
            counts[link.there] += u64::from(rounds);
        }
        counts
    }

    /// From now on rounds are counted, this many.
    pub(crate) fn begin_counting(&mut self, rounds: u32) -> Result<()> {
        let target = self.process.processor_time()?;
        if self.listens_for_all() {
            self.process.listen(self.notifications(rounds))?;
        }
        self.counting = Some(Counting { rounds, target });
        self.spent = 0;
        Ok(())
    }

    /// Processor time of both sides in the rounds that were counted.
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    pub(crate) fn end_counting(&mut self) -> Result<Cpu> {
        let Some(Counting { rounds, target }) = self.counting.take() else {
            return Ok(Cpu::default());
        };
        if self.listens_for_all() {
            self.process.finish()?;
        }
        let target = self.process.processor_time()? - target;
        let per_request = |nanoseconds: u64| nanoseconds as f64 / 1e3 / f64::from(rounds);
        Ok(Cpu { initiator: per_request(self.spent), target: per_request(target) })
    }

    pub(crate) fn close(self) -> Result<()> {
        self.fabric.close(self.ranks.ports())?;
        for driver in self.drivers {
            driver.abort();
        }
        self.process.close()
    }
}

/// The same number of blocks, no two of them neighbours.
fn spread_out(tables: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let apart = |ids: &Vec<u32>| (0..).map(|at| 1 + 2 * at).take(ids.len()).collect();
    tables.iter().map(apart).collect()
}
