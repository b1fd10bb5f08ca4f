//! Replays a trace: prefill, transfer, check, decode, request by request.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use kvx_core::transfer::Mode;
use kvx_core::{Error, ErrorKind, Result};
use serde::Serialize;
use tokio::runtime::Runtime;

use super::link::Link;
use super::report::{Misplaced, Overwritten};
use crate::args::Damage;
use crate::engine::Engine;
use crate::engine::live::Traffic;
use crate::engine::pool::Lease;
use crate::engine::ranks::{Bystanders, Piece};
use crate::engine::tags::Prompt;
use crate::engine::work::{Checked, Sample, Share, Worker};
use crate::fabric::Fabric;
use crate::trace::{Entry, HASH_TOKENS};

/// Most tokens of the requests of one step, where there are several.
pub(super) const STEP_TOKENS: u64 = 65_536;
/// Milliseconds of the trace that a token of an answer takes.
const TOKEN_MS: u64 = 20;
/// Blocks of each cache group that are watched for change.
const WATCHED: usize = 12;

/// By which way caches are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Through {
    /// The whole connector: leases, peers, the control channel.
    Connector,
    /// A port of each rank, and nothing else.
    Port,
}

/// How to replay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) mode: Mode,
    pub(crate) through: Through,
    pub(crate) seed: u64,
    /// Requests whose caches are moved at the same time.
    pub(crate) in_flight: usize,
    /// Times faster than the trace; `None`: without waiting.
    pub(crate) speed: Option<f64>,
    pub(crate) damage: Option<Damage>,
}

/// Two engines and the fabric between them, and what became of the requests so far.
#[derive(Debug)]
pub(crate) struct Replay {
    pub(crate) options: Options,
    pub(crate) runtime: Runtime,
    pub(crate) producers: Engine,
    pub(crate) consumers: Engine,
    /// By the consumer's replica.
    pub(crate) links: Vec<Link>,
    /// Requests that decode, by the consumer's replica: when they end, in milliseconds of the trace.
    pub(crate) running: Vec<Vec<Running>>,
    pub(crate) totals: Totals,
}

/// What the replay came to.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    pub(crate) segments: u64,
    pub(crate) tokens: u64,
    pub(crate) reused: u64,
    pub(crate) notifications: u64,
    pub(crate) transport: String,
    pub(crate) moving: Duration,
    pub(crate) filling: Duration,
    pub(crate) checking: Duration,
    pub(crate) elements: u64,
    pub(crate) wrong: u64,
    pub(crate) mismatches: Vec<Misplaced>,
    pub(crate) watched: u64,
    pub(crate) changed: Vec<Overwritten>,
    /// Of the producers and of the consumers, where that is known.
    pub(crate) traffic: Vec<Traffic>,
    damaged: bool,
}

/// A request that decodes.
#[derive(Debug)]
pub(crate) struct Running {
    ends: u64,
    prompt: Prompt,
    lease: Lease,
}

/// A request whose cache is moved in this step.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) number: u64,
    pub(super) prompt: Prompt,
    /// Replicas.
    pub(super) producer: usize,
    pub(super) consumer: usize,
    pub(super) source: Lease,
    pub(super) target: Lease,
    ends: u64,
}

/// Where damage is done: consumer rank, its replica, and the element.
pub(super) type Damaged = (usize, usize, Sample);

impl Replay {
    /// Replays `trace`; ends early when something is found wrong.
    pub(crate) fn run(&mut self, trace: &[Entry], progress: &ProgressBar) -> Result<()> {
        let begun = Instant::now();
        let mut next = 0;
        while next < trace.len() && self.totals.is_good() {
            self.wait_for(&trace[next], &trace[0], begun);
            let jobs = self.admit(trace, next, begun)?;
            next += jobs.len();
            let count = jobs.len() as u64;
            self.step(jobs, trace.len() as u64)?;
            progress.inc(count);
        }
        match self.producers.place.strays()? + self.consumers.place.strays()? {
            0 => Ok(()),
            left if self.options.through == Through::Connector => {
                Err(Error::peer("demo", "leases or requests are not over")
                    .with_context("leases and requests", left))
            }
            strays => Err(Error::peer("demo", "notifications came that nobody waited for")
                .with_context("notifications", strays)),
        }
    }

    /// Milliseconds from the first request until this one is due.
    fn due(&self, entry: &Entry, first: &Entry) -> Option<Duration> {
        let speed = self.options.speed?;
        let after = Duration::from_millis(entry.timestamp.saturating_sub(first.timestamp));
        Duration::try_from_secs_f64(after.as_secs_f64() / speed).ok()
    }

