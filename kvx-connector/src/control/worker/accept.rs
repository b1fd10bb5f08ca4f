//! Being dialled: how many connections there may be of those that have proven nothing, and how many handshakes a second.

use std::io::ErrorKind as IoKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};

use super::super::conn::{Conn, End, Phase};
use super::super::session::Session;
use super::super::stats::one;
use super::Worker;

/// So many connections are accepted, and so many handshakes answered, before it is the others' turn.
const TURN: usize = 16;
/// After no connection could be accepted: until there may be descriptors again.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Listener {
    pub(super) socket: TcpListener,
    pub(super) ready: bool,
    pub(super) not_before: Option<Instant>,
}

/// So much a second, with a tenth of a second's worth at once.
#[derive(Debug)]
pub(super) struct Bucket {
    each: Duration,
    burst: Duration,
    /// When the bucket is full.
    full_at: Instant,
    waited: bool,
}

impl Bucket {
    pub(super) fn new(per_second: u32, now: Instant) -> Self {
        let each = Duration::from_secs(1) / per_second.max(1);
        Self { each, burst: Duration::from_millis(100).max(each), full_at: now, waited: false }
    }

    /// Takes one, or says when there is one.
    fn take(&mut self, now: Instant) -> Result<(), Instant> {
        let full_at = self.full_at.max(now) + self.each;
        match full_at.checked_duration_since(now + self.burst) {
            Some(early) if !early.is_zero() => Err(now + early),
            _ => {
                self.full_at = full_at;
                Ok(())
            }
        }
    }
}

impl Worker {
    /// Whether connections may be accepted now. Not where many wait for this side: they would be dropped for newer ones. Their
    /// number falls as fast as handshakes may be answered.
    pub(super) fn accepts(&self) -> bool {
        self.knocked.len() <= self.shared.config.limits.half_open / 2 && !self.too_many_events()
    }

    pub(super) fn accept_all(&mut self, now: Instant) {
        if self.listeners.iter().all(|it| !it.ready) || !self.accepts() {
            return;
        }
        for at in 0..self.listeners.len() {
            for _ in 0..TURN {
                let listener = &mut self.listeners[at];
                if !listener.ready || listener.not_before.is_some_and(|at| at > now) {
                    break;
                }
                listener.not_before = None;
                match listener.socket.accept() {
                    Ok((stream, peer)) => self.accepted(stream, peer, now),
                    Err(error) => match error.kind() {
                        IoKind::WouldBlock => listener.ready = false,
                        // The one who connected has thought better of it.
                        IoKind::ConnectionAborted | IoKind::Interrupted => {}
                        _ => {
                            one(&self.shared.counters.accept_failed);
                            let remedy = error.raw_os_error().and_then(kvx_core::limit_remedy);
                            tracing::warn!(%error, remedy, "the control channel cannot accept a connection");
                            // As a rule there is no descriptor. One that says nothing gives way.
                            match self.droppable.first().copied() {
                                Some((_, oldest)) => {
                                    one(&self.shared.counters.evicted);
                                    self.forget(oldest);
                                }
                                None => listener.not_before = Some(now + ACCEPT_AGAIN),
                            }
                        }
                    },
                }
            }
        }
    }

    fn accepted(&mut self, mut stream: TcpStream, peer: SocketAddr, now: Instant) {
        one(&self.shared.counters.accepted);
        let session = self.shared.next_session();
        // Only speed depends on it.
        let _ = stream.set_nodelay(true);
        if let Err(error) = self.watch(session, &mut stream) {
            tracing::warn!(%error, "the control channel cannot watch a connection");
            return;
        }
        let limits = &self.shared.config.limits;
        let deadline = now + limits.half_open_for;
        let half_open = limits.half_open;
        let machine = Session::accept(&self.local);
        let mut conn = Conn::new(session, stream, peer, machine, Phase::Proving, deadline, now);
        // What was sent with the connection is often there already.
        conn.readable = true;
        self.conns.insert(session, conn);
        self.droppable.insert((false, session));
        self.enqueue(session);
        self.wake_by(deadline);
        while self.droppable.len() > half_open
            && let Some((_, oldest)) = self.droppable.iter().find(|it| it.1 != session).copied()
        {
            one(&self.shared.counters.evicted);
            self.forget(oldest);
        }
    }

    /// Answers those that have knocked, as many as may be.
    pub(super) fn answer_some(&mut self, now: Instant) {
        self.answer_at = None;
        for _ in 0..TURN {
            let Some(session) = self.knocked.first().copied() else { return };
            if let Err(at) = self.handshakes.take(now) {
                if !std::mem::replace(&mut self.handshakes.waited, true) {
                    one(&self.shared.counters.deferred);
                }
                self.answer_at = Some(at);
                return;
            }
            self.handshakes.waited = false;
            self.knocked.remove(&session);
            if let Some(mut conn) = self.conns.remove(&session) {
                match conn.session.answer() {
                    Ok(()) => {
                        self.conns.insert(session, conn);
                        self.enqueue(session);
                    }
                    Err(fault) => self.ended(conn, End::Fault(fault), now),
                }
            }
        }
        self.answer_at = (!self.knocked.is_empty()).then_some(now);
    }
}
