//! Transfers: posting them, and the handle that waits.

use std::borrow::Cow;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::peers::Peer;
use super::regions::{RegionSet, stale};
use super::split::{self, Cutter, Size};
use super::state::{Effects, Record, State};
use super::{DOZE, Port, waiters::Topic};
use crate::error::{Error, Result, Retry};
use crate::id::{PeerId, RegionId};
use crate::memory::Region;
use crate::transfer::{Mode, PostedSegment, Segment};

const OPERATION: &str = "port.transfer";

/// What a transfer that is done was.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferReport {
    /// Bytes moved.
    pub bytes: u64,
    /// Segments posted, after splitting those that were too long for the backend.
    pub segments: u64,
    /// Batches posted.
    pub batches: u64,
    /// From the call until the first batch was posted: what other transfers' credits cost this one.
    pub queued: Duration,
    /// From the first batch posted until all had settled.
    pub elapsed: Duration,
    /// The transport that the connection used, as the fabric calls it. Empty where the peer was gone before it was asked.
    pub transport: Arc<str>,
    /// By which of the backend's ways the bytes went, where it has several and says so: the names of all that were used, in
    /// alphabetical order with `+` between them.
    pub route: Option<Cow<'static, str>>,
}

impl Serialize for TransferReport {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct as _;
        let mut fields = serializer.serialize_struct("TransferReport", 7)?;
        fields.serialize_field("bytes", &self.bytes)?;
        fields.serialize_field("segments", &self.segments)?;
        fields.serialize_field("batches", &self.batches)?;
        fields.serialize_field("queued_seconds", &self.queued.as_secs_f64())?;
        fields.serialize_field("elapsed_seconds", &self.elapsed.as_secs_f64())?;
        fields.serialize_field("transport", &*self.transport)?;
        fields.serialize_field("route", &self.route)?;
        fields.end()
    }
}

impl Port {
    /// Moves segments between the regions of `local` and those of `peer`
    /// ([`add_regions`](Self::add_regions)), and with `notify` tells the peer so, once, when all is moved.
    ///
    /// Every segment is checked before anything is posted. Segments longer than the backend takes are split, and batches
    /// that it does not take now are posted later, as others settle. No segments and no `notify` is done at once; no
    /// segments with `notify` is a bare notification.
    ///
    /// What fails after the checks settles as a failed transfer, and not before everything of it that was posted is
    /// quiet.
    ///
    /// # Errors
    ///
    /// Nothing is posted when this fails.
    ///
    /// - [`ErrorKind::Misuse`](crate::ErrorKind::Misuse): a segment that is empty, outside its region or names a region
    ///   that does not exist (the error gives its index and the values); a stale region or peer; a set of another port; a
    ///   notification over the backend's limit.
    /// - [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): the backend has no transfers of this mode.
    /// - [`ErrorKind::Peer`](crate::ErrorKind::Peer): the peer is being severed or disconnected.
    /// - [`ErrorKind::Closed`](crate::ErrorKind::Closed): the port was closed.
    pub fn transfer(
        &self,
        peer: PeerId,
        mode: Mode,
        local: &RegionSet,
        segments: &[Segment],
        notify: Option<&[u8]>,
    ) -> Result<Transfer> {
        self.check_call(mode, local, notify)?;
        let limits = &self.capabilities().limits;
        let (remote, mut posted) = {
            let mut state = self.inner.lock();
            let remote = Arc::clone(&open_peer(&mut state, peer)?.regions);
            (remote, state.spare())
        };
        let mut used = vec![false; local.members.len()];
        let checked =
            split::check(segments, &local.members, &remote, limits, &mut used, &mut posted);
        let size = match checked {
            Ok(Size { batches: 0, .. }) => {
                Size { batches: notify.is_some().into(), ..Size::default() }
            }
            Ok(size) => size,
            Err(error) => {
                posted.clear();
                self.inner.lock().keep_spare(posted);
                return Err(error.with_backend(self.backend_name()).with_context("peer", peer));
            }
        };
        self.begin(peer, mode, size, posted, notify, local, &used)
    }

