//! What carries the handshake here: a pipe each way. An engine has a control channel of its own.

use std::fs::File;
use std::io::{self, ErrorKind as IoKind, Read as _, Write as _, stdin, stdout};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::Child;
use std::time::Instant;

use kvx_core::handshake::HandshakeBytes;
use kvx_core::layout::RankLayout;
use kvx_core::memory::KeyBlob;
use kvx_core::{Error, ErrorKind, Result, wire};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::PATIENCE;

/// What the prefill engine says about the cache. (Between hosts that is a `kvx_core::card::Card`.)
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Published {
    pub(crate) layout: RankLayout,
    pub(crate) offer: HandshakeBytes,
    /// One for each region of the layout.
    #[serde(deserialize_with = "wire::list::<_, _, 1024>")]
    pub(crate) keys: Vec<KeyBlob>,
    /// Where the request's tokens are.
    #[serde(deserialize_with = "wire::list::<_, _, 65536>")]
    pub(crate) blocks: Vec<u32>,
}

/// Most bytes of a message.
const MAX_BYTES: usize = 1 << 20;
/// Bytes of which a pipe that is ready to be written to has room for all: `write` does not wait for the reader.
const ROOM: usize = 4096;

/// A pipe each way. No message takes longer than [`PATIENCE`], whatever the other process does.
pub(crate) struct Pipe {
    from: File,
    to: File,
}

impl Pipe {
    pub(crate) fn of_this_process() -> Result<Self> {
        Self::new(stdin().as_fd(), stdout().as_fd())
    }

    pub(crate) fn of_child(child: &Child) -> Result<Self> {
        match (&child.stdout, &child.stdin) {
            (Some(from), Some(to)) => Self::new(from.as_fd(), to.as_fd()),
            _ => Err(Error::misuse("pipe", "the process has no pipes")),
        }
    }

    fn new(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<Self> {
        let own = |end: BorrowedFd<'_>| end.try_clone_to_owned().map(File::from).map_err(broken);
        Ok(Self { from: own(from)?, to: own(to)? })
    }

    pub(crate) fn send<T: Serialize>(&mut self, message: &T) -> Result<()> {
        let body = wire::to_bytes("pipe", message)?;
        let count = u32::try_from(body.len())
            .map_err(|_| Error::misuse("pipe", "the message is too long"))?;
        let until = Instant::now() + PATIENCE;
        for piece in [&count.to_le_bytes(), &body[..]].concat().chunks(ROOM) {
            let mut rest = piece;
            while !rest.is_empty() {
                ready(&self.to, PollFlags::OUT, until)?;
                let written = self.to.write(rest).map_err(broken)?;
                rest = rest.get(written..).unwrap_or_default();
            }
        }
        Ok(())
    }

    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let until = Instant::now() + PATIENCE;
        let mut count = [0; 4];
        self.read_exact(&mut count, until)?;
        let count = u32::from_le_bytes(count) as usize;
        if count > MAX_BYTES {
            return Err(Error::peer("pipe", "the message is too long").with_context("bytes", count));
        }
        let mut body = vec![0; count];
        self.read_exact(&mut body, until)?;
        wire::from_bytes("pipe", "the message", &body)
    }

    fn read_exact(&mut self, mut missing: &mut [u8], until: Instant) -> Result<()> {
        while !missing.is_empty() {
            ready(&self.from, PollFlags::IN, until)?;
            match self.from.read(missing).map_err(broken)? {
                0 => return Err(broken(IoKind::UnexpectedEof.into())),
                count => missing = &mut missing[count..],
            }
        }
        Ok(())
    }
}

/// Waits until a pipe can be read or written without waiting, or its other end is gone.
fn ready(pipe: &File, flags: PollFlags, until: Instant) -> Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        // A few seconds fit any clock.
        let left = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut [PollFd::new(pipe, flags)], Some(&left)) {
            Ok(0) => {
                return Err(Error::peer("pipe", "the other engine's process does not answer")
                    .with_context("seconds", PATIENCE.as_secs())
                    .with_remedy("see whether it was stopped"));
            }
            Err(Errno::INTR) => {}
            other => return other.map(drop).map_err(|error| broken(error.into())),
        }
    }
}

fn broken(error: io::Error) -> Error {
    Error::new(ErrorKind::Peer, "pipe", "the other engine's process is gone").with_source(error)
}
