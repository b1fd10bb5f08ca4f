//! The engine that needs caches: asks for requests, fetches them, and compares every element.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_connector::control::{ControlEvent, SessionId};
use kvx_connector::rank::FetchReport;
use kvx_connector::ticket::TransferParams;
use kvx_connector::worker::FetchFailure;
use kvx_core::card::Address;
use kvx_core::transfer::Mode;
use kvx_core::{Error, ErrorKind, Result};
use serde_json::Value;
use tokio::task::JoinSet;

use super::door::{Door, no_producer};
use super::message::{Ask, FromConsumer, FromProducer, Outcome, from_bytes};
use super::report::{Fetched, Row};
use super::{Ends, Side};
use crate::args::ServeArgs;
use crate::engine::pool::Lease;
use crate::engine::tags::Prompt;
use crate::failure::{self, Failure};
use crate::output::{self, Output};
use crate::size;
use crate::trace;

/// Requests, and tokens of each, where nothing else is said.
const REQUESTS: u32 = 16;
const TOKENS: u64 = 1024;
/// Pause before a producer without room is asked again.
const PAUSE: Duration = Duration::from_millis(20);
/// How often it looks whether somebody has not answered in time.
const LOOK: Duration = Duration::from_millis(100);
/// How long it waits at its end for requests that it has given up.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long what is being fetched may take to end by itself once the producer has gone.
const GRACE: Duration = Duration::from_millis(500);
/// How long the producer may take to say who it is.
const GREETING: Duration = Duration::from_secs(10);

type Fetch = std::result::Result<Vec<FetchReport>, FetchFailure>;

struct Consumer {
    side: Side,
    door: Door,
    session: SessionId,
    /// Tokens of every request.
    lengths: Vec<u64>,
    next: usize,
    jobs: BTreeMap<u64, Job>,
    running: JoinSet<(u64, Fetch)>,
    fetched: Fetched,
    /// The first failure's exit code.
    code: u8,
    /// Why no more is asked for, though not all was.
    stopped: Option<String>,
    /// Since when the producer has gone, and why.
    gone: Option<(Instant, Error)>,
    deadline: Duration,
}

/// A request that is not over.
struct Job {
    ask: Ask,
    prompt: Prompt,
    lease: Lease,
    begun: Instant,
    /// When it is to be asked for again; `None`: it is asked for, or being fetched.
    again: Option<Instant>,
    has_ticket: bool,
    /// How often the producer had no room.
    refusals: u32,
}

/// Runs it; gives the exit code.
pub(super) async fn run(
    args: &ServeArgs,
    side: Side,
    producer: Address,
    out: &mut Output,
) -> Result<u8, Failure> {
    let requests = args.requests.unwrap_or(REQUESTS) as usize;
    let lengths = match &args.trace {
        Some(path) => {
            let trace = trace::read(path, requests)?;
            trace.iter().map(|entry| entry.input_length).collect()
        }
        None => vec![args.tokens.unwrap_or(TOKENS); requests],
    };
    let longest = lengths.iter().copied().max().unwrap_or(0);
    side.room(longest)?;
    let mut ends = Ends::new()?;
    let mut door = Door::new(side.name.clone(), side.security.clone())?;
    let session = tokio::select! {
        session = door.dial(&producer, args.patience()) => session?,
        why = ends.asked() => return Err(Error::new(ErrorKind::Closed, "serve", why).into()),
    };
    let (engine, model, shape) = greeted(&mut door).await?;
    if engine == side.name.as_str() {
        return Err(Error::config("serve", "the producer and this consumer have the same name")
            .with_context("name", engine)
            .with_remedy("give one of the two another --name")
            .into());
    }
    out.line(format!("producer  {engine} at {producer}: {model}, {shape}"))?;
    out.line(format!("consumer  {}: {}, {}", side.name, side.model, side.shape))?;
    out.line("")?;
    let fetched = Fetched::new(&side, &producer, (engine, model, shape), !args.no_integrity);
    let mut consumer = Consumer {
        side,
        door,
        session,
        lengths,
        next: 0,
        jobs: BTreeMap::new(),
        running: JoinSet::new(),
        fetched,
        code: failure::OK,
        stopped: None,
        gone: None,
        deadline: Duration::from_secs(args.deadline),
    };
    let begun = Instant::now();
    consumer.fetch_all(args, &mut ends).await?;
    consumer.end(begun).await;
    let Consumer { fetched, code, .. } = consumer;
    fetched.print(out)?;
    out.document(&fetched)?;
    Ok(if fetched.verified { failure::OK } else { code.max(failure::FAILED) })
}