    fn check_call(&self, mode: Mode, local: &RegionSet, notify: Option<&[u8]>) -> Result<()> {
        let capabilities = self.capabilities();
        if !capabilities.mode(mode) {
            return Err(Error::unsupported(OPERATION, format!("the backend has no {mode}s"))
                .with_backend(self.backend_name())
                .with_remedy("use the other mode, or another backend"));
        }
        if local.port != self.inner.number {
            return Err(Error::misuse(OPERATION, "the set of regions belongs to another port"));
        }
        let limit = capabilities.limits.max_notification_bytes;
        match notify {
            Some(payload) if payload.len() as u64 > u64::from(limit) => {
                Err(Error::misuse(OPERATION, "the notification is too long")
                    .with_backend(self.backend_name())
                    .with_context("bytes", payload.len())
                    .with_context("limit", limit))
            }
            _ => Ok(()),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one caller, which has checked each of them")]
    fn begin(
        &self,
        peer: PeerId,
        mode: Mode,
        size: Size,
        posted: Vec<PostedSegment>,
        notify: Option<&[u8]>,
        local: &RegionSet,
        used: &[bool],
    ) -> Result<Transfer> {
        let (slot, notify) = (Arc::new(Slot::default()), notify.map(<[u8]>::to_vec));
        let mut effects = Effects::default();
        let number = {
            let mut state = self.inner.lock();
            // Again, because the lock was released for the checks: what was checked still holds for these very handles.
            open_peer(&mut state, peer)?;
            let regions = hold(&state, local, used)?;
            let record = Record::new(peer, mode, size, Arc::clone(&slot), regions);
            let number = state.begin(record, Cutter::new(posted), notify, &mut effects);
            if !self.capabilities().event_fd {
                state.waiters.take(Topic::Driver, &mut effects.wake);
            }
            number
        };
        self.inner.run(effects);
        Ok(Transfer { port: self.clone(), number, slot })
    }
}

fn open_peer(state: &mut State, peer: PeerId) -> Result<&mut Peer> {
    state.open(OPERATION)?;
    let known = state.peer(OPERATION, peer)?;
    if known.leaving {
        return Err(Error::peer(OPERATION, "the peer is being disconnected")
            .with_context("peer", peer)
            .with_retry(Retry::Reconnect));
    }
    Ok(known)
}

/// The regions that are used, unless one is stale.
fn hold(state: &State, local: &RegionSet, used: &[bool]) -> Result<Vec<(RegionId, Region)>> {
    let used = local.members.iter().zip(used).filter(|(_, used)| **used);
    used.map(|(member, _)| {
        let entry = state.regions.get(member.id).filter(|entry| !entry.leaving);
        let entry = entry.ok_or_else(|| stale(OPERATION, member.id))?;
        Ok((member.id, entry.region.clone()))
    })
    .collect()
}

/// A transfer under way: a future of its outcome.
///
/// Whoever awaits it moves it along where nobody [drives](Port::drive) the port: it polls the port and wakes itself
/// again, so other tasks of the executor run in between. Where somebody drives the port, it sleeps.
///
/// The outcome is given once: by awaiting, [`try_result`](Self::try_result) or [`wait`](Self::wait). Dropping the handle
/// neither cancels the transfer nor frees the memory that it uses.
#[must_use = "the outcome tells whether the data arrived; a dropped transfer goes on unseen"]
pub struct Transfer {
    port: Port,
    number: u64,
    slot: Arc<Slot>,
}

impl Transfer {
    /// Whether it has settled: its memory is quiet on this side.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        !matches!(self.slot.lock().outcome, Outcome::Pending)
    }

    /// The outcome, if it has settled. Polls the port first where nobody drives it.
    ///
    /// # Errors
    ///
    /// The inner result: why it failed, [`ErrorKind::Closed`](crate::ErrorKind::Closed) when it was cancelled,
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) when the outcome was taken before.
    pub fn try_result(&mut self) -> Option<Result<TransferReport>> {
        let first = self.slot.take();
        if first.is_none() && !self.port.is_driven() {
            self.port.poll();
            return self.slot.take();
        }
        first
    }

    /// Gives it up. Best effort: what is posted may still arrive, and it settles only when all of that is quiet; the
    /// outcome is [`ErrorKind::Closed`](crate::ErrorKind::Closed), or done if it was too late. Its notification is not
    /// sent unless it is on its way already.
    pub fn cancel(&self) {
        let mut effects = Effects::default();
        let in_flight = self.port.inner.lock().cancel(self.number, &mut effects);
        for id in in_flight {
            // An error says that it just settled, which is as good.
            let _settled = self.port.inner.backend.cancel(id);
        }
        self.port.inner.run(effects);
    }

