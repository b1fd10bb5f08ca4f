//! This side's requests to a peer, and what it answers.

use std::io::{self, BufReader};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::Outcome;
use kvx_core::id::PeerId;
use kvx_core::transfer::Mode;
use kvx_core::{Error, wire};

use crate::NAME;
use crate::connection::Shared;
use crate::message::{Answer, CHUNK, Hello, Request, receive, send};
use crate::state::{Stage, State};

/// The longest time to reach a peer: shorter than `SEVER_BOUND`, because `close` waits for it.
const DIAL: Duration = Duration::from_millis(1500);

const BROKE: Option<&str> = Some("the connection to the peer broke");

impl Shared {
    /// Dials a peer, then sends what is posted, until the connection is over.
    pub(crate) fn ask(self: &Arc<Self>, peer: PeerId, word: u64) {
        let Some(stream) = self.dial(peer, word) else {
            return self.with(|state| state.end(peer, Some("the peer cannot be reached")));
        };
        let answers = Arc::clone(&stream);
        let hearing = self.spawn("tcp-hear", move |shared| shared.hear(peer, &answers));
        if hearing.is_err() {
            return self.with(|state| state.end(peer, Some("no thread was to be had")));
        }
        while let Some(ticket) = self.next(peer) {
            if self.send_batch(&stream, ticket).is_err() {
                // Answers may have come before it broke: the thread that hears them sees its end, too.
                return;
            }
        }
    }

    fn dial(&self, peer: PeerId, word: u64) -> Option<Arc<TcpStream>> {
        let (address, to) = self.with(|state| {
            let known = state.live("dial", peer).ok()?;
            Some((known.address, known.incarnation))
        })?;
        let stream = Arc::new(TcpStream::connect_timeout(&address, DIAL).ok()?);
        stream.set_nodelay(true).ok()?;
        Hello { from: self.incarnation, to, word }.send(&stream).ok()?;
        self.with(|state| {
            state.live("dial", peer).ok()?.outgoing = Some(Arc::clone(&stream));
            state.advance(peer, Stage::Connected);
            Some(stream)
        })
    }

    /// Sleeps until something is posted to a peer. `None` when the connection is over.
    fn next(&self, peer: PeerId) -> Option<u64> {
        let next = self.sleep_until(None, |state| match state.live("ask", peer) {
            Ok(known) => known.outbox.pop_front().map(Some),
            Err(_) => Some(None),
        });
        next.flatten()
    }

    fn send_batch(&self, stream: &TcpStream, ticket: u64) -> io::Result<()> {
        let Some(request) = self.with(|state| state.begin(ticket)) else { return Ok(()) };
        send(stream, &request)?;
        if matches!(request, Request::Read(_)) {
            return Ok(());
        }
        loop {
            let next = self.with(|state| state.next_chunk(ticket));
            send(stream, &next)?;
            if !matches!(next, Request::Data(_)) {
                return Ok(());
            }
        }
    }

    /// Takes a peer's answers, until the connection is over.
    fn hear(&self, peer: PeerId, stream: &TcpStream) {
        let mut reader = BufReader::with_capacity(CHUNK, stream);
        while let Ok(answer) = receive::<Answer>(&mut reader) {
            if self.with(|state| state.hear(peer, answer)).is_err() {
                break;
            }
        }
        self.with(|state| state.end(peer, BROKE));
    }
}

impl State {
    /// What follows in a write: data, its end, or that it was given up.
    fn next_chunk(&mut self, ticket: u64) -> Request {
        let Some(flight) = self.flights.get_mut(&ticket) else { return Request::Abort };
        let regions = &flight.regions;
        match flight.cursor.take(CHUNK, |index| Ok(&regions[index])) {
            Ok(bytes) if bytes.is_empty() => Request::End,
            Ok(bytes) => Request::Data(crate::message::Chunk(bytes)),
            Err(error) => {
                self.settle(ticket, Outcome::Failed(error.with_backend(NAME)));
                Request::Abort
            }
        }
    }

    /// Takes an answer. One to a transfer that is over already says nothing.
    fn hear(&mut self, peer: PeerId, answer: Answer) -> Result<(), Error> {
        let (Answer::Data(ticket, _) | Answer::Done(ticket) | Answer::Refused(ticket, _)) = answer;
        let Some(flight) = self.flights.get_mut(&ticket).filter(|flight| flight.peer == peer)
        else {
            return Ok(());
        };
        match answer {
            Answer::Data(_, chunk) => {
                if flight.mode == Mode::Write {
                    return Err(Error::peer("transfer", "data in answer to a write"));
                }
                let regions = &flight.regions;
                flight.cursor.put(&chunk.0, |index| Ok(&regions[index]))?;
            }
            Answer::Done(_) if flight.cursor.left() > 0 => {
                let error = Error::peer("transfer", "the peer calls it done, but data is missing")
                    .with_backend(NAME)
                    .with_context("bytes", flight.cursor.left());
                self.settle(ticket, Outcome::Failed(error));
            }
            Answer::Done(_) => {
                if !self.tell(ticket) {
                    self.settle(ticket, Outcome::done());
                }
            }
            Answer::Refused(_, why) => {
                let error = Error::peer("transfer", "the peer refused it")
                    .with_backend(NAME)
                    .with_context("why", wire::printable(why.as_str()));
                self.settle(ticket, Outcome::Failed(error));
            }
        }
        Ok(())
    }
}
