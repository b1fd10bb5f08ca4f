//! What happens when something comes up: data is copied, transfers are reported, notifications arrive.

use kvx_core::backend::{Event, Outcome};
use kvx_core::memory::Region;
use kvx_core::transfer::Mode;
use kvx_core::{Error, ErrorKind, Result};
use rand::RngExt;

use crate::engine::{Engine, Job, Life, Note, PeerState, Stage, Wait, Work};
use crate::error::{BACKEND, down, malformed, ruled};
use crate::net::{EngineId, Net, lost};
use crate::preset::Loss;
use crate::schedule::{Happening, Lane};
use crate::timing::{Nanos, Span};
use crate::trace::What;
use crate::way::Judged;

impl Net {
    /// Lets the next thing happen. `false` when there is none.
    pub(crate) fn step(&mut self) -> bool {
        let Some(what) = self.schedule.pop() else { return false };
        self.step += 1;
        match what {
            Happening::Data(lane, number) => self.data(lane, number),
            Happening::Completion(lane, number) => self.completion(lane, number),
            Happening::Note(lane, number) => self.note(lane, number),
            Happening::Notice(lane) => self.told(lane),
            Happening::Silence(lane) => self.silent(lane),
            Happening::Loss(lane) => self.given_up(lane),
            Happening::Finish(lane) => self.finish(lane),
            Happening::Flap(number) => self.flap(number),
        }
        true
    }

    /// Lets the first transfer of a lane that has data to move begin: any, or the next where they go in order.
    pub(crate) fn begin(&mut self, lane: Lane, number: u64) {
        if self.is_ordered(lane.engine) {
            self.begin_next(lane);
        } else {
            self.next_part(lane, number, true);
        }
    }

    fn begin_next(&mut self, lane: Lane) {
        let Some(side) = self.side(lane) else { return };
        let mut list = side.transfers.iter();
        let next = list.find(|(_, transfer)| !matches!(transfer.stage, Stage::Over(_)));
        if let Some((&number, transfer)) = next
            && matches!(transfer.stage, Stage::Data)
            && transfer.wait == Wait::Turn
        {
            self.next_part(lane, number, true);
        }
    }

    /// Draws how much of a transfer moves next, and when.
    fn next_part(&mut self, lane: Lane, number: u64, first: bool) {
        let timing = self.timing(lane.engine);
        let Some(left) = self.transfer_mut(lane, number).map(|t| t.work.jobs.len()) else { return };
        let part = self.rng.random_range(1..=left.max(1));
        // The way takes its time once per transfer; what follows comes close behind.
        let jitter = Span::new(std::time::Duration::ZERO, timing.latency.shortest / 4);
        let latency = self.draw(if first { timing.latency } else { jitter });
        let now = self.schedule.now;
        let Some(side) = self.side_mut(lane) else { return };
        let Some(transfer) = side.transfers.get_mut(&number) else { return };
        transfer.work.part = part;
        transfer.judged = false;
        let from = if first { transfer.posted_at } else { now };
        let cost = timing.cost(transfer.work.part_bytes());
        side.busy_until = side.busy_until.max(now).saturating_add(cost);
        let arrival = side.busy_until.max(from.saturating_add(latency).saturating_add(cost));
        let delay = arrival - now;
        let what = Happening::Data(lane, number);
        let wait = self.wait(delay, what);
        self.set_wait(what, wait);
    }

