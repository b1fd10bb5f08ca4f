//! A rank with a thread of its own.
//!
//! A [`Worker`] runs a [`Rank`] on one named thread (`kvx-rank`), which sleeps on the descriptors of the control channel and of
//! the backends until something happens or is due. Calls into it may come from any thread; none waits for the network or for a
//! peer. What can be done at once is done by the calling thread. Where digests are compared, a second thread (`kvx-digest`) computes
//! them.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvx_core::card::Address;
use kvx_core::thread::runs_briefly;
use kvx_core::{Error, ErrorKind, Result};
use rustix::event::Timespec;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use tokio::sync::oneshot;

use crate::control::Control;
use crate::observe::RankStatus;
use crate::protocol::peers::PeerStatus;
use crate::protocol::{LeaseName, Part, Reason, RequestNumber, StageNumber};
use crate::rank::{
    FetchOrder, FetchReport, GrantOrder, Rank, RankCounts, RankEvent, RankSetup, StageOf,
};

mod channel;
pub mod connector;
mod digests;
mod glance;
mod news;

pub use channel::ControlChannel;
pub use connector::{WorkerConnector, WorkerSetup};
pub use glance::Glance;

use connector::Book;
use digests::Digester;
use news::News;

/// How long the thread sleeps at most, so that a wake-up that was lost costs little.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// How long a worker that is dropped waits until its peers are told.
const GOODBYE: Duration = Duration::from_millis(200);

/// A rank with a thread of its own. See the [module's documentation](self).
pub struct Worker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    inside: Mutex<Inside>,
    /// Wakes the thread.
    bell: OwnedFd,
    begun: Instant,
    stop: AtomicBool,
    /// Whoever waits for a report.
    news: Arc<News>,
}

struct Inside {
    rank: Rank<ControlChannel>,
    /// Until when the thread sleeps, if nothing wakes it.
    sleeps_until: Duration,
    fetches: BTreeMap<RequestNumber, oneshot::Sender<Fetched>>,
    leases: BTreeMap<LeaseName, oneshot::Sender<Reason>>,
    stages: Option<Box<dyn Stages>>,
    /// What a scheduler has said, where there is one.
    book: Option<Book>,
    news: Arc<News>,
    digester: Option<Digester>,
    /// What nobody here waits for.
    others: Vec<RankEvent>,
}

/// How a request ended.
pub type Fetched = std::result::Result<FetchReport, FetchFailure>;

/// A request that was not moved.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FetchFailure {
    /// Why. [`ErrorKind::Closed`]: it was given up on this side.
    pub error: Arc<Error>,
    /// Why the lease ended, or was refused by its owner, where that is why: to be told apart without reading the error.
    pub reason: Option<Reason>,
    /// This rank's blocks that are not proven good, as (group, id). None where it was given up, or the worker has ended: then all
    /// of the request's blocks are not.
    pub blocks: std::collections::BTreeSet<(u16, u32)>,
    /// Whether something in them may still move: they must not be used again before the worker says so
    /// ([`Worker::take_events`]).
    pub quarantined: bool,
}

impl FetchFailure {
    fn without_blocks(error: Error, quarantined: bool) -> Self {
        let (error, blocks) = (Arc::new(error), Default::default());
        Self { error, reason: None, blocks, quarantined }
    }
}

impl fmt::Display for FetchFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {} blocks are not proven good", self.error, self.blocks.len())?;
        if self.quarantined { f.write_str(", and quarantined") } else { Ok(()) }
    }
}

impl std::error::Error for FetchFailure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.error)
    }
}

/// Runs stages: copies between a host's buffer and a device, and whatever else an engine does to a part before or after it
/// moves. Must not wait: what takes long is begun, and [`Worker::stage_done`] called when it is over.
pub trait Stages: Send {
    /// Begins a stage. Returns whether it did what it should, where it is over already.
    fn run(&mut self, stage: StageNumber, of: StageOf, part: &Part, which: u8) -> Option<bool>;
}

impl Worker {
    /// Starts a rank. `control` listens already, at the address that the setup names.
    ///
    /// # Errors
    ///
    /// Those of [`Rank::new`]; [`ErrorKind::Resources`] where there is no thread or descriptor to be had.
    pub fn start(setup: RankSetup, control: Control) -> Result<Self> {
        Self::start_with(setup, control, None)
    }

