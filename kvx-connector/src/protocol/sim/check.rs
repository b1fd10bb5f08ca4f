//! What owners say is held to the promises, and the end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvx_core::id::Incarnation;
use kvx_mock::sim::Violation;

use super::ensure;
use super::spec::Spec;
use super::world::{Event, Verdict, World};
use crate::protocol::id::{LeaseName, Nonce, Reader};
use crate::protocol::message::{ToOwner, ToUser};
use crate::protocol::owner;
use crate::protocol::terms::{Access, Reason, RequestNumber};

/// What the next step of an owner must say.
#[derive(Debug, Default)]
pub(super) struct Expected {
    verdicts: BTreeSet<(LeaseName, Reader, Nonce)>,
}

impl World {
    pub(super) fn before_owner(
        &mut self,
        seat: usize,
        now: Duration,
        input: &owner::Input,
    ) -> Verdict<Expected> {
        let mut expected = Expected::default();
        let life = self.owner_engine;
        let owner = &mut self.owners[seat];
        let expected_leases = &owner.expected;
        owner.early.retain(|name, (until, _)| *until > now || expected_leases.contains(name));
        let early_for = self.setting.owner.early_for;
        match input {
            owner::Input::Grant(grant) => {
                self.report.granted += 1;
                let name = grant.lease;
                let mut spec = Spec::new(grant, now);
                spec.cause = (grant.total == Some(0)).then_some(Reason::Empty);
                let owner = &mut self.owners[seat];
                owner.expected.remove(&name);
                for (peer, message) in owner.early.remove(&name).map_or_else(Vec::new, |it| it.1) {
                    if spec.cause.is_none() {
                        spec.hear(now, peer, &message);
                    }
                    if let ToOwner::Confirm(confirm) = &message {
                        expected.verdicts.insert((name, confirm.reader, confirm.nonce));
                    }
                }
                owner.specs.insert(name, spec);
                let (process, ends) =
                    (&owner.process, grant.hard + self.setting.owner.quarantine_after);
                let (at, life) = (process.clock.span(ends) + 2_000, process.life);
                let stopped = process.stopped;
                self.after(at, Event::MustFree(seat, life, name, stopped));
            }
            owner::Input::Publish { lease, parts, .. } => {
                let held = self.owners[seat].specs.get(lease).is_some_and(|it| it.over.is_none());
                if let Some(job) = self.job(*lease)
                    && self.jobs[job].access == Access::Read
                    && self.jobs[job].stages == 0
                    && held
                {
                    for part in parts {
                        self.fill(job, seat, part.number..part.number + 1);
                    }
                }
            }
            owner::Input::Withdraw { lease, why } => {
                let owner = &mut self.owners[seat];
                owner.expected.remove(lease);
                // One that is over is not taken back any more.
                if let Some(spec) = owner.specs.get_mut(lease).filter(|spec| spec.over.is_none()) {
                    spec.cause.get_or_insert(*why);
                }
            }
            owner::Input::Message { peer, message } => {
                let name = message.lease();
                let owner = &mut self.owners[seat];
                let known = owner.specs.get(&name).is_some_and(|spec| spec.must_know(now, message));
                if let ToOwner::Confirm(confirm) = message
                    && (known || name.owner != life)
                {
                    expected.verdicts.insert((name, confirm.reader, confirm.nonce));
                }
                if let Some(spec) = owner.specs.get_mut(&name) {
                    spec.hear(now, *peer, message);
                } else if name.owner == life && message.set().contains(message.reader().rank) {
                    let until = now + early_for;
                    let waiting = owner.early.entry(name).or_insert((until, Vec::new()));
                    // A question that is asked again says newly how long it will be asked.
                    let again = |(from, it): &&mut (Incarnation, ToOwner)| match (it, message) {
                        (ToOwner::Confirm(old), ToOwner::Confirm(new)) => {
                            (*from, old.reader, old.nonce) == (*peer, new.reader, new.nonce)
                        }
                        _ => false,
                    };
                    match waiting.1.iter_mut().find(again) {
                        Some((_, asked)) => *asked = message.clone(),
                        None => waiting.1.push((*peer, message.clone())),
                    }
                }
            }
            owner::Input::StageDone { stage, ok } => self.owner_staged(seat, *stage, *ok)?,
            owner::Input::PeerGone { peer } => {
                let owner = &mut self.owners[seat];
                owner.specs.values_mut().for_each(|spec| spec.gone(*peer));
                for (_, waiting) in owner.early.values_mut() {
                    waiting.retain(|(from, _)| from != peer);
                }
            }
            owner::Input::Quiescent { peer } => {
                let specs = self.owners[seat].specs.values_mut();
                specs.filter(|it| it.access == Access::Write).for_each(|it| it.quiet(*peer));
            }
            owner::Input::Expect { lease, .. } => {
                let owner = &mut self.owners[seat];
                if lease.owner == life && !owner.specs.contains_key(lease) {
                    owner.expected.insert(*lease);
                }
            }
            owner::Input::Tick => {}
        }
        Ok(expected)
    }

