//! What a port knows, and the transitions of a transfer until it is posted. Nothing here calls a backend, wakes a task or
//! frees memory: what is to be done without the lock is left in [`Effects`].

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use super::peers::Peer;
use super::regions::RegionTable;
use super::split::{Cutter, Size};
use super::stats::PortStats;
use super::transfer::Slot;
use super::waiters::{Topic, Waiters};
use crate::backend::{Outcome, Submit};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{PeerId, RegionId, TransferId};
use crate::memory::Region;
use crate::transfer::{Mode, PostedSegment};

/// Lists of segments kept for reuse, and the largest of them, in segments.
const SPARE_LISTS: usize = 8;
const SPARE_SEGMENTS: usize = 65_536;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Open,
    Closing,
    Closed,
}

/// All that changes, under one lock. See the [module documentation of the port](super) for what holds between calls.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) stage: Stage,
    pub(super) regions: RegionTable,
    pub(super) peers: BTreeMap<PeerId, Peer>,
    /// Transfers not settled, by number.
    pub(super) transfers: BTreeMap<u64, Record>,
    /// Batches in flight, with their transfers.
    pub(super) batches: BTreeMap<TransferId, u64>,
    /// Peers whose next batch was refused as full and not yet tried again.
    pub(super) stalled: BTreeSet<PeerId>,
    pub(super) notifications: VecDeque<(PeerId, Vec<u8>)>,
    pub(super) peer_downs: VecDeque<(PeerId, Option<Error>)>,
    /// A poll was put off because the notifications were not taken.
    pub(super) blocked: bool,
    /// Steps of handshakes under way, and the peers that went down meanwhile.
    pub(super) meetings: usize,
    pub(super) early_downs: BTreeSet<PeerId>,
    pub(super) waiters: Waiters,
    pub(super) stats: PortStats,
    next_transfer: u64,
    next_batch: u64,
    /// Batches settled so far: tells whether anything settled since some moment.
    pub(super) settles: u64,
    spare: Vec<Vec<PostedSegment>>,
}

/// A transfer that has not settled.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) peer: PeerId,
    pub(super) mode: Mode,
    pub(super) slot: Arc<Slot>,
    /// The regions that it uses: held until it settles.
    pub(super) regions: Vec<(RegionId, Region)>,
    pub(super) size: Size,
    pub(super) asked: Instant,
    /// When the first batch was posted.
    pub(super) posted: Option<Instant>,
    /// Batches not posted; once it has failed, they never are.
    pub(super) unposted: u64,
    /// Batches posted, or being posted, and not settled.
    pub(super) outstanding: Vec<TransferId>,
    /// The last batch, which carries the notification, held until `outstanding` is empty.
    pub(super) held: Option<Work>,
    /// By which ways the bytes of the batches that are done went.
    pub(super) route: Option<Cow<'static, str>>,
    /// The first thing that went wrong.
    pub(super) failure: Option<Error>,
    /// It was given up when all of it was posted or being posted: why it fails if the backend has no room for the rest.
    pub(super) given_up: Option<Error>,
}

impl Record {
    /// A transfer of `size` to `peer`.
    pub(super) fn new(
        peer: PeerId,
        mode: Mode,
        size: Size,
        slot: Arc<Slot>,
        regions: Vec<(RegionId, Region)>,
    ) -> Self {
        Self {
            peer,
            mode,
            slot,
            regions,
            size,
            asked: Instant::now(),
            posted: None,
            unposted: size.batches,
            outstanding: Vec::new(),
            held: None,
            route: None,
            failure: None,
            given_up: None,
        }
    }

    /// A batch is done, and its bytes went this way. Allocates only where another batch of the transfer went another.
    pub(super) fn went(&mut self, route: Option<&'static str>) {
        let Some(route) = route else { return };
        match &mut self.route {
            None => self.route = Some(Cow::Borrowed(route)),
            Some(known) if *known == route => {}
            Some(known) => {
                let both: BTreeSet<&str> = known.split('+').chain(route.split('+')).collect();
                let both = both.into_iter().collect::<Vec<_>>().join("+");
                *known = Cow::Owned(both);
            }
        }
    }
}

