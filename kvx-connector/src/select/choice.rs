//! What was chosen, and what became of the rest.

use std::fmt;

use kvx_core::registry::Registration;
use serde::Serialize;

/// A backend that was chosen, and why.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Choice {
    /// The backend.
    #[serde(rename = "backend", serialize_with = "only_name")]
    pub registration: &'static Registration,
    /// Why it was chosen.
    pub reason: ChoiceReason,
    /// What its probe found.
    pub detail: String,
    /// Every backend of this program, by name, and what became of it.
    pub considered: Vec<Considered>,
}

fn only_name<S: serde::Serializer>(
    registration: &&'static Registration,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(registration.name)
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.registration.name, self.reason, self.detail)
    }
}

/// Why a backend was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ChoiceReason {
    /// The program named it.
    Named,
    /// `KVX_BACKEND` named it.
    Environment,
    /// Nothing else could be used.
    Only,
    /// It has the highest rank of all that could be used.
    Ranked,
}

impl fmt::Display for ChoiceReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Named => "asked for by name",
            Self::Environment => "named by KVX_BACKEND",
            Self::Only => "the only one that can be used",
            Self::Ranked => "the best of those that can be used",
        })
    }
}

/// A backend that was considered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Considered {
    /// Its name.
    pub name: &'static str,
    /// What became of it.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// What became of a backend that was considered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    /// It was chosen.
    Chosen,
    /// Another one was named.
    NotNamed,
    /// It is never chosen unasked.
    NeverUnasked,
    /// The policy does not allow it.
    NotAllowed,
    /// The other side does not have it.
    PeerLacksIt,
    /// The other side has it, but at a place that it does not reach from here.
    PeerElsewhere {
        /// This side's place.
        here: String,
        /// The other side's.
        there: String,
        /// In what they differ, where the backend says so.
        why: Option<String>,
        /// How to bring the two together, likewise.
        remedy: Option<String>,
    },
    /// It was named with options that are wrong.
    BadOptions {
        /// What is wrong with them.
        reason: String,
        /// What to write instead.
        remedy: Option<String>,
    },
    /// It cannot be used here.
    Unavailable {
        /// Why.
        reason: String,
        /// What to install or change.
        remedy: Option<String>,
    },
    /// It can be used, but another one goes before it.
    Outranked {
        /// Its rank.
        rank: u32,
    },
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chosen => f.write_str("chosen"),
            Self::NotNamed => f.write_str("another one was named"),
            Self::NeverUnasked => f.write_str("never chosen unasked"),
            Self::NotAllowed => f.write_str("not allowed by the policy"),
            Self::PeerLacksIt => f.write_str("the peer does not have it"),
            Self::PeerElsewhere { here, there, why: None, .. } => {
                write!(f, "the peer is elsewhere: at {there}, not at {here}")
            }
            Self::PeerElsewhere { here, there, why: Some(why), .. } => {
                write!(f, "{why} (here {here}, there {there})")
            }
            Self::BadOptions { reason, remedy: None } => write!(f, "wrong options: {reason}"),
            Self::BadOptions { reason, remedy: Some(remedy) } => {
                write!(f, "wrong options: {reason}; {remedy}")
            }
            Self::Unavailable { reason, remedy: None } => write!(f, "unavailable: {reason}"),
            Self::Unavailable { reason, remedy: Some(remedy) } => {
                write!(f, "unavailable: {reason}; {remedy}")
            }
            Self::Outranked { rank } => write!(f, "available, but its rank {rank} is not the best"),
        }
    }
}
