//! Calls that wait.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use kvx_core::Result;
use kvx_core::backend::{Events, Submit};
use kvx_core::id::{PeerId, RegionId, TransferId};

use crate::wrapper::{At, Post, Sabotage};

/// One kind of call waits, the first time that it is made.
pub(crate) struct Blocks {
    which: Call,
    waited: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Submit,
    Poll,
    Cancel,
    Sever,
    Revoke,
    Deregister,
}

impl Blocks {
    pub(crate) fn new(which: Call) -> Self {
        Self { which, waited: AtomicBool::new(false) }
    }

    fn called(&self, call: Call) {
        if call != self.which || self.waited.swap(true, SeqCst) {
            return;
        }
        let seconds = if matches!(call, Call::Revoke | Call::Deregister) { 2 } else { 1 };
        std::thread::sleep(Duration::from_secs(seconds) + Duration::from_millis(200));
    }
}

impl Sabotage for Blocks {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        self.called(Call::Submit);
        post.to(at)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.called(Call::Poll);
        at.backend.poll(events);
    }

    fn cancel(&self, at: &At, id: TransferId) -> Result<()> {
        self.called(Call::Cancel);
        at.backend.cancel(id)
    }

    fn sever(&self, at: &At, peer: PeerId) -> Result<()> {
        self.called(Call::Sever);
        at.backend.sever(peer)
    }

    fn revoke(&self, at: &At, peer: PeerId) -> Result<()> {
        self.called(Call::Revoke);
        at.backend.revoke(peer)
    }

    fn deregister(&self, at: &At, region: RegionId) -> Result<()> {
        self.called(Call::Deregister);
        at.backend.deregister(region)
    }
}
