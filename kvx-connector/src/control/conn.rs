//! One connection: its socket, its session, and how long each state of it may last.

use std::collections::VecDeque;
use std::io::{ErrorKind as IoKind, Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use kvx_core::card::{Address, EngineName};
use kvx_core::{Error, Retry};
use mio::net::TcpStream;

use super::SessionId;
use super::session::{Fault, FaultKind, Session};
use super::shared::Shared;
use super::stats::{add, one};

/// Where less output than this waits for a socket, the next message is made into output.
const OUTPUT_BYTES: usize = 64 << 10;
/// So much is read or written for one connection before it is the others' turn.
const TURN_BYTES: usize = 512 << 10;

/// Where a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The socket is not connected yet.
    Connecting,
    /// The key is not proven yet.
    Proving,
    Up,
    /// Over for the caller; what is left is sent, and the other side may read it.
    Leaving,
}

/// What was asked for, where this side dialled.
#[derive(Debug)]
pub(super) struct Dial {
    pub(super) address: Address,
    pub(super) expected: Option<EngineName>,
    /// Addresses that were not tried yet.
    pub(super) candidates: VecDeque<SocketAddr>,
    /// All its addresses are this host's own.
    pub(super) is_here: bool,
    pub(super) deadline: Instant,
}

#[derive(Debug)]
pub(super) struct Conn {
    pub(super) id: SessionId,
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) session: Session,
    pub(super) phase: Phase,
    pub(super) dial: Option<Dial>,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// Whether it is on the list of those that have something to do.
    pub(super) queued: bool,
    /// When `Connecting`, `Proving` and `Leaving` end.
    pub(super) deadline: Instant,
    /// When something came last.
    pub(super) heard: Instant,
    /// The same, for others to see.
    pub(super) heard_at: Arc<AtomicU64>,
    /// How often it was asked since whether it is there, and when it was last.
    pub(super) asked: u32,
    pub(super) asked_at: Instant,
    /// When something was sent last.
    pub(super) said: Instant,
    /// The last ping that was not answered: its number, and when it was sent.
    pub(super) pinged: Option<(u64, Instant)>,
    pub(super) next_ping: u64,
    /// Bytes of messages that came since the events were polled so many times.
    pub(super) inbox: (u64, usize),
    /// Nobody polls: it is not read.
    pub(super) paused: bool,
    /// Messages that are to be sent although the session was closed.
    pub(super) rest: VecDeque<Vec<u8>>,
    /// Nothing more will be sent.
    shut: bool,
}

/// How reading or writing ended.
pub(super) enum Io {
    /// There is no more to do now.
    Idle,
    /// It is the others' turn.
    Again,
}

/// Why a connection ends.
pub(super) enum End {
    /// The other side closed it, or it broke.
    Lost(Option<std::io::Error>),
    Fault(Fault),
}

impl Conn {
    pub(super) fn new(
        id: SessionId,
        stream: TcpStream,
        peer: SocketAddr,
        session: Session,
        phase: Phase,
        deadline: Instant,
        now: Instant,
    ) -> Self {
        Self {
            id,
            stream,
            peer,
            session,
            phase,
            dial: None,
            readable: false,
            writable: phase != Phase::Connecting,
            queued: false,
            deadline,
            heard: now,
            heard_at: Arc::default(),
            asked: 0,
            asked_at: now,
            said: now,
            pinged: None,
            next_ping: 0,
            inbox: (0, 0),
            paused: false,
            rest: VecDeque::new(),
            shut: false,
        }
    }

    /// When somebody has to look at it, whatever happens.
    pub(super) fn due(&self, ping_after: Duration) -> Instant {
        match self.phase {
            Phase::Connecting | Phase::Proving | Phase::Leaving => self.deadline,
            Phase::Up => self.ask_at(ping_after).min(self.said + ping_after),
        }
    }

    /// When it has been silent for so long that it is asked whether it is there. Counted from when it was last asked, not from
    /// when it was last heard: this side may have stood still itself.
    pub(super) fn ask_at(&self, ping_after: Duration) -> Instant {
        let since = if self.asked == 0 { self.heard } else { self.asked_at };
        since + ping_after
    }

