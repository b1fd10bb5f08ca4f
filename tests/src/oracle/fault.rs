//! What the oracle found.

use std::fmt;

/// What was found to be wrong.
#[derive(Debug)]
#[non_exhaustive]
pub enum Fault {
    /// The request cannot be served: a block table lacks a needed block, or names one that must not be used. A planner
    /// must refuse it.
    Scene(String),
    /// No memory is like this: by the producer's block tables, two elements of the request lie in the same place, which
    /// happens where groups share memory and a block is in two of their tables. A planner cannot see it.
    Contradiction(String),
    /// Shares of the pairing are missing, doubled, or held by nobody.
    Pairing(String),
    /// A list of segments is malformed, not sorted, or longer than it need be.
    Segments(String),
    /// A byte has the wrong value, the wrong origin, or was written too often.
    Bytes(String),
    /// The planner refused what it must do.
    Refused(kvx_core::Error),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scene(what) => write!(f, "the request cannot be served: {what}"),
            Self::Contradiction(what) => write!(f, "no memory is like this: {what}"),
            Self::Pairing(what) => write!(f, "pairing: {what}"),
            Self::Segments(what) => write!(f, "segments: {what}"),
            Self::Bytes(what) => write!(f, "bytes: {what}"),
            Self::Refused(error) => write!(f, "refused: {error}"),
        }
    }
}

impl std::error::Error for Fault {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Refused(error) => Some(error),
            _ => None,
        }
    }
}
