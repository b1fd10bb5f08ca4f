//! The owner's side of leases, at one rank: what it is told, and what it says.

mod terms;

pub use terms::{Config, Counts, Grant, Input, Output};
