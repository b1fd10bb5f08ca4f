//! How two ranks' backends meet: bytes in, bytes out, no sockets.
//!
//! ```text
//! initiator                       acceptor
//! offer()  ── offer ───────────▶  accept(offer)      both have a PeerId from here on
//! complete(reply) ◀── reply ────
//!     └────── completion ──────▶  finish(completion) the acceptor posts only after this
//! ```
//!
//! The initiator posts after [`complete`](Handshake::complete). What carries the bytes is the caller's: the connector uses
//! its control channel, tests use a function call. It is enough for fabrics where both sides must act (RC queue pairs) as
//! for those where one address is all there is.
//!
//! Peers are named by their [`Incarnation`]. Offers may cross, be repeated, or arrive late:
//!
//! - an offer or reply repeated by the same incarnation gives the same [`PeerId`] and changes nothing;
//! - when both sides offer, both exchanges may run to their end and give one connection, not two;
//! - an offer by another incarnation at the same address is another peer.

use std::fmt;

use crate::error::{Error, Result};
use crate::id::{Incarnation, PeerId};
use crate::wire;

/// The handshake of a fabric. See the [module documentation](self).
pub trait Handshake {
    /// This side's incarnation: drawn when the backend was opened.
    fn incarnation(&self) -> Incarnation;

    /// Begins: bytes for any peer.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Resources`](crate::ErrorKind::Resources) or [`ErrorKind::Fabric`](crate::ErrorKind::Fabric) when the
    /// fabric cannot make what it needs.
    fn offer(&self) -> Result<HandshakeBytes>;

    /// Takes a peer's offer and answers it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Peer`](crate::ErrorKind::Peer) when the bytes are malformed or of another fabric,
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) when the two sides cannot talk, naming the field and both
    /// values, [`ErrorKind::Resources`](crate::ErrorKind::Resources) when there is no room for one more connection, those
    /// included that are over and wait to be polled.
    fn accept(&self, offer: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)>;

    /// Takes the answer to this side's offer. From here on this side may post.
    ///
    /// # Errors
    ///
    /// As for [`accept`](Self::accept), and [`ErrorKind::Peer`](crate::ErrorKind::Peer) when it answers no offer of this
    /// incarnation.
    fn complete(&self, reply: &HandshakeBytes) -> Result<(PeerId, HandshakeBytes)>;

    /// Takes the initiator's completion. From here on the acceptor may post.
    ///
    /// # Errors
    ///
    /// As for [`complete`](Self::complete).
    fn finish(&self, completion: &HandshakeBytes) -> Result<PeerId>;
}

/// Bytes of a handshake: opaque, bounded.
#[derive(Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct HandshakeBytes(
    #[serde(
        serialize_with = "wire::serialize_bytes",
        deserialize_with = "wire::bytes::<_, { HandshakeBytes::MAX_BYTES }>"
    )]
    Vec<u8>,
);

impl HandshakeBytes {
    /// Most bytes of one message.
    pub const MAX_BYTES: usize = 16 * 1024;

    /// A message of these bytes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) when there are more than [`MAX_BYTES`](Self::MAX_BYTES).
    pub fn new(bytes: Vec<u8>) -> Result<Self> {
        if bytes.len() > Self::MAX_BYTES {
            return Err(Error::misuse("handshake", "the message is too long")
                .with_context("bytes", bytes.len())
                .with_context("limit", Self::MAX_BYTES));
        }
        Ok(Self(bytes))
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl TryFrom<Vec<u8>> for HandshakeBytes {
    type Error = Error;

    fn try_from(bytes: Vec<u8>) -> Result<Self> {
        Self::new(bytes)
    }
}

impl From<HandshakeBytes> for Vec<u8> {
    fn from(bytes: HandshakeBytes) -> Self {
        bytes.0
    }
}

impl fmt::Debug for HandshakeBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandshakeBytes({} bytes)", self.0.len())
    }
}
