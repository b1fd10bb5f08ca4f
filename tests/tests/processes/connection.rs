//! Connections, and the threads that sleep on them.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use kvx_core::backend::Outcome;
use kvx_core::id::{PeerId, TransferId};
use kvx_core::{Error, Result};

use crate::message::{Bytes, Hello, Request, Response, receive, send};
use crate::state::{State, gone, lock};

/// What the backend and its threads share.
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Something was posted, or a connection is over.
    wake: Condvar,
    pub(crate) incarnation: [u8; 16],
    pub(crate) address: SocketAddr,
    /// Readable while there are events.
    pub(crate) signal: (UnixStream, UnixStream),
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Shared {
    pub(crate) fn new(
        incarnation: [u8; 16],
        address: SocketAddr,
        signal: (UnixStream, UnixStream),
    ) -> Self {
        let (state, threads) = (Mutex::default(), Mutex::default());
        Self { state, wake: Condvar::new(), incarnation, address, signal, threads }
    }

    /// Acts on the state, then wakes whoever waits for what came of it.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        let mut state = lock(&self.state);
        let before = state.events.len();
        let result = act(&mut state);
        if state.events.is_empty() {
            let mut sink = [0; 64];
            while (&self.signal.0).read(&mut sink).is_ok_and(|count| count == sink.len()) {}
        } else if state.events.len() > before {
            // Full means that it is readable.
            let _ = (&self.signal.1).write(&[1]);
        }
        drop(state);
        self.wake.notify_all();
        result
    }

    fn spawn(self: &Arc<Self>, name: &str, task: impl FnOnce(Arc<Self>) + Send + 'static) {
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || task(shared));
        lock(&self.threads).extend(thread.ok());
    }

    /// Takes connections until it is closed.
    pub(crate) fn listen(self: &Arc<Self>, listener: TcpListener) {
        self.spawn("plain-listen", move |shared| {
            for stream in listener.incoming() {
                if shared.with(|state| state.closed) {
                    return;
                }
                if let Ok(stream) = stream {
                    shared.spawn("plain-serve", move |shared| shared.serve(&stream));
                }
            }
        });
    }

    /// Carries out what a peer asks for.
    fn serve(&self, stream: &TcpStream) {
        let limit = Some(Duration::from_secs(2));
        let hello = stream.set_read_timeout(limit).and_then(|()| receive::<Hello>(stream));
        let Ok(hello) = hello else { return };
        let Ok(copy) = stream.try_clone() else { return };
        if hello.to != self.incarnation || stream.set_read_timeout(None).is_err() {
            return;
        }
        let Some(peer) = self.with(|state| {
            let peer = state.dialled_by(hello.from, hello.word)?;
            state.peers.get_mut(&peer)?.incoming = Some(copy);
            Some(peer)
        }) else {
            return;
        };
        while let Ok(request) = receive::<Request>(stream) {
            let result = self.with(|state| {
                let over = state.peers.get(&peer).is_none_or(|peer| peer.over);
                (!over).then(|| state.carry_out(peer, &request))
            });
            let Some(result) = result else { return };
            let response = Response { id: request.id, result: result.map(Bytes) };
            if send(stream, &response).is_err() {
                break;
            }
        }
        self.with(|state| state.end(peer, Some("the peer's connection broke")));
    }

    /// Dials a peer, unless that was done.
    pub(crate) fn dial(self: &Arc<Self>, peer: PeerId) -> Result<()> {
        let Some((address, to, word)) = self.with(|state| {
            let known = state.peers.get(&peer).filter(|known| known.outgoing.is_none())?;
            Some((known.address, known.incarnation, known.their_word))
        }) else {
            return Ok(());
        };
        let failed = |error: std::io::Error| gone("it cannot be reached").with_source(error);
        let stream =
            TcpStream::connect_timeout(&address, Duration::from_secs(2)).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        send(&stream, &Hello { from: self.incarnation, to, word }).map_err(failed)?;
        let copies = [stream.try_clone().map_err(failed)?, stream.try_clone().map_err(failed)?];
        let [kept, asks] = copies;
        let first = self.with(|state| {
            let known =
                state.peers.get_mut(&peer).filter(|known| known.outgoing.is_none() && !known.over);
            known.map(|known| known.outgoing = Some(kept)).is_some()
        });
        if first {
            self.spawn("plain-ask", move |shared| shared.ask(peer, &asks));
            self.spawn("plain-hear", move |shared| shared.hear(peer, &stream));
        }
        Ok(())
    }

    /// Sends what is posted.
    fn ask(&self, peer: PeerId, stream: &TcpStream) {
        loop {
            let mut state = lock(&self.state);
            let request = loop {
                let Some(known) = state.peers.get_mut(&peer).filter(|known| !known.over) else {
                    return;
                };
                if let Some(request) = known.outbox.pop_front() {
                    break request;
                }
                state = self.wake.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
            };
            drop(state);
            if send(stream, &request).is_err() {
                self.with(|state| state.end(peer, Some("the connection to the peer broke")));
                return;
            }
        }
    }

    /// Takes a peer's answers.
    fn hear(&self, peer: PeerId, stream: &TcpStream) {
        while let Ok(response) = receive::<Response>(stream) {
            self.with(|state| answered(state, peer, response));
        }
        self.with(|state| state.end(peer, Some("the connection to the peer broke")));
    }

    /// Ends everything. With `wait`, also waits for the threads.
    pub(crate) fn shut(&self, wait: bool) {
        let first = self.with(|state| {
            let peers: Vec<_> = state.peers.keys().copied().collect();
            peers.into_iter().for_each(|peer| state.end(peer, None));
            state.regions.clear();
            !std::mem::replace(&mut state.closed, true)
        });
        if first {
            // Wakes the thread that listens.
            let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
        }
        if wait {
            let threads = std::mem::take(&mut *lock(&self.threads));
            threads.into_iter().for_each(|thread| drop(thread.join()));
        }
    }
}

/// A transfer's request was answered.
fn answered(state: &mut State, peer: PeerId, response: Response) {
    let id = TransferId(response.id);
    let Some(flight) = state.in_flight.get_mut(&id).filter(|f| !f.over && f.peer == peer) else {
        return;
    };
    let data = match response.result {
        Ok(data) => data.0,
        Err(why) => {
            let error = Error::peer("transfer", "the peer refused it").with_context("why", why);
            return state.settle(id, Outcome::Failed(error));
        }
    };
    let mut left = &data[..];
    for (region, segment) in std::mem::take(&mut flight.read) {
        let count = usize::try_from(segment.bytes).unwrap_or(usize::MAX);
        let written = match left.split_at_checked(count) {
            Some((now, rest)) => {
                left = rest;
                region.write_at(segment.local_offset, now)
            }
            None => Err(Error::peer("transfer", "too little data was sent")),
        };
        if let Err(error) = written {
            return state.settle(id, Outcome::Failed(error));
        }
    }
    // All was read: now the peer can be told.
    if let Some(note) = flight.note.take()
        && let Some(known) = state.peers.get_mut(&peer)
    {
        let (pieces, data) = (Vec::new(), Bytes::default());
        let notify = Some(Bytes(note));
        known.outbox.push_back(Request { id: id.0, write: true, pieces, data, notify });
        return;
    }
    state.settle(id, Outcome::Done);
}
