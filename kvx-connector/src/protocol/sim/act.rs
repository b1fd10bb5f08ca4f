//! What machines ask for is done: transfers, stages, connections.

use std::time::Duration;

use kvx_core::id::Incarnation;
use kvx_mock::sim::Violation;

use super::ensure;
use super::fabric::Flight;
use super::script::Climate;
use super::seat::Connection;
use super::world::{Event, Verdict, World};
use crate::protocol::id::Part;
use crate::protocol::owner;
use crate::protocol::terms::{Access, RequestNumber, TransferNumber};
use crate::protocol::user::{self, Outcome};

impl World {
    pub(super) fn owner_says(&mut self, seat: usize, output: owner::Output) -> Verdict {
        let life = self.owners[seat].process.life;
        match output {
            owner::Output::Send { peer, message } => self.send_user(life, peer, &message),
            owner::Output::RunStage { stage, lease, part, which } => {
                self.owners[seat].stages.insert(stage, (lease, part.number, which));
                let spec = self.owners[seat].specs.get_mut(&lease);
                let spec = spec.ok_or_else(|| Violation::new("a stage of an unknown lease"))?;
                spec.stages += 1;
                let ok = !(self.stormy && self.dice.chance(1, 40));
                let wait = self.a_while();
                self.after(wait, Event::Owner(seat, life, owner::Input::StageDone { stage, ok }));
            }
            owner::Output::Revoke { peer } => {
                ensure!(self.setting.revocable, "it revokes, and cannot");
                self.revoke(seat, peer);
            }
            owner::Output::Free { lease, why } => self.freed(seat, lease, why)?,
            owner::Output::Quarantined { lease, .. } => {
                self.report.quarantined += 1;
                self.set_quarantined(seat, lease)?;
            }
            owner::Output::Over { .. } | owner::Output::Written { .. } => {}
        }

        Ok(())
    }

    /// An owner ends the access of a user's rank, and is told that nothing of it moves.
    pub(super) fn revoke(&mut self, seat: usize, peer: Incarnation) {
        let life = self.owners[seat].process.life;
        for id in self.flights.between(peer, life) {
            if let Some(flight) = self.flights.all.get_mut(&id) {
                flight.barred = true;
            }
        }
        if let Some(user) = self.users.iter().position(|user| user.process.life == peer) {
            self.disconnect(user, life, false);
        }
        self.exactly(self.now, Event::Owner(seat, life, owner::Input::Quiescent { peer }));
    }

    pub(super) fn user_says(
        &mut self,
        seat: usize,
        now: Duration,
        output: user::Output,
    ) -> Verdict {
        let life = self.users[seat].process.life;
        match output {
            user::Output::NeedPeer { peer } => {
                let wait = self.dice.among(300, 3_000);
                self.after(wait, Event::Connect(seat, life, peer));
            }
            user::Output::Send { peer, message, .. } => {
                if self.users[seat].connections.get(&peer) == Some(&Connection::Up) {
                    self.send_owner(life, peer, &message);
                }
            }
            user::Output::Post { transfer, request, source, part } => {
                self.post(seat, transfer, request, source, &part)?;
            }
            user::Output::Cancel { transfer } => {
                let Some(id) = self.flights.of_transfer(life, transfer) else { return Ok(()) };
                let soon = self.dice.among(0, 3_000);
                let heeded = self.dice.chance(2, 3);
                if let Some(flight) = self.flights.all.get_mut(&id)
                    && !flight.stuck
                    && heeded
                {
                    flight.cancelled = true;
                    flight.settles = flight.settles.min(self.now + soon);
                    let at = flight.settles;
                    self.exactly(at, Event::Settle(id));
                }
            }
            user::Output::Sever { peer } => {
                for request in self.users[seat].requests.values_mut() {
                    if request.sources.iter().any(|(_, life)| *life == peer) {
                        request.severed = true;
                    }
                }
                self.disconnect(seat, peer, false);
            }
            user::Output::RunStage { stage, request, source, part, which } => {
                let place = (request, source, part.number, which);
                self.users[seat].stages.insert(stage, place);
                let req = self.req(seat, request)?;
                ensure!(!req.over, "{request:?} is over, and runs a stage");
                req.staging += 1;
                let ok = !(self.stormy && self.dice.chance(1, 40));
                let wait = self.a_while();
                self.after(wait, Event::User(seat, life, user::Input::StageDone { stage, ok }));
            }
            user::Output::PartProven { request, source, part } => {
                self.part_proven(seat, request, source, part)?;
            }
            user::Output::Ready { request } => self.ready(seat, request)?,
            user::Output::Failed { request, why, unproven, quarantined } => {
                self.failed(seat, now, request, why, &unproven)?;
                self.ended(seat, request, quarantined)?;
            }
            user::Output::Aborted { request, quarantined } => {
                self.report.aborted += 1;
                ensure!(self.req(seat, request)?.aborted, "{request:?} was never aborted");
                self.ended(seat, request, quarantined)?;
            }
            user::Output::Unquarantined { request } => {
                let req = self.req(seat, request)?;
                ensure!(std::mem::take(&mut req.quarantined), "{request:?} is not quarantined");
                ensure!(req.flying + req.staging == 0, "{request:?} still moves");
                self.release_blocks(seat, request)?;
            }
            user::Output::Refused { request } => {
                return Err(Violation::new(format!("{request:?} was refused")));
            }
        }
        Ok(())
    }