/// The batches of a transfer that are not posted. Held by the peer's queue, by the thread that posts, or by the record.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) transfer: u64,
    pub(super) cutter: Cutter,
    pub(super) notify: Option<Vec<u8>>,
}

/// One batch that is being posted.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) id: TransferId,
    pub(super) peer: PeerId,
    pub(super) mode: Mode,
    pub(super) work: Work,
    /// It is the transfer's last: the notification, if any, goes with it.
    pub(super) last: bool,
    settles: u64,
}

/// A transfer that settled: what is left to do without the lock.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) record: Record,
    pub(super) result: Result<()>,
    pub(super) settled: Instant,
    pub(super) transport: Option<Arc<str>>,
}

/// What is to be done once the lock is released.
#[derive(Debug, Default)]
pub(super) struct Effects {
    pub(super) finished: Vec<Finished>,
    /// Peers to which something can be posted.
    pub(super) ready: VecDeque<PeerId>,
    pub(super) wake: Vec<Waker>,
}

impl Effects {
    pub(super) fn ready(&mut self, peer: PeerId) {
        if !self.ready.contains(&peer) {
            self.ready.push_back(peer);
        }
    }
}

pub(super) fn closed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Closed, operation, "the port was closed")
}

impl State {
    /// Whether the port is open.
    pub(super) fn open(&self, operation: &'static str) -> Result<()> {
        if self.stage == Stage::Open { Ok(()) } else { Err(closed(operation)) }
    }

    /// An empty list of segments.
    pub(super) fn spare(&mut self) -> Vec<PostedSegment> {
        self.spare.pop().unwrap_or_default()
    }

    pub(super) fn keep_spare(&mut self, list: Vec<PostedSegment>) {
        let fits = 0 < list.capacity() && list.capacity() <= SPARE_SEGMENTS;
        if fits && self.spare.len() < SPARE_LISTS {
            self.spare.push(list);
        }
    }

    /// Takes up a transfer that was checked against `peer` and against the regions that it holds. Queued from here on.
    pub(super) fn begin(
        &mut self,
        record: Record,
        cutter: Cutter,
        notify: Option<Vec<u8>>,
        effects: &mut Effects,
    ) -> u64 {
        self.next_transfer += 1;
        let transfer = self.next_transfer;
        for (id, _) in &record.regions {
            if let Some(entry) = self.regions.get_mut(*id) {
                entry.users += 1;
            }
        }
        self.stats.transfers += 1;
        if let Some(peer) = self.peers.get_mut(&record.peer) {
            peer.stats.transfers += 1;
            peer.unsettled += 1;
            if record.unposted > 0 {
                peer.queue.push_back(Work { transfer, cutter, notify });
                effects.ready(record.peer);
            }
        }
        self.transfers.insert(transfer, record);
        // A transfer of nothing is over.
        self.settle(transfer, effects);
        transfer
    }

    /// The next batch for `peer`, entered as in flight before it is posted: it may settle before the backend's `submit`
    /// returns.
    pub(super) fn next_batch(&mut self, peer: PeerId, max_in_flight: u32) -> Option<Ticket> {
        loop {
            let known = self.peers.get_mut(&peer)?;
            if known.in_flight >= max_in_flight {
                return None;
            }
            let work = known.queue.pop_front()?;
            let record = self.transfers.get_mut(&work.transfer);
            let Some(record) = record.filter(|record| record.failure.is_none()) else {
                self.keep_spare(work.cutter.into_spare());
                continue;
            };
            // The notification must not overtake data. Batches in flight to one peer may become visible in any order
            // (`Ordering::Unordered`). Where they become visible in order (`Ordering::PerPeer`), the contract still does
            // not say that a batch fails when one before it failed, and a notification after failed data is worse than
            // one round trip. So the batch that carries it waits for all others, whatever the ordering.
            if work.notify.is_some() && record.unposted == 1 && !record.outstanding.is_empty() {
                record.held = Some(work);
                continue;
            }
            self.next_batch += 1;
            let id = TransferId(self.next_batch);
            known.in_flight += 1;
            record.unposted -= 1;
            record.outstanding.push(id);
            record.posted.get_or_insert_with(Instant::now);
            self.batches.insert(id, work.transfer);
            let (mode, last) = (record.mode, record.unposted == 0);
            return Some(Ticket { id, peer, mode, work, last, settles: self.settles });
        }
    }

