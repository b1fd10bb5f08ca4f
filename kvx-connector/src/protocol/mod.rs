//! Who may touch which memory, until when, and when a request is proven: the state machines of leases and peers.
//!
//! Nothing here does anything: no sockets, no clock, no threads, no backend. A machine is told what happened and what time it
//! is, and says what is to be done. So the same code runs under a driver with real sockets and under a simulation that
//! loses, doubles and reorders, tens of thousands of times.
//!
//! # Words
//!
//! - An *owner* has memory, a *user* reads or writes it. For reading (the consumer pulls) the producer is the owner; for
//!   writing (the producer pushes) the consumer is. The machines are the same for both.
//! - A [`LeaseName`] is the owner's promise that named blocks hold what they held when they were granted (to read), or may be
//!   written (to write), until its epoch has ended.
//! - A [`Reader`] is one rank in one [`Attempt`] of a user to use a lease. A lease is done when one attempt's whole *set* of
//!   readers has confirmed.
//! - A [`Part`] is what is published, transferred, settled, confirmed and fails as one: a group, a range of layers, a range of
//!   tokens.
//!
//! Times are [`Duration`](std::time::Duration)s since some moment of this process's own monotonic clock. Two hosts' clocks are
//! never compared.

mod few;
mod id;
pub mod message;
pub mod owner;
pub mod peers;
mod plant;
#[cfg(feature = "sim")]
pub mod sim;
mod terms;
pub mod user;

pub use id::{Attempt, Fingerprint, LeaseName, Nonce, Part, Reader, TransferKey};
#[cfg(any(test, feature = "sim"))]
pub use plant::Plant;
pub use terms::{Access, Ranks, Reason, RequestNumber, StageNumber, TransferNumber};
