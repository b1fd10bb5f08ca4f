//! An engine's ranks, in this process or in one of their own.

use std::time::Duration;

use kvx_core::layout::RankLayout;
use kvx_core::{Error, ErrorKind, Result};

use super::rank::{Rank, meet};
use super::ranks::{Awaited, Bystanders, Piece, Ranks};
use super::watch::Changed;
use super::work::{Checked, Sample};
use crate::fabric::Fabric;
use crate::remote::{Memory, Process};

/// Longest time for two ranks of this process to connect.
const CONNECT: Duration = Duration::from_secs(30);

/// The ranks of one engine. They are numbered over all replicas.
#[derive(Debug)]
pub(crate) enum Place {
    Here(Ranks),
    There(Box<Process>),
}

impl Place {
    /// Makes ranks in this process.
    pub(crate) fn here(fabric: &Fabric, layouts: Vec<RankLayout>, memory: Memory) -> Result<Self> {
        let ranks = layouts.into_iter().map(|layout| Rank::new(layout, fabric.port()?, memory));
        Ok(Self::Here(Ranks::new(ranks.collect::<Result<_>>()?)))
    }

    /// Makes ranks in a process of their own.
    pub(crate) fn there(fabric: &Fabric, layouts: Vec<RankLayout>, memory: Memory) -> Result<Self> {
        Ok(Self::There(Box::new(Process::start(&fabric.spec(), layouts, memory)?)))
    }

    /// The ranks, which are in this process.
    pub(crate) fn list(&self) -> Result<&[Rank]> {
        match self {
            Self::Here(ranks) => Ok(ranks.list()),
            Self::There(_) => Err(elsewhere()),
        }
    }

    /// Lets a rank of this process meet one of `target`.
    pub(crate) fn meet(
        &mut self,
        fabric: &Fabric,
        rank: usize,
        (target, other): (&mut Self, usize),
    ) -> Result<()> {
        let Self::Here(ranks) = self else { return Err(elsewhere()) };
        let one = (ranks.get_mut(rank)?, rank);
        match target {
            Self::Here(others) => {
                let met = meet(one, (others.get_mut(other)?, other), CONNECT);
                fabric.runtime.block_on(met)
            }
            Self::There(process) => process.meet(fabric, one, other).map(|_| ()),
        }
    }

    /// Writes tags.
    pub(crate) fn fill(&mut self, pieces: Vec<Piece>) -> Result<()> {
        match self {
            Self::Here(ranks) => ranks.memories.fill(&pieces),
            Self::There(process) => process.fill(pieces),
        }
    }

    /// Compares tags, piece by piece.
    pub(crate) fn check(&mut self, pieces: Vec<Piece>) -> Result<Vec<Checked>> {
        match self {
            Self::Here(ranks) => ranks.memories.check(&pieces),
            Self::There(process) => process.check(pieces),
        }
    }

    /// Watches blocks until [`changed`](Self::changed) is asked: how many.
    pub(crate) fn watch(&mut self, bystanders: Vec<Bystanders>) -> Result<u64> {
        match self {
            Self::Here(ranks) => ranks.memories.watch(&bystanders),
            Self::There(process) => process.watch(bystanders),
        }
    }

    /// Those that changed, by rank.
    pub(crate) fn changed(&mut self) -> Result<Vec<(usize, Changed)>> {
        match self {
            Self::Here(ranks) => ranks.memories.changed(),
            Self::There(process) => process.changed(),
        }
    }

    /// Flips a bit of an element.
    pub(crate) fn flip(&mut self, rank: usize, sample: &Sample) -> Result<()> {
        match self {
            Self::Here(ranks) => ranks.memories.flip(rank, sample),
            Self::There(process) => process.flip(rank, *sample),
        }
    }

    /// Begins to wait for notifications: [`hear`](Self::hear) waits for the rest.
    pub(crate) fn expect(&mut self, awaited: &[Awaited]) -> Result<()> {
        match self {
            Self::Here(_) => Ok(()),
            Self::There(process) => process.expect(awaited.to_vec()),
        }
    }

    /// Takes what has been heard out of `missing`: how much. Waits for all of it where that is another process's business.
    pub(crate) fn hear(&mut self, missing: &mut Vec<Awaited>) -> Result<u64> {
        match self {
            Self::Here(ranks) => ranks.hear(missing),
            Self::There(process) => {
                process.finish()?;
                Ok(std::mem::take(missing).len() as u64)
            }
        }
    }

    /// Looks after the process that the ranks are in, if it is another one: that it does not stand still.
    pub(crate) fn look(&mut self) -> Result<()> {
        match self {
            Self::Here(_) => Ok(()),
            Self::There(process) => process.look(),
        }
    }

    /// Notifications that came and that nobody waited for.
    pub(crate) fn strays(&mut self) -> Result<usize> {
        match self {
            Self::Here(ranks) => Ok(ranks.strays()),
            Self::There(process) => process.strays(),
        }
    }

    /// Closes all ports, and the process.
    pub(crate) fn close(self, fabric: &Fabric) -> Result<()> {
        match self {
            Self::Here(ranks) => fabric.close(ranks.ports()),
            Self::There(process) => process.close(),
        }
    }
}

fn elsewhere() -> Error {
    Error::new(ErrorKind::Internal, "engine", "the ranks are in another process")
}