    fn post(
        &mut self,
        seat: usize,
        transfer: TransferNumber,
        request: RequestNumber,
        source: u16,
        part: &Part,
    ) -> Verdict {
        let life = self.users[seat].process.life;
        let req = self.req(seat, request)?;
        ensure!(!req.over, "{request:?} is over, and posts");
        req.flying += 1;
        let (owner, owner_life) = req.sources[usize::from(source)];
        let mine = req.blocks.get(&(source, part.number)).copied();
        let (job, access, edited) = (req.job, req.access, req.edited);
        self.users[seat].transfers.insert(transfer, request);
        let lease = self.jobs[job].lease;
        let theirs = self.granted[job].blocks.get(&(owner, seat, part.number)).copied();
        let there = self.owners[owner].process.life == owner_life;
        let up = self.users[seat].connections.get(&owner_life) == Some(&Connection::Up);
        // Over a connection that has ended nothing moves.
        if access == Access::Write && there && up {
            let spec = self.owners[owner].specs.get(&lease);
            ensure!(spec.is_some_and(|spec| !spec.freed), "{request:?} writes what is not leased");
            ensure!(!edited, "{request:?} writes into other blocks than are leased");
        }
        let copies: Vec<_> = theirs.zip(mine.map(|(block, _)| block)).into_iter().collect();
        if !up || (!self.dice.chance(9, 10)) {
            let tries = self.setting.climate == Climate::Lossy || self.stormy;
            let outcome = match self.dice.index(3) {
                0 if up && tries => Outcome::Failed { retry: true },
                _ if up => Outcome::Busy,
                _ => Outcome::Failed { retry: true },
            };
            self.req(seat, request)?.transfer_failed |= outcome != Outcome::Busy;
            let input = user::Input::Settled { transfer, outcome };
            self.exactly(self.now, Event::User(seat, life, input));
            return Ok(());
        }
        let mut wait = self.a_while();
        let stuck = self.stormy && self.dice.chance(1, 40);
        if stuck {
            wait += self.dice.among(100_000, 800_000);
        }
        let settles = self.now + wait;
        let fails = self.setting.climate != Climate::Fair && self.dice.chance(1, 12);
        let flight = Flight {
            user: seat,
            user_life: life,
            owner,
            owner_life,
            request: request.0,
            transfer,
            access,
            copies,
            copied: 0,
            barred: false,
            cancelled: false,
            fails,
            settles,
            stuck,
        };
        let many = flight.copies.len();
        let id = self.flights.add(flight);
        for _ in 0..many {
            let at = self.dice.among(self.now, settles);
            self.exactly(at, Event::Copy(id));
        }
        self.exactly(settles, Event::Settle(id));
        Ok(())
    }

