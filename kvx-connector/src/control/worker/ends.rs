//! How connections end.

use std::sync::atomic::Ordering;
use std::time::Instant;

use kvx_core::{Error, ErrorKind};

use super::Worker;
use crate::control::conn::{Conn, End, Io, Phase};
use crate::control::session::FaultKind;
use crate::control::stats::one;
use crate::control::{Leave, SessionId};

impl Worker {
    /// A connection ended, or must.
    pub(super) fn ended(&mut self, conn: Conn, end: End, now: Instant) {
        let counters = &self.shared.counters;
        let was_up = conn.phase == Phase::Up;
        if was_up {
            counters.up.fetch_sub(1, Ordering::Relaxed);
        }
        let (why, tell) = match end {
            End::Lost(source) => {
                match conn.phase {
                    Phase::Up => one(&counters.lost),
                    Phase::Connecting | Phase::Proving => one(&counters.unproven),
                    Phase::Leaving => {}
                }
                (conn.lost(source), false)
            }
            End::Fault(fault) => {
                match fault.kind {
                    FaultKind::NotOurs => one(&counters.not_ours),
                    FaultKind::WrongKey => one(&counters.wrong_key),
                    FaultKind::BadFrame => one(&counters.bad_frames),
                    FaultKind::Refused => one(&counters.refused),
                    FaultKind::Left => one(&counters.left),
                    FaultKind::Local => {}
                }
                (conn.at(fault.error), !conn.session.output().is_empty())
            }
        };
        if conn.dial.is_some() && !was_up && conn.phase != Phase::Leaving {
            counters.dialling.fetch_sub(1, Ordering::Relaxed);
        }
        if conn.phase != Phase::Leaving {
            tracing::debug!(session = %conn.id, peer = %conn.peer, error = %why, "a session is over");
        }
        self.forget(conn.id);
        self.shared.down(conn.id, why);
        if tell && conn.phase != Phase::Leaving {
            self.leave(conn, now);
        }
    }

    /// What is left is sent, if the other side takes it in time.
    fn leave(&mut self, mut conn: Conn, now: Instant) {
        conn.phase = Phase::Leaving;
        conn.deadline = now + self.shared.config.limits.linger;
        match conn.write(&self.shared, now) {
            Ok(io) => {
                self.droppable.insert((false, conn.id));
                // Whatever came meanwhile is read, and thrown away.
                let again = matches!(io, Io::Again) || conn.readable;
                self.keep(conn, again);
            }
            Err(_) => drop(conn),
        }
    }

    /// The caller closes a session.
    pub(super) fn close(&mut self, session: SessionId, now: Instant) {
        // One that the caller knows of.
        if !self.shared.is_open(session) {
            return;
        }
        let closed =
            || Error::new(ErrorKind::Closed, "control", "the session was closed on this side");
        if self.looked_up.remove(&session).is_some() {
            self.shared.counters.dialling.fetch_sub(1, Ordering::Relaxed);
            self.shared.down(session, closed());
            return;
        }
        match self.conns.remove(&session) {
            Some(conn) if conn.phase == Phase::Leaving => {
                self.conns.insert(session, conn);
            }
            Some(mut conn) => {
                let was_up = conn.phase == Phase::Up;
                let gauge =
                    if was_up { &self.shared.counters.up } else { &self.shared.counters.dialling };
                gauge.fetch_sub(1, Ordering::Relaxed);
                if let Some(queue) =
                    self.shared.with_outbox(session, |outbox| std::mem::take(&mut outbox.queue))
                {
                    conn.rest = queue;
                }
                self.shared.down(session, closed());
                if was_up {
                    self.leave(conn, now);
                }
            }
            None => {}
        }
    }

    /// Says so to all that are up, as far as they take it at once.
    pub(super) fn stop(&mut self) {
        let now = Instant::now();
        for conn in self.conns.values_mut().filter(|conn| conn.phase == Phase::Up) {
            conn.session.leave(Leave::Stopping, "");
            conn.phase = Phase::Leaving;
            // Nobody is left who could be told of an error.
            let _ = conn.write(&self.shared, now);
        }
        self.conns.clear();
        self.listeners.clear();
        self.shared.end("the control channel is closed");
    }
}
