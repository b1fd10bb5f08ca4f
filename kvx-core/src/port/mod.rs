//! The safe front over a backend.
//!
//! A [`Port`] checks every segment against its regions, splits by the backend's limits, keeps regions alive until their
//! transfers settle, and counts what is in flight: a backend never sees what is out of range, too much or stale, and a
//! caller never sees a full queue. It is used by the connector, and by anyone with no need of leases. A backend belongs to
//! one port: two would take each other's events.
//!
//! ```no_run
//! # use kvx_core::{Result, port::Port, memory::Region, transfer::{Mode, Segment}, id::PeerId, memory::KeyBlob};
//! # async fn f(port: Port, peer: PeerId, their_key: KeyBlob) -> Result<()> {
//! let region = port.register(&Region::host(1 << 20)?)?;
//! let mine = port.region_set(&[region])?;
//! port.add_regions(peer, &[(their_key, 1 << 20)])?;
//! let all =
//!     Segment { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, bytes: 1 << 20 };
//! let report = port.transfer(peer, Mode::Read, &mine, &[all], Some(b"read"))?.await?;
//! println!("{} bytes over {}", report.bytes, report.transport);
//! # Ok(())
//! # }
//! ```
//!
//! # A transfer's states
//!
//! ```text
//!            ┌──── full ─────┐
//!            ▼               │
//! ──────▶ queued ────▶ posting ────▶ drained ────▶ settled
//!            ▲               │          ▲
//!            └──── held ◀────┴─ failed ─┘
//! ```
//!
//! - *queued*: its next batch waits in its peer's queue, for its turn and for credit.
//! - *posting*: one thread hands its next batch to the backend. Back to *queued* while batches remain.
//! - *held*: only the last batch, which carries the notification, is left, and others are in flight. Queued again, first in
//!   line, when they have all settled as done.
//! - *failed*: something went wrong or it was cancelled. Nothing more of it is posted, the notification included; what is in
//!   flight is waited for.
//! - *drained*: nothing is left to post.
//! - *settled*: nothing is in flight, either: the outcome is known, and the memory is released.
//!
//! What every transition keeps:
//!
//! 1. A batch is entered as in flight before the backend is called, and taken out only when it settles, or when the backend
//!    said that nothing was posted. So a batch may settle before the call that posted it returns.
//! 2. A transfer holds the regions that it uses from the call until it is settled, whoever drops its handle. So a region can
//!    be deregistered only when no transfer uses it.
//! 3. A transfer settles once, after every batch of it that was posted has settled, also when it failed.
//! 4. The notification is handed to the backend with the last batch, and only when every other batch of the transfer has
//!    settled as done. So it is sent at most once, and never when any of the data failed.
//! 5. At most `max_in_flight` batches to one peer are in flight. A batch that is refused as full is the same batch when it
//!    is tried again: when anything has settled, or at the next [`poll`](Port::poll) when nothing is in flight.
//! 6. Transfers to one peer are begun in the order of the calls; one that is held lets the others pass.
//! 7. A peer that goes down takes its queue and keys with it. Its transfers fail, and settle as in 3. Its handle is stale.
//! 8. No lock is held while the backend is called, a task is woken or memory is freed, but for one that keeps two threads
//!    from polling at once: events are routed in the order in which the backend gave them.
//!
//! # Who moves it along
//!
//! [`Port::poll`] does, whoever calls it. [`Port::drive`] is a task that does. Without a driver each waiting future polls;
//! see there. Programs without a runtime call [`Transfer::wait`] and [`Port::wait_notified`].
//!
//! When the last [`Port`] and [`Transfer`] of a backend are dropped without [`close`](Port::close), the backend is dropped
//! too, unless the program holds it elsewhere: it then ends what is in flight by itself and holds the memory until that is
//! quiet, as its [contract](crate::backend) demands.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::backend::{Events, SEVER_BOUND, TransferBackend};
use crate::capability::Capabilities;
use crate::error::{Error, ErrorKind, Result};

mod drive;
mod peers;
mod progress;
mod regions;
mod settle;
mod split;
mod state;
mod stats;
mod transfer;
mod waiters;

#[cfg(test)]
mod tests;

pub use regions::RegionSet;
pub use stats::PortStats;
pub use transfer::{Transfer, TransferReport};

use state::{Effects, Stage, State};

/// Most events that one [`Port::poll`] takes.
const EVENTS_PER_POLL: usize = 256;

/// The longest sleep of a wait that blocks, before it looks again.
const DOZE: Duration = Duration::from_millis(1);

/// Most notifications kept until they are taken: see [`Port::next_notification`].
pub const KEPT_NOTIFICATIONS: usize = 8192;

/// The safe front over a backend. See the [module documentation](self). Cheap to clone; all clones are one port.
#[derive(Clone)]
pub struct Port {
    inner: Arc<Inner>,
}

