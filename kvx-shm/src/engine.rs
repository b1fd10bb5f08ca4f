//! What the backend and its threads share, and how connections begin and end.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvx_core::backend::Outcome;
use kvx_core::capability::Capabilities;
use kvx_core::id::{Incarnation, PeerId};
use kvx_core::limits::Wanted;
use kvx_core::{Error, Result};
use rustix::event::{EventfdFlags, epoll};

use crate::config::{Options, Users};
use crate::door::Porch;
use crate::error::{BACKEND, closed, denied, down, system};
use crate::handshake::Hand;
use crate::host::Host;
use crate::link::OwnTable;
use crate::state::{Phase, State};
use crate::sys::socket;

/// How long the last reader on the other side of a connection that is over is waited for. A reader looks up much more often;
/// one that does not by then is a process that stands still.
pub(crate) const READER_BOUND: Duration = Duration::from_millis(1000);

/// How long a peer has to answer once the handshake is complete.
pub(crate) const CONNECT_BOUND: Duration = Duration::from_secs(5);

/// How often a lock that is about to be free is tried for: 10 to 50 microseconds.
const SOON: u32 = 1000;

/// Most connections, those included that are over and wait to be polled.
const MOST_PEERS: usize = 4096;

pub(crate) const TOKEN_WAKE: u64 = 1 << 62;
pub(crate) const TOKEN_LISTENER: u64 = (1 << 62) + 1;

pub(crate) struct Shared {
    pub(crate) incarnation: [u8; 16],
    pub(crate) host: Host,
    pub(crate) options: Options,
    pub(crate) capabilities: Capabilities,
    pub(crate) table: OwnTable,
    pub(crate) epoll: OwnedFd,
    wake: OwnedFd,
    /// What a program sleeps on: readable while there are events, or a peer knocks.
    pub(crate) porch: Porch,
    /// Peers try to read this one's memory here.
    pub(crate) probe: Box<AtomicU64>,
    pub(crate) probe_value: u64,
    state: Mutex<State>,
    /// There is something to do for threads that copy.
    work: Condvar,
    /// Lanes wait for threads, and all threads copy: those that help are to stop doing so.
    wanted: AtomicBool,
    /// A lane of a connection that is over has no thread any more.
    quiet: Condvar,
    pub(crate) threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The name under which an engine listens. No file stands for it.
pub(crate) fn socket_name(incarnation: &[u8; 16]) -> String {
    format!("kvx-shm-{}", Incarnation::from_bytes(*incarnation))
}

/// A number that nobody can guess.
pub(crate) fn random() -> Result<u64> {
    let random = Incarnation::random()?;
    Ok(u64::from_le_bytes(*random.as_bytes().first_chunk().unwrap_or(&[0; 8])))
}

impl Shared {
    /// Everything but the threads, and the socket on which to listen.
    pub(crate) fn new(options: &Options) -> Result<(Self, OwnedFd)> {
        let failed = |error| system("open", "a descriptor cannot be had", error);
        let host = Host::here()
            .map_err(|error| system("open", "/proc does not say where this process is", error))?;
        let incarnation = *Incarnation::random()?.as_bytes();
        let listener = socket::listen(socket_name(&incarnation).as_bytes()).map_err(failed)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags).map_err(|e| failed(e.into()))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        for (source, token) in [(&wake, TOKEN_WAKE), (&listener, TOKEN_LISTENER)] {
            let data = epoll::EventData::new_u64(token);
            epoll::add(&epoll, source, data, epoll::EventFlags::IN)
                .map_err(|e| failed(e.into()))?;
        }
        let porch = Porch::new(options.users == Users::Same).map_err(failed)?;
        let table = OwnTable::new().map_err(failed)?;
        // Without it nobody could be told that there is none left.
        let spare = listener.try_clone().map_err(failed)?;
        let probe_value = random()?;
        let shared = Self {
            incarnation,
            host,
            options: options.clone(),
            capabilities: crate::probe::capabilities(&host),
            table,
            epoll,
            wake,
            porch,
            probe: Box::new(AtomicU64::new(probe_value)),
            probe_value,
            state: Mutex::new(State { spare: Some(spare), ..State::default() }),
            work: Condvar::new(),
            wanted: AtomicBool::new(false),
            quiet: Condvar::new(),
            threads: Mutex::default(),
        };
        Ok((shared, listener))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`lock`](Self::lock), for a program that was woken by the very peer for whom the thread that sleeps on the sockets has the
    /// lock: that thread is about to be done, and to fall asleep for it takes longer. The attempts are bounded.
    pub(crate) fn lock_soon(&self) -> MutexGuard<'_, State> {
        for _ in 0..SOON {
            match self.state.try_lock() {
                Ok(state) => return state,
                Err(TryLockError::Poisoned(state)) => return state.into_inner(),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        self.lock()
    }

    /// Makes the descriptor readable, as there are events. Of a program that looks by itself the thread that sleeps on the
    /// sockets sees it when it stops doing so.
    pub(crate) fn signal(&self, state: &mut State) {
        if !state.signalled && !state.events.is_empty() && !state.spins {
            state.signalled = true;
            self.porch.signal();
        }
    }

    /// The thread that sleeps on the sockets is to look at everything.
    pub(crate) fn wake(&self) {
        // It can fail only where the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    pub(crate) fn woken(&self) {
        let mut count = [0; 8];
        // It may have been read before.
        let _ = rustix::io::read(&self.wake, &mut count);
    }

    /// Wakes as many threads as there are jobs.
    pub(crate) fn employ(&self, state: &State) {
        if state.runnable.len() > state.idle {
            self.wanted.store(true, Relaxed);
        }
        match state.runnable.len() {
            0 => {}
            1 => self.work.notify_one(),
            _ => self.work.notify_all(),
        }
    }

    /// Wakes the threads that have nothing to do: they may help.
    pub(crate) fn call_for_help(&self, state: &State) {
        if state.idle > 0 {
            self.work.notify_all();
        }
    }

    /// Whether a thread that helps is to look for a lane that waits.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Relaxed)
    }

