//! What ranks send each other, over whichever way: one byte that says for whom it is, then the message.

use kvx_core::wire::Text;
use kvx_core::{Error, wire};

use crate::integrity::{Answer, Question};
use crate::protocol::message::{ToOwner, ToUser};
use crate::protocol::{LeaseName, Reader};
use serde::{Deserialize, Serialize};

const OPERATION: &str = "frame";

const PEERS: u8 = 1;
const TO_OWNER: u8 = 2;
const TO_USER: u8 = 3;
const DIGESTS: u8 = 4;

/// Most bytes of the reason for which digests are not given.
pub(super) const MAX_WHY: usize = 512;

/// A message, by whom it is for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame<'a> {
    /// For [`Peers`](crate::protocol::peers::Peers), which decodes it.
    Peers(&'a [u8]),
    /// For the owner of a lease.
    ToOwner(ToOwner),
    /// For its user.
    ToUser(ToUser),
    /// For those who compare digests.
    Digests(Digests),
}

/// What is said about digests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Digests {
    /// From a reader to the owner of a lease.
    Ask {
        lease: LeaseName,
        reader: Reader,
        /// Number of the transfer at the reader.
        transfer: u64,
        question: Question,
    },
    /// The owner's answer, or why there is none.
    Tell { lease: LeaseName, reader: Reader, transfer: u64, answer: Result<Answer, Text<MAX_WHY>> },
}

/// A frame for [`Peers`](crate::protocol::peers::Peers) from its bytes.
pub(super) fn peers(message: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(message.len() + 1);
    bytes.push(PEERS);
    bytes.extend_from_slice(message);
    bytes
}

pub(super) fn to_owner(message: &ToOwner) -> kvx_core::Result<Vec<u8>> {
    framed(TO_OWNER, message)
}

pub(super) fn to_user(message: &ToUser) -> kvx_core::Result<Vec<u8>> {
    framed(TO_USER, message)
}

pub(super) fn digests(message: &Digests) -> kvx_core::Result<Vec<u8>> {
    framed(DIGESTS, message)
}

fn framed<T: Serialize>(kind: u8, message: &T) -> kvx_core::Result<Vec<u8>> {
    // Room for a message of a lease, so that it need not grow.
    let mut bytes = Vec::with_capacity(256);
    bytes.push(kind);
    wire::append(OPERATION, message, &mut bytes)?;
    Ok(bytes)
}

/// Reads a frame.
///
/// # Errors
///
/// [`ErrorKind::Peer`](kvx_core::ErrorKind::Peer): empty, malformed, over a limit. `Ok(None)` for a kind that a later version
/// may have.
pub(super) fn read(bytes: &[u8]) -> kvx_core::Result<Option<Frame<'_>>> {
    let Some((kind, message)) = bytes.split_first() else {
        return Err(Error::peer(OPERATION, "a frame without bytes"));
    };
    Ok(Some(match *kind {
        PEERS => Frame::Peers(message),
        TO_OWNER => Frame::ToOwner(wire::from_bytes(OPERATION, "a message to an owner", message)?),
        TO_USER => Frame::ToUser(wire::from_bytes(OPERATION, "a message to a user", message)?),
        DIGESTS => Frame::Digests(wire::from_bytes(OPERATION, "digests", message)?),
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests;
