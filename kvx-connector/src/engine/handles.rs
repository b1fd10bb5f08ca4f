//! What an engine gives for a lease, and for a fetch.

use std::collections::BTreeSet;

use kvx_core::Result;

use super::Engine;
use crate::protocol::Reason;
use crate::rank::FetchReport;
use crate::ticket::Ticket;
use crate::worker::{FetchFailure, Fetching, Granted, Recall, Worker};

/// A request's blocks under a lease.
#[derive(Debug)]
#[must_use = "its blocks are in use until it is over"]
pub struct Published<'a> {
    pub(super) engine: &'a Engine,
    pub(super) ticket: Ticket,
    pub(super) granted: Vec<Granted>,
}

impl Published<'_> {
    /// What the consumer is given.
    pub const fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// Takes the blocks back: whoever reads them is told at once.
    pub fn withdraw(&self, why: Reason) {
        self.engine.withdraw(self.ticket.lease, why);
    }

    /// The same without a borrow of the engine: to be sent to a task, beside an `Arc` of the engine or without one.
    pub fn into_owned(self) -> Leased {
        let ranks = self.engine.workers().iter().map(Worker::recall).collect();
        Leased { ticket: self.ticket, granted: self.granted, ranks }
    }

    /// The ticket, and what says for each rank that its lease is over: for whoever keeps it apart from the engine.
    #[must_use = "its blocks are in use until it is over"]
    pub fn into_parts(self) -> (Ticket, Vec<Granted>) {
        (self.ticket, self.granted)
    }

    /// Waits until the lease is over at every rank, and the blocks may be used again. Gives why it ended, where ranks differ
    /// everything but [`Reason::Done`].
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`](kvx_core::ErrorKind::Closed): a worker is gone.
    pub async fn over(self) -> Result<Vec<Reason>> {
        over(self.granted).await
    }
}

/// A request's blocks under a lease, without a borrow of the engine: [`Published::into_owned`]. What is to be done with it may be done
/// elsewhere, in a task of its own.
#[derive(Debug)]
#[must_use = "its blocks are in use until it is over"]
pub struct Leased {
    ticket: Ticket,
    granted: Vec<Granted>,
    ranks: Vec<Recall>,
}

impl Leased {
    /// What the consumer is given.
    pub const fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// Takes the blocks back, while the engine is there: whoever reads them is told at once.
    pub fn withdraw(&self, why: Reason) {
        self.ranks.iter().for_each(|rank| rank.withdraw(self.ticket.lease, why));
    }

    /// As [`Published::over`].
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`](kvx_core::ErrorKind::Closed): the engine is gone, or one of its workers.
    pub async fn over(self) -> Result<Vec<Reason>> {
        over(self.granted).await
    }
}

/// Waits until a lease is over at every rank, and gives why: where ranks differ everything but that it was done.
async fn over(granted: Vec<Granted>) -> Result<Vec<Reason>> {
    let mut reasons = BTreeSet::new();
    for granted in granted {
        reasons.insert(granted.await?);
    }
    if reasons.len() > 1 {
        reasons.remove(&Reason::Done);
    }
    Ok(reasons.into_iter().collect())
}

/// A request under way at all ranks.
#[derive(Debug)]
#[must_use = "its blocks are in use until it has ended"]
pub struct Fetch {
    pub(super) ranks: Vec<Fetching>,
}

impl Fetch {
    /// Gives it up. It still has to be awaited.
    pub fn abort(&self) {
        self.ranks.iter().for_each(Fetching::abort);
    }

    /// What each rank does, in order: for whoever waits for each, or has it given up from elsewhere.
    #[must_use = "its blocks are in use until all have ended"]
    pub fn into_ranks(self) -> Vec<Fetching> {
        self.ranks
    }

    /// Waits until every rank has ended. Gives what each moved.
    ///
    /// # Errors
    ///
    /// What failed first, in the order of ranks, with the blocks of all: those that are not proven good at every rank.
    pub async fn over(self) -> std::result::Result<Vec<FetchReport>, FetchFailure> {
        let mut reports = Vec::new();
        let mut failure: Option<FetchFailure> = None;
        for rank in self.ranks {
            match (rank.await, &mut failure) {
                (Ok(report), _) => reports.push(report),
                (Err(failed), None) => failure = Some(failed),
                (Err(failed), Some(first)) => {
                    first.blocks.extend(failed.blocks);
                    first.quarantined |= failed.quarantined;
                }
            }
        }
        failure.map_or(Ok(reports), Err)
    }
}
