//! The backend: one engine's end of the fabric.

use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, PoisonError};
use std::task::Poll;

use async_trait::async_trait;
use kvx_core::backend::{Events, PeerInfo, Submit, TransferBackend};
use kvx_core::capability::Capabilities;
use kvx_core::id::{Incarnation, PeerId, TransferId};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::{Error, ErrorKind, Result};

use crate::config::Options;
use crate::error::{BACKEND, down, misuse, system};
use crate::contact::{Contact, Way};
use crate::peer::Peer;
use crate::shared::{Counters, Shared};

/// One engine's end of UCX. Dropping it ends the engine.
pub struct UcxBackend {
    pub(crate) shared: Arc<Shared>,
}

impl UcxBackend {
    /// Opens it: a context, a worker, and a thread that sleeps on the worker's descriptor.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Unsupported`]: there is no UCX, or it finds none of what is asked for.
    /// - [`ErrorKind::Config`]: a setting that it does not know, or another library than the one that this process has.
    /// - [`ErrorKind::Resources`]: no descriptors, memory or threads.
    pub fn open(options: &Options) -> Result<Arc<Self>> {
        let shared = Arc::new(Shared::new(options)?);
        shared.watch();
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("kvx-ucx".into());
        let thread = thread
            .spawn(move || {
                // It is woken for what others wait for, and does little itself.
                kvx_core::thread::runs_briefly();
                own.progress();
            })
            .map_err(|error| system("open", "a thread cannot be had", error))?;
        *shared.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(Arc::new(Self { shared }))
    }

    /// What its messages to peers carried so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.shared.look(|core| core.counters)
    }
}

impl fmt::Debug for UcxBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UcxBackend")
            .field("incarnation", &Incarnation::from_bytes(self.shared.incarnation))
            .field("options", &self.shared.options)
            .finish_non_exhaustive()
    }
}

impl Drop for UcxBackend {
    fn drop(&mut self) {
        self.shared.shut();
    }
}

#[async_trait]
impl TransferBackend for UcxBackend {
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
        self.shared.with(|core| core.submit(id, peer, mode, segments, notify))
    }

    fn poll(&self, events: &mut Events) {
        self.shared.with(|core| core.poll(events));
    }

    fn cancel(&self, id: TransferId) -> Result<()> {
        self.shared.with(|core| core.cancel(id))
    }

    fn sever(&self, peer: PeerId) -> Result<()> {
        self.shared.with(|core| {
            core.peer("sever", peer)?;
            core.end(peer, None);
            Ok(())
        })
    }

    fn peer_info(&self, peer: PeerId) -> Result<PeerInfo> {
        self.shared.look(|core| {
            let known = core.peer("peer_info", peer)?;
            Ok(match &known.way {
                Some(Way { contact: Contact::Made(info, _), .. }) => info.clone(),
                _ => PeerInfo::new(BACKEND),
            })
        })
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.shared.ready.as_fd())
    }

    async fn connect(&self, peer: PeerId) -> Result<()> {
        std::future::poll_fn(|context| {
            self.shared.with(|core| {
                let open = match core.peer("connect", peer) {
                    Ok(known) if known.is_open() && !known.ready => {
                        let error =
                            misuse("connect", "the handshake with this peer is not complete");
                        return Poll::Ready(Err(error));
                    }
                    Ok(known) => known.is_open(),
                    Err(error) => return Poll::Ready(Err(error)),
                };
                if open
                    && let Err(error) = core.way("connect", peer)
                    && core.peers.get(peer).is_some_and(Peer::is_open)
                {
                    core.end(peer, Some(error.again()));
                    return Poll::Ready(Err(error));
                }
                let way = core.peers.get(peer).and_then(|known| known.way.as_ref());
                match way {
                    Some(Way { contact: Contact::Made(..), .. }) => Poll::Ready(Ok(())),
                    Some(_) => {
                        core.wakes(context.waker());
                        Poll::Pending
                    }
                    None => {
                        let why = core.peers.get(peer).and_then(|known| known.why.as_ref());
                        let error = why.map_or_else(|| down("connect", "the connection is over"), Error::again);
                        Poll::Ready(Err(error))
                    }
                }
            })
        })
        .await
    }

    async fn close(&self) -> Result<()> {
        self.shared.shut();
        std::future::poll_fn(|context| {
            self.shared.look(|core| {
                if core.finished {
                    return Poll::Ready(());
                }
                core.wakes(context.waker());
                Poll::Pending
            })
        })
        .await;
        let thread = self.shared.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            return Err(Error::new(ErrorKind::Internal, "close", "the backend's thread panicked")
                .with_backend(BACKEND));
        }
        Ok(())
    }
}
