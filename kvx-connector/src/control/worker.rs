//! The channel's thread: it alone touches sockets and sessions, and sleeps where nothing is to be done.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::ErrorKind as IoKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token};

use super::SessionId;
use super::conn::{Conn, Dial, End, Io, Phase};
use super::resolve::{Resolver, Resolving};
use super::session::{Local, SessionEvent};
use super::shared::{Command, Shared};
use super::stats::{one, set};

mod accept;
mod came;
mod dial;
mod ends;
mod times;

use accept::{Bucket, Listener};

pub(super) const WAKER: Token = Token(0);
/// Tokens from here on are listeners', those below are sessions'.
const LISTENERS: usize = usize::MAX / 2;
const BUFFER_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Worker {
    shared: Arc<Shared>,
    local: Arc<Local>,
    poll: Poll,
    listeners: Vec<Listener>,
    conns: BTreeMap<SessionId, Conn>,
    /// Accepted connections that may be dropped for others: those that have said nothing valid, and those that leave, first.
    droppable: BTreeSet<(bool, SessionId)>,
    /// Those that wait to be answered.
    knocked: BTreeSet<SessionId>,
    handshakes: Bucket,
    /// When the next of them may be answered.
    answer_at: Option<Instant>,
    /// Dials whose names are being looked up.
    looked_up: BTreeMap<SessionId, Dial>,
    resolving: Resolving<SessionId>,
    /// Those that have something to do.
    ready: VecDeque<SessionId>,
    /// When to look at all of them at the latest.
    wake_at: Option<Instant>,
    buffer: Vec<u8>,
    events: Vec<SessionEvent>,
    stopping: bool,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, poll: Poll, resolver: Resolver) -> Self {
        let config = &shared.config;
        let local = Local {
            identity: config.identity.clone(),
            versions: config.versions,
            security: config.security.clone(),
            max_message_bytes: config.limits.message_bytes,
        };
        Self {
            local: Arc::new(local),
            poll,
            listeners: Vec::new(),
            conns: BTreeMap::new(),
            droppable: BTreeSet::new(),
            knocked: BTreeSet::new(),
            handshakes: Bucket::new(config.limits.handshakes_per_second, Instant::now()),
            answer_at: None,
            looked_up: BTreeMap::new(),
            resolving: Resolving::new(resolver),
            ready: VecDeque::new(),
            wake_at: None,
            buffer: vec![0; BUFFER_BYTES],
            events: Vec::new(),
            stopping: false,
            shared,
        }
    }

    pub(super) fn run(mut self) {
        kvx_core::thread::runs_briefly();
        let mut happened = Events::with_capacity(256);
        let (mut commands, mut dirty) = (Vec::new(), Vec::new());
        while !self.stopping {
            let wait = self.wait(Instant::now());
            match self.poll.poll(&mut happened, wait) {
                Ok(()) => {}
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) => {
                    tracing::error!(%error, "the control channel cannot wait for its sockets");
                    self.shared.end("the control channel cannot wait for its sockets");
                    return;
                }
            }
            let now = Instant::now();
            for event in &happened {
                self.note(event);
            }
            self.shared.look(&mut commands, &mut dirty);
            for command in commands.drain(..) {
                self.obey(command, now);
            }
            for session in dirty.drain(..) {
                self.enqueue(session);
            }
            self.accept_all(now);
            for _ in 0..self.ready.len() {
                if let Some(session) = self.ready.pop_front() {
                    self.drive(session, now);
                }
            }
            self.answer_some(now);
            self.look_up_found(now);
            if self.wake_at.is_some_and(|at| at <= now) {
                self.look_at_all(now);
            }
            let counters = &self.shared.counters;
            set(&counters.half_open, self.droppable.len());
        }
        self.stop();
    }

    /// How long nothing needs to be done.
    fn wait(&self, now: Instant) -> Option<Duration> {
        let due = |it: &Listener| it.ready && it.not_before.is_none_or(|at| at <= now);
        let accepts = self.listeners.iter().any(due) && self.accepts();
        if !self.ready.is_empty() || accepts {
            return Some(Duration::ZERO);
        }
        let accept_again = self.listeners.iter().filter_map(|it| it.not_before);
        let next = accept_again.chain(self.wake_at).chain(self.answer_at).min()?;
        Some(next.saturating_duration_since(now))
    }

    fn wake_by(&mut self, at: Instant) {
        self.wake_at = Some(self.wake_at.map_or(at, |known| known.min(at)));
    }

    fn too_many_events(&self) -> bool {
        let limit = self.shared.config.limits.events;
        // Only where it matters does somebody have to tell.
        self.shared.waiting(false).0 >= limit && self.shared.waiting(true).0 >= limit
    }

    fn note(&mut self, event: &mio::event::Event) {
        let Token(token) = event.token();
        if event.token() == WAKER {
        } else if token >= LISTENERS {
            if let Some(listener) = self.listeners.get_mut(token - LISTENERS) {
                listener.ready = true;
            }
        } else {
            let session = SessionId(token as u64);
            if let Some(conn) = self.conns.get_mut(&session) {
                conn.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
                conn.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
                self.enqueue(session);
            }
        }
    }

    fn enqueue(&mut self, session: SessionId) {
        if let Some(conn) = self.conns.get_mut(&session)
            && !std::mem::replace(&mut conn.queued, true)
        {
            self.ready.push_back(session);
        }
    }

    fn obey(&mut self, command: Command, now: Instant) {
        match command {
            Command::Listen(mut socket) => {
                let token = Token(LISTENERS + self.listeners.len());
                if let Err(error) =
                    self.poll.registry().register(&mut socket, token, Interest::READABLE)
                {
                    tracing::error!(%error, "the control channel cannot watch a listener");
                }
                self.listeners.push(Listener { socket, ready: true, not_before: None });
            }
            Command::Dial { session, address, expected, begun } => {
                let deadline = begun + self.shared.config.limits.half_open_for;
                let candidates = VecDeque::new();
                let dial = Dial { address, expected, candidates, is_here: false, deadline };
                self.dial(session, dial, now);
            }
            Command::Close(session) => self.close(session, now),
            Command::Polled => {
                let paused: Vec<_> =
                    self.conns.values().filter(|it| it.readable).map(|it| it.id).collect();
                for session in paused {
                    if let Some(conn) = self.conns.get_mut(&session) {
                        conn.paused = false;
                    }
                    self.enqueue(session);
                }
            }
            Command::Stop => self.stopping = true,
        }
    }

    fn watch(&self, session: SessionId, stream: &mut mio::net::TcpStream) -> std::io::Result<()> {
        let token = usize::try_from(session.0).ok().filter(|token| *token < LISTENERS);
        let token = Token(token.ok_or(IoKind::OutOfMemory)?);
        self.poll.registry().register(stream, token, Interest::READABLE | Interest::WRITABLE)
    }

    /// Closes a connection at once, without a word to anybody.
    fn forget(&mut self, session: SessionId) {
        self.conns.remove(&session);
        self.undroppable(session);
        self.knocked.remove(&session);
    }

    fn undroppable(&mut self, session: SessionId) {
        self.droppable.remove(&(false, session));
        self.droppable.remove(&(true, session));
    }

    /// Does what can be done for one connection.
    fn drive(&mut self, session: SessionId, now: Instant) {
        let Some(mut conn) = self.conns.remove(&session) else { return };
        conn.queued = false;
        if conn.phase == Phase::Connecting {
            match self.connected(conn, now) {
                Some(connected) => conn = connected,
                None => return,
            }
        }
        match self.read_and_write(&mut conn, now) {
            Ok(io) => self.keep(conn, matches!(io, Io::Again)),
            Err(end) => self.ended(conn, end, now),
        }
    }

    fn keep(&mut self, conn: Conn, again: bool) {
        let session = conn.id;
        self.wake_by(conn.due(self.shared.config.limits.ping_after));
        self.conns.insert(session, conn);
        if again {
            self.enqueue(session);
        }
    }

    fn read_and_write(&mut self, conn: &mut Conn, now: Instant) -> Result<Io, End> {
        let shared = Arc::clone(&self.shared);
        let mut turns = 8;
        let mut again = matches!(conn.write(&shared, now)?, Io::Again);
        while conn.reads(shared.config.limits.message_bytes) {
            if turns == 0 {
                again = true;
                break;
            }
            turns -= 1;
            if conn.phase != Phase::Leaving && self.too_many_events() {
                conn.paused = true;
                one(&shared.counters.paused);
                break;
            }
            let bytes = conn.read(&mut self.buffer, &shared)?;
            if bytes == 0 || conn.phase == Phase::Leaving {
                continue;
            }
            self.events.clear();
            let received = conn.session.receive(&self.buffer[..bytes], &mut self.events);
            self.heard(conn, now);
            for event in std::mem::take(&mut self.events) {
                self.came(conn, event, now)?;
            }
            received.map_err(End::Fault)?;
            again |= matches!(conn.write(&shared, now)?, Io::Again);
        }
        Ok(if again { Io::Again } else { Io::Idle })
    }
}
