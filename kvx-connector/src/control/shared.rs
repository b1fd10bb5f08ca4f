//! What the callers' threads and the channel's own thread share: a queue per session out, one queue in.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvx_core::card::{Address, EngineName};
use kvx_core::{Error, ErrorKind, Result, Retry};

use super::stats::Counters;
use super::{Agreed, ControlConfig, ControlEvent, RemoteIdentity, Sent, SessionId};

/// What the thread is asked to do.
#[derive(Debug)]
pub(super) enum Command {
    Listen(mio::net::TcpListener),
    Dial {
        session: SessionId,
        address: Address,
        expected: Option<EngineName>,
        begun: Instant,
    },
    Close(SessionId),
    /// The events were polled: what was not read for want of room may be read now.
    Polled,
    Stop,
}

/// Messages of one session that wait to be sent, and how it is.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub(super) queue: VecDeque<Vec<u8>>,
    pub(super) bytes: usize,
    /// Whether the thread was told.
    dirty: bool,
    pub(super) up: Option<UpInfo>,
}

/// What is known of a session that is up.
#[derive(Debug)]
pub(super) struct UpInfo {
    pub(super) remote: RemoteIdentity,
    pub(super) agreed: Agreed,
    pub(super) peer: SocketAddr,
    pub(super) dialled: Option<Address>,
    pub(super) since: Instant,
    /// When something came last, in microseconds since the channel was started.
    pub(super) heard: Arc<AtomicU64>,
    pub(super) missed_pings: u32,
    pub(super) round_trip: Option<Duration>,
}

#[derive(Debug, Default)]
pub(super) struct Outgoing {
    pub(super) commands: Vec<Command>,
    /// Sessions whose queue is no longer empty.
    pub(super) dirty: Vec<SessionId>,
    pub(super) outboxes: BTreeMap<SessionId, Outbox>,
    /// The thread has ended.
    pub(super) over: bool,
}

#[derive(Debug, Default)]
struct Incoming {
    events: Vec<ControlEvent>,
    /// Whether the descriptor was made readable.
    rung: bool,
    /// Whether the thread wants to be told when the events are polled.
    waits: bool,
    /// How often the events were polled.
    polled: u64,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: ControlConfig,
    pub(super) counters: Counters,
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
    waker: mio::Waker,
    /// Whether the thread was woken and has not yet looked.
    woken: AtomicBool,
    next: AtomicU64,
    started: Instant,
    /// Where the bell is rung, and where it is heard.
    ring: UnixStream,
    pub(super) bell: UnixStream,
}

