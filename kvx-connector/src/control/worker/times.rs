//! What has waited long enough: deadlines, and pings.

use std::sync::atomic::Ordering;
use std::time::Instant;

use kvx_core::{Error, Retry};

use super::super::conn::{Conn, End, Phase};
use super::super::session::{Fault, FaultKind};
use super::super::stats::one;
use super::Worker;

impl Worker {
    /// Looks at whatever has been waiting for its time.
    pub(super) fn look_at_all(&mut self, now: Instant) {
        let ping_after = self.shared.config.limits.ping_after;
        let (mut due, mut next) = (Vec::new(), None::<Instant>);
        let mut later = |at: Instant| next = Some(next.map_or(at, |known| known.min(at)));
        for conn in self.conns.values() {
            let at = conn.due(ping_after);
            if at <= now { due.push(conn.id) } else { later(at) }
        }
        let late: Vec<_> = self
            .looked_up
            .iter()
            .filter(|(_, dial)| dial.deadline <= now)
            .map(|it| *it.0)
            .collect();
        for dial in self.looked_up.values().filter(|dial| dial.deadline > now) {
            later(dial.deadline);
        }
        self.wake_at = next;
        for session in due {
            if let Some(conn) = self.conns.remove(&session) {
                self.overdue(conn, now);
            }
        }
        for session in late {
            if let Some(dial) = self.looked_up.remove(&session) {
                self.dial_failed(session, &dial, "its name was not resolved in time", None);
            }
        }
    }

    fn overdue(&mut self, conn: Conn, now: Instant) {
        match conn.phase {
            Phase::Leaving => self.forget(conn.id),
            Phase::Connecting => self.next_candidate(conn, None, now),
            Phase::Proving => {
                one(&self.shared.counters.timed_out);
                self.forget(conn.id);
                if conn.dial.is_some() {
                    self.shared.counters.dialling.fetch_sub(1, Ordering::Relaxed);
                    let why = Error::peer("control", "the peer did not prove its key in time")
                        .with_retry(Retry::Backoff);
                    self.shared.down(conn.id, conn.at(why));
                }
            }
            Phase::Up => self.ask(conn, now),
        }
    }

    /// Asks a peer that has been silent whether it is there, and tells one that has heard nothing that this side is.
    fn ask(&mut self, mut conn: Conn, now: Instant) {
        let limits = self.shared.config.limits;
        if conn.paused {
            // What it says is not read: its silence means nothing.
            conn.heard = now;
            conn.asked = 0;
        } else if conn.ask_at(limits.ping_after) <= now {
            let missed = conn.asked;
            if missed > 0 {
                one(&self.shared.counters.missed_pings);
            }
            self.shared.with_up(conn.id, |up| up.missed_pings = missed);
            if missed >= limits.missed_pings {
                one(&self.shared.counters.silent);
                self.shared.counters.up.fetch_sub(1, Ordering::Relaxed);
                self.forget(conn.id);
                let silence = now.saturating_duration_since(conn.heard);
                let why = Error::peer("control", format!("the peer missed {missed} pings"))
                    .with_context("silent_ms", silence.as_millis())
                    .with_retry(Retry::Reconnect);
                self.shared.down(conn.id, conn.at(why));
                return;
            }
            (conn.asked, conn.asked_at) = (missed + 1, now);
        }
        conn.said = now;
        // Where something waits to be sent, that says as much, and pings behind it would only grow in number.
        if conn.session.output().is_empty() {
            let token = conn.next_ping;
            conn.next_ping += 1;
            conn.pinged = Some((token, now));
            if let Err(error) = conn.session.ping(token) {
                self.ended(conn, End::Fault(Fault { kind: FaultKind::Local, error }), now);
                return;
            }
        }
        let session = conn.id;
        self.keep(conn, false);
        self.enqueue(session);
    }
}
