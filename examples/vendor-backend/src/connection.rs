//! What the threads share, and the threads themselves: one listens, and for each connection one or two sleep on it.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvx_core::Result;
use kvx_core::id::Incarnation;
use rustix::event::{EventfdFlags, eventfd};

use crate::config::Config;
use crate::error::resources;
use crate::probe::REMEDY;
use crate::state::{State, park};

/// Most connections that have not said yet whose they are.
pub(crate) const MAX_STRANGERS: usize = 32;

/// What the backend and its threads share.
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Something was posted, or a connection is over.
    stir: Condvar,
    pub(crate) incarnation: Incarnation,
    pub(crate) address: SocketAddr,
    listener: TcpListener,
    /// Readable while there are events.
    pub(crate) readable: OwnedFd,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Listens at a free port.
    pub(crate) fn open(config: &Config) -> Result<Arc<Self>> {
        let listener = TcpListener::bind((config.address, 0)).map_err(|error| {
            resources("open", "it cannot listen", error)
                .with_kind(kvx_core::ErrorKind::Unsupported)
                .with_context("address", config.address)
                .with_remedy(REMEDY)
        })?;
        let address = listener.local_addr();
        let address = address.map_err(|error| resources("open", "no address", error))?;
        let readable = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| resources("open", "no event descriptor", error))?;
        let shared = Arc::new(Self {
            state: Mutex::default(),
            stir: Condvar::new(),
            incarnation: Incarnation::random()?,
            address,
            listener,
            readable,
            handles: Mutex::default(),
        });
        shared.spawn("tcp-listen", |shared| shared.listen())?;
        Ok(shared)
    }

    /// Acts on the state, then wakes whoever waits for what came of it.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        let mut state = lock(&self.state);
        let result = act(&mut state);
        let any = !state.events.is_empty();
        if any != state.signalled {
            state.signalled = any;
            // Neither can fail: the counter is 0 or 1.
            let _ = if any {
                rustix::io::write(&self.readable, &1_u64.to_ne_bytes())
            } else {
                rustix::io::read(&self.readable, &mut [0; 8])
            };
        }
        let stirred = std::mem::take(&mut state.stirred);
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        if stirred {
            self.stir.notify_all();
        }
        wakers.into_iter().for_each(std::task::Waker::wake);
        result
    }

    /// Sleeps until `look` finds something, `patience` long at most, if that is said.
    pub(crate) fn sleep_until<R>(
        &self,
        patience: Option<Duration>,
        mut look: impl FnMut(&mut State) -> Option<R>,
    ) -> Option<R> {
        let begin = Instant::now();
        let mut state = lock(&self.state);
        loop {
            if let Some(found) = look(&mut state) {
                return Some(found);
            }
            state = match patience.map(|patience| patience.checked_sub(begin.elapsed())) {
                None => self.stir.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Some(left)) => {
                    let waited = self.stir.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                Some(None) => return None,
            };
        }
    }

    /// Starts a thread that `close` waits for.
    pub(crate) fn spawn(
        self: &Arc<Self>,
        name: &str,
        task: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) -> Result<()> {
        self.with(|state| state.threads += 1);
        let running = Running(Arc::clone(self));
        let thread = std::thread::Builder::new().name(name.into());
        let handle = thread
            .spawn(move || task(&running.0))
            .map_err(|error| resources("connection", "no thread was to be had", error))?;
        let mut handles = lock(&self.handles);
        handles.retain(|handle| !handle.is_finished());
        handles.push(handle);
        Ok(())
    }

    /// Takes connections until it is closed.
    fn listen(self: &Arc<Self>) {
        loop {
            let accepted = self.listener.accept();
            if self.with(|state| state.closed) {
                return;
            }
            match accepted {
                Ok((stream, _)) => self.welcome(Arc::new(stream)),
                // Most likely there are no descriptors: to try at once would burn a processor.
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Serves a connection. Where there are too many strangers already, the one that has said nothing for longest goes: a
    /// peer says at once who it is, so a crowd that does not keeps no peer out.
    fn welcome(self: &Arc<Self>, stream: Arc<TcpStream>) {
        let entered = self.with(|state| {
            if state.closed {
                return None;
            }
            if state.strangers.len() >= MAX_STRANGERS
                && let Some((_, oldest)) = state.strangers.pop_first()
            {
                let _ = oldest.shutdown(Shutdown::Both);
            }
            let number = state.slot().ok()?;
            state.strangers.insert(number, Arc::clone(&stream));
            Some(number)
        });
        let Some(number) = entered else { return };
        if self.spawn("tcp-serve", move |shared| shared.serve(number, &stream)).is_err() {
            self.with(|state| state.strangers.remove(&number));
        }
    }

    /// Ends everything, and waits for nothing.
    pub(crate) fn shut(&self) {
        let (regions, strangers) = self.with(|state| {
            state.closed = true;
            for peer in state.peers.keys().copied().collect::<Vec<_>>() {
                state.end(peer, None);
            }
            (std::mem::take(&mut state.regions), std::mem::take(&mut state.strangers))
        });
        drop(regions);
        for stream in strangers.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        // Wakes the thread that listens.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
    }

    /// Ready when no thread runs any more.
    pub(crate) fn ended(&self, task: &Context<'_>) -> Poll<()> {
        let running = self.with(|state| {
            if state.threads > 0 {
                park(&mut state.closing, task);
            }
            state.threads > 0
        });
        if running {
            return Poll::Pending;
        }
        for handle in std::mem::take(&mut *lock(&self.handles)) {
            // It has nothing left to do. Its panic, if there was one, was reported.
            let _ = handle.join();
        }
        Poll::Ready(())
    }
}

/// A thread that runs, or is about to.
struct Running(Arc<Shared>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.with(|state| {
            state.threads -= 1;
            if state.threads == 0 {
                let mut closing = std::mem::take(&mut state.closing);
                state.wakers.append(&mut closing);
            }
        });
    }
}