/// What the producer says of itself.
async fn greeted(door: &mut Door) -> Result<(String, String, String)> {
    let hello = async {
        loop {
            match door.next().await? {
                ControlEvent::Message { bytes, .. } => match from_bytes(&bytes)? {
                    FromProducer::Hello { engine, model, shape } => {
                        return Ok((engine, model, shape));
                    }
                    _ => return Err(Error::peer("serve", "the producer did not say who it is")),
                },
                ControlEvent::Down { why, .. } => return Err(why),
                ControlEvent::Up { .. } => {}
            }
        }
    };
    tokio::time::timeout(GREETING, hello).await.map_err(|_| no_producer())?
}

impl Consumer {
    /// Fetches all, or what it can.
    async fn fetch_all(&mut self, args: &ServeArgs, ends: &mut Ends) -> Result<()> {
        while !self.jobs.is_empty() || (self.next < self.lengths.len() && self.stopped.is_none()) {
            self.ask(args)?;
            let look = if self.waits() { PAUSE } else { LOOK };
            tokio::select! {
                event = self.door.next() => self.hear(event?)?,
                Some(done) = self.running.join_next(), if !self.running.is_empty() => {
                    let (request, outcome) = done.map_err(|source| {
                        Error::new(ErrorKind::Internal, "serve", "a task has ended early")
                            .with_source(source)
                    })?;
                    self.done(request, outcome)?;
                }
                why = ends.asked() => {
                    self.stopped = Some(why.to_owned());
                    return Ok(());
                }
                () = tokio::time::sleep(look) => {}
            }
            self.give_up_late();
            if self.gone.as_ref().is_some_and(|(since, _)| since.elapsed() > GRACE) {
                self.give_up_running();
            }
        }
        Ok(())
    }

    fn waits(&self) -> bool {
        self.jobs.values().any(|job| job.again.is_some())
    }

    /// Asks for as many as may be fetched at the same time, and for those again that there was no room for.
    fn ask(&mut self, args: &ServeArgs) -> Result<()> {
        let now = Instant::now();
        let mut asks = Vec::new();
        for job in self.jobs.values_mut() {
            if job.again.is_some_and(|again| again <= now) {
                job.again = None;
                asks.push(job.ask);
            }
        }
        while self.jobs.len() < usize::from(args.in_flight)
            && self.next < self.lengths.len()
            && self.stopped.is_none()
        {
            let tokens = self.lengths[self.next];
            let ask = Ask { request: self.next as u64, tokens, seed: args.seed.unwrap_or(0) };
            let prompt = ask.prompt();
            let Some(lease) = self.side.pool.lease(&prompt) else { break };
            self.next += 1;
            let (again, has_ticket, refusals) = (None, false, 0);
            let job = Job { ask, prompt, lease, begun: now, again, has_ticket, refusals };
            self.jobs.insert(ask.request, job);
            asks.push(ask);
        }
        if self.jobs.is_empty() && self.next < self.lengths.len() && self.stopped.is_none() {
            return Err(Error::new(ErrorKind::Resources, "serve", "no block of the pool is free")
                .with_remedy("blocks of requests that failed are kept while something may still move in them"));
        }
        asks.into_iter().for_each(|ask| self.say(&FromConsumer::Ask(ask)));
        Ok(())
    }

    /// Where it cannot be said the session is over, of which the next event tells.
    fn say(&self, message: &FromConsumer) {
        let _over = self.door.say(self.session, message);
    }

    fn hear(&mut self, event: ControlEvent) -> Result<()> {
        match event {
            ControlEvent::Message { bytes, .. } => match from_bytes(&bytes)? {
                FromProducer::Ticket { request, params } => self.fetch(request, &params),
                FromProducer::Busy { request } => {
                    if let Some(job) = self.jobs.get_mut(&request) {
                        job.again = Some(Instant::now() + PAUSE);
                        job.refusals += 1;
                    }
                    Ok(())
                }
                FromProducer::Refused { request, why } => {
                    let error = Error::peer("serve", format!("the producer refuses: {why}"));
                    self.failed(request, &error, false);
                    Ok(())
                }
                FromProducer::Hello { .. } => Ok(()),
            },
            ControlEvent::Down { why, .. } => {
                self.producer_is_gone(why);
                Ok(())
            }
            ControlEvent::Up { .. } => Ok(()),
        }
    }

    /// A ticket has come.
    fn fetch(&mut self, request: u64, params: &Value) -> Result<()> {
        let Some(job) = self.jobs.get_mut(&request).filter(|job| !job.has_ticket) else {
            return Ok(());
        };
        let ticket = TransferParams::from_json(params)?.ticket.ok_or_else(|| {
            Error::peer("serve", "the producer sent no ticket").with_context("request", request)
        })?;
        if ticket.tokens != job.ask.tokens {
            return Err(Error::peer("serve", "the ticket is for another request")
                .with_context("tokens", ticket.tokens));
        }
        job.has_ticket = true;
        let range = 0..ticket.tokens;
        let fetch = self.side.live.fetch(0, &ticket, range, &job.lease.tables, Mode::Read)?;
        self.running.spawn(async move { (request, fetch.over().await) });
        Ok(())
    }

