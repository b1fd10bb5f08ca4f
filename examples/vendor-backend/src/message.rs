//! What crosses a connection. All of it comes from a peer: nothing is believed, and nothing allocates without a bound.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kvx_core::id::{Incarnation, RegionId};
use kvx_core::wire::{self, Text};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Most bytes of data in one frame.
pub(crate) const CHUNK: usize = 64 << 10;
/// Most ranges of one batch, and most bytes of a notification: what the capabilities say.
pub(crate) const MAX_PIECES: usize = 64;
pub(crate) const MAX_NOTE: usize = 1024;
/// Most bytes of one frame: a chunk, or all ranges of a batch.
const MAX_FRAME: usize = CHUNK + (16 << 10);

/// What this side asks of its peer, in this order: what to do, then the data of a write, in chunks, and its end.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    Read(Batch),
    Write(Batch),
    Data(Chunk),
    End,
    /// The rest of the data does not come: the batch is to be forgotten.
    Abort,
}

/// A batch, as its target is asked to carry it out.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Batch {
    /// Never used again, other than a transfer's id: late answers find nobody.
    pub(crate) ticket: u64,
    #[serde(deserialize_with = "wire::list::<_, _, MAX_PIECES>")]
    pub(crate) pieces: Vec<Piece>,
    pub(crate) note: Option<Note>,
}

/// A range of a region of the target.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Piece {
    slot: u32,
    generation: u32,
    pub(crate) secret: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Piece {
    pub(crate) const fn new(region: RegionId, secret: u64, offset: u64, bytes: u64) -> Self {
        let (slot, generation) = (region.slot(), region.generation());
        Self { slot, generation, secret, offset, bytes }
    }

    pub(crate) const fn region(&self) -> RegionId {
        RegionId::new(self.slot, self.generation)
    }
}

/// What the target answers: the data of a read, in chunks, and how it ended.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Data(u64, Chunk),
    Done(u64),
    Refused(u64, Text<300>),
}

/// A chunk of data.
#[derive(Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Chunk(
    #[serde(
        serialize_with = "wire::serialize_bytes",
        deserialize_with = "wire::bytes::<_, CHUNK>"
    )]
    pub(crate) Vec<u8>,
);

/// The bytes of a notification.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Note(
    #[serde(
        serialize_with = "wire::serialize_bytes",
        deserialize_with = "wire::bytes::<_, MAX_NOTE>"
    )]
    pub(crate) Vec<u8>,
);

/// The first bytes of a connection: who dials, whom, and the word that the dialled side gave for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) from: Incarnation,
    pub(crate) to: Incarnation,
    pub(crate) word: u64,
}

const MAGIC: [u8; 8] = *b"plaintcp";

impl Hello {
    pub(crate) fn send(&self, mut to: &TcpStream) -> io::Result<()> {
        let [from, target] = [self.from.as_bytes(), self.to.as_bytes()];
        to.write_all(&[&MAGIC, &from[..], &target[..], &self.word.to_le_bytes()].concat())
    }

    /// Waits for it, `patience` long in all, however slowly it comes.
    pub(crate) fn receive(mut from: &TcpStream, patience: Duration) -> io::Result<Self> {
        let (begin, mut bytes, mut filled) = (Instant::now(), [0; 48], 0);
        while filled < bytes.len() {
            let left = patience.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            from.set_read_timeout(Some(left))?;
            match from.read(&mut bytes[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        from.set_read_timeout(None)?;
        if bytes[..8] != MAGIC {
            return Err(io::Error::other("not a connection of plain TCP"));
        }
        let (mut source, mut target, mut word) = ([0; 16], [0; 16], [0; 8]);
        source.copy_from_slice(&bytes[8..24]);
        target.copy_from_slice(&bytes[24..40]);
        word.copy_from_slice(&bytes[40..]);
        let [from, to] = [source, target].map(Incarnation::from_bytes);
        Ok(Self { from, to, word: u64::from_le_bytes(word) })
    }
}

/// Sends one frame, in one call.
pub(crate) fn send<T: Serialize>(mut to: &TcpStream, message: &T) -> io::Result<()> {
    let body = wire::to_bytes("send", message).map_err(io::Error::other)?;
    let count = u32::try_from(body.len()).map_err(io::Error::other)?;
    to.write_all(&[&count.to_le_bytes(), &body[..]].concat())
}

/// Receives one frame.
pub(crate) fn receive<T: DeserializeOwned>(mut from: impl Read) -> io::Result<T> {
    let mut count = [0; 4];
    from.read_exact(&mut count)?;
    let count = u32::from_le_bytes(count) as usize;
    if count > MAX_FRAME {
        return Err(io::Error::other("the frame is too long"));
    }
    let mut body = vec![0; count];
    from.read_exact(&mut body)?;
    wire::from_bytes("receive", "the frame", &body).map_err(io::Error::other)
}
