//! The channel over which requests are asked for: a control channel of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvx_connector::control::{
    Control, ControlConfig, ControlEvent, RemoteIdentity, Security, Sent, SessionId,
};
use kvx_core::card::{Address, EngineName};
use kvx_core::id::Incarnation;
use kvx_core::limits::{self, Wanted};
use kvx_core::{Error, ErrorKind, Result};
use serde::Serialize;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::message;

/// Pause before a producer that is not there yet is dialled again.
const PAUSE: Duration = Duration::from_millis(200);
/// Most sessions of a producer.
const MAX_SESSIONS: usize = 64;
/// Most events that wait to be looked at here; more wait in the control channel, which has bounds of its own.
const MAX_EVENTS: usize = 64;
/// How long the thread sleeps at most, so that it ends soon after it is told to.
const LOOK: Duration = Duration::from_millis(100);

/// The channel, and a thread that waits for what happens on it.
#[derive(Debug)]
pub(super) struct Door {
    control: Arc<Control>,
    events: Receiver<ControlEvent>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    pub(super) fn new(engine: EngineName, security: Security) -> Result<Self> {
        let identity = RemoteIdentity { engine, incarnation: Incarnation::random()?, rank: None };
        let mut config = ControlConfig::new(identity, security);
        config.limits.sessions = MAX_SESSIONS;
        config.limits.half_open = MAX_SESSIONS;
        let control = Arc::new(Control::start(config)?);
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, events) = channel(MAX_EVENTS);
        let thread = {
            let (control, stop) = (Arc::clone(&control), Arc::clone(&stop));
            std::thread::Builder::new()
                .name("kvx-door".into())
                .spawn(move || wait(&control, &sender, &stop))
                .map_err(|source| {
                    let error = Error::new(ErrorKind::Resources, "serve", "no thread to be had");
                    limits::explain(error, source, Wanted::Thread)
                })?
        };
        Ok(Self { control, events, stop, thread: Some(thread) })
    }

    pub(super) fn listen(&self, address: &Address) -> Result<Address> {
        self.control.listen(address)
    }

    /// Dials the producer until it answers, or `patience` is over. What cannot change by waiting (a wrong key, another program)
    /// is not waited for.
    pub(super) async fn dial(
        &mut self,
        address: &Address,
        patience: Duration,
    ) -> Result<SessionId> {
        let until = Instant::now() + patience;
        loop {
            let unreachable = self.control.stats().unreachable;
            self.control.dial(address, None)?;
            let why = loop {
                match self.next().await? {
                    ControlEvent::Up { remote, .. } if remote.rank.is_some() => {
                        return Err(no_producer().with_context("found", &remote));
                    }
                    ControlEvent::Up { session, .. } => return Ok(session),
                    ControlEvent::Down { why, .. } => break why,
                    ControlEvent::Message { .. } => {}
                }
            };
            let absent = self.control.stats().unreachable > unreachable;
            if !absent || Instant::now() + PAUSE > until {
                return Err(why);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// What happens next.
    pub(super) async fn next(&mut self) -> Result<ControlEvent> {
        let event = self.events.recv().await;
        event.ok_or_else(|| Error::new(ErrorKind::Internal, "serve", "nobody waits any more"))
    }

    /// Says something to whoever is at the other end of a session.
    ///
    /// # Errors
    ///
    /// The session is over, or its other end does not read.
    pub(super) fn say(&self, session: SessionId, message: &impl Serialize) -> Result<()> {
        match self.control.send(session, &message::to_bytes(message)?)? {
            Sent::Sent => Ok(()),
            Sent::Full => Err(Error::peer("serve", "the other side does not read what it is told")),
        }
    }

    /// Connections so far that did not have the key, or were no kvx.
    pub(super) fn strangers(&self) -> u64 {
        let stats = self.control.stats();
        stats.wrong_key + stats.not_ours
    }

    pub(super) fn close(&self, session: SessionId) {
        self.control.close(session);
    }
}

/// Somebody with the key, but not who was meant.
pub(super) fn no_producer() -> Error {
    Error::peer("serve", "whoever is at that address does not say that it is a producer")
        .with_remedy("give the address that kvx serve --role producer prints as \"requests at\"")
}

impl Drop for Door {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.events.close();
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so.
            let _panicked = thread.join();
        }
    }
}

/// Hands on what happens, until it is told to end or nobody listens.
fn wait(control: &Control, sender: &Sender<ControlEvent>, stop: &AtomicBool) {
    let mut events = Vec::new();
    while !stop.load(Ordering::Acquire) && control.wait(LOOK).is_ok() {
        control.poll(&mut events);
        for event in events.drain(..) {
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    }
}