    /// What the backend said to a batch. Returns whether posting to this peer may go on.
    pub(super) fn posted(
        &mut self,
        ticket: Ticket,
        said: Result<Submit>,
        effects: &mut Effects,
    ) -> bool {
        let Ticket { id, peer, mut work, last, settles, .. } = ticket;
        match said {
            Ok(said @ (Submit::Submitted | Submit::Done { .. })) => {
                self.count(peer, |stats| stats.batches += 1);
                if let Some(known) = self.peers.get_mut(&peer) {
                    known.last_batch = id.0;
                    known.waits_for_room = false;
                }
                work.cutter.advance();
                // The record is gone if all of it, or what was posted before it failed, settled meanwhile.
                if last {
                    self.keep_spare(work.cutter.into_spare());
                } else {
                    self.queue_first(peer, work);
                }
                if let Submit::Done { route } = said {
                    self.batch_settled(id, Outcome::Done { route }, effects);
                }
                true
            }
            Ok(Submit::Full) => {
                self.count(peer, |stats| stats.full += 1);
                let transfer = work.transfer;
                self.not_posted(id, peer, transfer);
                let record = self.transfers.get_mut(&transfer);
                if let Some(error) = record.and_then(|record| record.given_up.take()) {
                    self.keep_spare(work.cutter.into_spare());
                    self.fail(transfer, error, effects);
                } else {
                    self.queue_first(peer, work);
                    self.settle(transfer, effects);
                }
                // Something that settled meanwhile made room, and nobody will say so again.
                if self.settles != settles {
                    return true;
                }
                if let Some(known) = self.peers.get_mut(&peer) {
                    self.stalled.insert(peer);
                    // Told once: a driver that is refused again would wake itself, and spin.
                    if !std::mem::replace(&mut known.waits_for_room, true) {
                        self.waiters.take(Topic::Driver, &mut effects.wake);
                    }
                }
                false
            }
            Err(error) => {
                let transfer = work.transfer;
                self.not_posted(id, peer, transfer);
                self.keep_spare(work.cutter.into_spare());
                self.fail(transfer, error, effects);
                true
            }
        }
    }

    pub(super) fn count(&mut self, peer: PeerId, change: impl Fn(&mut PortStats)) {
        change(&mut self.stats);
        if let Some(peer) = self.peers.get_mut(&peer) {
            change(&mut peer.stats);
        }
    }

    pub(super) fn queue_first(&mut self, peer: PeerId, work: Work) {
        match self.peers.get_mut(&peer) {
            Some(peer) => peer.queue.push_front(work),
            None => self.keep_spare(work.cutter.into_spare()),
        }
    }

    /// Undoes what [`next_batch`](Self::next_batch) entered.
    fn not_posted(&mut self, id: TransferId, peer: PeerId, transfer: u64) {
        self.batches.remove(&id);
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.in_flight -= 1;
        }
        if let Some(record) = self.transfers.get_mut(&transfer) {
            record.outstanding.retain(|other| *other != id);
            record.unposted += 1;
            if record.unposted == record.size.batches {
                record.posted = None;
            }
        }
    }

    /// Whether only time can help: something was refused as full, and nothing is in flight.
    pub(super) fn only_time_helps(&self) -> bool {
        !self.stalled.is_empty() && self.batches.is_empty()
    }
}
