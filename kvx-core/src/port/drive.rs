//! Waiting without blocking: driving a port, and tasks that wait for more than one transfer.

use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Sleep;

use super::state::{Stage, State};
use super::waiters::Topic;
use super::{Inner, Port};
use crate::error::{Error, ErrorKind, Result};
use crate::id::PeerId;

/// How long a driver sleeps when only time can help: nothing is in flight, and the backend has no descriptor to sleep on or
/// said full.
const NAP: Duration = Duration::from_millis(1);
/// Most polls of the port in one poll of its driver.
const ROUNDS: usize = 16;

impl Port {
    /// Moves the port along until it is closed or its last [`Port`] is dropped. **Run one such future per port**, as a task
    /// of a tokio runtime with I/O and time enabled:
    ///
    /// ```no_run
    /// # fn f(port: kvx_core::port::Port) {
    /// let driver = tokio::spawn(port.drive());
    /// # }
    /// ```
    ///
    /// Where the backend has an event descriptor, it sleeps on that, and uses no time while nothing happens. Where it has
    /// none, it polls: giving way to other tasks in between while transfers are in flight, and every millisecond otherwise.
    ///
    /// While it runs (from its first poll on), futures of this port sleep until it wakes them. Without it each of them polls
    /// the port itself and wakes itself again, which works in any executor and keeps one core busy. Dropping it at any time
    /// loses nothing.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`]: it does not run in a tokio runtime. [`ErrorKind::Resources`]: the descriptor could not be
    /// watched.
    ///
    /// # Panics
    ///
    /// In a tokio runtime without I/O or time.
    pub fn drive(&self) -> impl Future<Output = Result<()>> + Send + 'static {
        drive(Arc::downgrade(&self.inner))
    }

    /// Whether a driver runs.
    pub(super) fn is_driven(&self) -> bool {
        self.inner.drivers.load(Ordering::SeqCst) > 0
    }

    /// The next notification: from whom, and its bytes. Cancel-safe.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`]: the port was closed, and none is left.
    pub async fn notified(&self) -> Result<(PeerId, Vec<u8>)> {
        self.taken("port.notified", Topic::Notified, Self::next_notification).await
    }

    /// The next peer-down event: which peer, and why (`None` when this side severed it). Cancel-safe.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`]: the port was closed, and none is left.
    pub async fn peer_down(&self) -> Result<(PeerId, Option<Error>)> {
        self.taken("port.peer_down", Topic::PeerDown, Self::next_peer_down).await
    }

    async fn taken<T>(
        &self,
        operation: &'static str,
        topic: Topic,
        take: impl Fn(&Self) -> Option<T>,
    ) -> Result<T> {
        self.wait_for(topic, || match take(self) {
            Some(value) => Some(Ok(value)),
            None => self.inner.lock().unclosed(operation).err().map(Err),
        })
        .await
    }

    /// Waits until `check` holds, looking whenever a transfer settles or a peer goes down.
    pub(super) async fn until_settled(&self, check: impl Fn(&State) -> bool) {
        self.wait_for(Topic::Settled, || check(&self.inner.lock()).then_some(())).await;
    }

    /// Waits until `check` gives something, looking whenever something happens on `topic`.
    async fn wait_for<T>(&self, topic: Topic, check: impl Fn() -> Option<T>) -> T {
        let seat = Seat::new(&self.inner, topic);
        poll_fn(|context| {
            // The seat is taken before looking, so that nothing is missed in between.
            seat.sit(context);
            if let Some(value) = check() {
                return Poll::Ready(value);
            }
            if self.is_driven() {
                return Poll::Pending;
            }
            self.try_poll();
            if let Some(value) = check() {
                return Poll::Ready(value);
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await
    }

    /// Polls until `check` holds, giving way to other tasks, for at most `bound`. Returns whether it holds. Used where time
    /// must pass in any executor, and only on the way to an end.
    pub(super) async fn until(&self, bound: Duration, check: impl Fn(&State) -> bool) -> bool {
        let begun = Instant::now();
        poll_fn(|context| {
            self.try_poll();
            if check(&self.inner.lock()) {
                return Poll::Ready(true);
            }
            if begun.elapsed() >= bound {
                return Poll::Ready(false);
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await
    }
}

impl State {
    fn unclosed(&self, operation: &'static str) -> Result<()> {
        if self.stage == Stage::Closed { Err(super::state::closed(operation)) } else { Ok(()) }
    }
}

/// A task's place among those that wait for a topic; given up when dropped.
struct Seat<'a> {
    inner: &'a Inner,
    topic: Topic,
    number: u64,
}

impl<'a> Seat<'a> {
    fn new(inner: &'a Inner, topic: Topic) -> Self {
        let number = inner.lock().waiters.seat();
        Self { inner, topic, number }
    }

    fn sit(&self, context: &Context<'_>) {
        let waker = context.waker().clone();
        let before = self.inner.lock().waiters.sit(self.topic, self.number, waker);
        drop(before);
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let before = self.inner.lock().waiters.leave(self.topic, self.number);
        drop(before);
    }
}

/// Holds no strong reference while it sleeps, so that a port can be dropped under it.
async fn drive(port: Weak<Inner>) -> Result<()> {
    const OPERATION: &str = "port.drive";
    if tokio::runtime::Handle::try_current().is_err() {
        return Err(Error::misuse(OPERATION, "not in a tokio runtime")
            .with_remedy("spawn it on a runtime with I/O and time enabled"));
    }
    let Some(running) = Running::new(port) else { return Ok(()) };
    let Some(descriptor) = running.descriptor(OPERATION)? else {
        running.poll_until_closed().await;
        return Ok(());
    };
    // SAFETY: an `OwnedFd` is open and the same descriptor for as long as it lives, and it lives in the `AsyncFd`.
    let descriptor = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }
        .map_err(|error| cannot_watch(OPERATION, error.into()))?;
    let mut nap = pin!(tokio::time::sleep(Duration::ZERO));
    poll_fn(|context| {
        loop {
            // The seat is taken before polling: what happens between polling and sleeping wakes this task again.
            let Some(port) = running.sit(context) else { return Poll::Ready(Ok(())) };
            // A storm of events must not keep the thread from its other tasks.
            if (0..ROUNDS).all(|_| port.poll() > 0) {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            let only_time_helps = port.inner.lock().only_time_helps();
            drop(port);
            if only_time_helps && nap_over(nap.as_mut(), context) {
                continue;
            }
            match descriptor.poll_read_ready(context) {
                Poll::Pending => return Poll::Pending,
                // Cleared before polling again: an event that comes after that makes it ready anew.
                Poll::Ready(Ok(mut ready)) => ready.clear_ready(),
                Poll::Ready(Err(source)) => {
                    return Poll::Ready(Err(cannot_watch(OPERATION, source)));
                }
            }
        }
    })
    .await
}

fn cannot_watch(operation: &'static str, source: std::io::Error) -> Error {
    Error::new(ErrorKind::Resources, operation, "the event descriptor cannot be watched")
        .with_source(source)
}

/// Whether a nap is over; if not, the task is woken when it is.
fn nap_over(mut nap: Pin<&mut Sleep>, context: &mut Context<'_>) -> bool {
    if nap.is_elapsed() {
        nap.as_mut().reset(tokio::time::Instant::now() + NAP);
        return nap.poll(context).is_ready();
    }
    nap.poll(context).is_ready()
}

/// Counts a driver while it lives. When the last one ends, all who sleep are woken to look after themselves.
struct Running {
    port: Weak<Inner>,
    seat: u64,
}

impl Running {
    fn new(port: Weak<Inner>) -> Option<Self> {
        let inner = port.upgrade()?;
        inner.drivers.fetch_add(1, Ordering::SeqCst);
        let seat = inner.lock().waiters.seat();
        Some(Self { port, seat })
    }

    /// A descriptor of its own, so that two drivers can watch it.
    fn descriptor(&self, operation: &'static str) -> Result<Option<OwnedFd>> {
        let Some(inner) = self.port.upgrade() else { return Ok(None) };
        let Some(descriptor) = inner.backend.event_fd() else { return Ok(None) };
        let descriptor = descriptor.try_clone_to_owned();
        Ok(Some(descriptor.map_err(|source| cannot_watch(operation, source))?))
    }

    /// The port, with this task to be woken for it; `None` once it is closed or dropped.
    fn sit(&self, context: &Context<'_>) -> Option<Port> {
        let (inner, waker) = (self.port.upgrade()?, context.waker().clone());
        let mut state = inner.lock();
        if state.stage == Stage::Closed {
            return None;
        }
        let before = state.waiters.sit(Topic::Driver, self.seat, waker);
        drop(state);
        drop(before);
        Some(Port { inner })
    }

    async fn poll_until_closed(&self) {
        let mut nap = pin!(tokio::time::sleep(Duration::ZERO));
        poll_fn(|context| {
            let Some(port) = self.sit(context) else { return Poll::Ready(()) };
            port.poll();
            let busy = !port.inner.lock().batches.is_empty();
            drop(port);
            if busy || nap_over(nap.as_mut(), context) {
                context.waker().wake_by_ref();
            }
            Poll::Pending
        })
        .await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(inner) = self.port.upgrade() else { return };
        inner.drivers.fetch_sub(1, Ordering::SeqCst);
        let mut wake = Vec::new();
        let _before;
        let slots: Vec<_> = {
            let mut state = inner.lock();
            _before = state.waiters.leave(Topic::Driver, self.seat);
            if inner.drivers.load(Ordering::SeqCst) > 0 {
                return;
            }
            state.waiters.take_all(&mut wake);
            state.transfers.values().map(|record| Arc::clone(&record.slot)).collect()
        };
        wake.extend(slots.iter().filter_map(|slot| slot.take_waker()));
        for waker in wake {
            waker.wake();
        }
    }
}
