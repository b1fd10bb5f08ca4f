//! The control channel: frames of bytes between engines that have proven a common key.
//!
//! What the bytes mean is the [`protocol`](crate::protocol)'s business. This module knows who is at the other end, that nobody
//! else can have said it, and that no stranger costs more than a fixed amount.
//!
//! ```
//! use std::time::Duration;
//! use kvx_connector::control::{
//!     Control, ControlConfig, ControlEvent, Key, RemoteIdentity, Security,
//! };
//! use kvx_core::card::EngineName;
//! use kvx_core::id::Incarnation;
//!
//! # fn main() -> kvx_core::Result<()> {
//! let key = Key::generate()?; // all engines of a deployment have a copy
//! let start = |engine: &str| {
//!     let engine = EngineName::new(engine)?;
//!     let me = RemoteIdentity { engine, incarnation: Incarnation::random()?, rank: None };
//!     Control::start(ControlConfig::new(me, Security::with_key(key.clone())))
//! };
//! let (prefill, decode) = (start("prefill-1")?, start("decode-7")?);
//! let address = prefill.listen(&"localhost:0".parse()?)?;
//! let session = decode.dial(&address, Some(EngineName::new("prefill-1")?))?;
//! decode.send(session, b"a card, please")?; // waits in the queue until the session is up
//!
//! let mut events = Vec::new();
//! while events.len() < 2 {
//!     prefill.wait(Duration::from_secs(5))?;
//!     prefill.poll(&mut events);
//! }
//! assert!(matches!(&events[0], ControlEvent::Up { remote, .. } if remote.engine.as_str() == "decode-7"));
//! assert!(matches!(&events[1], ControlEvent::Message { bytes, .. } if bytes == b"a card, please"));
//! # Ok(())
//! # }
//! ```
//!
//! # Rules
//!
//! - One thread, `kvx-control`, owns all sockets; it sleeps where nothing is to be done, and is joined when [`Control`] is
//!   dropped. Every call may come from any thread, and none but [`listen`](Control::listen) waits for the network.
//! - A session that the caller knows of (he dialled it, or was told that it is [`Up`](ControlEvent::Up)) ends with exactly one
//!   [`Down`](ControlEvent::Down), its last event, also where the caller closes it. It never comes back: whoever wants another
//!   dials again, when and as often as he decides.
//! - Messages of one session come whole, once, and in the order in which they were sent, or the session ends. That a message
//!   was taken by [`send`](Control::send) does not mean that the other side has read it.
//! - A session is between two *lives*: [`RemoteIdentity::incarnation`] is another one after each start, at whatever address.
//! - A full queue is a value. A peer that does not read fills its own queue; nobody else's is touched.
//!
//! # Against strangers
//!
//! Before it has proven the key, a connection is worth 62 bytes of memory besides its socket, [`Limits::half_open`] of them at
//! the most, each for [`Limits::half_open_for`]. It hears nothing: a wrong first message is not answered, it is hung up on.
//! What the key protects and what not is in `docs/security.md`; how it is done, in [`session`].
//!
//! # Why not ZeroMQ
//!
//! A ROUTER socket of libzmq 4.3.4 was tried: a stranger that does ZeroMQ's own greeting, for which it needs no key, stays
//! connected for as long as it likes, takes 22 KiB, and cannot be hung up on; neither is there a limit to how many do. That
//! cannot be mended from outside. Nor does what remains (framing, queues) outweigh a parser in C++ that faces strangers.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvx_core::card::{Address, EngineName, Host};
use kvx_core::limits::{self, Wanted};
use kvx_core::{Error, ErrorKind, Result, Retry};

mod config;
mod conn;
mod hello;
mod key;
mod record;
mod resolve;
pub mod session;
mod shared;
mod stats;
#[cfg(test)]
mod tests;
mod worker;

pub use config::{Agreed, Allowed, ControlConfig, Limits, RemoteIdentity, Security, Versions};
pub use key::Key;
pub use record::Leave;
pub use stats::{ControlStats, SessionInfo};

use resolve::Resolver;
use shared::{Command, Shared};
use worker::Worker;

/// A session of one [`Control`]. The number is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub(crate) u64);

impl std::fmt::Display for SessionId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// What became of a message that was to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Sent {
    /// It will be sent, if the session lasts.
    Sent,
    /// There is no room. Later, perhaps.
    Full,
}

