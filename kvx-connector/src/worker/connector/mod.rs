//! The worker's side of an engine with a scheduler: what each of its worker processes calls.
//!
//! A [`WorkerConnector`] carries out what the engine's [`SchedulerConnector`](crate::scheduler::SchedulerConnector) says in each step,
//! and reports what came of it. The engine carries both, as bytes.
//!
//! ```text
//!   once     register_caches ──▶ handshake_metadata ──▶ scheduler: set_handshake_metadata
//!            serve_cards ◀── the cards of all ranks ──── scheduler: cards
//!
//!   a step   start_load(bytes) ◀──────────────────────── scheduler: build_step
//!              wait_for_layer, save_layer: for each layer of the forward pass
//!            wait_for_save
//!            take_report ──▶ bytes ────────────────────▶ scheduler: update
//!
//!   idle     wait_for_report: returns when there is something that the scheduler waits for
//! ```
//!
//! No call waits for the network or for a peer, but for those that say so ([`wait_for_report`](WorkerConnector::wait_for_report),
//! [`wait_until_loaded`](WorkerConnector::wait_until_loaded)).
//!
//! # What holds
//!
//! - Steps are numbered from 1 on. One that is left out, comes twice or is of another life of the engine is an error that says so, and
//!   nothing of it is carried out; nor of one that contradicts what was said before.
//! - A lease that was granted has one end in the reports: when its blocks may be reused here. One that was only expected has none.
//! - A load that was begun has one end in the reports: when nothing is written into its blocks any more, or they are said to be in
//!   quarantine; that they are quiet follows, once.
//! - Whether a load that failed may be tried again is what its error advises ([`Retry`](kvx_core::Retry)). Then its lease goes on being
//!   extended until a load replaces it, or it is released.
//! - A load that replaces one that was loaded here (another rank has failed) is reported as loaded at once: its blocks are as
//!   they were.
//!
//! # Layer by layer
//!
//! Loads run between steps, a request at a time; a request is scheduled once it is there. So nothing of it is missing when a forward pass
//! reaches a layer, and nothing is published before its request has finished: [`wait_for_layer`](WorkerConnector::wait_for_layer) and
//! [`save_layer`](WorkerConnector::save_layer) have nothing to do. An engine that has loads begin and end within the step that needs
//! them calls [`wait_until_loaded`](WorkerConnector::wait_until_loaded) before its forward pass.

mod book;
mod check;
mod copies;
mod loads;
mod outbox;
mod setup;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvx_core::card::{Address, CardReader};
use kvx_core::id::Incarnation;
use kvx_core::layout::RankLayout;
use kvx_core::{Error, Result};

pub use copies::{CopyBlocks, CopyJob, CopyNumber, CopyOf, Direction};
pub use setup::WorkerSetup;

pub(super) use book::Book;

use super::Worker;
use crate::control::{Control, ControlConfig, RemoteIdentity};
use crate::engine::seed_of;
use crate::protocol::peers::PeerStatus;
use crate::rank::{RankCounts, RankSetup};
use crate::scheduler::{StepMetadata, WorkerReport, WorkerStats};

/// What a worker process of an engine calls. See the [module](self).
pub struct WorkerConnector {
    worker: Worker,
    copies: Mutex<Option<Box<dyn CopyBlocks>>>,
    ranks: usize,
}

impl WorkerConnector {
    /// Registers a rank's caches with its backends, and starts its thread and its control channel.
    ///
    /// # Errors
    ///
    /// Those of [`Control::start`], [`Control::listen`] and [`Worker::start`].
    pub fn register_caches(setup: WorkerSetup) -> Result<Self> {
        let incarnation = Incarnation::random()?;
        let coords = *setup.layout.coords();
        let (engine, rank) = (setup.engine.clone(), Some(coords));
        let me = RemoteIdentity { engine: engine.clone(), incarnation, rank };
        let control = Control::start(ControlConfig::new(me, setup.security))?;
        let address = control.listen(&setup.listen)?;
        let groups = setup.layout.groups().to_vec();
        let book = Book::new(setup.life, groups, setup.copies.is_some(), setup.digests);
        let rank = RankSetup::new(
            (engine, incarnation, setup.life),
            address,
            setup.facts,
            (setup.layout, setup.regions),
            setup.backends,
            setup.choosing,
            seed_of(&incarnation),
        );
        let worker = Worker::start_with(rank, control, Some(book))?;
        let ranks = (coords.grid.tp * coords.grid.pp) as usize;
        Ok(Self { worker, copies: Mutex::new(setup.copies), ranks })
    }