    fn owner_staged(
        &mut self,
        seat: usize,
        stage: crate::protocol::terms::StageNumber,
        ok: bool,
    ) -> Verdict {
        let Some((lease, part, which)) = self.owners[seat].stages.remove(&stage) else {
            return Ok(());
        };
        let Some(spec) = self.owners[seat].specs.get_mut(&lease) else { return Ok(()) };
        spec.stages -= 1;
        if !ok {
            spec.cause.get_or_insert(Reason::Stage);
        }
        if let Some(job) = self.job(lease)
            && ok
            && self.jobs[job].access == Access::Read
            && which + 1 == self.jobs[job].stages
        {
            self.fill(job, seat, part..part + 1);
        }
        Ok(())
    }

    pub(super) fn after_owner(
        &mut self,
        seat: usize,
        now: Duration,
        expected: &Expected,
        out: &[owner::Output],
    ) -> Verdict {
        let owner = &mut self.owners[seat];
        let mut due = expected.verdicts.clone();
        let mut told: BTreeMap<LeaseName, BTreeSet<(Reader, Incarnation)>> = BTreeMap::new();
        let mut over = Vec::new();
        for output in out {
            match output {
                owner::Output::Over { lease, why } => {
                    let spec = owner.specs.get_mut(lease);
                    let spec = spec.ok_or_else(|| Violation::new(format!("{lease} is unknown")))?;
                    spec.ends(*lease, now, *why)?;
                    over.push(*lease);
                }
                owner::Output::Send { peer, message: ToUser::Ended(ended) } => {
                    told.entry(ended.lease).or_default().insert((ended.reader, *peer));
                    if let Some(spec) = owner.specs.get(&ended.lease) {
                        spec.explained(ended.lease, now, ended.reason)?;
                    }
                }
                owner::Output::Send { message: ToUser::Parts(list), .. } => {
                    if let Some(spec) = owner.specs.get_mut(&list.lease) {
                        spec.admit(list.reader);
                    }
                }
                owner::Output::Send { message: ToUser::Verdict(verdict), .. } => {
                    due.remove(&(verdict.lease, verdict.reader, verdict.nonce));
                    let asked = (verdict.reader, verdict.nonce);
                    match owner.specs.get(&verdict.lease) {
                        Some(spec) => {
                            spec.judged(verdict.lease, now, asked, verdict.held)?;
                            ensure!(verdict.held == verdict.why.is_none(), "no reason is told");
                            if let Some(why) = verdict.why {
                                spec.explained(verdict.lease, now, why)?;
                            }
                        }
                        None => ensure!(!verdict.held, "a lease that never was is confirmed"),
                    }
                }
                _ => {}
            }
        }
        ensure!(due.is_empty(), "no verdict for {due:?}");
        for lease in over {
            let told = told.remove(&lease).unwrap_or_default();
            for (reader, peer) in owner.specs[&lease].active() {
                ensure!(
                    told.contains(&(reader, peer)),
                    "{reader} is not told that {lease} is over"
                );
            }
        }
        owner.specs.iter().try_for_each(|(name, spec)| spec.check(*name, now))
    }

