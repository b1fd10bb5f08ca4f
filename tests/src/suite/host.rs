//! One side's backend and memory, doing what it is told.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, Outcome, SEVER_BOUND, Submit, TransferBackend};
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::TransferId;
use kvx_core::memory::{KeyBlob, Region};
use kvx_core::transfer::PostedSegment;
use kvx_core::{Error, ErrorKind, Result};

use super::arena::Arena;
use super::command::{Answer, Command, End, Post, Posted, Seen};
use super::dice::pattern;

/// One side.
pub(crate) struct Host {
    backend: Mutex<Option<Arc<dyn TransferBackend>>>,
    arenas: Mutex<Vec<Arena>>,
    patience: Duration,
    /// Arenas are of memory that the backend allocates.
    allocates: bool,
}

impl Host {
    pub(crate) fn new(
        backend: Arc<dyn TransferBackend>,
        patience: Duration,
        allocates: bool,
    ) -> Self {
        Self { backend: Mutex::new(Some(backend)), arenas: Mutex::default(), patience, allocates }
    }

    /// The backend, for scripts that call it from several threads.
    pub(crate) fn backend(&self) -> Result<Arc<dyn TransferBackend>> {
        self.backend
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .ok_or_else(|| Error::new(ErrorKind::Closed, "backend", "the kit dropped this side"))
    }

    fn arenas(&self) -> MutexGuard<'_, Vec<Arena>> {
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with_arena<R>(&self, arena: u64, act: impl FnOnce(&Arena) -> Result<R>) -> Result<R> {
        let arenas = self.arenas();
        let found = usize::try_from(arena).ok().and_then(|index| arenas.get(index));
        act(found.ok_or_else(|| Error::misuse("arena", "there is no such arena"))?)
    }

    pub(crate) fn execute(&self, command: Command) -> Result<Answer> {
        if let Some(answer) = self.on_memory(&command) {
            return answer;
        }
        let backend = self.backend()?;
        Ok(match command {
            Command::Name => Answer::Text(backend.name().to_owned()),
            Command::Capabilities => Answer::Claims(Box::new(backend.capabilities().into())),
            Command::Incarnation => Answer::Bytes(backend.incarnation().as_bytes().to_vec()),
            Command::Register { arena, offset, bytes } => {
                let region = self.with_arena(arena, |arena| arena.range(offset, bytes))?;
                Answer::Region(backend.register(&region)?)
            }
            Command::RegisterForeign { arena } => {
                let region = self.with_arena(arena, |arena| arena.foreign_range(0, 64))?;
                Answer::Region(backend.register(&region)?)
            }
            Command::Deregister(region) => done(backend.deregister(region))?,
            Command::KeyBlob(region) => Answer::Bytes(backend.key_blob(region)?.into()),
            Command::ImportKey(peer, blob) => {
                Answer::Remote(backend.import_key(peer, &KeyBlob::new(blob)?)?)
            }
            Command::ReleaseKey(peer, region) => done(backend.release_key(peer, region))?,
            Command::Offer => Answer::Bytes(backend.offer()?.into()),
            Command::Accept(offer) => {
                let (peer, reply) = backend.accept(&HandshakeBytes::new(offer)?)?;
                Answer::Met(peer, reply.into())
            }
            Command::Complete(reply) => {
                let (peer, completion) = backend.complete(&HandshakeBytes::new(reply)?)?;
                Answer::Met(peer, completion.into())
            }
            Command::Finish(completion) => {
                Answer::Peer(backend.finish(&HandshakeBytes::new(completion)?)?)
            }
            Command::Connect(peer) => done(within(self.patience, backend.connect(peer)))?,
            Command::Submit(post) => submit(&*backend, &post)?,
            Command::Poll { room } => Answer::Events(poll(&*backend, room)),
            Command::Cancel(id) => done(backend.cancel(TransferId(id)))?,
            Command::Sever(peer) => done(backend.sever(peer))?,
            Command::Revoke(peer) => done(backend.revoke(peer))?,
            Command::PeerInfo(peer) => Answer::Text(backend.peer_info(peer)?.transport),
            Command::Close => done(within(self.patience + SEVER_BOUND, backend.close()))?,
            _ => return Err(Error::new(ErrorKind::Internal, "kit", "an unknown command")),
        })
    }

