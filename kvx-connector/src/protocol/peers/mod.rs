//! Which engines and ranks there are, and how this rank comes to be connected with those that it needs.

mod config;
mod io;
mod message;
mod route;
mod serve;
mod status;
#[cfg(test)]
mod tests;

pub use config::{Choosing, Chosen, Limits, Local, LocalRank, Setup};
pub use io::{
    Connection, Input, Output, Place, Reason, Remote, SessionId, Step, StepId, Stepped, Want,
    WantId,
};
pub use message::{BackendName, CardBytes, Disagreement, Message, Refusal, Words};
pub use route::{Confirm, Link, Role, Route};
pub use serve::OwnCards;
pub use status::{PeerState, PeerStatus, PeersStats};