    fn done(&mut self, request: u64, outcome: Fetch) -> Result<()> {
        match outcome {
            Ok(reports) => self.fetched(request, &reports),
            Err(FetchFailure { error, quarantined, .. }) => {
                let error: Arc<Error> = error;
                self.failed(request, &error, quarantined);
                Ok(())
            }
        }
    }

    /// A request is there, and proven: compares it.
    fn fetched(&mut self, request: u64, reports: &[FetchReport]) -> Result<()> {
        let Some(job) = self.jobs.remove(&request) else { return Ok(()) };
        let mut row = Row::new(request, job.ask.tokens, job.begun.elapsed(), reports);
        for checked in self.side.live.memories.check(&self.side.pieces(&job.prompt, &job.lease))? {
            row.elements += checked.elements;
            row.wrong += checked.wrong;
        }
        self.side.pool.release(&job.prompt, job.lease);
        let outcome = match row.wrong {
            0 => Outcome::Good,
            _ => Outcome::Wrong,
        };
        if outcome == Outcome::Wrong {
            row.error = Some(format!("{} elements are wrong", row.wrong));
        }
        self.fetched.rows.push(row);
        self.say(&FromConsumer::Over { request, outcome });
        Ok(())
    }

    fn failed(&mut self, request: u64, error: &Error, quarantined: bool) {
        let Some(job) = self.jobs.remove(&request) else { return };
        let mut row = Row::new(request, job.ask.tokens, job.begun.elapsed(), &[]);
        row.error = Some(failure::line(error));
        self.fetched.rows.push(row);
        self.code = self.code.max(failure::exit_code(error));
        if !quarantined {
            self.side.pool.release(&job.prompt, job.lease);
        }
        self.say(&FromConsumer::Over { request, outcome: Outcome::Failed });
        if self.stopped.is_none() && is_lasting(error) {
            self.stopped = Some("no request can be fetched as these two are configured".to_owned());
        }
    }

    /// What it would have answered never comes. What is being fetched ends by itself, or is given up after [`GRACE`]: another life of
    /// the producer, for which the connector would wait, has none of it.
    fn producer_is_gone(&mut self, why: Error) {
        let error = Error::peer("serve", "the producer has gone").with_source(why);
        self.stopped.get_or_insert_with(|| "the producer has gone".to_owned());
        let unanswered = self.jobs.iter().filter(|(_, job)| !job.has_ticket);
        let unanswered: Vec<u64> = unanswered.map(|(request, _)| *request).collect();
        unanswered.into_iter().for_each(|request| self.failed(request, &error, false));
        self.gone.get_or_insert_with(|| (Instant::now(), error));
    }

    fn give_up_running(&mut self) {
        let Some((_, error)) = &self.gone else { return };
        let error = error.again();
        let running: Vec<u64> = self.jobs.keys().copied().collect();
        // Something may still move in their blocks, until all is at its end.
        running.into_iter().for_each(|request| self.failed(request, &error, true));
    }

    /// Gives up what the producer has not answered in time. What is being fetched has its own deadline.
    fn give_up_late(&mut self) {
        let late = |job: &Job| !job.has_ticket && job.begun.elapsed() > self.deadline;
        let late: Vec<(u64, u32)> = self
            .jobs
            .iter()
            .filter(|(_, job)| late(job))
            .map(|(request, job)| (*request, job.refusals))
            .collect();
        for (request, refusals) in late {
            let error = match refusals {
                0 => Error::peer("serve", "the producer gave no ticket in time"),
                _ => Error::new(ErrorKind::Resources, "serve", "the producer had no room in time")
                    .with_context("asked", refusals)
                    .with_remedy("give the producer more --pool-tokens, or fetch fewer at the same time (--in-flight)"),
            };
            let error = error.with_context("seconds", self.deadline.as_secs());
            self.failed(request, &error, false);
        }
    }

    /// Gives up what is not over, and waits until nothing of it moves.
    async fn end(&mut self, begun: Instant) {
        // What is dropped is given up.
        self.running.abort_all();
        while self.running.join_next().await.is_some() {}
        // A producer that has gone takes no part any more: what is left would be said to it, or to its next life.
        let patience = if self.gone.is_some() { GRACE } else { PATIENCE };
        let since = Instant::now();
        while self.side.live.traffic().requests > 0 && since.elapsed() < patience {
            tokio::time::sleep(PAUSE).await;
        }
        let good = self.fetched.rows.iter().filter(|row| row.error.is_none()).count();
        let left = self.lengths.len() - good;
        if let Some(why) = &self.stopped {
            output::note(format!("{why}: {} not fetched", size::of_many(left as u64, "request")));
        }
        self.fetched.ended(begun.elapsed(), self.lengths.len(), &self.side.live);
    }
}

/// Whether the next request would fail as this one did.
fn is_lasting(error: &Error) -> bool {
    error.as_mismatch().is_some()
        || matches!(error.kind(), ErrorKind::Config | ErrorKind::Unsupported)
}