    fn keep(&self, arena: Arena) -> Answer {
        let mut arenas = self.arenas();
        arenas.push(arena);
        Answer::Number(arenas.len() as u64 - 1)
    }

    fn memory(&self, bytes: u64) -> Result<Region> {
        if self.allocates { self.backend()?.allocate(bytes) } else { Region::host(bytes) }
    }

    /// The commands that can be carried out without the backend.
    fn on_memory(&self, command: &Command) -> Option<Result<Answer>> {
        Some(match command {
            Command::Arena { bytes, seed } => {
                let memory = self.memory(*bytes);
                memory
                    .and_then(|memory| Arena::filled(memory, &pattern(*seed, *bytes)))
                    .map(|arena| self.keep(arena))
            }
            Command::Untouched { bytes } => {
                self.memory(*bytes).and_then(Arena::new).map(|arena| self.keep(arena))
            }
            Command::Allocate { bytes } => {
                let memory = self.backend().and_then(|backend| backend.allocate(*bytes));
                memory.and_then(Arena::new).map(|arena| self.keep(arena))
            }
            Command::Read { arena, offset, bytes } => {
                self.with_arena(*arena, |arena| arena.read(*offset, *bytes)).map(Answer::Bytes)
            }
            Command::Write { arena, offset, bytes } => {
                done(self.with_arena(*arena, |arena| arena.write(*offset, bytes)))
            }
            Command::Held { arena } => {
                self.with_arena(*arena, |arena| Ok(arena.held())).map(Answer::Number)
            }
            Command::Drop => {
                let backend = self.backend.lock().unwrap_or_else(PoisonError::into_inner).take();
                drop(backend);
                Ok(Answer::Nothing)
            }
            _ => return None,
        })
    }
}

fn done(result: Result<()>) -> Result<Answer> {
    result.map(|()| Answer::Nothing)
}

fn submit(backend: &dyn TransferBackend, post: &Post) -> Result<Answer> {
    let segments: Vec<PostedSegment> = post.segments.iter().map(|piece| (*piece).into()).collect();
    let notify = post.notify.as_deref();
    let submit = backend.submit(TransferId(post.id), post.peer, post.mode, &segments, notify)?;
    Ok(Answer::Posted(match submit {
        Submit::Full => Posted::Full,
        Submit::Submitted => Posted::Submitted,
        Submit::Done { .. } => Posted::Done,
    }))
}

fn poll(backend: &dyn TransferBackend, room: u32) -> Vec<Seen> {
    let mut events = Events::with_limit(room as usize);
    backend.poll(&mut events);
    events.drain().filter_map(seen).collect()
}

/// An event, as it crosses to another process.
pub(crate) fn seen(event: Event) -> Option<Seen> {
    Some(match event {
        Event::Settled { id, outcome } => Seen::Settled {
            id: id.0,
            end: match outcome {
                Outcome::Done { .. } => End::Done,
                Outcome::Cancelled => End::Cancelled,
                Outcome::Failed(error) => End::Failed(error.into()),
                other => {
                    let error = Error::new(ErrorKind::Internal, "kit", format!("{other:?}"));
                    End::Failed(error.into())
                }
            },
        },
        Event::Notified { peer, payload } => Seen::Notified { peer, payload },
        Event::PeerDown { peer, error } => Seen::PeerDown { peer, error: error.map(Into::into) },
        _ => return None,
    })
}

/// Runs a future of a backend to its end on this thread, or gives it up.
pub(crate) fn within<R>(patience: Duration, future: impl Future<Output = Result<R>>) -> Result<R> {
    let mut future = std::pin::pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let begin = Instant::now();
    loop {
        if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
            return result;
        }
        let Some(left) = patience.checked_sub(begin.elapsed()) else {
            return Err(Error::new(ErrorKind::Internal, "kit", "the call did not end")
                .with_context("seconds", patience.as_secs_f32()));
        };
        std::thread::park_timeout(left.min(Duration::from_millis(20)));
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
