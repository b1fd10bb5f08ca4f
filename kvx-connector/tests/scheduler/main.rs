//! Engines with schedulers of their own: what the scheduler's side says in steps is carried out by the workers' side, between
//! engines of different shapes, over a real control channel and shared memory. Nothing passes between a scheduler and a worker but
//! bytes.
#![cfg(feature = "shm")]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests"
)]

mod bytes;
mod ends;
mod host;
mod hybrid;
mod kit;
mod process;
mod random;
mod retries;
mod shapes;
mod steps;
