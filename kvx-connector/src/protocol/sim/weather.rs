//! What is done to processes and connections, and the end of the world.

use super::ensure;
use super::script::other;
use super::world::{Event, Verdict, World};
use crate::protocol::id::{Fingerprint, Nonce};
use crate::protocol::message::{
    Confirm, Ended, Hold, PartList, Release, ToOwner, ToUser, Verdict as Judged,
};
use crate::protocol::owner;
use crate::protocol::terms::{Access, Ranks, Reason};
use crate::protocol::user;

impl World {
    /// Something goes wrong.
    pub(super) fn weather(&mut self) {
        let owner = self.dice.index(self.owners.len());
        let user = self.dice.index(self.users.len());
        match self.dice.index(10) {
            0 => self.owners_die(),
            1 => self.users_die(true),
            2 => {
                let until = self.now + self.dice.among(5_000, 300_000);
                let process = &mut self.owners[owner].process;
                let before = process.stopped_until.max(self.now);
                process.stopped += until.saturating_sub(before);
                process.stopped_until = process.stopped_until.max(until);
            }
            3 => {
                let until = self.now + self.dice.among(5_000, 300_000);
                let process = &mut self.users[user].process;
                let before = process.stopped_until.max(self.now);
                process.stopped += until.saturating_sub(before);
                process.stopped_until = process.stopped_until.max(until);
            }
            4 => {
                let peer = self.owners[owner].process.life;
                self.disconnect(user, peer, false);
            }
            5 if self.setting.revocable => {
                let peer = self.users[user].process.life;
                if self.owners[owner].process.stopped_until <= self.now {
                    self.revoke(owner, peer);
                }
            }
            _ => {
                for _ in 0..4 {
                    self.lie(owner);
                }
            }
        }
    }

    /// The owner's engine dies, and another life of it begins.
    fn owners_die(&mut self) {
        self.owner_engine = self.dice.life();
        // Numbers begin anew: the life tells them apart.
        self.next_lease = 0;
        for seat in 0..self.owners.len() {
            let before = self.owners[seat].process.life;
            let process = self.process();
            let machine = self.owner();
            let owner = &mut self.owners[seat];
            owner.process = process;
            owner.machine = machine;
            owner.specs.clear();
            owner.early.clear();
            owner.expected.clear();
            owner.stages.clear();
            self.report.died += 1;
            for user in 0..self.users.len() {
                self.disconnect(user, before, true);
            }
        }
        let jobs = self.dice.among(0, 3);
        for _ in 0..jobs {
            let at = self.dice.among(0, 100_000);
            self.after(at, Event::NewJob);
        }
    }

    /// The user's engine dies. What it has posted is still under way, unless the fabric ends it.
    fn users_die(&mut self, again: bool) {
        self.user_engine = self.dice.life();
        for seat in 0..self.users.len() {
            let before = self.users[seat].process.life;
            for id in self.flights.from(before) {
                let late = self.now + self.dice.among(0, 60_000);
                let Some(flight) = self.flights.all.get_mut(&id) else { continue };
                flight.barred |= self.setting.revocable || !again;
                // What a card sends again when nobody is there any more.
                if !flight.barred && flight.access == Access::Write && !flight.copies.is_empty() {
                    flight.copied = flight.copied.min(flight.copies.len() - 1);
                    flight.settles = flight.settles.max(late);
                    let settles = flight.settles;
                    self.exactly(late, Event::Copy(id));
                    self.exactly(settles, Event::Settle(id));
                }
            }
            let mut process = self.process();
            process.alive = again;
            let machine = self.user();
            let user = &mut self.users[seat];
            user.process = process;
            user.machine = machine;
            user.requests.clear();
            user.connections.clear();
            user.stages.clear();
            user.transfers.clear();
            self.report.died += 1;
            for owner in 0..self.owners.len() {
                let life = self.owners[owner].process.life;
                let wait = self.dice.among(100, 50_000);
                let gone = owner::Input::PeerGone { peer: before };
                self.after(wait, Event::Owner(owner, life, gone));
                if self.setting.revocable || !again {
                    let quiet = owner::Input::Quiescent { peer: before };
                    let wait = wait + self.dice.among(0, 50_000);
                    self.after(wait, Event::Owner(owner, life, quiet));
                }
            }
        }
        // Whoever comes in its place is asked for the same again: most often at once, while what was posted may still move.
        for at in 0..self.jobs.len() {
            if again && self.jobs[at].access == Access::Write && self.dice.chance(3, 4) {
                let after = self.dice.among(0, 3_000);
                self.after(after, Event::Attempt(at));
            }
        }
    }