    fn start_with(setup: RankSetup, control: Control, book: Option<Book>) -> Result<Self> {
        let resources = |what: &'static str| {
            move |source: std::io::Error| {
                Error::new(ErrorKind::Resources, "worker", what).with_source(source)
            }
        };
        let bell = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(|error| {
            resources("no descriptor to wake the rank's thread with")(error.into())
        })?;
        let mut rank = Rank::new(setup, ControlChannel::new(control))?;
        rank.digest_elsewhere();
        let duplicate = |fd: std::os::fd::BorrowedFd<'_>| {
            fd.try_clone_to_owned().map_err(resources("a descriptor cannot be duplicated"))
        };
        let mut descriptors = vec![duplicate(bell.as_fd())?];
        for port in rank.ports() {
            if let Some(fd) = port.event_fd() {
                descriptors.push(duplicate(fd)?);
            }
        }
        descriptors.push(duplicate(rank.channel().descriptor()?)?);
        let news = Arc::new(News::default());
        let inside = Inside {
            rank,
            sleeps_until: Duration::ZERO,
            fetches: BTreeMap::new(),
            leases: BTreeMap::new(),
            stages: None,
            book,
            news: Arc::clone(&news),
            digester: None,
            others: Vec::new(),
        };
        let shared = Arc::new(Shared {
            inside: Mutex::new(inside),
            bell,
            begun: Instant::now(),
            stop: AtomicBool::new(false),
            news,
        });
        shared.lock().digester = Some(Digester::new(Arc::downgrade(&shared)));
        let thread = {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name("kvx-rank".into())
                .spawn(move || shared.run(&descriptors))
                .map_err(resources("no thread for the rank"))?
        };
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Runs the engine's stages with `stages`.
    pub fn with_stages(&self, stages: Box<dyn Stages>) {
        self.shared.lock().stages = Some(stages);
    }

    /// The rank's card, encoded.
    #[must_use]
    pub fn card(&self) -> Arc<[u8]> {
        self.shared.lock().rank.card()
    }

    /// Serves these cards, of all ranks of the engine, at this rank's address.
    ///
    /// # Errors
    ///
    /// Those of [`Rank::serve`].
    pub fn serve(&self, cards: Vec<Arc<[u8]>>) -> Result<()> {
        self.shared.act(|inside| inside.rank.serve(cards))
    }

    /// Grants a lease. The [`Granted`] is done when it is over and its blocks may be reused.
    #[must_use = "only what it says when it is done frees the blocks"]
    pub fn grant(&self, order: GrantOrder) -> Granted {
        let (sender, receiver) = oneshot::channel();
        self.shared.act(|inside| {
            inside.leases.insert(order.lease, sender);
            inside.rank.grant(order);
        });
        Granted { receiver }
    }

    /// Publishes more parts of a lease.
    pub fn publish(&self, lease: LeaseName, parts: Vec<Part>, total: Option<u32>) {
        self.shared.act(|inside| inside.rank.publish(lease, parts, total));
    }

    /// Takes a lease back: its users are told at once.
    pub fn withdraw(&self, lease: LeaseName, why: Reason) {
        self.shared.act(|inside| inside.rank.withdraw(lease, why));
    }

    /// Moves a request.
    ///
    /// # Errors
    ///
    /// Those of [`Rank::fetch`].
    pub fn fetch(&self, order: FetchOrder) -> Result<Fetching> {
        let (sender, receiver) = oneshot::channel();
        let request = order.request;
        let now = self.shared.now();
        self.shared.act(|inside| {
            inside.rank.fetch(now, order)?;
            inside.fetches.insert(request, sender);
            Ok(())
        })?;
        Ok(Fetching { receiver, worker: Arc::downgrade(&self.shared), request, over: false })
    }

    /// A stage that was begun is over.
    pub fn stage_done(&self, of: StageOf, stage: StageNumber, ok: bool) {
        self.shared.act(|inside| inside.rank.stage_done(of, stage, ok));
    }

    /// What happened that no [`Granted`] or [`Fetching`] tells: quarantines and their ends, parts proven.
    #[must_use]
    pub fn take_events(&self) -> Vec<RankEvent> {
        std::mem::take(&mut self.shared.lock().others)
    }

    /// All peers, as they are now.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerStatus> {
        self.shared.lock().rank.peers()
    }

    /// What there is now, as JSON can show it.
    #[must_use]
    pub fn status(&self) -> RankStatus {
        self.shared.status()
    }

    /// Something to look at the worker with, that does not keep it.
    #[must_use]
    pub fn glance(&self) -> Glance {
        Glance { worker: Arc::downgrade(&self.shared) }
    }

    /// What the rank has counted.
    #[must_use]
    pub fn counts(&self) -> RankCounts {
        self.shared.lock().rank.counts()
    }

    /// Leases that are not freed, and requests that are not over or whose blocks are kept.
    #[must_use]
    pub fn open(&self) -> (usize, usize) {
        self.shared.lock().rank.open()
    }

    /// The address at which its control channel listens.
    #[must_use]
    pub fn address(&self) -> Address {
        self.shared.lock().rank.address().clone()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.ring();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a rank has panicked");
        }
        let digests = self.shared.lock().digester.take();
        if let Some(running) = digests.and_then(|mut digester| digester.take()) {
            running.end();
        }
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("rank", &self.shared.lock().rank).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn status(&self) -> RankStatus {
        self.lock().rank.status(self.now())
    }

    fn ring(&self) {
        // A full counter rings too.
        let _rung = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Gives the rank an order and carries out what can be done at once.
    fn act<T>(&self, order: impl FnOnce(&mut Inside) -> T) -> T {
        let mut inside = self.lock();
        let result = order(&mut inside);
        let mut told = Told::default();
        let due = inside.step(self.now(), &mut told);
        let sooner = due < inside.sleeps_until;
        drop(inside);
        if sooner {
            self.ring();
        }
        drop(told);
        result
    }

    /// The thread.
    fn run(&self, descriptors: &[OwnedFd]) {
        runs_briefly();
        let mut leaves = None;
        loop {
            if self.stop.load(Ordering::Acquire) {
                let until = *leaves.get_or_insert_with(|| {
                    self.lock().rank.close();
                    Instant::now() + GOODBYE
                });
                if Instant::now() >= until || self.lock().rank.is_alone() {
                    return;
                }
            }
            let mut inside = self.lock();
            let mut told = Told::default();
            let due = inside.step(self.now(), &mut told);
            let longest = if leaves.is_some() { Duration::from_millis(5) } else { LONGEST_SLEEP };
            let sleep = due.saturating_sub(self.now()).min(longest);
            inside.sleeps_until = self.now() + sleep;
            drop(inside);
            drop(told);
            let mut watched: Vec<PollFd<'_>> =
                descriptors.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            let timeout = Timespec {
                tv_sec: i64::try_from(sleep.as_secs()).unwrap_or(1),
                tv_nsec: sleep.subsec_nanos().into(),
            };
            // Interrupted or refused, it looks again all the same; a refusal does not become a busy loop.
            if rustix::event::poll(&mut watched, Some(&timeout)).is_err() {
                std::thread::yield_now();
            }
            let mut rung = [0; 8];
            let _rung = rustix::io::read(&self.bell, &mut rung);
        }
    }
}

