//! What crosses the wire: the handshake's bytes, key blobs, requests and responses.

use std::io::{Read, Write};
use std::net::SocketAddr;

use kvx_core::handshake::HandshakeBytes;
use kvx_core::memory::KeyBlob;
use kvx_core::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Most bytes of a frame.
const MAX_FRAME: usize = 1 << 27;

/// A step of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Step {
    Offer,
    Reply,
    Completion,
}

/// A message of the handshake.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hand {
    magic: String,
    pub(crate) step: Step,
    pub(crate) from: [u8; 16],
    pub(crate) to: [u8; 16],
    /// Where the sender listens.
    pub(crate) address: SocketAddr,
    /// What the sender wants to hear from whoever dials it for this connection; an offer says none.
    pub(crate) word: u64,
}

const HAND: &str = "plain-tcp hand 1";

impl Hand {
    pub(crate) fn new(
        step: Step,
        from: [u8; 16],
        to: [u8; 16],
        address: SocketAddr,
        word: u64,
    ) -> Self {
        Self { magic: HAND.into(), step, from, to, address, word }
    }

    pub(crate) fn encode(&self) -> Result<HandshakeBytes> {
        HandshakeBytes::new(packed(self)?)
    }

    pub(crate) fn decode(
        operation: &'static str,
        bytes: &HandshakeBytes,
        step: Step,
    ) -> Result<Self> {
        let hand: Self = whole(operation, bytes.as_bytes())?;
        if hand.magic != HAND || hand.step != step {
            return Err(Error::peer(operation, "not this step of a handshake of plain TCP"));
        }
        Ok(hand)
    }
}

/// A key to a region of the side that published it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Key {
    magic: u32,
    pub(crate) owner: [u8; 16],
    pub(crate) slot: u32,
    pub(crate) generation: u32,
    pub(crate) secret: u64,
}

const KEY: u32 = 0x9a17_7c90;

impl Key {
    pub(crate) fn new(owner: [u8; 16], slot: u32, generation: u32, secret: u64) -> Self {
        Self { magic: KEY, owner, slot, generation, secret }
    }

    pub(crate) fn encode(&self) -> Result<KeyBlob> {
        KeyBlob::new(packed(self)?)
    }

    pub(crate) fn decode(blob: &KeyBlob) -> Result<Self> {
        let key: Self = whole("import_key", blob.as_bytes())?;
        if key.magic == KEY { Ok(key) } else { Err(Error::peer("import_key", "not a key blob")) }
    }
}

/// The first frame of a connection: who dials, and whom.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) from: [u8; 16],
    pub(crate) to: [u8; 16],
    /// The word that the side that is dialled has given for this connection.
    pub(crate) word: u64,
}

/// A batch, as its target is asked to carry it out.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) write: bool,
    pub(crate) pieces: Vec<Piece>,
    /// What is written, one piece after the other.
    pub(crate) data: Bytes,
    pub(crate) notify: Option<Bytes>,
}

/// A range of a region of the target.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Piece {
    pub(crate) key: Key,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// What became of a request: what was read, or why it failed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Response {
    pub(crate) id: u64,
    pub(crate) result: Result<Bytes, String>,
}

/// Bytes that are packed as such.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Bytes;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(Bytes(bytes.to_vec()))
            }

            fn visit_byte_buf<E>(self, bytes: Vec<u8>) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }
        }
        from.deserialize_byte_buf(Visitor)
    }
}

fn packed<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    rmp_serde::to_vec(value)
        .map_err(|error| Error::new(kvx_core::ErrorKind::Internal, "encode", error.to_string()))
}

/// Decodes bytes of a peer, all of them.
fn whole<T: DeserializeOwned>(operation: &'static str, mut bytes: &[u8]) -> Result<T> {
    let value = rmp_serde::from_read(&mut bytes)
        .map_err(|error| Error::peer(operation, "malformed").with_context("error", error))?;
    if bytes.is_empty() { Ok(value) } else { Err(Error::peer(operation, "too long")) }
}

pub(crate) fn send<T: Serialize>(mut to: impl Write, message: &T) -> std::io::Result<()> {
    let bytes = rmp_serde::to_vec(message).map_err(std::io::Error::other)?;
    let count = u32::try_from(bytes.len()).map_err(std::io::Error::other)?;
    let mut frame = count.to_le_bytes().to_vec();
    frame.extend(bytes);
    to.write_all(&frame)
}

pub(crate) fn receive<T: DeserializeOwned>(mut from: impl Read) -> std::io::Result<T> {
    let mut count = [0; 4];
    from.read_exact(&mut count)?;
    let count = u32::from_le_bytes(count) as usize;
    if count > MAX_FRAME {
        return Err(std::io::Error::other("the frame is too long"));
    }
    let mut bytes = vec![0; count];
    from.read_exact(&mut bytes)?;
    rmp_serde::from_slice(&bytes).map_err(std::io::Error::other)
}