    fn wait_for(&self, entry: &Entry, first: &Entry, begun: Instant) {
        if let Some(due) = self.due(entry, first) {
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
        }
    }

    /// Gives blocks to the next requests: as many as may be in flight, have arrived and have room.
    fn admit(&mut self, trace: &[Entry], from: usize, begun: Instant) -> Result<Vec<Job>> {
        let mut jobs: Vec<Job> = Vec::new();
        let mut tokens = 0;
        for (index, entry) in trace.iter().enumerate().skip(from).take(self.options.in_flight) {
            tokens += entry.input_length;
            let late = self.due(entry, &trace[0]).is_some_and(|due| due > begun.elapsed());
            if !jobs.is_empty() && (late || tokens > STEP_TOKENS) {
                break;
            }
            match self.admit_one(entry, index, &jobs)? {
                Some(job) => jobs.push(job),
                None => break,
            }
        }
        if jobs.is_empty() {
            return Err(Error::new(ErrorKind::Internal, "demo", "an empty pool has no room")
                .with_context("request", from));
        }
        Ok(jobs)
    }

    fn admit_one(&mut self, entry: &Entry, index: usize, jobs: &[Job]) -> Result<Option<Job>> {
        let prompt = Prompt::new(self.options.seed, entry.input_length, &entry.hash_ids);
        let replicas = (self.producers.replicas.len(), self.consumers.replicas.len());
        let (producer, consumer) = (index % replicas.0, index % replicas.1);
        let running = &mut self.running[consumer];
        let pool = &mut self.consumers.replicas[consumer].pool;
        while let Some(done) = running.iter().position(|other| other.ends <= entry.timestamp) {
            let done = running.swap_remove(done);
            pool.release(&done.prompt, done.lease);
        }
        let target = loop {
            if let Some(lease) = pool.lease(&prompt) {
                break lease;
            }
            // As an engine does that is short of blocks: the request that is nearest to its end makes room.
            let Some(soonest) = (0..running.len()).min_by_key(|at| running[*at].ends) else {
                return Ok(None);
            };
            let done = running.swap_remove(soonest);
            pool.release(&done.prompt, done.lease);
        };
        // What another request is bringing right now is waited for rather than moved twice.
        let missing = prompt.chain().get(target.shared());
        let is_coming = |job: &Job| {
            let whole = usize::try_from(job.prompt.tokens() / HASH_TOKENS).unwrap_or(usize::MAX);
            job.consumer == consumer
                && missing.is_some_and(|name| job.prompt.chain()[..whole].contains(name))
        };
        if jobs.iter().any(is_coming) {
            pool.release(&prompt, target);
            return Ok(None);
        }
        let Some(source) = self.producers.replicas[producer].pool.lease(&prompt) else {
            pool.release(&prompt, target);
            return Ok(None);
        };
        let ends = entry.timestamp.saturating_add(entry.output_length.saturating_mul(TOKEN_MS));
        let number = index as u64;
        Ok(Some(Job { number, prompt, producer, consumer, source, target, ends }))
    }

    /// Fills, moves and checks the caches of some requests.
    fn step(&mut self, mut jobs: Vec<Job>, all: u64) -> Result<()> {
        let begun = Instant::now();
        self.fill(&jobs)?;
        for job in &mut jobs {
            self.producers.replicas[job.producer].pool.keep(&job.prompt, &mut job.source);
        }
        self.watch(&jobs)?;
        let filled = Instant::now();
        let damaged = self.damage(&jobs, all)?;
        self.transfer(&jobs, damaged.as_ref())?;
        let moved = Instant::now();
        if let Some((rank, consumer, sample)) = &damaged
            && self.options.damage == Some(Damage::Byte)
        {
            let rank = self.consumers.first(*consumer) + rank;
            self.consumers.place.flip(rank, sample)?;
        }
        self.check(&jobs)?;
        let changed = self.consumers.place.changed()?;
        let overwritten = changed.into_iter().map(|(rank, block)| Overwritten { rank, block });
        self.totals.changed.extend(overwritten);
        for mut job in jobs {
            self.totals.requests += 1;
            self.totals.tokens += job.prompt.tokens();
            self.totals.reused += job.target.reused;
            self.producers.replicas[job.producer].pool.release(&job.prompt, job.source);
            self.consumers.replicas[job.consumer].pool.keep(&job.prompt, &mut job.target);
            let Job { ends, prompt, target: lease, .. } = job;
            self.running[job.consumer].push(Running { ends, prompt, lease });
        }
        self.totals.filling += filled - begun;
        self.totals.moving += moved - filled;
        self.totals.checking += moved.elapsed();
        Ok(())
    }

