//! What whoever has given an order waits with.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use kvx_core::{Error, ErrorKind, Result};
use tokio::sync::oneshot;

use super::shared::Shared;
use crate::protocol::{Reason, RequestNumber};
use crate::rank::FetchReport;

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
    /// ([`Worker::take_events`](super::Worker::take_events)).
    pub quarantined: bool,
}

impl FetchFailure {
    pub(super) fn without_blocks(error: Error, quarantined: bool) -> Self {
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

/// A lease that was granted: a future of why it ended, done when its blocks may be reused.
#[derive(Debug)]
pub struct Granted {
    pub(super) receiver: oneshot::Receiver<Reason>,
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
    pub(super) receiver: oneshot::Receiver<Fetched>,
    pub(super) worker: Weak<Shared>,
    pub(super) request: RequestNumber,
    pub(super) over: bool,
}

impl Fetching {
    /// Its number: what [`RankEvent::Unquarantined`](crate::rank::RankEvent::Unquarantined) calls it.
    #[must_use]
    pub const fn request(&self) -> RequestNumber {
        self.request
    }

    /// Something to give it up with, from any thread, that does not keep it.
    #[must_use]
    pub fn aborter(&self) -> Aborter {
        Aborter { worker: Weak::clone(&self.worker), request: self.request }
    }

    /// Gives it up. It still has to be awaited: its blocks are in use until it has ended.
    pub fn abort(&self) {
        self.aborter().abort();
    }
}

/// Gives a [`Fetching`] up, wherever that is held.
#[derive(Clone)]
pub struct Aborter {
    worker: Weak<Shared>,
    request: RequestNumber,
}

impl Aborter {
    /// Gives it up, unless it is over. It still has to be awaited: its blocks are in use until it has ended.
    pub fn abort(&self) {
        if let Some(shared) = self.worker.upgrade() {
            let request = self.request;
            shared.give(move |inside| inside.rank.abort(request));
        }
    }
}

impl fmt::Debug for Aborter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Aborter").field("request", &self.request).finish_non_exhaustive()
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
