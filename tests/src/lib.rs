//! What kvx is tested with, for kvx itself and for whoever adds a backend or a layout to it.
//!
//! - [`oracle`]: what a transfer between two layouts must do, byte by byte. It shares no code with the planner.
//! - [`planner`]: holds the planner against the oracle.
//! - [`suite`]: the conformance kit, which holds a backend to the contract.
//! - [`sweep`]: many seeds of a simulation, on all processors.
//! - [`strategy`]: [`proptest`] strategies for models, layouts, block tables and requests.
//!
//! `docs/testing-layouts.md` shows how to test a layout of your own with them.

pub mod oracle;
pub mod planner;
pub mod strategy;
pub mod suite;
mod sweep;

pub use sweep::sweep;

/// The guide's code is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../docs/testing-layouts.md")]
struct Guide;