    /// Blocks until it settles or `timeout` has passed, for programs without an async runtime. Polls the port.
    ///
    /// # Errors
    ///
    /// The inner result, as for [`try_result`](Self::try_result).
    pub fn wait(&mut self, timeout: Duration) -> Option<Result<TransferReport>> {
        let begun = Instant::now();
        let mut pause = Pause::default();
        loop {
            self.port.poll();
            let left = timeout.saturating_sub(begun.elapsed());
            let outcome = self.slot.take();
            if outcome.is_some() || left.is_zero() {
                return outcome;
            }
            match pause.next() {
                None => std::thread::yield_now(),
                Some(_) if self.port.is_driven() => self.slot.sleep(DOZE.min(left)),
                Some(pause) => {
                    if !self.port.inner.doze(left) {
                        self.slot.sleep(pause.min(left));
                    }
                }
            }
        }
    }
}

impl Future for Transfer {
    type Output = Result<TransferReport>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(outcome) = self.slot.take_or_wait(context.waker()) {
            return Poll::Ready(outcome);
        }
        // The waker is in place before the question is asked: a driver that ends now will wake this task.
        if self.port.is_driven() {
            return Poll::Pending;
        }
        self.port.try_poll();
        match self.slot.take() {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // The task may have gone on to other things.
        drop(self.slot.take_waker());
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settled = self.is_settled();
        f.debug_struct("Transfer")
            .field("number", &self.number)
            .field("settled", &settled)
            .finish_non_exhaustive()
    }
}

/// Where a transfer's outcome is left for its handle.
#[derive(Debug, Default)]
pub(super) struct Slot {
    inside: Mutex<Inside>,
    settled: Condvar,
}

#[derive(Debug, Default)]
struct Inside {
    outcome: Outcome,
    waker: Option<Waker>,
    /// Threads that sleep until it is there.
    sleepers: u32,
}

#[derive(Debug, Default)]
enum Outcome {
    #[default]
    Pending,
    Ready(Result<TransferReport>),
    Taken,
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves the outcome and wakes whoever waits for it. No lock of the port is held.
    pub(super) fn put(&self, result: Result<TransferReport>) {
        let (waker, sleepers) = {
            let mut inside = self.lock();
            inside.outcome = Outcome::Ready(result);
            (inside.waker.take(), inside.sleepers)
        };
        if sleepers > 0 {
            self.settled.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The task that waits for it, to be woken.
    pub(super) fn take_waker(&self) -> Option<Waker> {
        self.lock().waker.take()
    }

    fn take(&self) -> Option<Result<TransferReport>> {
        self.lock().take()
    }

    fn take_or_wait(&self, waker: &Waker) -> Option<Result<TransferReport>> {
        let mut inside = self.lock();
        let outcome = inside.take();
        if outcome.is_none() && !inside.waker.as_ref().is_some_and(|old| old.will_wake(waker)) {
            let before = inside.waker.replace(waker.clone());
            drop(inside);
            drop(before);
        }
        outcome
    }

    fn sleep(&self, longest: Duration) {
        let mut inside = self.lock();
        if matches!(inside.outcome, Outcome::Pending) {
            inside.sleepers += 1;
            let woken = self.settled.wait_timeout(inside, longest);
            woken.unwrap_or_else(PoisonError::into_inner).0.sleepers -= 1;
        }
    }
}

impl Inside {
    fn take(&mut self) -> Option<Result<TransferReport>> {
        match std::mem::replace(&mut self.outcome, Outcome::Taken) {
            Outcome::Pending => {
                self.outcome = Outcome::Pending;
                None
            }
            Outcome::Ready(result) => Some(result),
            Outcome::Taken => {
                Some(Err(Error::misuse("transfer.result", "the outcome was taken before")))
            }
        }
    }
}

/// How long a blocking wait sleeps between polls: not at all at first, then longer, up to a fifth of a millisecond.
#[derive(Debug, Default)]
pub(super) struct Pause {
    rounds: u32,
}

impl Pause {
    /// The next sleep; `None` to only give way to other threads.
    pub(super) fn next(&mut self) -> Option<Duration> {
        self.rounds = self.rounds.saturating_add(1);
        match self.rounds {
            0..=64 => None,
            65..=128 => Some(Duration::from_micros(20)),
            _ => Some(Duration::from_micros(200)),
        }
    }
}