    /// A block is copied, if both processes are there.
    pub(super) fn copy(&mut self, id: u64) {
        let Some(flight) = self.flights.all.get_mut(&id) else { return };
        let Some((theirs, mine)) = flight.copies.get(flight.copied).copied() else { return };
        flight.copied += 1;
        let owner = &mut self.owners[flight.owner].process;
        let user = &mut self.users[flight.user].process;
        if flight.barred || owner.life != flight.owner_life {
            return;
        }
        match flight.access {
            Access::Read if user.life == flight.user_life => {
                user.memory.tags[mine] = owner.memory.tags[theirs];
            }
            Access::Read => {}
            // What a dead writer had posted may still arrive: it is some junk.
            Access::Write => {
                let same = user.life == flight.user_life;
                owner.memory.tags[theirs] = if same { user.memory.tags[mine] } else { u32::MAX };
            }
        }
    }

    pub(super) fn settle(&mut self, id: u64) {
        let Some(flight) = self.flights.all.get(&id) else { return };
        if flight.settles > self.now {
            return;
        }
        let complete = flight.copied == flight.copies.len() && !flight.barred && !flight.fails;
        let Some(flight) = self.flights.all.remove(&id) else { return };
        let there = self.owners[flight.owner].process.life == flight.owner_life;
        let outcome = if complete && (there || flight.copies.is_empty()) {
            Outcome::Done
        } else if flight.cancelled {
            Outcome::Cancelled
        } else {
            Outcome::Failed { retry: true }
        };
        let (user, life) = (flight.user, flight.user_life);
        if self.users[user].process.life == life {
            if outcome != Outcome::Done
                && let Some(req) = self.users[user].requests.get_mut(&RequestNumber(flight.request))
            {
                req.transfer_failed = true;
            }
            let input = user::Input::Settled { transfer: flight.transfer, outcome };
            self.exactly(self.now, Event::User(user, life, input));
        }
        self.maybe_down(user, life, flight.owner_life);
    }

    pub(super) fn connect(&mut self, seat: usize, life: Incarnation, peer: Incarnation) {
        let user = &self.users[seat];
        if user.process.life != life || !user.process.alive {
            return;
        }
        let owner = self.owners.iter().find(|owner| owner.process.life == peer);
        let stopped = owner.is_some_and(|owner| owner.process.stopped_until > self.now);
        if user.connections.contains_key(&peer) || stopped {
            return self.after(2_000, Event::Connect(seat, life, peer));
        }
        let fails = owner.is_none() || (self.stormy && self.dice.chance(1, 60));
        let input = if fails {
            user::Input::PeerFailed { peer }
        } else {
            self.users[seat].connections.insert(peer, Connection::Up);
            user::Input::PeerReady { peer }
        };
        self.exactly(self.now, Event::User(seat, life, input));
    }

    /// A connection ends: what is under way settles soon, if it is not stuck, and then both sides hear of it.
    pub(super) fn disconnect(&mut self, seat: usize, peer: Incarnation, gone: bool) {
        let life = self.users[seat].process.life;
        let Some(connection) = self.users[seat].connections.get_mut(&peer) else { return };
        match connection {
            Connection::Up => *connection = Connection::Ending { gone },
            Connection::Ending { gone: before } => *before |= gone,
        }
        for id in self.flights.between(life, peer) {
            let soon = self.dice.among(100, 15_000);
            if let Some(flight) = self.flights.all.get_mut(&id)
                && (!flight.stuck || flight.barred || gone)
            {
                flight.fails |= flight.copied < flight.copies.len();
                flight.settles = flight.settles.min(self.now + soon);
                let at = flight.settles;
                self.exactly(at, Event::Settle(id));
            }
        }
        self.maybe_down(seat, life, peer);
    }

    /// Tells both sides that a connection has ended, once nothing of it is under way.
    fn maybe_down(&mut self, seat: usize, life: Incarnation, peer: Incarnation) {
        if self.users[seat].process.life != life || !self.flights.between(life, peer).is_empty() {
            return;
        }
        let Some(Connection::Ending { gone }) = self.users[seat].connections.get(&peer) else {
            return;
        };
        let input =
            if *gone { user::Input::PeerGone { peer } } else { user::Input::PeerDown { peer } };
        self.users[seat].connections.remove(&peer);
        self.exactly(self.now, Event::User(seat, life, input));
        let owner = self.owners.iter().position(|owner| owner.process.life == peer);
        if let Some(owner) = owner.filter(|_| self.setting.revocable) {
            let input = owner::Input::Quiescent { peer: life };
            self.exactly(self.now, Event::Owner(owner, peer, input));
        }
    }
}
