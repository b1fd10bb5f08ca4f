//! Faults of whole engines: leases that end in mid-read; processes that die, stand still and come back; networks that fail.
//!
//! What is promised then, and which test shows it, is in `docs/faults.md`.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

mod cache;
mod child;
mod fault;
mod filter;
mod held;
mod ledger;
mod node;
mod process;
mod proxy;
mod replay;
mod stale;
mod trace;
mod words;
mod world;

use std::task::{Context, Poll, Waker};

/// What a future gives, if it is done.
fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    match std::pin::Pin::new(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}