/// A lock is never held where anything could panic half-way.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(config: ControlConfig, waker: mio::Waker) -> std::io::Result<Self> {
        let (ring, bell) = UnixStream::pair()?;
        ring.set_nonblocking(true)?;
        bell.set_nonblocking(true)?;
        Ok(Self {
            config,
            counters: Counters::default(),
            outgoing: Mutex::default(),
            incoming: Mutex::default(),
            waker,
            woken: AtomicBool::new(false),
            next: AtomicU64::new(1),
            started: Instant::now(),
            ring,
            bell,
        })
    }

    /// A session's number that was never given out.
    pub(super) fn next_session(&self) -> SessionId {
        SessionId(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Microseconds since the channel was started.
    pub(super) fn clock(&self, now: Instant) -> u64 {
        let micros = now.saturating_duration_since(self.started).as_micros();
        u64::try_from(micros).unwrap_or(u64::MAX)
    }

    pub(super) fn silence(&self, up: &UpInfo) -> Duration {
        let heard = up.heard.load(Ordering::Relaxed);
        Duration::from_micros(self.clock(Instant::now()).saturating_sub(heard))
    }

    pub(super) fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel)
            && let Err(error) = self.waker.wake()
        {
            tracing::error!(%error, "the control channel's thread cannot be woken");
        }
    }

    pub(super) fn command(&self, command: Command) {
        lock(&self.outgoing).commands.push(command);
        self.wake();
    }

    /// The thread looks: what it is told from now on, it is woken for.
    pub(super) fn look(&self, commands: &mut Vec<Command>, dirty: &mut Vec<SessionId>) {
        self.woken.store(false, Ordering::Release);
        let mut outgoing = lock(&self.outgoing);
        commands.append(&mut outgoing.commands);
        dirty.append(&mut outgoing.dirty);
    }

    /// A new session's queue. Refused where there are as many sessions as there may be.
    pub(super) fn open(&self, session: SessionId) -> Result<()> {
        let limit = self.config.limits.sessions;
        let mut outgoing = lock(&self.outgoing);
        if outgoing.over {
            return Err(over());
        }
        if outgoing.outboxes.len() >= limit {
            return Err(Error::new(ErrorKind::Resources, "control", "there are too many sessions")
                .with_context("limit", limit)
                .with_retry(Retry::Backoff)
                .with_remedy("close those that are not needed, or raise the limit"));
        }
        outgoing.outboxes.insert(session, Outbox::default());
        Ok(())
    }

    pub(super) fn is_open(&self, session: SessionId) -> bool {
        lock(&self.outgoing).outboxes.contains_key(&session)
    }

    pub(super) fn with_outbox<R>(
        &self,
        session: SessionId,
        look: impl FnOnce(&mut Outbox) -> R,
    ) -> Option<R> {
        lock(&self.outgoing).outboxes.get_mut(&session).map(look)
    }

    pub(super) fn with_up(&self, session: SessionId, change: impl FnOnce(&mut UpInfo)) {
        self.with_outbox(session, |outbox| outbox.up.as_mut().map(change));
    }

    pub(super) fn outboxes<R>(&self, look: impl FnOnce(&BTreeMap<SessionId, Outbox>) -> R) -> R {
        look(&lock(&self.outgoing).outboxes)
    }

    /// The next message of a session's queue.
    pub(super) fn next_message(&self, session: SessionId) -> Option<Vec<u8>> {
        self.with_outbox(session, |outbox| {
            let next = outbox.queue.pop_front();
            outbox.bytes -= next.as_ref().map_or(0, Vec::len);
            if outbox.queue.is_empty() {
                outbox.dirty = false;
            }
            next
        })?
    }

    pub(super) fn send(&self, session: SessionId, message: &[u8]) -> Result<Sent> {
        let mut outgoing = lock(&self.outgoing);
        let Some(outbox) = outgoing.outboxes.get_mut(&session) else {
            return Err(if outgoing.over { over() } else { gone(session) });
        };
        if !outbox.queue.is_empty() && outbox.bytes + message.len() > self.config.limits.queue_bytes
        {
            super::stats::one(&self.counters.full);
            return Ok(Sent::Full);
        }
        outbox.bytes += message.len();
        outbox.queue.push_back(message.to_vec());
        // Before it is up the thread looks by itself.
        let tell = !std::mem::replace(&mut outbox.dirty, true) && outbox.up.is_some();
        if tell {
            outgoing.dirty.push(session);
        }
        drop(outgoing);
        if tell {
            self.wake();
        }
        Ok(Sent::Sent)
    }

    /// Ends a session for the callers: its last event.
    pub(super) fn down(&self, session: SessionId, why: Error) {
        // Dropped once no lock is held.
        let outbox = lock(&self.outgoing).outboxes.remove(&session);
        if outbox.is_some() {
            self.event(ControlEvent::Down { session, why });
        }
    }

    /// The thread has ended: nobody can be reached any more.
    pub(super) fn end(&self, why: &str) {
        let ended = {
            let mut outgoing = lock(&self.outgoing);
            outgoing.over = true;
            std::mem::take(&mut outgoing.outboxes)
        };
        for session in ended.into_keys() {
            let why = Error::new(ErrorKind::Closed, "control", why.to_owned());
            self.event(ControlEvent::Down { session, why });
        }
    }

    pub(super) fn event(&self, event: ControlEvent) {
        let mut incoming = lock(&self.incoming);
        incoming.events.push(event);
        if !std::mem::replace(&mut incoming.rung, true) {
            // It is empty, so there is room.
            let _ = (&self.ring).write(&[1]);
        }
    }

    /// How many events wait, and how often they were taken. The thread is told when they are next.
    pub(super) fn waiting(&self, tell: bool) -> (usize, u64) {
        let mut incoming = lock(&self.incoming);
        incoming.waits |= tell && !incoming.events.is_empty();
        (incoming.events.len(), incoming.polled)
    }

    pub(super) fn poll(&self, into: &mut Vec<ControlEvent>) {
        let mut incoming = lock(&self.incoming);
        if std::mem::take(&mut incoming.rung) {
            let mut rung = [0; 8];
            let _ = (&self.bell).read(&mut rung);
        }
        if incoming.events.is_empty() {
            return;
        }
        if into.is_empty() {
            std::mem::swap(into, &mut incoming.events);
        } else {
            into.append(&mut incoming.events);
        }
        // What one flood needed is not kept for ever.
        incoming.events.shrink_to(1024);
        incoming.polled += 1;
        let tell = std::mem::take(&mut incoming.waits);
        drop(incoming);
        if tell {
            self.command(Command::Polled);
        }
    }
}

pub(super) fn over() -> Error {
    Error::new(ErrorKind::Closed, "control", "the control channel is closed")
}

fn gone(session: SessionId) -> Error {
    Error::new(ErrorKind::Closed, "control", format!("session {session} is over"))
        .with_retry(Retry::Reconnect)
}
