//! What an engine's scheduler asks and is told.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use kvx_core::Result;
use kvx_core::plan::BlockTable;
use kvx_core::wire::Text;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::form::own_form;

/// An engine's own name of a request. It means nothing to any other engine: see
/// [`TransferKey`](crate::protocol::TransferKey).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(Arc<str>);

own_form!(RequestId);

impl RequestId {
    /// Most bytes of an id.
    pub const MAX_BYTES: usize = 512;

    /// The request of this name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): too long, or with a control character.
    pub fn new(id: impl Into<String>) -> Result<Self> {
        let text = Text::<{ Self::MAX_BYTES }>::new(id)?;
        Ok(Self(text.as_str().into()))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for RequestId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestId({:?})", self.as_str())
    }
}

impl Serialize for RequestId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for RequestId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Text::<{ Self::MAX_BYTES }>::deserialize(deserializer)?;
        Ok(Self(text.as_str().into()))
    }
}

/// A request, as the engine's scheduler shows it in each call.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Its name.
    pub id: &'a RequestId,
    /// Tokens of its prompt.
    pub prompt_tokens: u64,
    /// Its `kv_transfer_params`, if it came with any. Read once, when the request is first seen.
    pub params: Option<&'a Value>,
}

/// How many tokens come from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matched {
    /// So many, beyond those that the engine has already.
    Tokens {
        /// How many. With 0, the engine computes the request itself.
        tokens: u64,
        /// Whether they come while the request waits, between steps; otherwise within the step that needs them.
        asynchronous: bool,
    },
    /// That is not known yet: ask again in the next step.
    AskLater,
}

impl Matched {
    /// The engine computes the request itself.
    pub const NONE: Self = Self::Tokens { tokens: 0, asynchronous: false };

    /// How many; `None` where that is not known yet.
    #[must_use]
    pub const fn tokens(self) -> Option<u64> {
        match self {
            Self::Tokens { tokens, .. } => Some(tokens),
            Self::AskLater => None,
        }
    }
}

/// A request that is computed in a step.
#[derive(Clone, Copy, Debug)]
pub struct Scheduled<'a> {
    /// The request.
    pub request: &'a RequestId,
    /// Tokens in its cache before the step.
    pub computed: u64,
    /// Tokens that the step computes.
    pub tokens: u64,
    /// Ids of blocks, by cache group, that it got since [`after_alloc`](super::SchedulerConnector::after_alloc) or the step before,
    /// to be put after those that it has. May be empty: none for any group.
    pub appended: &'a [&'a [u32]],
}

/// How a request ended in the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FinishStatus {
    /// It has the tokens that were asked for: a request whose cache another engine decodes from ends so, after one token.
    LengthCapped,
    /// It stopped by itself: there is nothing left to decode.
    Stopped,
    /// It was aborted.
    Aborted,
    /// It was refused or went wrong.
    Failed,
}

/// A request that has finished.
#[derive(Clone, Copy, Debug)]
pub struct Finishing<'a> {
    /// How.
    pub status: FinishStatus,
    /// Tokens in its cache.
    pub tokens: u64,
    /// Its blocks, one table for each cache group.
    pub blocks: &'a [BlockTable<'a>],
}

/// What is to be done with a request that has finished.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finished {
    /// Whether its blocks are still needed: then they must not be freed before [`Updates`] names the request. Blocks that it had
    /// before a preemption wait for [`Updates::drained`], as they did before.
    pub hold: bool,
    /// What goes back to the router, for the consumer.
    pub params: Option<Map<String, Value>>,
}

/// What the workers' reports mean for the engine's scheduler.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Updates {
    /// Finished requests whose blocks were held for another engine, and are not any more.
    pub sent: Vec<RequestId>,
    /// Aborted or preempted requests whose blocks were held because something might still have been written there.
    pub drained: Vec<RequestId>,
    /// Requests that are loaded, by every rank.
    pub received: Vec<Received>,
    /// Requests that could not be loaded: no rank writes anything for them any more.
    pub failed: Vec<LoadFailed>,
    /// Blocks, by cache group, that must not be used again, though what they were for is over: it cannot be proved that nobody
    /// writes there.
    pub quarantined: BTreeMap<u16, BTreeSet<u32>>,
    /// Blocks, by cache group, that were in quarantine and may be used again.
    pub unquarantined: BTreeMap<u16, BTreeSet<u32>>,
}

impl Updates {
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A request that is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The request.
    pub request: RequestId,
    /// How many tokens the engine may count as computed.
    pub computed: u64,
}

/// A request that could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadFailed {
    /// The request.
    pub request: RequestId,
    /// What is not proven good at one rank or another, as (cache group, logical block).
    pub blocks: BTreeSet<(u16, u32)>,
    /// How many tokens, from the request's first on, the engine may count as computed all the same.
    pub computed: u64,
    /// What the engine is to do.
    pub then: OnFailure,
    /// What went wrong, at the first rank that said so.
    pub reason: String,
}

/// What is done with a request whose cache cannot be had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnFailure {
    /// The engine computes it itself.
    #[default]
    Recompute,
    /// The engine fails it.
    Fail,
}