/// What happened.
#[derive(Debug)]
pub enum ControlEvent {
    /// Both have proven the key, and fit together.
    Up {
        /// The session.
        session: SessionId,
        /// Who is at the other end.
        remote: RemoteIdentity,
        /// What both speak.
        agreed: Agreed,
        /// Whether this side dialled.
        dialled: bool,
    },
    /// A message came.
    Message {
        /// The session.
        session: SessionId,
        /// The message.
        bytes: Vec<u8>,
    },
    /// The session is over, or a dial came to nothing.
    Down {
        /// The session.
        session: SessionId,
        /// Why.
        why: Error,
    },
}

/// One side's control channel. See the [module's documentation](self).
#[derive(Debug)]
pub struct Control {
    shared: Arc<Shared>,
    resolver: Resolver,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts the channel. It listens nowhere yet.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`]: the configuration is not one. [`ErrorKind::Resources`]: no thread or descriptor is to be had.
    pub fn start(config: ControlConfig) -> Result<Self> {
        Self::start_with(config, Resolver::default())
    }

    fn start_with(config: ControlConfig, resolver: Resolver) -> Result<Self> {
        config.check()?;
        if config.security.keys().is_empty() {
            tracing::warn!(
                "the control channel has no key: whoever reaches it is taken for an engine"
            );
        }
        let refused = |what: &'static str, wanted| {
            move |source: std::io::Error| {
                let error = Error::new(ErrorKind::Resources, "control", what)
                    .with_native(source.raw_os_error().unwrap_or(0).into());
                limits::explain(error, source, wanted)
            }
        };
        let io = |what| refused(what, Wanted::Descriptor);
        let poll = mio::Poll::new().map_err(io("no descriptor to wait on"))?;
        let waker = mio::Waker::new(poll.registry(), worker::WAKER)
            .map_err(io("no descriptor to be woken by"))?;
        let shared = Arc::new(Shared::new(config, waker).map_err(io("no descriptors for events"))?);
        let worker = Worker::new(Arc::clone(&shared), poll, resolver.clone());
        let thread = std::thread::Builder::new()
            .name("kvx-control".into())
            .spawn(move || worker.run())
            .map_err(refused("no thread to be had", Wanted::Thread))?;
        Ok(Self { shared, resolver, thread: Some(thread) })
    }

    /// Listens at this address, with whatever port is free where it is 0. A name is looked up, and all its addresses are
    /// listened at. Returns the address with the port that it is.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`]: somebody else has the port, the host is not this one, or it would be plaintext beyond loopback.
    pub fn listen(&self, address: &Address) -> Result<Address> {
        let mut tries = 0;
        loop {
            match self.listen_at(address) {
                // Another address of the host has that port in use.
                Err((_, true)) if address.port() == 0 && tries < 8 => tries += 1,
                Err((error, _)) => return Err(error),
                Ok(port) => {
                    return Ok(match address.host() {
                        Host::V4(ip) => Address::new((*ip).into(), port),
                        Host::V6(ip) => Address::new((*ip).into(), port),
                        _ => with_port(address, port)?,
                    });
                }
            }
        }
    }

    /// The port, or an error, and whether it is that the port is in use.
    fn listen_at(&self, address: &Address) -> Result<u16, (Error, bool)> {
        let mut port = address.port();
        let mut sockets = Vec::new();
        for mut at in self.resolver.resolve(address).map_err(|error| (error, false))? {
            let security = &self.shared.config.security;
            security
                .admit(address, at.ip().to_canonical().is_loopback())
                .map_err(|error| (error, false))?;
            at.set_port(port);
            let bound = mio::net::TcpListener::bind(at)
                .and_then(|socket| socket.local_addr().map(|at| (socket, at.port())));
            match bound {
                Ok((socket, bound)) => {
                    port = bound;
                    sockets.push(socket);
                }
                // A host without IPv6 has a `localhost` all the same.
                Err(error)
                    if error.kind() == std::io::ErrorKind::AddrNotAvailable
                        && matches!(address.host(), Host::Name(_))
                        && at.is_ipv6() => {}
                Err(error) => return Err(cannot_listen(address, at, error)),
            }
        }
        if sockets.is_empty() {
            let host = address.host();
            let error = Error::config("control", format!("no address of {host} is this host's"));
            return Err((error, false));
        }
        for socket in sockets {
            self.shared.command(Command::Listen(socket));
        }
        Ok(port)
    }

    /// Begins a session with whoever listens at this address. `expected` is the engine that should; another one is refused.
    ///
    /// Messages may be sent at once. [`Up`](ControlEvent::Up) or [`Down`](ControlEvent::Down) follows.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`]: the address may not be dialled. [`ErrorKind::Resources`]: there are too many sessions.
    pub fn dial(&self, address: &Address, expected: Option<EngineName>) -> Result<SessionId> {
        self.shared.config.admit(address)?;
        let session = self.shared.next_session();
        self.shared.open(session)?;
        let address = address.clone();
        let begun = Instant::now();
        self.shared.command(Command::Dial { session, address, expected, begun });
        Ok(session)
    }

    /// Puts a message into a session's queue.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`]: the message is too long. [`ErrorKind::Closed`]: the session is over.
    pub fn send(&self, session: SessionId, message: &[u8]) -> Result<Sent> {
        let limit = self.shared.config.limits.message_bytes;
        if message.len() > limit {
            return Err(session::too_long(message.len(), limit));
        }
        self.shared.send(session, message)
    }

    /// Ends a session. What is in its queue is still sent, for [`Limits::linger`]; nothing more of it is received. Its last
    /// event is [`Down`](ControlEvent::Down), like any other's; there is none if it is over already.
    pub fn close(&self, session: SessionId) {
        if self.shared.is_open(session) {
            self.shared.command(Command::Close(session));
        }
    }

    /// Appends what happened since.
    pub fn poll(&self, events: &mut Vec<ControlEvent>) {
        self.shared.poll(events);
    }

    /// Waits until there is something to [`poll`](Self::poll). Returns whether there is.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Internal`]: the system refuses.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        use rustix::event::{PollFd, PollFlags, Timespec};
        let until = Instant::now() + timeout;
        loop {
            let mut bell = [PollFd::new(&self.shared.bell, PollFlags::IN)];
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(|_| {
                Error::misuse("control", "a timeout that is no time")
                    .with_context("s", timeout.as_secs())
            })?;
            match rustix::event::poll(&mut bell, Some(&left)) {
                Ok(count) => return Ok(count > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    return Err(Error::new(ErrorKind::Internal, "control", "cannot wait")
                        .with_native(errno.raw_os_error().into()));
                }
            }
        }
    }

    /// What has happened, in numbers.
    #[must_use]
    pub fn stats(&self) -> ControlStats {
        let queued = self.shared.outboxes(|all| all.values().map(|outbox| outbox.bytes).sum());
        stats::set(&self.shared.counters.queued_bytes, queued);
        self.shared.counters.read()
    }

    /// All sessions that are up.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionInfo> {
        let now = Instant::now();
        self.shared.outboxes(|outboxes| {
            let up =
                outboxes.iter().filter_map(|(id, outbox)| Some((id, outbox, outbox.up.as_ref()?)));
            up.map(|(id, outbox, up)| SessionInfo {
                session: *id,
                remote: up.remote.clone(),
                agreed: up.agreed,
                peer: up.peer,
                dialled: up.dialled.clone(),
                up_for: now.saturating_duration_since(up.since),
                silent_for: self.shared.silence(up),
                missed_pings: up.missed_pings,
                round_trip: up.round_trip,
                queued_bytes: outbox.bytes,
            })
            .collect()
        })
    }

    /// Says so to all, closes all, and waits for the thread to end: what dropping does.
    pub fn shutdown(self) {}
}

