//! A rank with a thread of its own.
//!
//! A [`Worker`] runs a [`Rank`] on one named thread (`kvx-rank`), which sleeps on the descriptors of the control channel and of
//! the backends until something happens or is due. Calls into it may come from any thread; none waits for the network or for a
//! peer. What can be done at once is done by the calling thread, or by the rank's where that is awake: then orders are left to it, so that
//! neither waits for the other, and many that are given one after the other are carried out together. Where digests are compared, a second thread (`kvx-digest`) computes
//! them.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvx_core::card::Address;
use kvx_core::limits::{self, Wanted};
use kvx_core::{Error, ErrorKind, Result};
use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::oneshot;

use crate::control::Control;
use crate::observe::RankStatus;
use crate::protocol::peers::PeerStatus;
use crate::protocol::{LeaseName, Part, Reason, StageNumber};
use crate::rank::{FetchOrder, GrantOrder, Rank, RankCounts, RankEvent, RankSetup, StageOf};

mod channel;
pub mod connector;
mod digests;
mod glance;
mod handles;
mod inside;
mod news;
mod recall;
mod shared;

pub use channel::ControlChannel;
pub use connector::{WorkerConnector, WorkerSetup};
pub use glance::Glance;
pub use handles::{Aborter, FetchFailure, Fetched, Fetching, Granted};

use connector::Book;
use digests::Digester;
use inside::Inside;
use news::News;
pub(crate) use recall::Recall;
use shared::Shared;

/// A rank with a thread of its own. See the [module's documentation](self).
pub struct Worker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
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
                let error = Error::new(ErrorKind::Resources, "worker", what);
                limits::explain(error, source, Wanted::Descriptor)
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
            ordered: Duration::ZERO,
            refused: Vec::new(),
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
            orders: Mutex::new(Vec::new()),
            awake: AtomicBool::new(true),
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
                .map_err(|source| {
                    let error =
                        Error::new(ErrorKind::Resources, "worker", "no thread for the rank");
                    limits::explain(error, source, Wanted::Thread)
                })?
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
        self.shared.give(move |inside| {
            inside.leases.insert(order.lease, sender);
            inside.rank.grant(order);
        });
        Granted { receiver }
    }

    /// Publishes more parts of a lease.
    pub fn publish(&self, lease: LeaseName, parts: Vec<Part>, total: Option<u32>) {
        self.shared.give(move |inside| inside.rank.publish(lease, parts, total));
    }

    /// Takes a lease back: its users are told at once.
    pub fn withdraw(&self, lease: LeaseName, why: Reason) {
        self.shared.give(move |inside| inside.rank.withdraw(lease, why));
    }

    /// Something to take leases back with, that does not keep the worker.
    pub(crate) fn recall(&self) -> Recall {
        Recall { worker: Arc::downgrade(&self.shared) }
    }

    /// Moves a request. One that [cannot be taken](Rank::fetch) is a [`Fetching`] that says so.
    ///
    /// # Errors
    ///
    /// None so far.
    pub fn fetch(&self, order: FetchOrder) -> Result<Fetching> {
        let (sender, receiver) = oneshot::channel();
        let request = order.request;
        let now = self.shared.now();
        self.shared.give(move |inside| inside.fetch(now, order, sender));
        Ok(Fetching { receiver, worker: Arc::downgrade(&self.shared), request, over: false })
    }

    /// A stage that was begun is over.
    pub fn stage_done(&self, of: StageOf, stage: StageNumber, ok: bool) {
        self.shared.give(move |inside| inside.rank.stage_done(of, stage, ok));
    }

    /// What happened that no [`Granted`] or [`Fetching`] tells: quarantines and their ends, parts proven.
    #[must_use]
    pub fn take_events(&self) -> Vec<RankEvent> {
        std::mem::take(&mut self.shared.look().others)
    }

    /// All peers, as they are now.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerStatus> {
        self.shared.look().rank.peers()
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
        self.shared.look().rank.counts()
    }

    /// Leases that are not freed, and requests that are not over or whose blocks are kept.
    #[must_use]
    pub fn open(&self) -> (usize, usize) {
        self.shared.look().rank.open()
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
