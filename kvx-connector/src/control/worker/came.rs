//! What came over a session.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Worker;
use crate::control::conn::{Conn, End, Phase};
use crate::control::session::{Fault, FaultKind, SessionEvent};
use crate::control::shared::UpInfo;
use crate::control::stats::one;
use crate::control::{ControlEvent, Leave};

impl Worker {
    pub(super) fn heard(&self, conn: &mut Conn, now: Instant) {
        conn.heard = now;
        conn.heard_at.store(self.shared.clock(now), Ordering::Relaxed);
        if std::mem::take(&mut conn.asked) > 1 {
            self.shared.with_up(conn.id, |up| up.missed_pings = 0);
        }
    }

    pub(super) fn came(
        &mut self,
        conn: &mut Conn,
        event: SessionEvent,
        now: Instant,
    ) -> Result<(), End> {
        let shared = &self.shared;
        match event {
            SessionEvent::Knocked => {
                self.droppable.remove(&(false, conn.id));
                self.droppable.insert((true, conn.id));
                self.knocked.insert(conn.id);
            }
            SessionEvent::Up { remote, agreed } => {
                if conn.dial.is_none() {
                    if let Err(error) = shared.open(conn.id) {
                        one(&shared.counters.too_many);
                        conn.session.leave(Leave::TooMany, error.message());
                        return Err(End::Fault(Fault { kind: FaultKind::Local, error }));
                    }
                    if conn.session.used_old_key() {
                        one(&shared.counters.old_key);
                    }
                }
                let info = UpInfo {
                    remote: remote.clone(),
                    agreed,
                    peer: conn.peer,
                    dialled: conn.dial.as_ref().map(|dial| dial.address.clone()),
                    since: now,
                    heard: Arc::clone(&conn.heard_at),
                    missed_pings: 0,
                    round_trip: None,
                };
                shared.with_outbox(conn.id, |outbox| outbox.up = Some(info));
                conn.phase = Phase::Up;
                one(&shared.counters.established);
                if conn.dial.is_some() {
                    shared.counters.dialling.fetch_sub(1, Ordering::Relaxed);
                }
                shared.counters.up.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(session = %conn.id, %remote, peer = %conn.peer, "a session is up");
                shared.event(ControlEvent::Up {
                    session: conn.id,
                    remote,
                    agreed,
                    dialled: conn.dial.is_some(),
                });
                self.undroppable(conn.id);
            }
            SessionEvent::Message(bytes) => {
                one(&shared.counters.messages_received);
                conn.inbox.1 += bytes.len();
                shared.event(ControlEvent::Message { session: conn.id, bytes });
                if conn.inbox.1 > shared.config.limits.inbox_bytes {
                    let (_, polled) = shared.waiting(true);
                    if polled == conn.inbox.0 {
                        conn.paused = true;
                        one(&shared.counters.paused);
                    } else {
                        conn.inbox = (polled, 0);
                    }
                }
            }
            SessionEvent::Pong(token) => {
                if let Some((_, at)) = conn.pinged.take_if(|(pinged, _)| *pinged == token) {
                    let round_trip = Some(now.saturating_duration_since(at));
                    shared.with_up(conn.id, |up| up.round_trip = round_trip);
                }
            }
        }
        Ok(())
    }
}