    /// The rank's card: for [`set_handshake_metadata`](crate::scheduler::SchedulerConnector::set_handshake_metadata).
    #[must_use]
    pub fn handshake_metadata(&self) -> Vec<u8> {
        self.worker.card().to_vec()
    }

    /// Where its control channel listens. That of one rank is the address of the engine's cards.
    #[must_use]
    pub fn address(&self) -> Address {
        self.worker.address()
    }

    /// Takes the cards of all ranks of this replica, in whatever order: how the engine is divided is read from them, and they are served to
    /// whoever asks at [`address`](Self::address). To be called once, at each rank, before the first step that loads something.
    ///
    /// # Errors
    ///
    /// - Those of [`CardReader::decode`]; a card of another engine, or two of one rank.
    /// - [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): not the cards of all ranks.
    pub fn serve_cards(&self, cards: &[Vec<u8>]) -> Result<()> {
        let mut layouts = Vec::new();
        for card in cards {
            layouts.push(CardReader::default().decode(card)?.layout().clone());
        }
        layouts.sort_by_key(|layout| layout.coords().replica_index());
        let numbers = layouts.iter().map(|layout| layout.coords().replica_index() as usize);
        if !numbers.eq(0..self.ranks) {
            return Err(Error::misuse(
                "worker.serve_cards",
                "not the cards of all ranks, each once",
            )
            .with_context("cards", cards.len())
            .with_context("ranks", self.ranks)
            .with_context("of", places(&layouts)));
        }
        self.worker.shared.act(|inside| {
            inside.rank.serve(cards.iter().map(|card| card.as_slice().into()).collect())?;
            inside.rank.set_replica(layouts);
            inside.book()?.served = true;
            Ok(())
        })
    }

    /// Begins what a step says: see the [module](self). `step` is what the scheduler's
    /// [`build_step`](crate::scheduler::SchedulerConnector::build_step) gave, encoded.
    ///
    /// # Errors
    ///
    /// - Those of [`StepMetadata::decode`].
    /// - [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): a step that was left out or comes twice, of another life of the engine, or
    ///   that cannot be carried out. Nothing of it is.
    pub fn start_load(&self, step: &[u8]) -> Result<()> {
        self.carry_out(StepMetadata::decode(step)?)
    }

    /// As [`start_load`](Self::start_load), of a step that is no bytes any more.
    ///
    /// # Errors
    ///
    /// Those of [`start_load`](Self::start_load), but for bytes.
    pub fn carry_out(&self, step: StepMetadata) -> Result<()> {
        // What the step before computed, where the engine did not have it copied at its end.
        self.copy(Direction::ToHost);
        let now = self.worker.shared.now();
        self.worker.shared.act(|inside| {
            let rank = &mut inside.rank;
            inside.book.as_mut().ok_or_else(no_book)?.take(now, step, rank)
        })
    }

    /// The forward pass reaches a layer. Returns at once: whoever computes a request has all of it already.
    pub const fn wait_for_layer(&self, _layer: u32) {}

    /// The forward pass has computed a layer. Returns at once: what others read is published when its request has finished, and
    /// copied to the host, where it has to be, in [`wait_for_save`](Self::wait_for_save).
    pub const fn save_layer(&self, _layer: u32) {}

    /// The forward pass is over: copies what the step says to the host's buffer, with the engine's copy function. Does nothing
    /// where there is none.
    pub fn wait_for_save(&self) {
        self.copy(Direction::ToHost);
    }