    /// A part of a transfer's data comes up.
    fn data(&mut self, lane: Lane, number: u64) {
        let what = Happening::Data(lane, number);
        match self.first_judged(what, lane, number) {
            Judged::Now => {}
            Judged::Later => return,
            Judged::Lost => return self.lose_data(lane, number),
            Judged::Failed(kind) => {
                let error = ruled("transfer", kind);
                return self.conclude(lane, number, Outcome::Failed(error));
            }
        }
        let (may_go_on, may_cancel) = (self.rng.random_ratio(1, 4), self.coin());
        let Some(side) = self.side_mut(lane) else { return };
        let (state, revoked) = (side.state, side.revoked);
        let Some(transfer) = side.transfers.get_mut(&number) else { return };
        let outcome = if let Some(error) = transfer.doomed.take() {
            Outcome::Failed(error)
        } else if revoked {
            Outcome::Failed(down("transfer", "the peer has ended this side's access"))
        } else if let PeerState::Closing(reason) = state
            && !may_go_on
        {
            ended(reason)
        } else if transfer.cancelled && may_cancel {
            Outcome::Cancelled
        } else {
            match self.copy_part(lane, number) {
                Ok(true) => return self.all_arrived(lane, number),
                Ok(false) => return self.next_part(lane, number, false),
                Err(error) => Outcome::Failed(error),
            }
        };
        self.conclude(lane, number, outcome);
    }

    /// As [`judge`](Self::judge), if the rules have not been asked before.
    fn first_judged(&mut self, what: Happening, lane: Lane, number: u64) -> Judged {
        match self.transfer_mut(lane, number) {
            Some(transfer) if !transfer.judged => transfer.judged = true,
            _ => return Judged::Now,
        }
        self.judge(what, lane)
    }

    /// Copies a part of a transfer. Whether that was all.
    fn copy_part(&mut self, lane: Lane, number: u64) -> Result<bool> {
        let Some(side) = self.side_mut(lane) else { return Ok(false) };
        let target = side.engine;
        let Some(transfer) = side.transfers.get_mut(&number) else { return Ok(false) };
        let (id, mode, mut work) = (transfer.id, transfer.mode, std::mem::take(&mut transfer.work));
        let segments = work.part;
        let copied = work.copy(mode, self.engines.get(&target));
        let complete = work.jobs.is_empty();
        if let Some(transfer) = self.transfer_mut(lane, number) {
            transfer.work = work;
        }
        copied?;
        self.record(lane.engine, What::Moved { id, segments });
        Ok(complete)
    }

    /// All data of a transfer has arrived: its notification sets out, if there is room for it.
    pub(crate) fn all_arrived(&mut self, lane: Lane, number: u64) {
        let Some(transfer) = self.transfer_mut(lane, number) else { return };
        let id = transfer.id;
        if transfer.notify.is_some() {
            let receiver = self.receiver(lane);
            if let Some(target) = receiver.and_then(|engine| self.engines.get_mut(&engine)) {
                if !target.has_room() {
                    target.inbox.waiting.push_back((lane, number));
                    if let Some(transfer) = self.transfer_mut(lane, number) {
                        (transfer.stage, transfer.wait) = (Stage::Room, Wait::Turn);
                    }
                    return self.record(lane.engine, What::NoRoom(id));
                }
                target.inbox.coming += 1;
            }
            self.set_out(lane, number, receiver.is_some());
        }
        self.conclude(lane, number, Outcome::done());
    }

    /// The engine that a notification of this lane would reach, if it is there and still knows this one.
    fn receiver(&self, lane: Lane) -> Option<EngineId> {
        let reverse = self.reverse(lane)?;
        let target = self.engines.get(&reverse.engine).filter(|e| e.life == Life::Up)?;
        let side = target.peers.get(reverse.peer)?;
        (side.state != PeerState::Down).then_some(reverse.engine)
    }

    fn set_out(&mut self, lane: Lane, number: u64, room: bool) {
        let order = self.number();
        let delay = self.draw(self.timing(lane.engine).latency);
        let Some(side) = self.side_mut(lane) else { return };
        let Some(transfer) = side.transfers.get_mut(&number) else { return };
        let Some(payload) = transfer.notify.take() else { return };
        let note = Note { id: transfer.id, payload, wait: Wait::Turn, judged: false, room };
        side.notes.insert(order, note);
        let what = Happening::Note(lane, order);
        let wait = self.wait(delay, what);
        self.set_wait(what, wait);
    }