    /// Whether it should be read, as far as it is up to itself. Not where more output waits than messages can have made: the
    /// rest are answers to pings of somebody who does not read them. (Messages alone must not stop it, or two sides with
    /// much to say would wait for each other.)
    pub(super) fn reads(&self, message_bytes: usize) -> bool {
        let messages = OUTPUT_BYTES + message_bytes + message_bytes / 1024;
        self.readable
            && !self.paused
            && self.phase != Phase::Connecting
            && (self.phase == Phase::Leaving
                || self.session.output().len() <= messages + OUTPUT_BYTES)
    }

    /// Reads once. The bytes are in `buffer`; 0 where there are none now.
    pub(super) fn read(&mut self, buffer: &mut [u8], shared: &Shared) -> Result<usize, End> {
        loop {
            match self.stream.read(buffer) {
                Ok(0) => return Err(End::Lost(None)),
                Ok(bytes) => {
                    add(&shared.counters.bytes_received, bytes as u64);
                    return Ok(bytes);
                }
                Err(error) if error.kind() == IoKind::WouldBlock => {
                    self.readable = false;
                    return Ok(0);
                }
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) => return Err(End::Lost(Some(error))),
            }
        }
    }

    /// Writes what there is, and messages that wait for it.
    pub(super) fn write(&mut self, shared: &Shared, now: Instant) -> Result<Io, End> {
        let mut turn = 0;
        loop {
            while self.session.output().len() < OUTPUT_BYTES
                && let Some(message) = self.next_message(shared)
            {
                self.session
                    .send(&message)
                    .map_err(|error| End::Fault(Fault { kind: FaultKind::Local, error }))?;
                one(&shared.counters.messages_sent);
            }
            if self.session.output().is_empty() {
                if self.phase == Phase::Leaving && !std::mem::replace(&mut self.shut, true) {
                    // The other side may be gone already.
                    let _ = self.stream.shutdown(std::net::Shutdown::Write);
                }
                return Ok(Io::Idle);
            }
            if !self.writable {
                return Ok(Io::Idle);
            }
            if turn >= TURN_BYTES {
                return Ok(Io::Again);
            }
            match self.stream.write(self.session.output()) {
                Ok(bytes) => {
                    turn += bytes;
                    self.said = now;
                    add(&shared.counters.bytes_sent, bytes as u64);
                    self.session.sent(bytes);
                }
                Err(error) if error.kind() == IoKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) => return Err(End::Lost(Some(error))),
            }
        }
    }

    fn next_message(&mut self, shared: &Shared) -> Option<Vec<u8>> {
        match self.phase {
            Phase::Up => shared.next_message(self.id),
            Phase::Leaving => {
                let next = self.rest.pop_front();
                if next.is_none() && !self.session.is_over() {
                    self.session.leave(super::Leave::Closed, "");
                }
                next
            }
            Phase::Connecting | Phase::Proving => None,
        }
    }

    /// What to tell the caller where the connection ended by itself.
    pub(super) fn lost(&self, source: Option<std::io::Error>) -> Error {
        let error = match (self.phase, &self.dial) {
            (Phase::Proving, Some(_)) => Error::peer(
                "control",
                "the peer closed the connection before it had proven that it has the key",
            )
            .with_retry(Retry::Backoff)
            .with_remedy(
                "check that both sides have the same key, and that the address is a kvx control channel",
            ),
            _ => Error::peer("control", "the connection was lost").with_retry(Retry::Reconnect),
        };
        let error = match source {
            Some(source) => {
                error.with_native(source.raw_os_error().unwrap_or(0).into()).with_source(source)
            }
            None => error,
        };
        self.at(error)
    }

    /// Says where it happened.
    pub(super) fn at(&self, error: Error) -> Error {
        match &self.dial {
            Some(dial) if error.context().iter().all(|(key, _)| *key != "address") => {
                error.with_context("address", &dial.address)
            }
            Some(_) => error,
            None => error.with_context("from", self.peer),
        }
    }
}