    /// No lane waits. To be called under the lock.
    pub(crate) fn wants_nobody(&self) {
        self.wanted.store(false, Relaxed);
    }

    pub(crate) fn wait_for_work<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
    ) -> MutexGuard<'a, State> {
        state.idle += 1;
        state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.idle -= 1;
        state
    }

    pub(crate) fn idle_lanes(&self) {
        self.quiet.notify_all();
    }

    pub(crate) fn wait_for_quiet<'a>(
        &self,
        state: MutexGuard<'a, State>,
        limit: Duration,
    ) -> MutexGuard<'a, State> {
        self.quiet.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Ends all threads.
    pub(crate) fn finish(&self, state: &mut State) {
        state.finished = true;
        state.early.clear();
        state.spare = None;
        self.work.notify_all();
        state.wakers.drain(..).for_each(std::task::Waker::wake);
    }

    /// The peer that a message of the handshake is from, known from now on.
    pub(crate) fn meet(
        &self,
        state: &mut State,
        operation: &'static str,
        hand: &Hand,
    ) -> Result<PeerId> {
        if state.closed {
            return Err(closed(operation));
        }
        if let Some(known) = state.known(&hand.from) {
            // It may have ended the connection, and this side not have heard of it yet.
            let over = state.peers.get(known).is_some_and(|peer| {
                let other = peer.their_word.is_some_and(|word| hand.word != 0 && word != hand.word);
                other || peer.link.as_ref().is_some_and(|link| socket::is_over(&link.socket))
            });
            if !over {
                return Ok(known);
            }
            self.end(state, known, Some("the peer has ended the connection".into()));
        }
        if state.peers.len() >= MOST_PEERS {
            return Err(Error::new(
                kvx_core::ErrorKind::Resources,
                operation,
                "no room for one more connection",
            )
            .with_backend(BACKEND)
            .with_context("connections", MOST_PEERS)
            .with_context("open", state.open.len())
            .with_remedy("poll, so that those that are over are forgotten, or sever some"));
        }
        let word = random()? | 1;
        let peer = state.peers.insert(crate::state::Peer::new(hand.from, hand.host, word));
        let peer = peer.ok_or_else(|| {
            Error::new(kvx_core::ErrorKind::Resources, operation, "as many peers as can be named")
                .with_backend(BACKEND)
        })?;
        state.open.insert(hand.from, peer);
        Ok(peer)
    }

    /// The handshake allows posting from now on. The word is the peer's.
    pub(crate) fn agree(
        &self,
        state: &mut State,
        operation: &'static str,
        peer: PeerId,
        word: u64,
    ) -> Result<()> {
        let Some(known) = state.peers.get_mut(peer) else {
            return Err(down(operation, "the connection is over"));
        };
        if word == 0 || known.their_word.is_some_and(|known| known != word) {
            return Err(down(operation, "the message belongs to another connection"));
        }
        known.their_word = Some(word);
        if known.ready.is_none() {
            known.ready = Some(Instant::now());
        }
        if operation == "complete"
            && known.link.is_none()
            && known.dialing.is_none()
            && let Err(error) = self.dial(state, peer)
        {
            self.end(state, peer, Some((&error).into()));
            return Err(error);
        }
        Ok(())
    }

    /// The kernel tells of this descriptor from now on.
    pub(crate) fn watch(&self, source: &OwnedFd, token: u64) -> std::io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        Ok(epoll::add(&self.epoll, source, data, flags)?)
    }

    /// As [`watch`](Self::watch), of nothing but its end.
    pub(crate) fn watch_end(&self, source: &OwnedFd, token: u64) -> std::io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::add(&self.epoll, source, data, epoll::EventFlags::RDHUP)?)
    }

    pub(crate) fn watch_no_more(&self, source: &OwnedFd) {
        // It may never have been watched.
        let _ = epoll::delete(&self.epoll, source);
    }

    /// Closes: everything ends, and the threads after it.
    pub(crate) fn shut(&self) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        state.closed = true;
        let peers: Vec<_> = state.peers.handles().collect();
        for peer in peers {
            self.end(&mut state, peer, None);
        }
        for registered in state.regions.drain() {
            if let Some((segment, _)) = registered.shared {
                state.uses_no_more(segment.number);
            }
        }
        drop(state);
        self.wake();
    }

    /// Puts what waits into the ring of a peer, in order, as far as there is room.
    pub(crate) fn flush(&self, state: &mut State, peer: PeerId) {
        let Some(known) = state.peers.get_mut(peer).filter(|known| known.phase == Phase::Open) else {
            return;
        };
        let Some(link) = known.link.clone() else { return };
        // Memory before the records that name it.
        while let Some((message, segment)) = known.unsent.front() {
            let carried = segment.as_ref().map(|segment| segment.own.fd());
            match socket::send(&link.socket, &message.encode(), carried.as_slice()) {
                Ok(true) => drop(known.unsent.pop_front()),
                // No room: the thread tries again. Or it is over, which the thread will hear.
                Ok(false) | Err(_) => return self.wake(),
            }
        }
        let mut settled = Vec::new();
        let (mut knocks, mut urgent) = (false, false);
        while let Some(outgoing) = known.out.front() {
            if !link.put(&outgoing.record) {
                // Whether or not the peer's program polls, its thread makes room.
                urgent = true;
                break;
            }
            knocks |= outgoing.for_program;
            urgent |= outgoing.for_thread;
            settled.extend(outgoing.settles);
            known.out.pop_front();
        }
        if known.out.is_empty() {
            link.wants_no_room();
        }
        if knocks {
            link.knock();
        }
        if urgent {
            link.ring_bell();
        }
        for id in settled {
            state.settle(id, Outcome::done());
        }
        self.signal(state);
    }
}

/// Starts a thread of the backend's.
pub(crate) fn start(
    shared: &Arc<Shared>,
    name: String,
    life: impl FnOnce(Arc<Shared>) + Send + 'static,
) -> Result<()> {
    let own = Arc::clone(shared);
    let thread = std::thread::Builder::new()
        .name(name)
        .spawn(move || {
            let cpus = &own.options.cpus.0;
            if !cpus.is_empty()
                && let Err(error) = crate::sys::numa::pin(cpus)
            {
                tracing::warn!(backend = BACKEND, ?cpus, %error, "the thread cannot be pinned");
            }
            life(own);
        })
        .map_err(|error| denied("open", "a thread cannot be started", error, Wanted::Thread))?;
    shared.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
    Ok(())
}