    /// There may be room for notifications again: those that waited for it set out, the oldest first.
    pub(crate) fn make_room(&mut self, engine: EngineId) {
        while let Some(entry) = self.engines.get_mut(&engine).filter(|entry| entry.has_room()) {
            let Some((lane, number)) = entry.inbox.waiting.pop_front() else { return };
            if self.transfer_mut(lane, number).is_some_and(|t| matches!(t.stage, Stage::Room)) {
                self.all_arrived(lane, number);
            }
        }
    }

    /// A transfer is over: it is reported after a while.
    pub(crate) fn conclude(&mut self, lane: Lane, number: u64, outcome: Outcome) {
        let delay = self.draw(self.timing(lane.engine).latency);
        self.conclude_after(delay, lane, number, outcome);
    }

    fn conclude_after(&mut self, delay: Nanos, lane: Lane, number: u64, outcome: Outcome) {
        let Some(transfer) = self.transfer_mut(lane, number) else { return };
        (transfer.stage, transfer.judged) = (Stage::Over(outcome), false);
        let what = Happening::Completion(lane, number);
        let wait = self.wait(delay, what);
        self.set_wait(what, wait);
        if self.is_ordered(lane.engine) {
            self.begin_next(lane);
        }
    }

    /// The report of a transfer comes up.
    fn completion(&mut self, lane: Lane, number: u64) {
        let what = Happening::Completion(lane, number);
        match self.first_judged(what, lane, number) {
            Judged::Now => {}
            Judged::Later => return,
            Judged::Lost => {
                self.set_wait(what, Wait::Way);
                return self.break_lane(lane);
            }
            Judged::Failed(kind) => {
                if let Some(transfer) = self.transfer_mut(lane, number) {
                    transfer.stage = Stage::Over(Outcome::Failed(ruled("transfer", kind)));
                }
            }
        }
        self.set_wait(what, Wait::Turn);
        self.report(lane, number);
    }

    /// Settles a transfer whose report has arrived; where they go in order, when it is the first, and then those behind it.
    fn report(&mut self, lane: Lane, number: u64) {
        if !self.is_ordered(lane.engine) {
            return self.settle_over(lane, number);
        }
        while let Some((&first, transfer)) =
            self.side(lane).and_then(|s| s.transfers.first_key_value())
        {
            if !matches!(transfer.stage, Stage::Over(_)) || transfer.wait != Wait::Turn {
                return;
            }
            self.settle_over(lane, first);
        }
    }

    fn settle_over(&mut self, lane: Lane, number: u64) {
        let Some(transfer) = self.transfer_mut(lane, number) else { return };
        if let Stage::Over(outcome) = std::mem::replace(&mut transfer.stage, Stage::Room) {
            self.settle(lane, number, outcome);
        }
    }

    /// A rule lost a part of a transfer's data.
    fn lose_data(&mut self, lane: Lane, number: u64) {
        let loss = self.engines.get(&lane.engine).map(|entry| entry.preset.loss());
        if loss == Some(Loss::Transfer) {
            let delay = self.draw(self.timing(lane.engine).death);
            self.conclude_after(delay, lane, number, Outcome::Failed(lost()));
        } else {
            self.set_wait(Happening::Data(lane, number), Wait::Way);
            self.break_lane(lane);
        }
    }

    /// Something of a lane was lost for good: nothing more of it moves, and after a while this side gives it up.
    fn break_lane(&mut self, lane: Lane) {
        let Some(side) = self.side_mut(lane) else { return };
        if std::mem::replace(&mut side.broken, true) {
            return;
        }
        let open = side.state == PeerState::Open;
        self.record(lane.engine, What::Broken(lane.peer));
        self.park();
        if open {
            let delay = self.draw(self.timing(lane.engine).death);
            let key = self.schedule.after(delay, Happening::Loss(lane));
            if let Some(side) = self.side_mut(lane) {
                side.loss = Some(key);
            }
        }
    }

