//! Why a session is over.

use kvx_core::{Error, Retry};

use crate::control::record;

/// Why a session is over, for whoever counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// What came first is no preamble of this protocol, or one for other security than this side's.
    NotOurs,
    /// The other side has no key of this side.
    WrongKey,
    /// Something wrong from a peer that has the key (or where there is none).
    BadFrame,
    /// The two do not fit: versions, features, another engine than expected.
    Refused,
    /// The other side said that it ends the session.
    Left,
    /// Something that is no fault of the other side.
    Local,
}

/// A session is over. What is still in its [`output`](super::Session::output) tells the other side, if it may know.
#[derive(Debug)]
pub struct Fault {
    /// For whoever counts.
    pub kind: FaultKind,
    /// For people.
    pub error: Error,
}

impl Fault {
    pub(super) fn bad(why: impl Into<String>) -> Self {
        Self {
            kind: FaultKind::BadFrame,
            error: Error::peer("control", why.into()).with_retry(Retry::Reconnect),
        }
    }

    pub(super) fn local(error: Error) -> Self {
        Self { kind: FaultKind::Local, error }
    }
}

pub(super) fn left(bytes: &[u8]) -> Fault {
    match record::read_bye(bytes) {
        Ok(error) => Fault { kind: FaultKind::Left, error },
        Err(error) => Fault { kind: FaultKind::BadFrame, error },
    }
}

pub(super) fn wrong_key(dials: bool) -> Fault {
    let error = Error::peer("control", "the peer does not have this side's key");
    let remedy = if dials {
        "give both sides the same key, and check that the address is a kvx control channel"
    } else {
        "give both sides the same key"
    };
    Fault { kind: FaultKind::WrongKey, error: error.with_remedy(remedy) }
}
