//! Whom one rank reads from or writes to, how, and whom it tells.

use std::fmt;
use std::sync::Arc;

use kvx_core::card::{Card, EngineName};
use kvx_core::id::Incarnation;
use kvx_core::plan::PeerPlan;
use serde::Serialize;

use super::io::Connection;

/// What this engine is in a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It reads what the other engine has filled.
    Consumer,
    /// It writes into the other engine's memory what it has filled.
    Producer,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Consumer => "consumer",
            Self::Producer => "producer",
        })
    }
}

/// What one rank of this engine has to do with one life of another engine's replica. Good until one of its ranks is
/// [`Gone`](super::Output::Gone).
#[derive(Clone, Debug)]
pub struct Route {
    /// The other engine.
    pub engine: EngineName,
    /// Its replica.
    pub replica: u32,
    /// Its life.
    pub life: Incarnation,
    /// What this engine is.
    pub role: Role,
    /// How many ranks the other engine's replica has.
    pub ranks: usize,
    /// The ranks between which and this rank bytes move. Those that the consumer reads from, or that the producer writes to.
    pub links: Vec<Link>,
    /// The ranks that must hear from this one when it is done, though some of them gave it nothing.
    pub confirms: Vec<Confirm>,
}

/// A rank with which bytes are exchanged.
#[derive(Clone, Debug)]
pub struct Link {
    /// Its number in the replica.
    pub rank: usize,
    /// Its life.
    pub incarnation: Incarnation,
    /// The connection to it.
    pub connection: Connection,
    /// Its card.
    pub card: Arc<Card>,
    /// How the two layouts map.
    pub plan: Arc<PeerPlan>,
}

/// A rank that must hear from this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confirm {
    /// Its number in the replica.
    pub rank: usize,
    /// Its life.
    pub incarnation: Incarnation,
    /// The ranks of this engine that it will hear from, this one among them: what to make its
    /// [`Roster`](kvx_core::plan::Roster) of.
    pub hears: Vec<usize>,
}