    /// Blocks are free: they are used for something else at once.
    pub(super) fn freed(&mut self, seat: usize, lease: LeaseName, why: Reason) -> Verdict {
        let owner = &mut self.owners[seat];
        let life = owner.process.life;
        let spec = owner.specs.get_mut(&lease);
        let spec = spec.ok_or_else(|| Violation::new(format!("{lease} is unknown")))?;
        ensure!(spec.over.is_some(), "{lease} is freed before it is over");
        ensure!(!std::mem::replace(&mut spec.freed, true), "{lease} is freed twice");
        ensure!(spec.stages == 0, "{lease} is freed under a stage");
        let access = spec.access;
        let Some(job) = self.job(lease) else { return Ok(()) };
        let mut blocks = Vec::new();
        for ((owner, user, part), tag) in &self.jobs[job].tags {
            if *owner == seat {
                let block = self.granted[job].blocks[&(*owner, *user, *part)];
                blocks.push(block);
                let is = self.owners[seat].process.memory.tags[block];
                let written = access == Access::Write && why == Reason::Done;
                ensure!(!written || is == *tag, "{lease} is done, and part {part} is not written");
            }
        }
        let moving = self.flights.all.values().any(|flight| {
            let mine = flight.owner_life == life && flight.access == Access::Write;
            mine && !flight.barred && flight.copies.iter().any(|(block, _)| blocks.contains(block))
        });
        ensure!(!moving, "{lease} is freed while a write is under way");
        for block in blocks {
            let junk = self.junk();
            self.owners[seat].process.memory.release(block, junk);
        }
        Ok(())
    }

    pub(super) fn set_quarantined(&mut self, seat: usize, lease: LeaseName) -> Verdict {
        let spec = self.owners[seat].specs.get_mut(&lease);
        let spec = spec.ok_or_else(|| Violation::new(format!("{lease} is unknown")))?;
        ensure!(spec.over.is_some() && !spec.freed, "{lease} is quarantined out of turn");
        ensure!(!std::mem::replace(&mut spec.quarantined, true), "{lease} is quarantined twice");
        Ok(())
    }

    pub(super) fn job(&self, lease: LeaseName) -> Option<usize> {
        self.jobs.iter().position(|job| job.lease == lease)
    }

    pub(super) fn must_end(
        &mut self,
        seat: usize,
        life: Incarnation,
        request: RequestNumber,
        stopped: u64,
    ) -> Verdict {
        let process = &self.users[seat].process;
        if process.life != life || !process.alive {
            return Ok(());
        }
        let more = process.stopped - stopped;
        if more > 0 || process.stopped_until > self.now {
            let stopped = process.stopped;
            self.after(more + 5_000, Event::MustEnd(seat, life, request, stopped));
            return Ok(());
        }
        let over = self.users[seat].requests.get(&request).is_none_or(|req| req.over);
        ensure!(over, "{request:?} is not over in time");
        Ok(())
    }

    pub(super) fn must_free(
        &mut self,
        seat: usize,
        life: Incarnation,
        lease: LeaseName,
        stopped: u64,
    ) -> Verdict {
        let process = &self.owners[seat].process;
        if process.life != life {
            return Ok(());
        }
        let more = process.stopped - stopped;
        if more > 0 || process.stopped_until > self.now {
            let stopped = process.stopped;
            self.after(more + 5_000, Event::MustFree(seat, life, lease, stopped));
            return Ok(());
        }
        let spec = &self.owners[seat].specs[&lease];
        ensure!(spec.freed || spec.quarantined, "{lease} has not ended in time");
        Ok(())
    }

    /// The end: nothing is left.
    pub(super) fn all_gone(&mut self) -> Verdict {
        for (seat, owner) in self.owners.iter().enumerate() {
            for (name, spec) in &owner.specs {
                ensure!(spec.freed, "{name} at owner {seat} was never freed");
            }
            let machine = &owner.machine;
            let (live, known) = (machine.live(), machine.remembered());
            ensure!(live == 0 && known == 0, "owner {seat} remembers {live} and {known}");
            let used = owner.process.memory.used();
            ensure!(used == 0, "owner {seat} has {used} blocks in use");
            ensure!(machine.wake().is_none(), "owner {seat} still waits for something");
        }
        Ok(())
    }
}
