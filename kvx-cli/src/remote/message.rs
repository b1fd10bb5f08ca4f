//! What the two processes say to each other.

use std::io::{self, Read, Write};

use kvx_core::handshake::HandshakeBytes;
use kvx_core::layout::RankLayout;
use kvx_core::memory::KeyBlob;
use kvx_core::transfer::{Mode, Segment};
use kvx_core::{Error, ErrorKind, Result, wire};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::engine::live::{LocalSetup, Traffic};
use crate::engine::ranks::{Awaited, Bystanders, Piece};
use crate::engine::watch::Changed;
use crate::engine::work::{Checked, Sample};

/// Most bytes of one message.
const MAX_BYTES: u32 = 1 << 28;

/// Where a rank's memory is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Memory {
    /// The heap.
    Heap,
    /// What the backend [allocates](kvx_core::memory::MemoryRegistry::allocate).
    Backend,
}

/// What is asked of the process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Opens a backend (`name,option=value`) per rank and makes the ranks' memory.
    Open {
        backend: String,
        layouts: Vec<RankLayout>,
        memory: Memory,
    },
    /// Starts all ranks of these replicas with the whole connector, and makes their memory.
    OpenLive {
        backend: String,
        replicas: Vec<Vec<RankLayout>>,
        setup: LocalSetup,
        /// All threads of the process are kept on this processor.
        cpu: Option<u32>,
    },
    /// Leases a request's blocks.
    Publish(Publish),
    /// Leases the same blocks so many times, under numbers from this one on.
    PublishMany(Publish, u32),
    /// Waits until the leases of these requests are over, all as done.
    Over(Vec<u64>),
    /// What went how.
    Traffic,
    /// A step of the handshake between a rank and rank `number` of the other engine.
    Accept {
        rank: usize,
        number: usize,
        offer: HandshakeBytes,
    },
    Finish {
        rank: usize,
        number: usize,
        completion: HandshakeBytes,
    },
    Connect {
        rank: usize,
        number: usize,
    },
    /// Writes tags.
    Fill(Vec<Piece>),
    /// Compares tags.
    Check(Vec<Piece>),
    /// Watches blocks.
    Watch(Vec<Bystanders>),
    /// Which of them changed.
    Changed,
    /// Flips a bit of an element.
    Flip {
        rank: usize,
        sample: Sample,
    },
    /// Waits until all of these have come, once.
    Expect(Vec<Awaited>),
    /// How many notifications came that nobody waited for.
    Strays,
    /// Takes this many notifications, by rank.
    Listen(Vec<u64>),
    /// Answers notifications of rank `number` of the other engine, this many, asleep in between or not.
    Echo {
        rank: usize,
        number: usize,
        times: u32,
        spin: bool,
        /// Kept on this processor meanwhile.
        cpu: Option<u32>,
    },
    /// Answers over two counters that come after this, this many times.
    Raw {
        times: u32,
        cpu: Option<u32>,
    },
    /// Prepares the kernel's copies of these segments out of another process's memory.
    PrepareCopies(Copies),
    /// Makes all copies that were prepared: how long it takes, in nanoseconds.
    Copy,
    /// Processor time of all threads so far, in nanoseconds, without that of such copies.
    Cpu,
    /// Ends gently.
    Close,
}

/// A request whose blocks are to be leased.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Publish {
    pub(crate) replica: usize,
    pub(crate) request: u64,
    pub(crate) tokens: u64,
    /// Block ids by cache group.
    pub(crate) tables: Vec<Vec<u32>>,
    /// To be read, or to be written.
    pub(crate) mode: Mode,
}

/// Segments that a rank is to take out of another process's memory by itself, past its backend.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Copies {
    pub(crate) rank: usize,
    pub(crate) pid: u32,
    /// Of the first bytes of the other process's regions.
    pub(crate) addresses: Vec<u64>,
    pub(crate) segments: Vec<Taken>,
}

/// One of them: region and first byte here, region and first byte there, bytes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Taken {
    pub(crate) here: (u32, u64),
    pub(crate) there: (u32, u64),
    pub(crate) bytes: u64,
}