    /// A notification comes up.
    fn note(&mut self, lane: Lane, order: u64) {
        let what = Happening::Note(lane, order);
        let note = self.side_mut(lane).and_then(|side| side.notes.get_mut(&order));
        let asked = note.is_none_or(|note| std::mem::replace(&mut note.judged, true));
        match if asked { Judged::Now } else { self.judge(what, lane) } {
            Judged::Later => return,
            Judged::Lost => {
                self.lose(lane, order);
                return self.break_lane(lane);
            }
            Judged::Now | Judged::Failed(_) => {}
        }
        self.set_wait(what, Wait::Turn);
        if !self.is_ordered(lane.engine) {
            return self.deliver(lane, order);
        }
        while let Some((&first, note)) = self.side(lane).and_then(|s| s.notes.first_key_value()) {
            if note.wait != Wait::Turn {
                return;
            }
            self.deliver(lane, first);
        }
    }

    /// Brings a notification to the other side, if that still knows this one.
    pub(crate) fn deliver(&mut self, lane: Lane, order: u64) {
        let Some((target, reverse)) =
            self.receiver(lane).and_then(|target| Some((target, self.reverse(lane)?)))
        else {
            return self.lose(lane, order);
        };
        let Some(note) = self.take_note(lane, order) else { return };
        let bytes = note.payload.len();
        self.record(target, What::Notified { peer: reverse.peer, bytes });
        if let Some(entry) = self.engines.get_mut(&target) {
            entry.inbox.notified += 1;
            let event = Event::Notified { peer: reverse.peer, payload: note.payload };
            entry.inbox.events.push_back(event);
        }
    }

    /// Loses a notification, with its connection.
    pub(crate) fn lose(&mut self, lane: Lane, order: u64) {
        let Some(note) = self.take_note(lane, order) else { return };
        self.record(lane.engine, What::Lost { peer: lane.peer, bytes: note.payload.len() });
        if let Some(target) = self.side(lane).map(|side| side.engine) {
            self.make_room(target);
        }
    }

    fn take_note(&mut self, lane: Lane, order: u64) -> Option<Note> {
        let side = self.side_mut(lane)?;
        let (target, note) = (side.engine, side.notes.remove(&order)?);
        self.unschedule(note.wait);
        if note.room
            && let Some(entry) = self.engines.get_mut(&target)
        {
            entry.inbox.coming = entry.inbox.coming.saturating_sub(1);
        }
        Some(note)
    }
}

impl Work {
    /// Copies the next part.
    fn copy(&mut self, mode: Mode, target: Option<&Engine>) -> Result<()> {
        for _ in 0..self.part {
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
        copy_between(mode, (local, job.local_offset), (remote, job.remote_offset), job.bytes)
    }
}

/// Copies a segment, if it lies within the peer's region: what a network card does with an access outside a registration.
pub(crate) fn copy_between(
    mode: Mode,
    (local, at): (&Region, u64),
    (remote, offset): (&Region, u64),
    bytes: u64,
) -> Result<()> {
    if offset.checked_add(bytes).is_none_or(|end| end > remote.bytes()) {
        return Err(Error::new(ErrorKind::Fabric, "transfer", "outside the peer's region")
            .with_backend(BACKEND)
            .with_context("offset", offset)
            .with_context("bytes", bytes)
            .with_context("region", remote.bytes()));
    }
    match mode {
        Mode::Read => remote.copy_to(offset, local, at, bytes),
        Mode::Write => local.copy_to(at, remote, offset, bytes),
    }
    .map_err(|error| error.with_backend(BACKEND))
}

/// How a transfer ends with its connection.
pub(crate) fn ended(reason: Option<&'static str>) -> Outcome {
    match reason {
        None => Outcome::Cancelled,
        Some(reason) => Outcome::Failed(down("transfer", reason)),
    }
}
