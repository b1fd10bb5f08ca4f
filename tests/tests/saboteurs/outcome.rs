//! Outcomes that say the wrong thing, come late, or to another transfer.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use kvx_core::backend::{Event, Events, Outcome, Submit};
use kvx_core::id::TransferId;
use kvx_core::{Error, ErrorKind, Result};

use crate::tools::{Later, Queue, lock, settled};
use crate::wrapper::{At, Closing, Post, Sabotage};

/// What becomes of the outcome of a transfer that failed.
pub(crate) struct Fails {
    said: fn(Error) -> Outcome,
    queue: Queue,
}

impl Fails {
    pub(crate) fn called_misuse() -> Self {
        let said = |error: Error| Outcome::Failed(error.with_kind(ErrorKind::Misuse));
        Self { said, queue: Queue::default() }
    }

    pub(crate) fn called_cancelled() -> Self {
        Self { said: |_| Outcome::Cancelled, queue: Queue::default() }
    }
}

impl Sabotage for Fails {
    fn poll(&self, at: &At, events: &mut Events) {
        self.queue.give(at, events, |event| match event {
            Event::Settled { id, outcome: Outcome::Failed(error) } => {
                vec![settled(id, (self.said)(error))]
            }
            other => vec![other],
        });
    }
}

/// The answer to a cancelled transfer comes a second time, and settles whatever has its id by then.
#[derive(Default)]
pub(crate) struct LateAnswer {
    cancelled: Mutex<BTreeSet<(usize, TransferId)>>,
    answered: Mutex<BTreeSet<(usize, TransferId)>>,
    later: Later,
    queue: Queue,
}

impl Sabotage for LateAnswer {
    fn cancel(&self, at: &At, id: TransferId) -> Result<()> {
        lock(&self.cancelled).insert((at.index, id));
        at.backend.cancel(id)
    }

    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        if !lock(&self.cancelled).remove(&(at.index, post.id)) {
            return post.to(at);
        }
        lock(&self.answered).insert((at.index, post.id));
        self.queue.push(at, settled(post.id, Outcome::done()));
        self.later.hold(at, 10, post.held());
        Ok(Submit::Submitted)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.later.poll(at);
        self.queue.give(at, events, |event| match event {
            Event::Settled { id, .. } if lock(&self.answered).remove(&(at.index, id)) => Vec::new(),
            other => vec![other],
        });
    }
}

/// What has not been polled when a peer closes has failed.
#[derive(Default)]
pub(crate) struct ClosingFails {
    closed: AtomicBool,
    queue: Queue,
}

impl Sabotage for ClosingFails {
    fn closing(&self, _: &At) -> Closing {
        self.closed.store(true, SeqCst);
        Closing::Honest
    }

    fn poll(&self, at: &At, events: &mut Events) {
        let closed = self.closed.load(SeqCst);
        self.queue.give(at, events, |event| match event {
            Event::Settled { id, outcome: Outcome::Done { .. } } if closed => {
                vec![settled(id, Outcome::Failed(Error::peer("transfer", "the peer is gone")))]
            }
            other => vec![other],
        });
    }
}
