//! An engine's ranks, in this process or in one of their own.

use std::ops::Range;
use std::time::Duration;

use kvx_connector::engine::Fetch;
use kvx_connector::ticket::Ticket;
use kvx_core::layout::RankLayout;
use kvx_core::transfer::Mode;
use kvx_core::{Error, ErrorKind, Result};
use tokio::runtime::Runtime;

use super::live::{Live, LocalSetup, Traffic};
use super::rank::{Rank, meet};
use super::ranks::{Awaited, Bystanders, Piece, Ranks};
use super::watch::Changed;
use super::work::{Checked, Sample};
use crate::fabric::Fabric;
use crate::remote::{Memory, PATIENCE, Process, Publish};

/// Longest time for two ranks of this process to connect.
const CONNECT: Duration = Duration::from_secs(30);

/// The ranks of one engine. They are numbered over all replicas.
#[derive(Debug)]
pub(crate) enum Place {
    /// With a port each.
    Here(Ranks),
    /// With the whole connector.
    Live(Box<Live>),
    /// Either, in another process.
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

    /// Starts ranks with the whole connector: in this process, or in one of their own.
    pub(crate) fn live(
        fabric: &Fabric,
        replicas: Vec<Vec<RankLayout>>,
        setup: LocalSetup,
        here: bool,
    ) -> Result<Self> {
        Ok(match here {
            true => {
                let live = Live::start(&setup.setup()?, replicas, || fabric.open())?;
                Self::Live(Box::new(live))
            }
            false => {
                Self::There(Box::new(Process::start_live(&fabric.spec(), replicas, setup, None)?))
            }
        })
    }

    /// Leases a request's blocks.
    pub(crate) fn publish(&mut self, publish: Publish) -> Result<Ticket> {
        match self {
            Self::Here(_) => Err(portless()),
            Self::Live(live) => live.publish_for(publish),
            Self::There(process) => process.publish(publish),
        }
    }

    /// Begins to move a request that another engine has leased.
    pub(crate) fn fetch(
        &self,
        replica: usize,
        ticket: &Ticket,
        range: Range<u64>,
        tables: &[Vec<u32>],
        mode: Mode,
    ) -> Result<Fetch> {
        match self {
            Self::Live(live) => live.fetch(replica, ticket, range, tables, mode),
            Self::Here(_) | Self::There(_) => Err(portless()),
        }
    }

    /// Begins to wait until leases are over: [`over`](Self::over) waits for the rest.
    pub(crate) fn expect_over(&mut self, requests: &[u64]) -> Result<()> {
        match self {
            Self::Here(_) | Self::Live(_) => Ok(()),
            Self::There(process) => process.expect_over(requests.to_vec()),
        }
    }

    /// Waits until they are: at how many ranks, each counted for each request.
    pub(crate) fn over(&mut self, runtime: &Runtime, requests: &[u64]) -> Result<u64> {
        match self {
            Self::Here(_) => Err(portless()),
            Self::Live(live) => {
                let over = async { tokio::time::timeout(PATIENCE, live.all_done(requests)).await };
                runtime.block_on(over).map_err(|_| {
                    Error::peer("lease", "it is not over in time")
                        .with_context("seconds", PATIENCE.as_secs())
                })?
            }
            Self::There(process) => process.over(),
        }
    }

    /// What went how, through the connector; nothing where there is none.
    pub(crate) fn traffic(&mut self) -> Result<Traffic> {
        match self {
            Self::Here(_) => Ok(Traffic::default()),
            Self::Live(live) => Ok(live.traffic()),
            Self::There(process) => process.traffic(),
        }
    }

    /// The ranks, which are in this process.
    pub(crate) fn list(&self) -> Result<&[Rank]> {
        match self {
            Self::Here(ranks) => Ok(ranks.list()),
            Self::Live(_) | Self::There(_) => Err(elsewhere()),
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
            Self::Live(_) => Err(elsewhere()),
            Self::There(process) => process.meet(fabric, one, other).map(|_| ()),
        }
    }

