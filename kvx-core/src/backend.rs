//! **The contract of a fabric.** The first file that a vendor reads.
//!
//! A fabric is one type that implements [`TransferBackend`] (with [`MemoryRegistry`] and [`Handshake`] beneath it), used as
//! `Arc<dyn TransferBackend>`, and one line of [`register_backend!`](crate::register_backend).
//!
//! *Core validates, backends translate.* The [`Port`](crate::port::Port) in front of a backend has checked every segment
//! against its regions, split by the backend's limits, counted what is in flight, and keeps regions alive until their
//! transfers settle. A backend checks only what it alone can know: that handles are its own and not stale.
//!
//! # The data path
//!
//! [`submit`](TransferBackend::submit) posts a batch, [`poll`](TransferBackend::poll) brings events. One dynamic call per
//! batch, none per segment. The contract, each point of which has a conformance test:
//!
//! 1. *Settled* is reported exactly once for every submitted transfer, with its outcome: by an event, or, where it is done
//!    before the call returns, by [`Submit::Done`].
//! 2. *Settled* as done, and *notified*, mean that the data is visible to users of that kind of memory at the place that
//!    was written.
//! 3. A notification is delivered after the data that it follows, at most once, whoever polls; and not at all when the
//!    transfer failed before its data was complete.
//! 4. Nobody depends on the *other* side's application polling. A backend whose target side is software runs its own
//!    sleeping progress thread from the first registration.
//! 5. Cancelling is best effort; *settled* is the only proof that the memory is quiet.
//! 6. After [`sever`](TransferBackend::sever) all my transfers to that peer settle within a bound, also when the peer is
//!    stopped.
//! 7. *Peer down* comes after that peer's last *settled*. Where [`Capabilities::revoke`] is
//!    [`Revoke::PerPeer`](crate::capability::Revoke::PerPeer), it also means that this peer's access to my memory has ended,
//!    whoever ended the connection.
//! 8. A stale handle is an error, never an access.
//! 9. `Full` and every error of `submit` mean that nothing was posted.
//!
//! What waits to be polled is bounded, so that an engine that does not poll harms nobody: a transfer is in flight, and counts
//! for [`Limits::max_in_flight`](crate::capability::Limits::max_in_flight), until its *settled* was polled, so that whoever
//! does not poll soon gets `Full`. A notification for which its receiver has no room keeps its transfer from settling, or
//! its poster gets `Full`, until there is room or the connection is over. Whoever lets too many ended connections wait gets
//! no new one.
//!
//! # Three different events
//!
//! *Locally reusable* (a written buffer may be overwritten), *remotely visible* (the peer can read what was written) and
//! *notified* (the peer was told) are three events. kvx reports the second as settled and the third as notified; the first
//! is never reported apart.

use std::fmt;
use std::os::fd::BorrowedFd;

use async_trait::async_trait;

use crate::capability::Capabilities;
use crate::error::{Error, Result};
use crate::handshake::Handshake;
use crate::id::{PeerId, TransferId};
use crate::memory::MemoryRegistry;
use crate::transfer::{Mode, PostedSegment};

/// A fabric. See the [module documentation](self) for the contract.
#[async_trait]
pub trait TransferBackend: MemoryRegistry + Handshake + fmt::Debug + Send + Sync {
    /// The name under which it is registered.
    fn name(&self) -> &'static str;

    /// What it can do. Does not change while it is open.
    fn capabilities(&self) -> &Capabilities;

    /// Posts a batch to `peer`: reads into, or writes from, my memory. With `notify`, the peer receives these bytes once
    /// all data of the batch is visible to it (for a read: once all of it was read).
    ///
    /// `segments` may be empty only with `notify`: a bare notification, ordered after nothing. `id` is the caller's, and
    /// unique among transfers not yet settled. Small batches may be done within the call, which then may say so instead of
    /// an event ([`Submit::Done`]).
    ///
    /// # Errors
    ///
    /// Nothing was posted when this fails.
    ///
    /// - [`ErrorKind::Misuse`](crate::ErrorKind::Misuse): a stale or unknown handle, or a notification over the limit.
    /// - [`ErrorKind::Peer`](crate::ErrorKind::Peer): the peer is down, with [`Retry::Reconnect`](crate::Retry).
    fn submit(
        &self,
        id: TransferId,
        peer: PeerId,
        mode: Mode,
        segments: &[PostedSegment],
        notify: Option<&[u8]>,
    ) -> Result<Submit>;

    /// Appends events to `events`, as many as there are up to its [`room`](Events::room), and makes progress. Never
    /// blocks. Any thread may call it; each event is given to one caller.
    fn poll(&self, events: &mut Events);

    /// Asks that a transfer be given up. Best effort: it still settles, as cancelled or otherwise, and until then its
    /// memory is in use.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) when no such transfer is in flight (it may just have settled).
    fn cancel(&self, id: TransferId) -> Result<()>;

    /// Ends my transfers to `peer` and the connection. Every transfer in flight settles within
    /// [`SEVER_BOUND`], then *peer down* is reported, and the handle is stale.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) for a stale or unknown handle.
    fn sever(&self, peer: PeerId) -> Result<()>;

