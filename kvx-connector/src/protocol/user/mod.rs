//! The user's side of leases, at one rank: what it is told, and what it says.

mod terms;

pub use terms::{Ask, Config, Counts, Input, Outcome, Output, Prove, Route, Source, Unproven, Why};