    /// Somebody says what is not theirs to say.
    fn lie(&mut self, owner: usize) {
        let stranger = self.dice.life();
        let specs: Vec<_> = self.owners[owner].specs.iter().collect();
        if specs.is_empty() {
            return;
        }
        let (name, spec) = specs[self.dice.index(specs.len())];
        let (name, readers) = (*name, spec.readers());
        let (mut access, mut fingerprint) = (spec.access, spec.fingerprint);
        if readers.is_empty() {
            return;
        }
        let (reader, peer, set) = readers[self.dice.index(readers.len())].clone();
        let life = self.owners[owner].process.life;
        // From a stranger all of it, from the reader itself with another set, or of another life or epoch.
        let (mut lease, mut from, mut set) = (name, stranger, set);
        match self.dice.index(6) {
            0 => {
                from = peer;
                set = if set.len() > 1 { vec![reader.rank] } else { vec![reader.rank, 900] };
            }
            1 => {
                from = peer;
                lease.owner = stranger;
            }
            2 => {
                from = peer;
                lease.epoch += 7;
            }
            3 => {
                from = peer;
                access = other(access);
            }
            4 => {
                from = peer;
                fingerprint = Some(Fingerprint(1));
            }
            _ => {}
        }
        let Ok(set) = Ranks::new(set) else { return };
        let nonce = Nonce(self.dice.among(0, u64::MAX - 1));
        let last = self.dice.chance(2, 3);
        let access = Some(access);
        let message = match self.dice.index(3) {
            0 => ToOwner::Hold(Hold {
                lease,
                reader,
                set,
                have: 0,
                total: false,
                asks: true,
                access,
                fingerprint,
            }),
            1 => ToOwner::Confirm(Confirm {
                lease,
                reader,
                set,
                nonce,
                parts: 1,
                last,
                left_ms: 100,
                access,
                fingerprint,
            }),
            _ => ToOwner::Release(Release { lease, reader, set, access, fingerprint }),
        };
        let input = owner::Input::Message { peer: from, message };
        self.after(0, Event::Owner(owner, life, input));
        // And to a user, in the owner's name.
        let message = match self.dice.index(3) {
            0 => ToUser::Ended(Ended { lease: name, reader, reason: Reason::Aborted }),
            1 => ToUser::Verdict(Judged { lease: name, reader, nonce, held: last, why: None }),
            _ => ToUser::Parts(PartList { lease: name, reader, parts: Vec::new(), total: Some(0) }),
        };
        let judged = matches!(message, ToUser::Verdict(_));
        if let Some(user) = self.users.iter().position(|user| user.process.life == peer) {
            // A verdict with a nonce that nobody drew may come from the owner itself.
            let from = if judged && !last { life } else { stranger };
            let input = user::Input::Message { peer: from, message };
            self.after(0, Event::User(user, peer, input));
        }
    }

    /// Everything that can end has ended: users die for good, and owners hear that nothing of theirs moves.
    pub(super) fn finish(&mut self) -> Verdict {
        for (seat, user) in self.users.iter().enumerate() {
            let (live, releasing) = (user.machine.live(), user.machine.releasing());
            ensure!(live == 0, "user {seat} still has {live} requests");
            ensure!(releasing == 0, "user {seat} still releases {releasing} leases");
            ensure!(user.machine.wake().is_none(), "user {seat} still waits for something");
            let used = user.process.memory.used();
            ensure!(used == 0, "user {seat} has {used} blocks in use");
        }
        self.stormy = false;
        self.users_die(false);
        for owner in 0..self.owners.len() {
            let life = self.owners[owner].process.life;
            let peers: std::collections::BTreeSet<_> = self.owners[owner]
                .specs
                .values()
                .flat_map(|spec| spec.readers().into_iter().map(|(_, peer, _)| peer))
                .collect();
            for peer in peers {
                let quiet = owner::Input::Quiescent { peer };
                self.after(200_000, Event::Owner(owner, life, quiet));
            }
        }
        self.flights.all.values_mut().for_each(|flight| flight.barred = true);
        Ok(())
    }
}