    /// Writes tags into the producers' blocks: of the tokens that these do not hold yet.
    fn fill(&mut self, jobs: &[Job]) -> Result<()> {
        let pieces = jobs.iter().flat_map(|job| {
            let ranks = self.producers.numbers(job.producer);
            ranks.map(|rank| piece(rank, &job.prompt, &job.source))
        });
        let pieces = pieces.collect();
        self.producers.place.fill(pieces)
    }

    /// Watches blocks of the consumers that the step must leave alone.
    fn watch(&mut self, jobs: &[Job]) -> Result<()> {
        let mut all = Vec::new();
        for (consumer, replica) in self.consumers.replicas.iter().enumerate() {
            let mut written: Vec<BTreeSet<u32>> = Vec::new();
            for job in jobs.iter().filter(|job| job.consumer == consumer) {
                written.resize(job.target.own.len(), BTreeSet::new());
                for (all, own) in written.iter_mut().zip(&job.target.own) {
                    all.extend(own.iter().copied());
                }
            }
            if !written.is_empty() {
                let blocks = replica.pool.bystanders(&written, WATCHED);
                let ranks = self.consumers.numbers(consumer);
                all.extend(ranks.map(|rank| Bystanders { rank, blocks: blocks.clone() }));
            }
        }
        self.totals.watched += self.consumers.place.watch(all)?;
        Ok(())
    }

    /// Where to do the damage that was asked for, if it is to be done in this step: consumer rank, replica, element.
    fn damage(&mut self, jobs: &[Job], all: u64) -> Result<Option<Damaged>> {
        if self.options.damage.is_none() || self.totals.damaged {
            return Ok(None);
        }
        for job in jobs.iter().filter(|job| job.number >= all / 2) {
            let share = Share { prompt: &job.prompt, tables: &job.target.tables };
            let layouts = &self.consumers.replicas[job.consumer].layouts;
            for (number, layout) in layouts.iter().enumerate() {
                let sample = Worker::default().sample(layout, share, job.target.reused)?;
                if let Some(sample) = sample {
                    self.totals.damaged = true;
                    return Ok(Some((number, job.consumer, sample)));
                }
            }
        }
        Ok(None)
    }

    /// Compares every element of the requests on every rank of their consumers.
    fn check(&mut self, jobs: &[Job]) -> Result<()> {
        let of_jobs = jobs.iter().flat_map(|job| {
            let ranks = self.consumers.numbers(job.consumer);
            ranks.map(move |rank| (job.number, piece(rank, &job.prompt, &job.target)))
        });
        let (requests, pieces): (Vec<u64>, Vec<Piece>) = of_jobs.unzip();
        let ranks: Vec<usize> = pieces.iter().map(|piece| piece.rank).collect();
        let found = self.consumers.place.check(pieces)?;
        for ((request, rank), Checked { elements, wrong, told }) in
            requests.into_iter().zip(ranks).zip(found)
        {
            self.totals.elements += elements;
            self.totals.wrong += wrong;
            let room = super::MAX_TOLD.saturating_sub(self.totals.mismatches.len());
            let told = told.into_iter().take(room);
            self.totals.mismatches.extend(told.map(|wrong| Misplaced { request, rank, wrong }));
        }
        Ok(())
    }

    /// Closes both engines, and gives what the replay came to.
    pub(crate) fn close(self, fabric: &Fabric) -> Result<Totals> {
        let mut this = self;
        for place in [&mut this.producers.place, &mut this.consumers.place] {
            if this.options.through == Through::Connector {
                this.totals.traffic.push(place.traffic()?);
            }
        }
        // The engine in this process first: its peers are still there to hear it.
        let (here, there) = match this.options.mode {
            Mode::Read => (this.consumers, this.producers),
            Mode::Write => (this.producers, this.consumers),
        };
        here.place.close(fabric)?;
        there.place.close(fabric)?;
        Ok(this.totals)
    }
}

/// A request's cache on one rank, of which the first tokens may be there already.
fn piece(rank: usize, prompt: &Prompt, lease: &Lease) -> Piece {
    Piece { rank, prompt: prompt.clone(), tables: lease.tables.clone(), from: lease.reused }
}

impl Totals {
    /// Whether the damage that was asked for was done.
    pub(crate) const fn has_damage(&self) -> bool {
        self.damaged
    }

    /// Whether nothing was found wrong.
    pub(crate) fn is_good(&self) -> bool {
        self.wrong == 0 && self.changed.is_empty()
    }
}
