//! Records: what a session's stream of bytes consists of.
//!
//! Each is a length (two bytes, little-endian) and so many bytes. Within a session that has a key those are encrypted, and 16
//! of them prove it. What is inside ends with a byte that says what it is.

use kvx_core::wire::{self, Text, printable};
use kvx_core::{Error, ErrorKind, Result, Retry};
use serde::{Deserialize, Serialize};

/// Most bytes of a record, as Noise has it.
pub(super) const MAX_BYTES: usize = 65_535;
/// Bytes of a record's proof.
pub(super) const TAG_BYTES: usize = 16;
/// Bytes of a record's length.
pub(super) const LENGTH_BYTES: usize = 2;
/// Most bytes of a message in one record.
pub(super) const MAX_PAYLOAD_BYTES: usize = MAX_BYTES - TAG_BYTES - 1;

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// [`hello`](super::hello): the first in each direction.
    Hello = 1,
    /// The beginning or the middle of a message; as long as a record can be.
    Part = 2,
    /// A message, or the end of one.
    Message = 3,
    /// Is anybody there? Eight bytes, to be sent back.
    Ping = 4,
    /// The answer.
    Pong = 5,
    /// The last one: [`Bye`].
    Bye = 6,
}

impl Tag {
    pub(super) const fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Hello,
            2 => Self::Part,
            3 => Self::Message,
            4 => Self::Ping,
            5 => Self::Pong,
            6 => Self::Bye,
            _ => return None,
        })
    }
}

/// Why a session ends, as one side tells the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Leave {
    /// It is not needed any more.
    Closed,
    /// The two do not fit: versions, features, another engine than expected.
    Refused,
    /// The other side sent something wrong.
    BadFrame,
    /// There are too many sessions.
    TooMany,
    /// The whole engine stops.
    Stopping,
}

impl Leave {
    const fn code(self) -> u8 {
        match self {
            Self::Closed => 0,
            Self::Refused => 1,
            Self::BadFrame => 2,
            Self::TooMany => 3,
            Self::Stopping => 4,
        }
    }
}

const MAX_REASON_BYTES: usize = 1024;

#[derive(Serialize)]
struct ByeOut<'a> {
    code: u8,
    reason: &'a str,
}

#[derive(Deserialize)]
struct ByeIn {
    code: u8,
    reason: Text<MAX_REASON_BYTES>,
}

pub(super) fn write_bye(leave: Leave, reason: &str) -> Result<Vec<u8>> {
    // Its own errors may hold what a peer said: that is printable already, but not bounded.
    let reason = printable(reason);
    let end = (0..=reason.len().min(MAX_REASON_BYTES))
        .rev()
        .find(|at| reason.is_char_boundary(*at))
        .unwrap_or(0);
    wire::to_bytes("control", &ByeOut { code: leave.code(), reason: &reason[..end] })
}

/// What the other side's last record means to this one.
pub(super) fn read_bye(bytes: &[u8]) -> Result<Error> {
    let bye: ByeIn = wire::from_bytes("control", "the bye", bytes)?;
    let said = printable(bye.reason.as_str());
    let error = |kind, message: &str| {
        let message =
            if said.is_empty() { message.to_owned() } else { format!("{message}: {said}") };
        Error::new(kind, "control", message)
    };
    Ok(match bye.code {
        0 => error(ErrorKind::Closed, "the peer closed the session").with_retry(Retry::Reconnect),
        1 => error(ErrorKind::Peer, "the peer refused the session"),
        2 => error(ErrorKind::Peer, "the peer ended the session over a bad frame")
            .with_retry(Retry::Reconnect),
        3 => error(ErrorKind::Peer, "the peer has too many sessions").with_retry(Retry::Backoff),
        4 => error(ErrorKind::Closed, "the peer is stopping").with_retry(Retry::Backoff),
        _ => error(ErrorKind::Peer, "the peer ended the session").with_retry(Retry::Backoff),
    })
}
