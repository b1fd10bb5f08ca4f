//! Copies between the engine's cache and the host's buffer that peers read from and that loads write to.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Range;

use kvx_core::Result;

use crate::protocol::LeaseName;
use crate::ticket::Table;

/// A copy that was ordered. Unique in one life of a connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CopyNumber(pub u64);

/// Which way blocks are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the engine's cache into the host's buffer: what was computed, for others to read.
    ToHost,
    /// From the host's buffer into the engine's cache: what was loaded.
    FromHost,
}

/// What blocks are copied for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyOf {
    /// A lease that will be granted on them.
    Lease(LeaseName),
    /// A load, by the number of its attempt.
    Load(u64),
}

/// Whole blocks to be copied. A block has the same id on both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyJob {
    /// Its number.
    pub number: CopyNumber,
    /// Which way.
    pub direction: Direction,
    /// What for.
    pub of: CopyOf,
    /// The request's tokens that are new in these blocks.
    pub tokens: Range<u64>,
    /// The blocks, one table per cache group; empty for a group of which nothing is copied.
    pub tables: Vec<Table>,
}

/// The engine's own copy functions. Called by the threads that call the connector, in the order in which the scheduler ordered
/// copies, never by two at a time.
///
/// Copies that are begun and end later must end as if they had run in that order: a block that is copied twice has what was copied
/// last.
pub trait CopyBlocks: Send + fmt::Debug {
    /// Copies blocks, or begins to: `None` says that [`WorkerConnector::copied`](super::WorkerConnector::copied) will be called
    /// when it is over, by whichever thread, not from within this call.
    fn copy(&mut self, job: &CopyJob) -> Option<Result<()>>;
}

/// Copies that are not over.
#[derive(Debug, Default)]
pub(super) struct Copies {
    next: u64,
    saves: VecDeque<CopyJob>,
    loads: VecDeque<CopyJob>,
    running: BTreeMap<CopyNumber, CopyOf>,
}

impl Copies {
    pub(super) fn add(
        &mut self,
        direction: Direction,
        of: CopyOf,
        tokens: Range<u64>,
        tables: Vec<Table>,
    ) {
        self.next += 1;
        let job = CopyJob { number: CopyNumber(self.next), direction, of, tokens, tables };
        match direction {
            Direction::ToHost => self.saves.push_back(job),
            Direction::FromHost => self.loads.push_back(job),
        }
    }

    /// The next copy to be begun.
    pub(super) fn take(&mut self, direction: Direction) -> Option<CopyJob> {
        let job = match direction {
            Direction::ToHost => self.saves.pop_front(),
            Direction::FromHost => self.loads.pop_front(),
        }?;
        self.running.insert(job.number, job.of);
        Some(job)
    }

    /// It is over; what it was of, if it was running.
    pub(super) fn done(&mut self, number: CopyNumber) -> Option<CopyOf> {
        self.running.remove(&number)
    }

    /// Whether loads wait to be copied.
    pub(super) fn loads_wait(&self) -> bool {
        !self.loads.is_empty()
    }
}
