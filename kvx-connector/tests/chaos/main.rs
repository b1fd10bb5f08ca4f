//! Faults of whole engines: leases that end in mid-read, and processes that die.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

mod cache;
mod held;
mod node;
mod stale;