/// Answers that are given once no lock is held: whoever waits for one may call again at once.
#[derive(Default)]
struct Told {
    fetched: Vec<(oneshot::Sender<Fetched>, Fetched)>,
    freed: Vec<(oneshot::Sender<Reason>, Reason)>,
    news: Option<Arc<News>>,
}

impl Drop for Told {
    fn drop(&mut self) {
        // Whoever no longer waits is told nothing.
        for (sender, fetched) in self.fetched.drain(..) {
            let _gone = sender.send(fetched);
        }
        for (sender, why) in self.freed.drain(..) {
            let _gone = sender.send(why);
        }
        if let Some(news) = self.news.take() {
            news.tell();
        }
    }
}

impl Inside {
    fn book(&mut self) -> Result<&mut Book> {
        self.book.as_mut().ok_or_else(connector::no_book)
    }

    /// Steps, and says when the next step is due.
    fn step(&mut self, now: Duration, told: &mut Told) -> Duration {
        loop {
            let due = self.rank.step(now).unwrap_or(Duration::MAX).min(now + LONGEST_SLEEP);
            self.dispatch(now, told);
            self.give_digests();
            // A stage may have been over at once.
            if !self.rank.has_orders() {
                return due;
            }
        }
    }

    /// Has digests computed, here where nobody else can.
    fn give_digests(&mut self) {
        while let Some(job) = self.rank.next_digest() {
            let given = match &mut self.digester {
                Some(digester) => digester.give(job),
                None => Err(job),
            };
            if let Err(job) = given {
                self.rank.digested(job.number(), job.run());
            }
        }
    }