    /// Writes tags.
    pub(crate) fn fill(&mut self, pieces: Vec<Piece>) -> Result<()> {
        match self {
            Self::Here(ranks) => ranks.memories.fill(&pieces),
            Self::Live(live) => live.memories.fill(&pieces),
            Self::There(process) => process.fill(pieces),
        }
    }

    /// Compares tags, piece by piece.
    pub(crate) fn check(&mut self, pieces: Vec<Piece>) -> Result<Vec<Checked>> {
        match self {
            Self::Here(ranks) => ranks.memories.check(&pieces),
            Self::Live(live) => live.memories.check(&pieces),
            Self::There(process) => process.check(pieces),
        }
    }

    /// Watches blocks until [`changed`](Self::changed) is asked: how many.
    pub(crate) fn watch(&mut self, bystanders: Vec<Bystanders>) -> Result<u64> {
        match self {
            Self::Here(ranks) => ranks.memories.watch(&bystanders),
            Self::Live(live) => live.memories.watch(&bystanders),
            Self::There(process) => process.watch(bystanders),
        }
    }

    /// Those that changed, by rank.
    pub(crate) fn changed(&mut self) -> Result<Vec<(usize, Changed)>> {
        match self {
            Self::Here(ranks) => ranks.memories.changed(),
            Self::Live(live) => live.memories.changed(),
            Self::There(process) => process.changed(),
        }
    }

    /// Flips a bit of an element.
    pub(crate) fn flip(&mut self, rank: usize, sample: &Sample) -> Result<()> {
        match self {
            Self::Here(ranks) => ranks.memories.flip(rank, sample),
            Self::Live(live) => live.memories.flip(rank, sample),
            Self::There(process) => process.flip(rank, *sample),
        }
    }

    /// Begins to wait for notifications: [`hear`](Self::hear) waits for the rest.
    pub(crate) fn expect(&mut self, awaited: &[Awaited]) -> Result<()> {
        match self {
            Self::Here(_) | Self::Live(_) => Ok(()),
            Self::There(process) => process.expect(awaited.to_vec()),
        }
    }

    /// Takes what has been heard out of `missing`: how much. Waits for all of it where that is another process's business.
    pub(crate) fn hear(&mut self, missing: &mut Vec<Awaited>) -> Result<u64> {
        match self {
            Self::Here(ranks) => ranks.hear(missing),
            Self::Live(_) => Err(elsewhere()),
            Self::There(process) => {
                process.finish()?;
                Ok(std::mem::take(missing).len() as u64)
            }
        }
    }

    /// Looks after the process that the ranks are in, if it is another one: that it is there, and does not stand still.
    pub(crate) fn look(&mut self) -> Result<()> {
        match self {
            Self::Here(_) | Self::Live(_) => Ok(()),
            Self::There(process) => process.look(),
        }
    }

    /// Notifications that came and that nobody waited for; through the connector, leases and requests that are not over.
    pub(crate) fn strays(&mut self) -> Result<usize> {
        match self {
            Self::Here(ranks) => Ok(ranks.strays()),
            Self::Live(live) => Ok(usize::try_from(live.left()).unwrap_or(usize::MAX)),
            Self::There(process) => process.strays(),
        }
    }

    /// Closes all ports, and the process.
    pub(crate) fn close(self, fabric: &Fabric) -> Result<()> {
        match self {
            Self::Here(ranks) => fabric.close(ranks.ports()),
            Self::Live(live) => {
                live.withdraw_all();
                Ok(())
            }
            Self::There(process) => process.close(),
        }
    }
}

fn elsewhere() -> Error {
    Error::new(ErrorKind::Internal, "engine", "the ranks have no ports in this process")
}

fn portless() -> Error {
    Error::new(ErrorKind::Internal, "engine", "the ranks have no connector in this process")
}