/// Readable while there is something to [`poll`](Control::poll): for the caller's own loop.
impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.shared.command(Command::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the control channel's thread has panicked");
        }
    }
}

fn with_port(address: &Address, port: u16) -> Result<Address> {
    let text = address.to_string();
    let host = text.rsplit_once(':').map_or(text.as_str(), |(host, _)| host);
    format!("{host}:{port}").parse()
}

/// An address for people: port 0 is none.
fn place(address: &Address) -> String {
    match address.port() {
        0 => address.host().to_string(),
        _ => address.to_string(),
    }
}

fn cannot_listen(
    address: &Address,
    at: std::net::SocketAddr,
    source: std::io::Error,
) -> (Error, bool) {
    let taken = source.kind() == std::io::ErrorKind::AddrInUse;
    let error = if taken {
        Error::config("control", format!("another program listens at {at} already"))
            .with_remedy("give each engine and each rank on a host a port of its own, or port 0")
            .with_retry(Retry::Backoff)
    } else {
        let place = place(address);
        let limit = source.raw_os_error().and_then(kvx_core::limit_remedy);
        let kind = if limit.is_some() { ErrorKind::Resources } else { ErrorKind::Config };
        Error::new(kind, "control", format!("cannot listen at {place}: {source}"))
            .with_remedy("listen at an address of this host, at a port that this user may use")
    };
    (error.with_native(source.raw_os_error().unwrap_or(0).into()).with_source(source), taken)
}
