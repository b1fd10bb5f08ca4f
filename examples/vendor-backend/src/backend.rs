//! The contract, each call in one place.

use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::task::Poll;

use async_trait::async_trait;
use kvx_core::backend::{Events, PeerInfo, Submit, TransferBackend};
use kvx_core::capability::Capabilities;
use kvx_core::id::{PeerId, TransferId};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::{Error, Result};

use crate::NAME;
use crate::config::Config;
use crate::connection::Shared;
use crate::probe::capabilities;
use crate::state::Stage;

/// One side of a fabric over plain TCP.
pub struct PlainTcp {
    pub(crate) shared: Arc<Shared>,
    capabilities: Capabilities,
}

impl PlainTcp {
    /// Opens it: from here on it listens.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`](kvx_core::ErrorKind::Unsupported): the address is not this host's.
    /// [`ErrorKind::Resources`](kvx_core::ErrorKind::Resources): no descriptor, thread or random number was to be had.
    pub fn open(config: &Config) -> Result<Self> {
        Ok(Self { shared: Shared::open(config)?, capabilities: capabilities() })
    }
}

impl fmt::Debug for PlainTcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlainTcp").field("address", &self.shared.address).finish_non_exhaustive()
    }
}

/// As `close`, without waiting.
impl Drop for PlainTcp {
    fn drop(&mut self) {
        self.shared.shut();
    }
}

#[async_trait]
impl TransferBackend for PlainTcp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(
        &self,
        id: TransferId,
        peer: PeerId,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Result<Submit> {
        let most = self.capabilities.limits.max_in_flight;
        self.shared.submit(id, peer, mode, segments, notify, most)
    }

    fn poll(&self, events: &mut Events) {
        self.shared.poll(events);
    }

    fn cancel(&self, id: TransferId) -> Result<()> {
        self.shared.cancel(id)
    }

    fn sever(&self, peer: PeerId) -> Result<()> {
        self.shared.with(|state| {
            state.peer("sever", peer)?;
            state.end(peer, None);
            Ok(())
        })
    }

    /// What a peer asks for is carried out under the lock, and only while its connection is there. So to end that is to end
    /// its access, whoever ends it.
    fn revoke(&self, peer: PeerId) -> Result<()> {
        self.sever(peer)
    }

    fn peer_info(&self, peer: PeerId) -> Result<PeerInfo> {
        self.shared.with(|state| state.peer("peer_info", peer).map(|_| PeerInfo::new("tcp")))
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.shared.readable.as_fd())
    }

    async fn connect(&self, peer: PeerId) -> Result<()> {
        std::future::poll_fn(|task| {
            self.shared.with(|state| match state.live("connect", peer) {
                Err(error) => Poll::Ready(Err(error)),
                Ok(known) => match known.stage {
                    Stage::Connected => Poll::Ready(Ok(())),
                    Stage::Dialling => {
                        known.wait(task);
                        Poll::Pending
                    }
                    _ => Poll::Ready(Err(Error::misuse(
                        "connect",
                        "the handshake with this peer is not complete",
                    )
                    .with_backend(NAME))),
                },
            })
        })
        .await
    }

    async fn close(&self) -> Result<()> {
        self.shared.shut();
        std::future::poll_fn(|task| self.shared.ended(task)).await;
        Ok(())
    }
}
