//! What the seed decides: which lane moves next, how far, how transfers end, and when notifications arrive.

use kvx_core::backend::{Event, Events, Outcome};
use kvx_core::id::PeerId;
use kvx_core::memory::Region;
use kvx_core::transfer::Mode;
use kvx_core::{Error, ErrorKind, Result};
use rand::RngExt;

use crate::engine::{Closing, Engine, Job, Peer, PeerState, Transfer, Work};
use crate::error::{BACKEND, down, malformed};
use crate::net::{EngineId, Net};
use crate::trace::What;

/// Most steps of one poll.
const STEPS: u32 = 16;

impl Net {
    /// A poll by `engine`: moves the whole fabric, then gives the engine its events.
    pub(crate) fn poll(&mut self, engine: EngineId, events: &mut Events) {
        if !self.active.is_empty() {
            let steps = self.rng.random_range(1..=STEPS);
            for _ in 0..steps {
                if !self.step() {
                    break;
                }
            }
        }
        self.settle_closing(engine);
        self.give(engine, events);
    }

    /// One step of virtual time. `false` when there is nothing to do.
    pub(crate) fn step(&mut self) -> bool {
        if self.active.is_empty() {
            return false;
        }
        self.step += 1;
        let (engine, peer) = self.active[self.rng.random_range(0..self.active.len())];
        let ordered = self.is_ordered(engine);
        let Some(side) = self.peer_mut(engine, peer) else { return false };
        let movable = |all: usize| if ordered { all.min(1) } else { all };
        let (transfers, notes) = (movable(side.transfers.len()), movable(side.notes.len()));
        if transfers + notes > 0 {
            let choice = self.rng.random_range(0..transfers + notes);
            if choice < transfers {
                self.progress(engine, peer, choice);
            } else {
                self.deliver(engine, peer, choice - transfers);
            }
        }
        self.tidy(engine, peer);
        true
    }

    /// Moves a transfer on, or ends it.
    fn progress(&mut self, engine: EngineId, peer: PeerId, index: usize) {
        let (may_go_on, may_cancel) = (self.rng.random_ratio(1, 4), self.rng.random_bool(0.5));
        let Some(side) = self.peer_mut(engine, peer) else { return };
        let state = side.state;
        let Some(transfer) = side.transfers.get_mut(index) else { return };
        let doomed = transfer.doomed.take();
        let (cancelled, complete) = (transfer.cancelled, transfer.work.jobs.is_empty());
        let outcome = if let Some(error) = doomed {
            Outcome::Failed(error)
        } else if complete {
            Outcome::Done
        } else if let PeerState::Closing(closing) = state
            && (closing.revoked || !may_go_on)
        {
            ended(closing)
        } else if cancelled && may_cancel {
            Outcome::Cancelled
        } else {
            match self.copy_some(engine, peer, index) {
                Ok(()) => return,
                Err(error) => Outcome::Failed(error),
            }
        };
        self.settle(engine, peer, index, outcome);
    }

    /// Copies some of a transfer's segments. Its notification sets out once all are copied.
    fn copy_some(&mut self, engine: EngineId, peer: PeerId, index: usize) -> Result<()> {
        let Some(side) = self.engines.get_mut(&engine).and_then(|e| e.peers.get_mut(peer)) else {
            return Ok(());
        };
        let target = side.engine;
        let Some(transfer) = side.transfers.get_mut(index) else { return Ok(()) };
        let (id, mode, mut work) = (transfer.id, transfer.mode, std::mem::take(&mut transfer.work));
        let segments = self.rng.random_range(1..=work.jobs.len().max(1));
        let copied = work.copy(mode, self.engines.get(&target), segments);
        if let Some(side) = self.peer_mut(engine, peer)
            && let Some(transfer) = side.transfers.get_mut(index)
        {
            transfer.work = work;
        }
        if copied.is_ok() {
            self.record(engine, What::Moved { id, segments });
            if let Some(side) = self.peer_mut(engine, peer) {
                side.release_note(index);
            }
        }
        copied
    }

    /// Brings a notification to the other side, if that still knows this one.
    pub(crate) fn deliver(&mut self, engine: EngineId, peer: PeerId, index: usize) {
        let Some(side) = self.peer_mut(engine, peer) else { return };
        let (target, reverse) = (side.engine, side.reverse);
        let Some(payload) = side.notes.remove(index) else { return };
        let bytes = payload.len();
        let receiver = reverse.and_then(|at| Some((at, self.peer_mut(target, at)?.state)));
        match receiver {
            Some((from, PeerState::Open | PeerState::Closing(_))) => {
                self.record(target, What::Notified { peer: from, bytes });
                if let Some(entry) = self.engines.get_mut(&target) {
                    entry.events.push_back(Event::Notified { peer: from, payload });
                }
            }
            _ => self.record(engine, What::Lost { peer, bytes }),
        }
    }