impl From<Taken> for Segment {
    fn from(taken: Taken) -> Self {
        let ((local_region, local_offset), (remote_region, remote_offset)) =
            (taken.here, taken.there);
        let bytes = taken.bytes;
        Self { local_region, remote_region, local_offset, remote_offset, bytes }
    }
}

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    /// Keys and sizes of each rank's regions, and their addresses in this process.
    Opened {
        ranks: Vec<OpenedRank>,
        pid: u32,
    },
    /// The ticket of a request, as bytes.
    Ticket(Vec<u8>),
    Tickets(Vec<Vec<u8>>),
    Traffic(Traffic),
    Reply(HandshakeBytes),
    Checked(Vec<Checked>),
    Changed(Vec<(usize, Changed)>),
    Number(u64),
    Failed {
        kind: ErrorKind,
        text: String,
        remedy: Option<String>,
    },
}

/// A rank of the other process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct OpenedRank {
    pub(crate) keys: Vec<(KeyBlob, u64)>,
    /// Of the regions' first bytes.
    pub(crate) addresses: Vec<u64>,
}

impl From<Error> for Answer {
    fn from(error: Error) -> Self {
        let mut text = crate::failure::line(&error);
        // It is said again by whoever is told.
        if let Some(remedy) = error.remedy() {
            text = text.replacen(&format!("; {}", remedy.replace('\n', " ")), "", 1);
        }
        Self::Failed { kind: error.kind(), text, remedy: error.remedy().map(ToOwned::to_owned) }
    }
}

/// Sends a message.
///
/// # Errors
///
/// When it cannot be expressed, or the socket fails.
pub(crate) fn send(to: &mut impl Write, message: &impl Serialize) -> Result<()> {
    let bytes = wire::to_bytes("remote", message)?;
    let length = u32::try_from(bytes.len()).ok().filter(|length| *length <= MAX_BYTES);
    let length = length.ok_or_else(|| {
        Error::new(ErrorKind::Internal, "remote", "a message is too long")
            .with_context("bytes", bytes.len())
    })?;
    let sent = to.write_all(&length.to_le_bytes()).and_then(|()| to.write_all(&bytes));
    sent.map_err(lost)
}

/// Receives a message; `None` where the other side has hung up.
///
/// # Errors
///
/// When the socket fails, or what comes is no such message.
pub(crate) fn receive<T: DeserializeOwned>(from: &mut impl Read) -> Result<Option<T>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other.map_err(lost)?,
    }
    let length = u32::from_le_bytes(length);
    if length > MAX_BYTES {
        return Err(Error::peer("remote", "a message is too long").with_context("bytes", length));
    }
    let mut bytes = Vec::new();
    from.take(length.into()).read_to_end(&mut bytes).map_err(lost)?;
    wire::from_bytes("remote", "a message", &bytes).map(Some)
}

fn lost(source: io::Error) -> Error {
    Error::peer("remote", "the other engine's process cannot be reached").with_source(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let mut bytes = Vec::new();
        send(&mut bytes, &Ask::Listen(vec![1, 2])).unwrap();
        send(&mut bytes, &Answer::from(Error::config("x", "wrong").with_remedy("right"))).unwrap();
        let mut from = &*bytes;
        let ask: Ask = receive(&mut from).unwrap().unwrap();
        assert!(matches!(ask, Ask::Listen(counts) if counts == [1, 2]));
        let answer: Answer = receive(&mut from).unwrap().unwrap();
        let Answer::Failed { kind, text, remedy } = answer else { panic!("{answer:?}") };
        assert_eq!((kind, remedy.as_deref()), (ErrorKind::Config, Some("right")));
        assert!(text.contains("wrong"));
        assert!(!text.contains("right"), "the remedy would be said twice: {text}");
        assert!(receive::<Ask>(&mut from).unwrap().is_none());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        assert!(receive::<Ask>(&mut &[255, 255, 255, 255, 0][..]).is_err());
        assert!(receive::<Ask>(&mut &[9, 0, 0, 0, 1][..]).is_err());
    }
}