struct Inner {
    /// Tells this port's region sets from another's.
    number: u64,
    backend: Arc<dyn TransferBackend>,
    capabilities: Capabilities,
    /// Held while events are taken and routed; before `state`, never after it.
    events: Mutex<Events>,
    state: Mutex<State>,
    /// Drivers that run.
    drivers: AtomicUsize,
    /// Held by the thread that sleeps on the backend's descriptor, in a wait that blocks.
    dozing: Mutex<()>,
}

impl Port {
    /// A port over `backend`, which from now on is polled by nobody else.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Internal`]: the backend's capabilities contradict each other ([`Capabilities::check`]).
    pub fn new(backend: Arc<dyn TransferBackend>) -> Result<Self> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let capabilities = backend.capabilities().clone();
        capabilities.check().map_err(|error| error.with_backend(backend.name()))?;
        if capabilities.event_fd && backend.event_fd().is_none() {
            return Err(Error::new(
                ErrorKind::Internal,
                "capabilities",
                "an event descriptor is claimed, but there is none",
            )
            .with_backend(backend.name()));
        }
        Ok(Self {
            inner: Arc::new(Inner {
                number: NUMBERS.fetch_add(1, Ordering::Relaxed),
                backend,
                capabilities,
                events: Mutex::new(Events::with_limit(EVENTS_PER_POLL)),
                state: Mutex::new(State::default()),
                drivers: AtomicUsize::new(0),
                dozing: Mutex::new(()),
            }),
        })
    }

    /// What the backend can do.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.inner.capabilities
    }

    /// The name under which the backend is registered.
    #[must_use]
    pub fn backend_name(&self) -> &'static str {
        self.inner.backend.name()
    }

    /// A descriptor that becomes readable when [`poll`](Self::poll) has something to do, where the backend has one: for
    /// programs that sleep on several things at once. See [`wants_poll`](Self::wants_poll).
    #[must_use]
    pub fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.backend.event_fd()
    }

    /// Whether it must be polled again before long though no descriptor says so: the backend has none and something is in
    /// flight, or it had no room and nothing is.
    #[must_use]
    pub fn wants_poll(&self) -> bool {
        let state = self.inner.lock();
        state.only_time_helps() || !self.inner.capabilities.event_fd && !state.transfers.is_empty()
    }

    /// Counters of the whole port.
    #[must_use]
    pub fn stats(&self) -> PortStats {
        let state = self.inner.lock();
        PortStats {
            in_flight: state.batches.len() as u64,
            unsettled: state.transfers.len() as u64,
            ..state.stats
        }
    }

    /// Closes the port and its backend. Peers are severed, so that everything settles within a bound: whoever wants
    /// transfers to be done awaits them first. Notifications that arrive from now on are discarded and counted. Idempotent.
    ///
    /// Gives way to other tasks while it waits, in any executor.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Fabric`]: the backend could not be shut down cleanly, or some transfers did not settle within twice
    /// [`SEVER_BOUND`]; the memory that those use is held on to as long as the port exists.
    pub async fn close(&self) -> Result<()> {
        const OPERATION: &str = "port.close";
        let mut effects = Effects::default();
        let peers: Vec<_> = {
            let mut state = self.inner.lock();
            if state.stage == Stage::Closed {
                return Ok(());
            }
            state.stage = Stage::Closing;
            state.give_up(|_| true, || state::closed("port.transfer"), &mut effects);
            state.peers.keys().copied().collect()
        };
        self.inner.run(effects);
        for peer in peers {
            // An error says that it is down already.
            let _down = self.inner.backend.sever(peer);
        }
        let bound = SEVER_BOUND * 2;
        self.until(bound, |state| state.transfers.is_empty()).await;
        let closed = self.inner.backend.close().await;
        while self.poll() > 0 {}
        self.forget(OPERATION).and(closed)
    }

    /// The last step of closing: forgets everything but what transfers that did not settle still use.
    fn forget(&self, operation: &'static str) -> Result<()> {
        let mut wake = Vec::new();
        let mut state = self.inner.lock();
        state.stage = Stage::Closed;
        state.waiters.take_all(&mut wake);
        let left = state.transfers.len();
        let peers = std::mem::take(&mut state.peers);
        let regions =
            if left == 0 { std::mem::take(&mut state.regions) } else { Default::default() };
        drop(state);
        drop((peers, regions));
        for waker in wake {
            waker.wake();
        }
        if left == 0 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Fabric, operation, "transfers did not settle")
            .with_backend(self.backend_name())
            .with_context("transfers", left))
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port")
            .field("backend", &self.backend_name())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A driver sleeps without holding the port: it is told that there is none.
        let mut wake = Vec::new();
        self.lock().waiters.take_all(&mut wake);
        for waker in wake {
            waker.wake();
        }
    }
}