    /// A copy that was begun is over.
    pub fn copied(&self, number: CopyNumber, result: Result<()>) {
        self.worker.shared.act(|inside| {
            let rank = &mut inside.rank;
            if let Some(book) = &mut inside.book {
                book.copied(number, result, rank);
            }
        });
        self.worker.shared.news.tell();
    }

    fn copy(&self, direction: Direction) {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(copies) = &mut *copies else { return };
        while let Some(job) = self.with_book(|book| book.next_copy(direction)).flatten() {
            if let Some(result) = copies.copy(&job) {
                self.copied(job.number, result);
            }
        }
    }

    fn with_book<T>(&self, look: impl FnOnce(&mut Book) -> T) -> Option<T> {
        self.worker.shared.lock().book.as_mut().map(look)
    }

    /// Whether something has finished that the scheduler waits for.
    #[must_use]
    pub fn has_report(&self) -> bool {
        self.with_book(|book| book.has_news()).unwrap_or(false)
    }

    /// Waits until something has finished that the scheduler waits for, or `timeout` has passed; whether something has. For engines
    /// that have nothing to compute.
    pub fn wait_for_report(&self, timeout: Duration) -> bool {
        self.wait_until(timeout, |connector| connector.has_report())
    }

    /// Waits until no load is under way any more, or `timeout` has passed; whether none is. For engines that have loads within the
    /// step that needs them ([`asynchronous`](crate::scheduler::SchedulerConfig::asynchronous) is `false`): before the forward pass.
    /// What did not load is in the next report.
    pub fn wait_until_loaded(&self, timeout: Duration) -> bool {
        self.wait_until(timeout, |connector| {
            connector.copy(Direction::FromHost);
            connector.with_book(|book| !book.loads()).unwrap_or(true)
        })
    }

    fn wait_until(&self, timeout: Duration, done: impl Fn(&Self) -> bool) -> bool {
        let until = Instant::now() + timeout;
        let news = Arc::clone(&self.worker.shared.news);
        loop {
            let seen = news.count();
            if done(self) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            news.wait(seen, left);
        }
    }

    /// What has finished since the last report, and what has been counted. Where caches go through a buffer of the host, what was loaded
    /// is copied from it here. What does not fit into one report is in the next: [`has_report`](Self::has_report) is still true then.
    #[must_use = "what it says is not said again"]
    pub fn take_report(&self) -> WorkerReport {
        self.copy(Direction::FromHost);
        let report = self.with_book(Book::report);
        report.unwrap_or_else(|| WorkerReport::new(Incarnation::from_bytes([0; 16]), 0))
    }

    /// Blocks, as (cache group, id), of loads that did not load, since this was last asked. The scheduler is told by reports; this is
    /// for engines whose workers say so themselves.
    #[must_use = "what it says is not said again"]
    pub fn failed_blocks(&self) -> BTreeSet<(u16, u32)> {
        self.with_book(|book| book.out.take_failed()).unwrap_or_default()
    }

    /// What it has done since it was started.
    #[must_use]
    pub fn stats(&self) -> WorkerStats {
        self.with_book(|book| book.out.stats()).unwrap_or_default()
    }

    /// All peers, as they are now.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerStatus> {
        self.worker.peers()
    }

    /// What the rank has counted.
    #[must_use]
    pub fn counts(&self) -> RankCounts {
        self.worker.counts()
    }

    /// Leases that are not freed, and requests that are not over or whose blocks are kept.
    #[must_use]
    pub fn open(&self) -> (usize, usize) {
        self.worker.open()
    }

    /// Tells all peers goodbye, and ends its thread. What was not reported never will be: the engine's life is over.
    pub fn shutdown(self) {
        drop(self.worker);
    }
}

fn places(layouts: &[RankLayout]) -> String {
    let places: Vec<String> =
        layouts.iter().map(|layout| layout.coords().replica_index().to_string()).collect();
    places.join(", ")
}

pub(super) fn no_book() -> Error {
    Error::misuse("worker", "this worker is no scheduler's")
}

impl fmt::Debug for WorkerConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerConnector").field("worker", &self.worker).finish_non_exhaustive()
    }
}
