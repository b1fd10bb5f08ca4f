//! What kvx is tested with, for kvx itself and for whoever adds a backend or a layout to it.
//!
//! - [`oracle`]: what a transfer between two layouts must do, byte by byte. It shares no code with the planner.
//! - [`planner`]: holds the planner against the oracle.
//! - [`suite`]: the conformance kit, which holds a backend to the contract.
//! - [`strategy`]: [`proptest`] strategies for models, layouts, block tables and requests.

pub mod oracle;
pub mod planner;
pub mod strategy;
pub mod suite;
