//! How connections end: who learns of it when, what settles how, and who may touch whose memory until when.

use kvx_core::backend::{Event, Outcome};
use kvx_core::id::PeerId;
use rand::RngExt;

use crate::engine::{Life, PeerState, Stage, Wait};
use crate::error::down;
use crate::net::{EngineId, Net};
use crate::schedule::{Happening, Lane};
use crate::step::ended;
use crate::trace::What;

impl Net {
    /// Ends a connection from one side: for this reason, and `theirs` is what the other side is told.
    pub(crate) fn end(&mut self, lane: Lane, mine: Option<&'static str>, theirs: &'static str) {
        if self.is_open(lane) {
            self.close_side(lane, mine);
            self.tell(lane, theirs);
        }
    }

    /// Takes one side of a connection out of use. What it has in flight settles from now on.
    fn close_side(&mut self, lane: Lane, reason: Option<&'static str>) {
        let sever = self.timing(lane.engine).sever;
        let delay = self.draw(sever);
        let finish = self.schedule.after(delay, Happening::Finish(lane));
        let Some(entry) = self.engines.get_mut(&lane.engine) else { return };
        entry.closing.insert(lane.peer);
        let Some(side) = entry.peers.get_mut(lane.peer) else { return };
        side.state = PeerState::Closing(reason);
        side.finish = Some(finish);
        let (connection, notice) = (side.connection, side.notice.take());
        for key in [side.silence.take(), side.loss.take()].into_iter().flatten() {
            self.schedule.remove(key);
        }
        if let Some((wait, _)) = notice {
            self.unschedule(wait);
        }
        if let Some(connection) = self.connections.remove(&connection) {
            let [one, other] = connection.sides;
            self.pairs.remove(&(one.0, other.0));
        }
    }

    /// Sends the news that a connection is over to its other side.
    fn tell(&mut self, lane: Lane, reason: &'static str) {
        if let Some(other) = self.reverse(lane) {
            self.notify(other, reason);
        }
    }

    /// Sends the news that its connection is over to a side.
    fn notify(&mut self, lane: Lane, reason: &'static str) {
        if !self.is_open(lane) || self.side(lane).is_none_or(|side| side.notice.is_some()) {
            return;
        }
        let delay = self.draw(self.timing(lane.engine).latency);
        let wait = self.wait(delay, Happening::Notice(lane));
        if let Some(side) = self.side_mut(lane) {
            side.notice = Some((wait, reason));
        }
    }

    /// A side learns that the other one has ended the connection.
    pub(crate) fn told(&mut self, lane: Lane) {
        let notice = self.side_mut(lane).and_then(|side| side.notice.take());
        if let Some((_, reason)) = notice {
            self.record(lane.engine, What::Told(lane.peer));
            self.close_side(lane, Some(reason));
        }
    }

    /// A side gives up a peer that does not answer.
    pub(crate) fn silent(&mut self, lane: Lane) {
        if let Some(side) = self.side_mut(lane) {
            side.silence = None;
        }
        self.record(lane.engine, What::Silent(lane.peer));
        self.end(lane, Some("the peer does not answer"), "the peer gave the connection up");
    }

    /// A side gives up a connection on which something was lost.
    pub(crate) fn given_up(&mut self, lane: Lane) {
        if let Some(side) = self.side_mut(lane) {
            side.loss = None;
        }
        self.end(lane, Some("something was lost for good"), "the peer gave the connection up");
    }

    /// A side that has a new connection to the same engine gives up the old one.
    pub(crate) fn retire(&mut self, lane: Lane) {
        self.end(lane, Some("the peer has connected anew"), "the peer has connected anew");
    }

    /// Ends the other side's access to the memory of this one.
    pub(crate) fn end_access(&mut self, lane: Lane) {
        if let Some(side) = self.reverse(lane).and_then(|other| self.side_mut(other)) {
            side.revoked = true;
        }
    }

    /// Settles all that is left of an ended connection.
    pub(crate) fn finish(&mut self, lane: Lane) {
        while self.side(lane).is_some_and(|side| !side.transfers.is_empty()) {
            self.settle_one(lane);
        }
        self.go_down(lane);
    }

