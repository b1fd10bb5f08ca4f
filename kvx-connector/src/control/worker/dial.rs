//! Dialling: names, their addresses one after the other, the first that answers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvx_core::{Error, ErrorKind, Retry};
use mio::net::TcpStream;

use super::super::conn::{Conn, Dial, Phase};
use super::super::session::Session;
use super::super::stats::one;
use super::super::{SessionId, resolve};
use super::Worker;

impl Worker {
    pub(super) fn dial(&mut self, session: SessionId, dial: Dial, now: Instant) {
        one(&self.shared.counters.dialled);
        self.shared.counters.dialling.fetch_add(1, Ordering::Relaxed);
        self.wake_by(dial.deadline);
        if let Some(found) = resolve::without_look_up(&dial.address) {
            self.found(session, dial, found, now);
            return;
        }
        let shared = Arc::downgrade(&self.shared);
        let tell = move || {
            if let Some(shared) = shared.upgrade() {
                shared.wake();
            }
        };
        match self.resolving.ask(session, dial.address.clone(), tell) {
            Ok(()) => {
                self.looked_up.insert(session, dial);
            }
            Err(error) => {
                self.dial_failed(session, &dial, "no thread to resolve its name", Some(error));
            }
        }
    }

    /// Goes on with those whose names were resolved.
    pub(super) fn look_up_found(&mut self, now: Instant) {
        if self.looked_up.is_empty() {
            return;
        }
        for (session, found) in self.resolving.found() {
            // Else its time is over.
            if let Some(dial) = self.looked_up.remove(&session) {
                match found {
                    Ok(found) => self.found(session, dial, found, now),
                    Err(error) => {
                        one(&self.shared.counters.unreachable);
                        self.shared.counters.dialling.fetch_sub(1, Ordering::Relaxed);
                        self.shared.down(session, error);
                    }
                }
            }
        }
    }

    fn found(&mut self, session: SessionId, mut dial: Dial, found: Vec<SocketAddr>, now: Instant) {
        let security = &self.shared.config.security;
        // Every address of it, or a name's owner could choose where plaintext goes.
        if let Some(error) = found.iter().find_map(|address| {
            security.admit(&dial.address, address.ip().to_canonical().is_loopback()).err()
        }) {
            one(&self.shared.counters.unreachable);
            self.shared.counters.dialling.fetch_sub(1, Ordering::Relaxed);
            self.shared.down(session, error);
            return;
        }
        dial.is_here = found.iter().all(|address| address.ip().to_canonical().is_loopback());
        dial.candidates = found.into();
        let expected = dial.expected.clone().map(|engine| (engine, dial.address.clone()));
        match Session::dial(&self.local, expected) {
            Ok(machine) => self.try_next(session, dial, machine, None, now),
            Err(error) => {
                self.shared.counters.dialling.fetch_sub(1, Ordering::Relaxed);
                self.shared.down(session, error.with_context("address", &dial.address));
            }
        }
    }

    /// Begins to connect to the next address that lets us.
    fn try_next(
        &mut self,
        session: SessionId,
        mut dial: Dial,
        machine: Session,
        mut last: Option<std::io::Error>,
        now: Instant,
    ) {
        while now < dial.deadline
            && let Some(peer) = dial.candidates.pop_front()
        {
            let connecting = TcpStream::connect(peer)
                .and_then(|mut stream| self.watch(session, &mut stream).map(|()| stream));
            match connecting {
                Ok(stream) => {
                    // The rest of the time is shared with those that are still to be tried.
                    let others = u32::try_from(dial.candidates.len()).unwrap_or(u32::MAX);
                    let share = (dial.deadline - now) / others.saturating_add(1);
                    let phase = Phase::Connecting;
                    let mut conn =
                        Conn::new(session, stream, peer, machine, phase, now + share, now);
                    conn.dial = Some(dial);
                    self.keep(conn, false);
                    return;
                }
                Err(error) => last = Some(error),
            }
        }
        if now >= dial.deadline {
            one(&self.shared.counters.timed_out);
        }
        self.dial_failed(session, &dial, "nobody answers", last);
    }

