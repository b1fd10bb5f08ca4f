//! How connections end, and why.

use std::borrow::Cow;
use std::time::Instant;

use kvx_core::backend::{Event, Outcome};
use kvx_core::id::PeerId;
use kvx_core::{Error, ErrorKind, Retry};

use crate::engine::{READER_BOUND, Shared};
use crate::error::BACKEND;
use crate::state::{Phase, State};

/// Of how many connections that are over it is known why, for handshakes that were not complete.
const MOST_ENDED: usize = 64;

/// Why a connection is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Why {
    pub(crate) kind: ErrorKind,
    pub(crate) text: Cow<'static, str>,
    pub(crate) remedy: Option<Cow<'static, str>>,
    /// The number with which this side's system refused what the connection takes: the peer is told.
    pub(crate) system: Option<i32>,
}

impl Why {
    /// For whoever uses the connection, or waits for it.
    pub(crate) fn error(&self, operation: &'static str) -> Error {
        let error = Error::new(self.kind, operation, self.text.clone())
            .with_backend(BACKEND)
            .with_retry(Retry::Reconnect);
        match &self.remedy {
            Some(remedy) => error.with_remedy(remedy.clone()),
            None => error,
        }
    }
}

impl Why {
    /// For whoever comes to use a connection that is over.
    pub(crate) fn over(&self, operation: &'static str) -> Error {
        let text = format!("the connection is over: {}", self.text).into();
        Self { text, ..self.clone() }.error(operation)
    }
}

/// The peer's doing, or its end.
impl From<&'static str> for Why {
    fn from(text: &'static str) -> Self {
        Self { kind: ErrorKind::Peer, text: text.into(), remedy: None, system: None }
    }
}

/// The peer's doing, or its end.
impl From<String> for Why {
    fn from(text: String) -> Self {
        Self { kind: ErrorKind::Peer, text: text.into(), remedy: None, system: None }
    }
}

/// What went wrong here.
impl From<&Error> for Why {
    fn from(error: &Error) -> Self {
        let causes = std::error::Error::source(error).map(|cause| format!(": {cause}"));
        let text = format!("{}{}", error.message(), causes.unwrap_or_default()).into();
        let remedy = error.remedy().map(|remedy| remedy.to_owned().into());
        let system = error.native().filter(|_| error.kind() == ErrorKind::Resources);
        let system = system.and_then(|number| i32::try_from(number).ok()).filter(|number| *number != 0);
        Self { kind: error.kind(), text, remedy, system }
    }
}

impl Shared {
    /// Ends a connection, from either side: nothing new begins. What is in flight settles once it is quiet.
    pub(crate) fn end(&self, state: &mut State, peer: PeerId, why: Option<Why>) {
        if state.peers.get(peer).is_none_or(|known| known.phase != Phase::Open) {
            return;
        }
        if let Some(number) = why.as_ref().and_then(|why| why.system) {
            self.tell(state, peer, number);
        }
        let Some(known) = state.peers.get_mut(peer) else { return };
        if let Some(why) = &why {
            state.ended.push_back((known.word, why.clone()));
            if state.ended.len() > MOST_ENDED {
                state.ended.pop_front();
            }
        }
        known.phase = Phase::Closing(why, Instant::now() + READER_BOUND);
        if let Some(link) = &known.link {
            link.end();
            if let Some(door) = link.door() {
                self.porch.listen_no_more(door);
            }
        }
        if let Some(dialing) = known.dialing.take() {
            self.watch_no_more(&dialing.socket);
        }
        known.reads.jobs.clear();
        known.serves.jobs.clear();
        known.out.clear();
        known.unsent.clear();
        known.locating.clear();
        let incarnation = known.incarnation;
        state.open.remove(&incarnation);
        state.closing.insert(peer);
        state.wakers.drain(..).for_each(std::task::Waker::wake);
        self.try_finish(state, peer);
        if !state.closing.is_empty() {
            self.wake();
        }
    }

    /// Brings a connection that is over to its end, if all is quiet: no thread of this side copies from the peer, and none of
    /// the peer's from this side.
    pub(crate) fn try_finish(&self, state: &mut State, peer: PeerId) {
        let Some(known) = state.peers.get_mut(peer) else { return };
        let Phase::Closing(why, until) = &known.phase else { return };
        if known.reads.busy || known.serves.busy {
            return;
        }
        if let Some(link) = &known.link
            && link.peer_is_reading()
            && Instant::now() < *until
        {
            return;
        }
        let why = why.clone();
        known.phase = Phase::Down(why.clone());
        if let Some(link) = known.link.take() {
            self.watch_no_more(&link.socket);
            if let Some(door) = link.door() {
                self.watch_no_more(door);
            }
            if let Some(process) = &link.process {
                self.watch_no_more(process);
            }
        }
        known.foreign.clear();
        known.sent.clear();
        let tokens = std::mem::take(&mut known.tokens);
        for token in tokens {
            state.sources.remove(&token);
        }
        state.closing.remove(&peer);
        let left: Vec<_> = state
            .flights
            .iter()
            .filter(|(_, flight)| flight.peer == peer && !flight.over)
            .map(|(id, _)| *id)
            .collect();
        for id in left {
            let outcome = why.clone().map_or(Outcome::Cancelled, |why| {
                Outcome::Failed(why.error("transfer").with_context("peer", peer))
            });
            state.settle(id, outcome);
        }
        let error = why.map(|why| why.error("connection").with_context("peer", peer));
        state.events.push_back(Event::PeerDown { peer, error });
        self.signal(state);
        if state.closed {
            self.wake();
        }
    }
}
