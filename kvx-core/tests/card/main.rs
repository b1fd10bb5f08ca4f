//! Cards: what is written can be read, and what must be refused is refused by name.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod bytes;
mod identity;
mod next_version;
mod refusals;
mod round_trip;
mod sample;
