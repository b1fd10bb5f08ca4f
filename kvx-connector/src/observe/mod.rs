//! What can be seen of a rank: metrics, traces, a status.
//!
//! - **Metrics** go to whatever [recorder](metrics::Recorder) the program has installed when a rank starts, and nowhere if there is
//!   none. [`METRICS`] lists them; `docs/metrics.md` says exactly what each counts. Every fact is counted in one place, by the rank
//!   or one of its machines; what has grown is handed on at the end of each step.
//! - **Traces**: spans and events of [`tracing`] for each request and each lease. Both sides derive the same [`TraceId`] from the
//!   request's [`TransferKey`](crate::protocol::TransferKey), so that what they say of it can be put together.
//! - **Status**: [`RankStatus`], what is there now, to be shown as JSON.
//!
//! Labels are bounded: they are this engine's name and rank, and words of this crate or of a backend. Names that peers choose are in
//! traces and the status only.

mod catalogue;
mod meters;
mod quota;
mod rows;
mod status;
mod tally;
#[cfg(test)]
mod tests;
mod trace;

pub use catalogue::{Kind, METRICS, Metric, describe};
pub use status::{EngineStatus, Leases, PeerView, Quarantine, RankStatus, RequestView, Requests};
pub use trace::TraceId;

pub(crate) use meters::Meters;
pub(crate) use quota::Quota;
pub(crate) use tally::{Gauges, Moved, Outcome, Tally, error_kind};
