//! What carries the handshake here: a pipe each way. An engine has a control channel of its own.

use std::fs::File;
use std::io::{Read as _, Write as _, stdin, stdout};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::Child;

use kvx_core::handshake::HandshakeBytes;
use kvx_core::layout::RankLayout;
use kvx_core::memory::KeyBlob;
use kvx_core::{Error, ErrorKind, Result, wire};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

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

/// A pipe each way.
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
        self.to.write_all(&[&count.to_le_bytes(), &body[..]].concat()).map_err(broken)
    }

    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut count = [0; 4];
        self.from.read_exact(&mut count).map_err(broken)?;
        let count = u32::from_le_bytes(count) as usize;
        if count > MAX_BYTES {
            return Err(Error::peer("pipe", "the message is too long").with_context("bytes", count));
        }
        let mut body = vec![0; count];
        self.from.read_exact(&mut body).map_err(broken)?;
        wire::from_bytes("pipe", "the message", &body)
    }
}

fn broken(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Peer, "pipe", "the other engine's process is gone").with_source(error)
}
