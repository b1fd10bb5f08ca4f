//! Moving things along: posting batches, taking events, and doing outside the lock what they bring.

use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::state::{Effects, Finished, Stage, State};
use super::transfer::{Pause, TransferReport};
use super::waiters::Topic;
use super::{DOZE, EVENTS_PER_POLL, Inner, KEPT_NOTIFICATIONS, Port};
use crate::backend::Events;
use crate::error::{Error, Result};
use crate::id::PeerId;

impl Inner {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic on foreign ground runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what a transition left to be done, and what follows from that.
    pub(super) fn run(&self, mut effects: Effects) {
        loop {
            for finished in effects.finished.drain(..) {
                self.finish(finished);
            }
            for waker in effects.wake.drain(..) {
                waker.wake();
            }
            let Some(peer) = effects.ready.pop_front() else { return };
            self.post(peer, &mut effects);
        }
    }

    /// Posts what can be posted to a peer. One thread at a time does so, so batches go out in order and the lock is not
    /// held while the backend is called. Whoever finds another at it leaves: that one looks again, under the lock, before
    /// it stops.
    fn post(&self, peer: PeerId, effects: &mut Effects) {
        let limits = &self.capabilities.limits;
        let mut state = self.lock();
        match state.peers.get_mut(&peer) {
            Some(known) if !known.posting => known.posting = true,
            _ => return,
        }
        let _posting = Posting { inner: self, peer };
        while let Some(mut ticket) = state.next_batch(peer, limits.max_in_flight) {
            drop(state);
            let notify = ticket.work.notify.as_deref().filter(|_| ticket.last);
            let batch = ticket.work.cutter.cut(limits);
            let said = self.backend.submit(ticket.id, peer, ticket.mode, batch, notify);
            state = self.lock();
            if !state.posted(ticket, said, effects) {
                break;
            }
        }
        if let Some(known) = state.peers.get_mut(&peer) {
            known.posting = false;
        }
    }

    /// Takes events from the backend and routes them. `events` keeps other threads from routing at the same time, which
    /// would let a peer's end overtake what came before it.
    fn poll_with(&self, mut events: MutexGuard<'_, Events>) -> usize {
        let mut effects = Effects::default();
        let before = {
            let mut state = self.lock();
            let room = state.notifications.len() + EVENTS_PER_POLL <= KEPT_NOTIFICATIONS;
            if !room && state.stage == Stage::Open {
                state.blocked = true;
                return 0;
            }
            state.settles
        };
        self.backend.poll(&mut events);
        let mut count = 0;
        let mut state = self.lock();
        for event in events.drain() {
            count += 1;
            state.route(event, &mut effects);
        }
        let settled = state.settles != before;
        state.retry_stalled(settled, &mut effects);
        drop(state);
        drop(events);
        self.run(effects);
        count
    }

    /// Sleeps until the backend has events, at most for `longest`, and never long: another thread may take the event for
    /// which the caller waits. Returns `false`, at once, where there is no descriptor, or another thread sleeps on it.
    pub(super) fn doze(&self, longest: Duration) -> bool {
        let Some(descriptor) = self.backend.event_fd().filter(|_| self.capabilities.event_fd)
        else {
            return false;
        };
        let Ok(_alone) = self.dozing.try_lock() else { return false };
        let mut ready = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
        let limit = Timespec::try_from(longest.min(DOZE)).ok();
        // An error, or a signal, is a short sleep.
        limit.is_some() && rustix::event::poll(&mut ready, limit.as_ref()).is_ok()
    }

    fn finish(&self, finished: Finished) {
        let Finished { record, result, settled, transport } = finished;
        // First the memory, so that whoever is told finds it free.
        drop(record.regions);
        let report = result.map(|()| {
            let posted = record.posted.unwrap_or(settled);
            TransferReport {
                bytes: record.size.bytes,
                segments: record.size.segments,
                batches: record.size.batches,
                queued: posted.saturating_duration_since(record.asked),
                elapsed: settled.saturating_duration_since(posted),
                transport: transport.unwrap_or_else(|| self.transport(record.peer)),
                route: record.route,
            }
        });
        let report = report.map_err(|error| match error.backend() {
            Some(_) => error,
            None => error.with_backend(self.backend.name()),
        });
        record.slot.put(report);
    }

