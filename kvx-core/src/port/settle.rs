//! How transfers end: events, failures, peers that go down. As in [`state`](super::state), nothing here leaves the lock.

use std::time::Instant;

use super::state::{Effects, Finished, Record, Stage, State};
use super::waiters::Topic;
use crate::backend::{Event, Outcome};
use crate::error::{Error, ErrorKind, Retry};
use crate::id::{PeerId, TransferId};

/// Most peer-down events kept for [`Port::next_peer_down`](super::Port::next_peer_down).
const KEPT_PEER_DOWNS: usize = 65_536;

impl State {
    /// Takes an event of the backend.
    pub(super) fn route(&mut self, event: Event, effects: &mut Effects) {
        match event {
            Event::Settled { id, outcome } => self.batch_settled(id, outcome, effects),
            Event::Notified { peer, payload } => {
                self.count(peer, |stats| stats.notifications += 1);
                if self.stage == Stage::Open {
                    self.notifications.push_back((peer, payload));
                    self.waiters.take(Topic::Notified, &mut effects.wake);
                } else {
                    self.stats.discarded_notifications += 1;
                }
            }
            Event::PeerDown { peer, error } => self.peer_down(peer, error, effects),
        }
    }

    pub(super) fn batch_settled(
        &mut self,
        id: TransferId,
        outcome: Outcome,
        effects: &mut Effects,
    ) {
        let Some(transfer) = self.batches.remove(&id) else {
            tracing::error!(%id, "the backend settled a transfer that is not in flight");
            return;
        };
        self.settles += 1;
        let Some(record) = self.transfers.get_mut(&transfer) else { return };
        record.outstanding.retain(|other| *other != id);
        let peer = record.peer;
        if let Some(known) = self.peers.get_mut(&peer) {
            known.in_flight -= 1;
            if !known.queue.is_empty() {
                effects.ready(peer);
            }
        }
        match outcome {
            Outcome::Done { route } => {
                record.went(route);
                self.settle(transfer, effects);
            }
            Outcome::Cancelled => self.fail(transfer, cancelled(), effects),
            Outcome::Failed(error) => self.fail(transfer, error, effects),
        }
    }

    fn peer_down(&mut self, peer: PeerId, error: Option<Error>, effects: &mut Effects) {
        if self.meetings > 0 {
            self.early_downs.insert(peer);
        }
        self.stalled.remove(&peer);
        self.peers.remove(&peer);
        let cause = error.as_ref().map_or_else(|| "severed".to_owned(), Error::to_string);
        let why = || {
            Error::peer("port.transfer", "the peer went down")
                .with_retry(Retry::Reconnect)
                .with_context("peer", peer)
                .with_context("cause", &cause)
        };
        self.give_up(|record| record.peer == peer, why, effects);
        if self.peer_downs.len() >= KEPT_PEER_DOWNS {
            self.peer_downs.pop_front();
            self.stats.discarded_peer_downs += 1;
        }
        self.peer_downs.push_back((peer, error));
        self.waiters.take(Topic::PeerDown, &mut effects.wake);
        self.waiters.take(Topic::Settled, &mut effects.wake);
    }

    /// Gives up those transfers that `which` chooses: what is not posted never will be.
    pub(super) fn give_up(
        &mut self,
        which: impl Fn(&Record) -> bool,
        why: impl Fn() -> Error,
        effects: &mut Effects,
    ) {
        let chosen: Vec<u64> = self
            .transfers
            .iter()
            .filter(|(_, record)| which(record))
            .map(|(transfer, _)| *transfer)
            .collect();
        for transfer in chosen {
            self.give_up_one(transfer, why(), effects);
        }
    }

    /// Cancels a transfer. Returns its batches in flight, to be cancelled by the backend.
    pub(super) fn cancel(&mut self, transfer: u64, effects: &mut Effects) -> Vec<TransferId> {
        let Some(record) = self.transfers.get(&transfer) else { return Vec::new() };
        let in_flight = record.outstanding.clone();
        self.give_up_one(transfer, cancelled(), effects);
        in_flight
    }

    fn give_up_one(&mut self, transfer: u64, why: Error, effects: &mut Effects) {
        match self.transfers.get_mut(&transfer) {
            Some(record) if record.unposted == 0 => {
                record.given_up.get_or_insert(why);
            }
            _ => self.fail(transfer, why, effects),
        }
    }

    pub(super) fn fail(&mut self, transfer: u64, error: Error, effects: &mut Effects) {
        if let Some(record) = self.transfers.get_mut(&transfer) {
            record.failure.get_or_insert(error);
            if let Some(work) = record.held.take() {
                self.keep_spare(work.cutter.into_spare());
            }
            self.settle(transfer, effects);
        }
    }

    /// Settles a transfer if nothing of it is in flight and nothing is to follow; releases its last batch if that waited
    /// for the others.
    pub(super) fn settle(&mut self, transfer: u64, effects: &mut Effects) {
        let Some(record) = self.transfers.get_mut(&transfer) else { return };
        if !record.outstanding.is_empty() {
            return;
        }
        let peer = record.peer;
        if record.failure.is_none() && record.unposted > 0 {
            if let Some(work) = record.held.take() {
                self.queue_first(peer, work);
                effects.ready(peer);
            }
            return;
        }
        let Some(mut record) = self.transfers.remove(&transfer) else { return };
        for (id, _) in &record.regions {
            if let Some(entry) = self.regions.get_mut(*id) {
                entry.users -= 1;
            }
        }
        let (failure, size) = (record.failure.take(), record.size);
        let done = failure.is_none();
        self.count(peer, |stats| {
            if done {
                stats.done += 1;
                stats.bytes += size.bytes;
                stats.segments += size.segments;
            } else {
                stats.failed += 1;
            }
        });
        let known = self.peers.get_mut(&peer);
        let transport = known.and_then(|known| {
            known.unsettled -= 1;
            known.transport.clone()
        });
        let result = failure.map_or(Ok(()), Err);
        let settled = Instant::now();
        // One, nearly always.
        effects.finished.reserve_exact(1);
        effects.finished.push(Finished { record, result, settled, transport });
        self.waiters.take(Topic::Settled, &mut effects.wake);
    }

    /// Peers that were refused as full are tried again once anything settled, or when nothing is in flight that could.
    pub(super) fn retry_stalled(&mut self, something_settled: bool, effects: &mut Effects) {
        if something_settled || self.batches.is_empty() {
            // In turns: first the peer that was served longest ago. All before those whose own batches settled.
            let mut waiting: Vec<_> = std::mem::take(&mut self.stalled)
                .into_iter()
                .filter_map(|peer| Some((self.peers.get(&peer)?.last_batch, peer)))
                .collect();
            waiting.sort_unstable();
            let others = std::mem::take(&mut effects.ready);
            effects.ready.extend(waiting.into_iter().map(|(_, peer)| peer));
            others.into_iter().for_each(|peer| effects.ready(peer));
        }
    }
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Closed, "port.transfer", "the transfer was cancelled")
}
