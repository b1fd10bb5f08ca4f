//! The backend: one engine's end of the fabric of this host.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use kvx_core::backend::{Events, PeerInfo, Submit, TransferBackend};
use kvx_core::capability::Capabilities;
use kvx_core::id::{Incarnation, PeerId, TransferId};
use kvx_core::thread::{gives_way, runs_briefly, runs_long};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::{Error, ErrorKind, Result};

use crate::config::Options;
use crate::engine::{READER_BOUND, Shared, start};
use crate::error::{BACKEND, down, misuse};
use crate::state::{Phase, State};

/// One engine's end of the fabric of this host. Dropping it ends the engine.
pub struct ShmBackend {
    pub(crate) shared: Arc<Shared>,
}

impl ShmBackend {
    /// Opens it: a socket under a name that only a card tells, a thread that sleeps on it, and threads that copy.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Resources`] when the operating system gives no descriptors, memory or threads; [`ErrorKind::Config`] when
    /// an option is out of range, or its threads may not run on a processor that the options name.
    pub fn open(options: &Options) -> Result<Arc<Self>> {
        options.check()?;
        if let Some(cpu) = crate::sys::numa::not_allowed(&options.cpus.0) {
            return Err(Error::config("open", "this process may not run on a processor that is named")
                .with_backend(BACKEND)
                .with_context("cpu", cpu)
                .with_remedy("name processors that there are (nproc --all) and that this process may use (taskset -p $$)"));
        }
        let (shared, listener) = Shared::new(options)?;
        let backend = Arc::new(Self { shared: Arc::new(shared) });
        let shared = &backend.shared;
        start(shared, "kvx-shm".into(), move |shared| {
            runs_briefly();
            shared.progress(listener);
        })?;
        for index in 0..options.copy_threads {
            start(shared, format!("kvx-shm-copy{index}"), |shared| {
                runs_long();
                gives_way(shared.options.copy_nice);
                shared.copy_jobs();
            })?;
        }
        Ok(backend)
    }
}

impl fmt::Debug for ShmBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShmBackend")
            .field("incarnation", &Incarnation::from_bytes(self.shared.incarnation))
            .field("options", &self.shared.options)
            .finish_non_exhaustive()
    }
}

impl Drop for ShmBackend {
    fn drop(&mut self) {
        self.shared.shut();
    }
}

#[async_trait]
impl TransferBackend for ShmBackend {
    fn name(&self) -> &'static str {
        BACKEND
    }

    fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    fn submit(
        &self,
        id: TransferId,
        peer: PeerId,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Result<Submit> {
        self.shared.submit(id, peer, mode, segments, notify)
    }

    fn poll(&self, events: &mut Events) {
        self.shared.poll(events);
    }

    fn cancel(&self, id: TransferId) -> Result<()> {
        self.shared.cancel(id)
    }

    fn sever(&self, peer: PeerId) -> Result<()> {
        let mut state = self.shared.lock();
        state.peer("sever", peer)?;
        self.shared.end(&mut state, peer, None);
        Ok(())
    }

    fn revoke(&self, peer: PeerId) -> Result<()> {
        let until = Instant::now() + READER_BOUND;
        let mut state = self.shared.lock();
        state.peer("revoke", peer)?;
        let link = state.peers.get(peer).and_then(|known| known.link.clone());
        self.shared.end(&mut state, peer, None);
        // This side carries out the peer's writes: none is, once its lane has no thread.
        while state.peers.get(peer).is_some_and(|known| known.serves.busy) {
            state = self.shared.wait_for_quiet(state, READER_BOUND);
        }
        drop(state);
        // The peer carries out its own reads: it has heard, or it begins none.
        let Some(link) = link else { return Ok(()) };
        while link.peer_is_reading() {
            if Instant::now() > until {
                return Err(down("revoke", "the peer stands still in the midst of a read")
                    .with_context("peer", peer)
                    .with_remedy("what it reads when it goes on it wipes and does not report; or end its process"));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    fn peer_info(&self, peer: PeerId) -> Result<PeerInfo> {
        let state = self.shared.lock();
        let known = state.peer("peer_info", peer)?;
        let info = PeerInfo::new(BACKEND);
        Ok(match known.used.name() {
            None => info,
            Some(route) => info.with_device(route),
        })
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.shared.porch.ready())
    }

    async fn connect(&self, peer: PeerId) -> Result<()> {
        let connected = |state: &State| {
            let known = state.peer("connect", peer)?;
            match &known.phase {
                Phase::Open if known.link.is_some() => Ok(true),
                Phase::Open if known.ready.is_none() => {
                    Err(misuse("connect", "the handshake with this peer is not complete"))
                }
                Phase::Open => Ok(false),
                over => Err(over.over("connect")),
            }
        };
        std::future::poll_fn(|context| {
            let mut state = self.shared.lock();
            match connected(&state) {
                Ok(true) => Poll::Ready(Ok(())),
                Ok(false) => {
                    state.wakes(context.waker());
                    Poll::Pending
                }
                Err(error) => Poll::Ready(Err(error)),
            }
        })
        .await
    }

    async fn close(&self) -> Result<()> {
        self.shared.shut();
        std::future::poll_fn(|context| {
            let mut state = self.shared.lock();
            if state.finished {
                return Poll::Ready(());
            }
            state.wakes(context.waker());
            Poll::Pending
        })
        .await;
        let threads =
            std::mem::take(&mut *self.shared.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let mut panicked = false;
        for thread in threads {
            panicked |= thread.join().is_err();
        }
        if panicked {
            return Err(Error::new(ErrorKind::Internal, "close", "a thread of the backend panicked")
                .with_backend(BACKEND));
        }
        Ok(())
    }
}