    /// Finds out whom the rank's events are for.
    fn dispatch(&mut self, now: Duration, told: &mut Told) {
        while let Some(event) = self.rank.next_event() {
            let event = match &mut self.book {
                None => Some(event),
                Some(book) => {
                    let rest = book.hear(event, now, &mut self.rank);
                    if book.has_news() {
                        told.news = Some(Arc::clone(&self.news));
                    }
                    rest
                }
            };
            let Some(event) = event else { continue };
            match event {
                RankEvent::Ready { request, report } => {
                    if let Some(sender) = self.fetches.remove(&request) {
                        told.fetched.push((sender, Ok(report)));
                    }
                }
                RankEvent::Failed { request, error, reason, blocks, quarantined, .. } => {
                    if let Some(sender) = self.fetches.remove(&request) {
                        let failure = FetchFailure { error, reason, blocks, quarantined };
                        told.fetched.push((sender, Err(failure)));
                    }
                }
                RankEvent::Aborted { request, quarantined } => {
                    if let Some(sender) = self.fetches.remove(&request) {
                        let error =
                            Error::new(ErrorKind::Closed, "fetch", "it was given up on this side");
                        let failure = FetchFailure::without_blocks(error, quarantined);
                        told.fetched.push((sender, Err(failure)));
                    }
                }
                RankEvent::Freed { lease, why } => {
                    if let Some(sender) = self.leases.remove(&lease) {
                        told.freed.push((sender, why));
                    }
                }
                RankEvent::Stage { stage, of, part, which } => match &mut self.stages {
                    Some(stages) => {
                        if let Some(ok) = stages.run(stage, of, &part, which) {
                            self.rank.stage_done(of, stage, ok);
                        }
                    }
                    None => {
                        tracing::error!(?of, "a stage was ordered, and nobody runs stages");
                        self.rank.stage_done(of, stage, false);
                    }
                },
                other => self.others.push(other),
            }
        }
    }
}

/// A lease that was granted: a future of why it ended, done when its blocks may be reused.
#[derive(Debug)]
pub struct Granted {
    receiver: oneshot::Receiver<Reason>,
}

impl Granted {
    /// Why it ended, if it has.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`]: the worker is gone.
    pub fn try_ended(&mut self) -> Result<Option<Reason>> {
        match self.receiver.try_recv() {
            Ok(reason) => Ok(Some(reason)),
            Err(oneshot::error::TryRecvError::Empty) => Ok(None),
            Err(oneshot::error::TryRecvError::Closed) => Err(closed()),
        }
    }
}

impl Future for Granted {
    type Output = Result<Reason>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.receiver).poll(context).map(|ended| ended.map_err(|_| closed()))
    }
}

/// A request under way: a future of how it ended.
///
/// It must be awaited before its blocks are used, or used for something else: what is in flight writes into them until it has
/// ended. Dropping it gives the request up, and leaves nobody to say when its blocks are quiet.
pub struct Fetching {
    receiver: oneshot::Receiver<Fetched>,
    worker: Weak<Shared>,
    request: RequestNumber,
    over: bool,
}

impl Fetching {
    /// Gives it up. It still has to be awaited: its blocks are in use until it has ended.
    pub fn abort(&self) {
        if let Some(shared) = self.worker.upgrade() {
            shared.act(|inside| inside.rank.abort(self.request));
        }
    }
}

impl Future for Fetching {
    type Output = Fetched;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.receiver).poll(context).map(|fetched| {
            self.over = true;
            fetched.unwrap_or_else(|_| Err(FetchFailure::without_blocks(closed(), true)))
        })
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        if !self.over {
            self.abort();
        }
    }
}

impl fmt::Debug for Fetching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fetching").field("request", &self.request).finish_non_exhaustive()
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "worker", "the worker has ended")
}