    /// Asks what the connection uses, once per peer: the first transfer has settled, so it has been chosen.
    fn transport(&self, peer: PeerId) -> Arc<str> {
        let Ok(info) = self.backend.peer_info(peer) else { return Arc::from("") };
        let transport: Arc<str> = info.transport.into();
        if let Some(known) = self.lock().peers.get_mut(&peer) {
            known.transport = Some(Arc::clone(&transport));
        }
        transport
    }
}

/// A thread that posts to a peer; if it unwinds, others may.
struct Posting<'a> {
    inner: &'a Inner,
    peer: PeerId,
}

impl Drop for Posting<'_> {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(known) = self.inner.lock().peers.get_mut(&self.peer)
        {
            known.posting = false;
        }
    }
}

impl Port {
    /// Moves things along: takes a bounded number of events from the backend, settles transfers and wakes those who wait
    /// for them, and posts what can be posted. Returns how many events there were. Never blocks for long; any thread may
    /// call it.
    ///
    /// Takes nothing while [too many notifications](Self::next_notification) are not taken.
    pub fn poll(&self) -> usize {
        self.inner.poll_with(self.inner.events.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Like [`poll`](Self::poll), but leaves it to another thread that is at it. For those who come back anyway.
    pub(super) fn try_poll(&self) -> usize {
        match self.inner.events.try_lock() {
            Ok(events) => self.inner.poll_with(events),
            Err(TryLockError::Poisoned(events)) => self.inner.poll_with(events.into_inner()),
            Err(TryLockError::WouldBlock) => 0,
        }
    }

    /// The oldest notification that was not taken: from whom, and its bytes. Does not poll.
    ///
    /// Notifications are never dropped while the port is open: up to [`KEPT_NOTIFICATIONS`] are kept, and when there is no
    /// more room, [`poll`](Self::poll) takes *no event at all* from the backend until some are taken. Whoever uses a port
    /// must therefore take them, or its transfers stop settling.
    #[must_use]
    pub fn next_notification(&self) -> Option<(PeerId, Vec<u8>)> {
        let mut wake = Vec::new();
        let taken = {
            let mut state = self.inner.lock();
            let taken = state.notifications.pop_front();
            let room = state.notifications.len() + EVENTS_PER_POLL <= KEPT_NOTIFICATIONS;
            if state.blocked && room {
                state.blocked = false;
                state.waiters.take(Topic::Driver, &mut wake);
            }
            taken
        };
        for waker in wake {
            waker.wake();
        }
        taken
    }

    /// The oldest peer-down event that was not taken: which peer, and why (`None` when this side severed it). Does not
    /// poll.
    ///
    /// Notifications that the peer sent before are not lost: they may still be waiting in
    /// [`next_notification`](Self::next_notification). The newest 65,536 events are kept; those that nobody took before are
    /// counted in [`PortStats::discarded_peer_downs`](super::PortStats::discarded_peer_downs).
    #[must_use]
    pub fn next_peer_down(&self) -> Option<(PeerId, Option<Error>)> {
        self.inner.lock().peer_downs.pop_front()
    }

    /// Blocks until a notification arrives or `timeout` has passed, for programs without an async runtime. Polls the port.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed): the port was closed, and none is left.
    pub fn wait_notified(&self, timeout: Duration) -> Result<Option<(PeerId, Vec<u8>)>> {
        let begun = Instant::now();
        let mut pause = Pause::default();
        loop {
            self.poll();
            if let Some(notification) = self.next_notification() {
                return Ok(Some(notification));
            }
            self.inner.lock().open("port.wait_notified")?;
            let left = timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            match pause.next() {
                None => std::thread::yield_now(),
                Some(pause) => {
                    if !self.inner.doze(left) {
                        std::thread::sleep(pause.min(left));
                    }
                }
            }
        }
    }
}
