//! What a peer asks for, carried out by a thread of this side: nobody's program has to poll for it.

use std::io::{self, BufReader};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::Event;
use kvx_core::id::PeerId;
use kvx_core::memory::Region;
use kvx_core::wire::{self, Text};
use kvx_core::{Error, Result};

use crate::connection::Shared;
use crate::cursor::Cursor;
use crate::error::gone;
use crate::message::{Answer, Batch, CHUNK, Chunk, Hello, Note, Piece, Request, receive, send};
use crate::state::State;

/// The longest time that a stranger may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(3);

/// The longest time that a peer's last answers are waited for.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Most notifications of one peer that wait to be polled. With more its connection ends: it harms only itself.
pub(crate) const MAX_UNTAKEN: usize = 16384;

/// A batch that is being carried out, until something about it is refused.
struct Work {
    pieces: Vec<Piece>,
    cursor: Cursor,
}

impl Shared {
    /// Serves one connection, until it is over.
    pub(crate) fn serve(&self, number: u32, stream: &Arc<TcpStream>) {
        let hello = Hello::receive(stream, PATIENCE);
        let peer = self.with(|state| {
            state.strangers.remove(&number);
            state.dialled(self, hello.ok()?, stream)
        });
        let Some(peer) = peer else { return };
        let mut reader = BufReader::with_capacity(CHUNK, &**stream);
        // An error says that the connection broke, that the peer sent what makes no sense, or that this side ended it.
        let error = loop {
            let carried_out = receive::<Request>(&mut reader).and_then(|request| match request {
                Request::Read(batch) => self.give(peer, stream, batch),
                Request::Write(batch) => self.take(peer, stream, &mut reader, batch),
                _ => Err(io::Error::other("data without a batch")),
            });
            if let Err(error) = carried_out {
                break error;
            }
        };
        if error.kind() == io::ErrorKind::UnexpectedEof {
            self.hear_out(peer);
        }
        self.with(|state| state.end(peer, Some("the peer's connection broke")));
    }

    /// A peer that ends the connection may have answered before: what it said on the other way is taken first.
    fn hear_out(&self, peer: PeerId) {
        let outgoing = self.with(|state| state.live("serve", peer).ok()?.outgoing.clone());
        if let Some(stream) = outgoing {
            // Says that nothing more will be asked. The thread that hears the answers ends the connection.
            let _ = stream.shutdown(Shutdown::Write);
            self.sleep_until(Some(LAST_WORDS), |state| {
                state.live("serve", peer).is_err().then_some(())
            });
        }
    }

    /// Carries out a read.
    fn give(&self, peer: PeerId, stream: &TcpStream, batch: Batch) -> io::Result<()> {
        let mut work = Work::new(batch.pieces);
        loop {
            let chunk = self.with(|state| {
                state.live("serve", peer).map_err(io::Error::other)?;
                Ok::<_, io::Error>(match &mut work {
                    Ok(Work { pieces, cursor }) => {
                        cursor.take(CHUNK, |index| state.reach(&pieces[index]))
                    }
                    Err(error) => Err(Error::peer("serve", error.to_string())),
                })
            })?;
            match chunk {
                Ok(bytes) if bytes.is_empty() => return send(stream, &Answer::Done(batch.ticket)),
                Ok(bytes) => send(stream, &Answer::Data(batch.ticket, Chunk(bytes)))?,
                Err(error) => return send(stream, &refused(batch.ticket, &error)),
            }
        }
    }

    /// Carries out a write. What is refused is still read to its end, so that the next batch is found.
    fn take(
        &self,
        peer: PeerId,
        stream: &TcpStream,
        mut reader: &mut BufReader<&TcpStream>,
        batch: Batch,
    ) -> io::Result<()> {
        let mut work = Work::new(batch.pieces);
        loop {
            let chunk = match receive::<Request>(&mut reader)? {
                Request::Data(chunk) => chunk.0,
                Request::End => break,
                Request::Abort => return Ok(()),
                _ => return Err(io::Error::other("a batch within a batch")),
            };
            self.with(|state| {
                state.live("serve", peer).map_err(io::Error::other)?;
                if let Ok(Work { pieces, cursor }) = &mut work
                    && let Err(error) = cursor.put(&chunk, |index| state.reach(&pieces[index]))
                {
                    work = Err(error);
                }
                Ok::<_, io::Error>(())
            })?;
        }
        let done = work.and_then(|work| match work.cursor.left() {
            0 => Ok(()),
            left => Err(Error::peer("serve", "too little data").with_context("bytes", left)),
        });
        if let Err(error) = done {
            return send(stream, &refused(batch.ticket, &error));
        }
        // The answer goes first: who is notified may have been waiting for just that, and close.
        send(stream, &Answer::Done(batch.ticket))?;
        match batch.note {
            Some(note) => self.with(|state| state.notified(peer, note)).map_err(io::Error::other),
            None => Ok(()),
        }
    }
}

impl Work {
    fn new(pieces: Vec<Piece>) -> Result<Self> {
        let cursor = Cursor::new(pieces.iter().map(|piece| (piece.offset, piece.bytes)))?;
        Ok(Self { pieces, cursor })
    }
}

impl State {
    /// The peer whose connection this is: one that says the word that this side gave it.
    fn dialled(
        &mut self,
        shared: &Shared,
        hello: Hello,
        stream: &Arc<TcpStream>,
    ) -> Option<PeerId> {
        let handle = self.known(hello.from).filter(|_| hello.to == shared.incarnation)?;
        let peer = self.live("serve", handle).ok()?;
        if peer.word != hello.word || peer.incoming.is_some() {
            return None;
        }
        stream.set_nodelay(true).ok()?;
        peer.incoming = Some(Arc::clone(stream));
        Some(handle)
    }

    /// A region that a peer's batch names, if it may.
    fn reach(&self, piece: &Piece) -> Result<&Region> {
        let known = self.regions.get(&piece.region()).filter(|known| known.secret == piece.secret);
        let known = known.ok_or_else(|| Error::peer("serve", "the region is not registered"))?;
        Ok(&known.region)
    }

    fn notified(&mut self, handle: PeerId, note: Note) -> Result<()> {
        let peer = self.live("serve", handle)?;
        if peer.untaken >= MAX_UNTAKEN {
            let why = "the peer sent more notifications than were taken";
            self.end(handle, Some(why));
            return Err(gone("serve", why));
        }
        peer.untaken += 1;
        self.events.push_back(Event::Notified { peer: handle, payload: note.0 });
        Ok(())
    }
}

fn refused(ticket: u64, error: &Error) -> Answer {
    let mut why = wire::printable(error.message());
    while why.len() > 300 {
        why.pop();
    }
    // Text without control characters, and not too long, is always taken.
    let text = Text::new(why).or_else(|_| Text::new("refused"));
    text.map_or(Answer::Done(ticket), |text| Answer::Refused(ticket, text))
}