    /// Ends `peer`'s access to all of my memory. Once it returns `Ok`, not one more byte of it is read or written by that
    /// peer. Offered where [`Capabilities::revoke`] is [`Revoke::PerPeer`](crate::capability::Revoke::PerPeer); includes
    /// [`sever`](Self::sever).
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): the capability says so.
    /// - [`ErrorKind::Misuse`](crate::ErrorKind::Misuse): a stale or unknown handle.
    fn revoke(&self, peer: PeerId) -> Result<()> {
        let _ = peer;
        Err(Error::unsupported("revoke", "this backend cannot end a peer's access")
            .with_backend(self.name()))
    }

    /// What the connection to `peer` really uses.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) for a stale or unknown handle.
    fn peer_info(&self, peer: PeerId) -> Result<PeerInfo>;

    /// A descriptor that becomes readable when [`poll`](Self::poll) has events to give, where
    /// [`Capabilities::event_fd`] says so.
    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Waits until transfers can be posted to a peer whose handshake is complete. Returns at once where nothing is left
    /// to do.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Peer`](crate::ErrorKind::Peer) or [`ErrorKind::Fabric`](crate::ErrorKind::Fabric) when it cannot be
    /// reached, within a bounded time.
    async fn connect(&self, peer: PeerId) -> Result<()>;

    /// Severs every peer, waits until all is settled and frees everything. Idempotent. Dropping the last `Arc` does the
    /// same without waiting.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Fabric`](crate::ErrorKind::Fabric) when something could not be shut down cleanly.
    async fn close(&self) -> Result<()>;
}

/// The longest time from [`TransferBackend::sever`] until the last transfer to that peer has settled.
pub const SEVER_BOUND: std::time::Duration = std::time::Duration::from_secs(2);

/// What became of a call to [`TransferBackend::submit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a full queue means that nothing was posted"]
pub enum Submit {
    /// Posted: a settled event will follow.
    Submitted,
    /// Posted and done, all of it, its notification on its way: no event will follow. Saves those who wait for something
    /// small from being woken for it.
    Done {
        /// As in [`Outcome::Done`].
        route: Option<&'static str>,
    },
    /// No room now: nothing was posted. Try again after some transfer settled.
    Full,
}

impl Submit {
    /// Whether it was posted.
    #[must_use]
    pub const fn is_posted(self) -> bool {
        !matches!(self, Self::Full)
    }
}

/// Something that happened.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A transfer is over: its memory is quiet on this side.
    Settled {
        /// Which one.
        id: TransferId,
        /// How it ended.
        outcome: Outcome,
    },
    /// A peer's transfer, or bare notification, arrived with these bytes.
    Notified {
        /// From whom.
        peer: PeerId,
        /// The bytes.
        payload: Vec<u8>,
    },
    /// The connection to a peer is over. Its last settled event came before this one. Where [`Capabilities::revoke`] is
    /// [`Revoke::PerPeer`](crate::capability::Revoke::PerPeer), that peer no longer reads or writes any of my memory.
    PeerDown {
        /// Which peer. The handle is stale from now on.
        peer: PeerId,
        /// Why: an error, or `None` when this side severed it.
        error: Option<Error>,
    },
}

/// How a transfer ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// All its data is where it belongs, and visible there.
    Done {
        /// By which of the backend's ways its bytes went, where it has several and knows: a name, or several names in
        /// alphabetical order with `+` between them. Ways that depend on the peer alone are in [`PeerInfo`].
        route: Option<&'static str>,
    },
    /// It was cancelled: any part of the data may have been moved.
    Cancelled,
    /// It failed: any part of the data may have been moved.
    Failed(Error),
}

impl Outcome {
    /// Done, by the only way that there is.
    #[must_use]
    pub const fn done() -> Self {
        Self::Done { route: None }
    }

    /// Whether all data arrived.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        matches!(self, Self::Done { .. })
    }
}

/// Where [`TransferBackend::poll`] puts events: a buffer of the caller's, with a bound.
#[derive(Debug)]
pub struct Events {
    list: Vec<Event>,
    limit: usize,
}

impl Events {
    /// A buffer for up to `limit` events (at least 1).
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        let limit = limit.max(1);
        Self { list: Vec::with_capacity(limit.min(1024)), limit }
    }

    /// How many more events it takes.
    #[must_use]
    pub fn room(&self) -> usize {
        self.limit - self.list.len()
    }

    /// Appends an event.
    ///
    /// Where there is no room the event is kept all the same: nothing is lost to a backend that miscounts.
    pub fn push(&mut self, event: Event) {
        debug_assert!(self.room() > 0, "more events than the caller has room for");
        self.list.push(event);
        self.limit = self.limit.max(self.list.len());
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Takes all events, oldest first.
    pub fn drain(&mut self) -> impl Iterator<Item = Event> + '_ {
        self.list.drain(..)
    }
}

/// What a connection really uses.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct PeerInfo {
    /// Transport, as the fabric calls it: `rc_mlx5`, `tcp`, `shm`, ...
    pub transport: String,
    /// Device or interface, where there is one.
    pub device: Option<String>,
}

impl PeerInfo {
    /// A connection over `transport`.
    #[must_use]
    pub fn new(transport: impl Into<String>) -> Self {
        Self { transport: transport.into(), device: None }
    }

    /// Names the device.
    #[must_use]
    pub fn with_device(mut self, device: impl Into<String>) -> Self {
        self.device = Some(device.into());
        self
    }
}