    pub(super) fn dial_failed(
        &mut self,
        session: SessionId,
        dial: &Dial,
        why: &str,
        source: Option<std::io::Error>,
    ) {
        one(&self.shared.counters.unreachable);
        self.shared.counters.dialling.fetch_sub(1, Ordering::Relaxed);
        let message = match &source {
            Some(source) => format!("{why} at {}: {source}", dial.address),
            None => format!("{why} at {}", dial.address),
        };
        let code = source.as_ref().and_then(std::io::Error::raw_os_error);
        let (kind, retry, remedy) = advice(code, dial.is_here);
        let mut error = Error::new(kind, "control", message)
            .with_retry(retry)
            .with_context("address", &dial.address)
            .with_remedy(remedy);
        if let Some(source) = source {
            error = error.with_native(code.unwrap_or(0).into()).with_source(source);
        }
        self.shared.down(session, error);
    }

    /// The connection, once its socket is connected. Else it is dealt with.
    pub(super) fn connected(&mut self, mut conn: Conn, now: Instant) -> Option<Conn> {
        if !conn.writable {
            self.keep(conn, false);
            return None;
        }
        let result = match conn.stream.take_error() {
            Ok(None) => conn.stream.peer_addr().map(drop),
            Ok(Some(error)) | Err(error) => Err(error),
        };
        match result {
            Ok(()) => {
                // Only speed depends on it.
                let _ = conn.stream.set_nodelay(true);
                conn.phase = Phase::Proving;
                conn.deadline = conn.dial.as_ref().map_or(conn.deadline, |dial| dial.deadline);
                conn.heard = now;
                Some(conn)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotConnected => {
                conn.writable = false;
                self.keep(conn, false);
                None
            }
            Err(error) => {
                self.next_candidate(conn, Some(error), now);
                None
            }
        }
    }

    /// This address does not answer: on to the next.
    pub(super) fn next_candidate(
        &mut self,
        conn: Conn,
        last: Option<std::io::Error>,
        now: Instant,
    ) {
        let Conn { id, session, dial, stream, .. } = conn;
        drop(stream);
        if let Some(dial) = dial {
            self.try_next(id, dial, session, last, now);
        }
    }
}

/// What to do about an address that was not reached, and whether that changes by itself: what is a matter of this host's configuration
/// does not.
fn advice(code: Option<i32>, is_here: bool) -> (ErrorKind, Retry, &'static str) {
    // Nobody was asked yet.
    if let Some(remedy) = code.and_then(kvx_core::limit_remedy) {
        return (ErrorKind::Resources, Retry::Backoff, remedy);
    }
    match code {
        Some(libc::ENETUNREACH) if is_here => (
            ErrorKind::Config,
            Retry::Never,
            "let this host, or container, have its loopback interface: ip link set lo up",
        ),
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH) => (
            ErrorKind::Peer,
            Retry::Backoff,
            "check that the address is right, and that this host has a route to it: ip route get",
        ),
        _ => (
            ErrorKind::Peer,
            Retry::Backoff,
            "check that the engine runs and listens there, and what lies between",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_is_down_does_not_come_up_by_itself() {
        let (kind, _, remedy) = advice(Some(libc::ENETUNREACH), true);
        assert!(kind == ErrorKind::Config && remedy.contains("ip link set lo up"), "{remedy}");
        let (kind, _, remedy) = advice(Some(libc::ENETUNREACH), false);
        assert!(kind == ErrorKind::Peer && remedy.contains("ip route"), "{remedy}");
        for code in [Some(libc::ECONNREFUSED), None] {
            let (kind, _, remedy) = advice(code, true);
            assert!(kind == ErrorKind::Peer && remedy.contains("listens there"), "{remedy}");
        }
        let (kind, retry, remedy) = advice(Some(libc::EMFILE), true);
        assert!(kind == ErrorKind::Resources && retry == Retry::Backoff, "{kind:?} {retry:?}");
        assert!(remedy.contains("ulimit -n"), "{remedy}");
    }
}
