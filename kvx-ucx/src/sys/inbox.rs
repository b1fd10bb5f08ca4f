//! What callbacks say.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Status;

/// Bytes of a message's header, and the most of what follows it.
pub(crate) const HEADER: usize = 32;
pub(crate) const MOST_PAYLOAD: usize = 4096;

/// Something that happened.
#[derive(Debug)]
pub(crate) enum Fact {
    /// Nothing of a batch is in UCX's hands any more.
    Over(u64),
    /// An endpoint failed.
    Failed(u64, Status),
    /// An endpoint that was closed is gone.
    Closed(u64),
    /// A message came.
    Message([u8; HEADER], Vec<u8>),
}

/// Facts, oldest first. Its lock is never held while anything else is called.
#[derive(Debug, Default)]
pub(crate) struct Inbox(Mutex<VecDeque<Fact>>);

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Fact>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, fact: Fact) {
        self.lock().push_back(fact);
    }

    pub(crate) fn pop(&self) -> Option<Fact> {
        self.lock().pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }
}