    /// Settles at least half of what is left on each of an engine's ended connections, so that a few polls are a bound.
    pub(crate) fn settle_closing(&mut self, engine: EngineId) {
        let Some(entry) = self.engines.get(&engine) else { return };
        let closing: Vec<PeerId> = entry.closing.iter().copied().collect();
        for peer in closing {
            let Some(side) = self.peer_mut(engine, peer) else { continue };
            let PeerState::Closing(how) = side.state else { continue };
            let left = side.transfers.len();
            for settled in 0..left.div_ceil(2) {
                let index = self.rng.random_range(0..left - settled);
                let outcome = self.outcome_at_end(engine, peer, index, how);
                self.settle(engine, peer, index, outcome);
            }
            self.tidy(engine, peer);
        }
    }

    fn outcome_at_end(
        &mut self,
        engine: EngineId,
        peer: PeerId,
        index: usize,
        how: Closing,
    ) -> Outcome {
        let side = self.peer_mut(engine, peer);
        match side.and_then(|side| side.transfers.get_mut(index)) {
            Some(Transfer { doomed: Some(_), .. }) | None => ended(how),
            Some(transfer) if transfer.work.jobs.is_empty() => Outcome::Done,
            Some(_) => ended(how),
        }
    }

    /// Gives an engine its events, oldest first, as many as the caller has room for.
    fn give(&mut self, engine: EngineId, events: &mut Events) {
        let Some(entry) = self.engines.get_mut(&engine) else { return };
        while events.room() > 0 {
            let Some(event) = entry.events.pop_front() else { break };
            match &event {
                Event::Settled { id, .. } => {
                    let peer = entry.in_flight.remove(id);
                    if let Some(side) = peer.and_then(|peer| entry.peers.get_mut(peer)) {
                        side.in_flight = side.in_flight.saturating_sub(1);
                    }
                }
                Event::PeerDown { peer, .. } => {
                    for key in entry.peers.remove(*peer).into_iter().flat_map(|side| side.keys) {
                        entry.keys.remove(key);
                    }
                }
                _ => {}
            }
            events.push(event);
        }
    }
}

impl Peer {
    /// Lets a transfer's notification set out, if all its data has arrived.
    pub(crate) fn release_note(&mut self, index: usize) {
        if let Some(transfer) = self.transfers.get_mut(index)
            && transfer.work.jobs.is_empty()
            && let Some(note) = transfer.notify.take()
        {
            self.notes.push_back(note);
        }
    }
}

impl Work {
    fn copy(&mut self, mode: Mode, target: Option<&Engine>, segments: usize) -> Result<()> {
        for _ in 0..segments {
            let Some(job) = self.jobs.pop() else { break };
            self.copy_one(mode, target, job)?;
        }
        Ok(())
    }

    fn copy_one(&self, mode: Mode, target: Option<&Engine>, job: Job) -> Result<()> {
        let operation = "transfer";
        let (Some((_, local)), Some((_, key))) =
            (self.locals.get(job.local), self.remotes.get(job.remote))
        else {
            return Err(Error::new(ErrorKind::Internal, operation, "a segment without a region"));
        };
        let target = target.ok_or_else(|| down(operation, "the peer is gone"))?;
        let remote = target.reached_by(key).ok_or_else(|| {
            malformed(operation, "the peer no longer has this region registered")
                .with_context("region", key.region)
        })?;
        check_inside(remote, job)?;
        match mode {
            Mode::Read => remote.copy_to(job.remote_offset, local, job.local_offset, job.bytes),
            Mode::Write => local.copy_to(job.local_offset, remote, job.remote_offset, job.bytes),
        }
        .map_err(|error| error.with_backend(BACKEND))
    }
}

/// The target's own check: what a network card does with an access outside a registration.
fn check_inside(remote: &Region, job: Job) -> Result<()> {
    if job.remote_offset.checked_add(job.bytes).is_some_and(|end| end <= remote.bytes()) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Fabric, "transfer", "outside the peer's region")
        .with_backend(BACKEND)
        .with_context("offset", job.remote_offset)
        .with_context("bytes", job.bytes)
        .with_context("region", remote.bytes()))
}

/// How a transfer ends with its connection.
fn ended(closing: Closing) -> Outcome {
    match closing.reason {
        None => Outcome::Cancelled,
        Some(reason) => Outcome::Failed(down("transfer", reason)),
    }
}