    /// Settles at least half of what is left on each of an engine's ended connections, so that a few polls are a bound.
    pub(crate) fn settle_closing(&mut self, engine: EngineId) {
        let Some(entry) = self.engines.get(&engine) else { return };
        let closing: Vec<PeerId> = entry.closing.iter().copied().collect();
        for peer in closing {
            let lane = Lane { engine, peer };
            let left = self.side(lane).map_or(0, |side| side.transfers.len());
            for _ in 0..left.div_ceil(2) {
                self.settle_one(lane);
            }
            if left <= 1 {
                self.go_down(lane);
            }
        }
    }

    /// Settles one transfer of an ended connection: the first where they go in order, any otherwise.
    fn settle_one(&mut self, lane: Lane) {
        let ordered = self.is_ordered(lane.engine);
        let Some(left) = self.side(lane).map(|side| side.transfers.len()) else { return };
        let index = if ordered { 0 } else { self.rng.random_range(0..left.max(1)) };
        let heard = self.coin();
        let Some(side) = self.side_mut(lane) else { return };
        let PeerState::Closing(reason) = side.state else { return };
        let Some((&number, transfer)) = side.transfers.iter_mut().nth(index) else { return };
        let known = match transfer.wait {
            Wait::Turn => true,
            Wait::Time(_) => heard,
            Wait::Way | Wait::Rule(..) => false,
        };
        let outcome = match std::mem::replace(&mut transfer.stage, Stage::Room) {
            // What this side cannot have heard, it does not report as done.
            Stage::Over(Outcome::Done { .. }) if !known => ended(reason),
            Stage::Over(outcome) => outcome,
            Stage::Data | Stage::Room => ended(reason),
        };
        self.settle(lane, number, outcome);
    }

    /// Reports an ended connection as down, once all has settled.
    fn go_down(&mut self, lane: Lane) {
        let Some(side) = self.side_mut(lane) else { return };
        let PeerState::Closing(reason) = side.state else { return };
        if !side.transfers.is_empty() {
            return;
        }
        if let Some(key) = side.finish.take() {
            self.schedule.remove(key);
        }
        if self.is_revoking(lane.engine) {
            self.end_access(lane);
        }
        let notes: Vec<(u64, Wait)> = match self.side(lane) {
            Some(side) => side.notes.iter().map(|(order, note)| (*order, note.wait)).collect(),
            None => Vec::new(),
        };
        for (order, wait) in notes {
            if self.coin() && matches!(wait, Wait::Time(_) | Wait::Turn) {
                self.deliver(lane, order);
            } else {
                self.lose(lane, order);
            }
        }
        let error = reason.map(|reason| down("connection", reason));
        if let Some(entry) = self.engines.get_mut(&lane.engine) {
            if let Some(side) = entry.peers.get_mut(lane.peer) {
                side.state = PeerState::Down;
            }
            entry.closing.remove(&lane.peer);
            entry.inbox.downs += 1;
            entry.inbox.events.push_back(Event::PeerDown { peer: lane.peer, error });
        }
        self.record(lane.engine, What::PeerDown(lane.peer));
    }

    /// Ends everything of an engine. What it had in flight settles at once.
    pub(crate) fn close(&mut self, engine: EngineId, reason: &'static str) {
        let Some(entry) = self.engines.get(&engine) else { return };
        if entry.life != Life::Up {
            return;
        }
        for lane in self.lanes_of(engine) {
            self.end(lane, None, reason);
        }
        self.withdraw(engine, Life::Closed);
        // Those that were still in the handshake.
        for other in self.lanes_to(engine) {
            self.notify(other, reason);
        }
        while self.engines.get(&engine).is_some_and(|entry| !entry.closing.is_empty()) {
            self.settle_closing(engine);
        }
        self.record(engine, What::Closed);
    }

    /// Takes an engine's memory and name from the others.
    pub(crate) fn withdraw(&mut self, engine: EngineId, life: Life) {
        let Some(entry) = self.engines.get_mut(&engine) else { return };
        entry.life = life;
        let (incarnation, regions) = (entry.incarnation, entry.regions.drain());
        entry.inbox.waiting.clear();
        self.give_up(regions.into_iter().map(|registered| registered.region));
        self.incarnations.remove(&incarnation);
        self.park();
    }

    /// Forgets an engine whose backend is gone.
    pub(crate) fn forget(&mut self, engine: EngineId) {
        self.close(engine, "the peer is gone");
        self.engines.remove(&engine);
        self.rules.forget(engine);
    }
}
