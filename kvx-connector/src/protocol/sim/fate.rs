//! What users say is held to the promises.

use std::time::Duration;

use kvx_core::id::Incarnation;
use kvx_mock::sim::Violation;

use super::ensure;
use super::script::Climate;
use super::seat::Req;
use super::world::{Verdict, World};
use crate::protocol::terms::{Access, Reason, RequestNumber};
use crate::protocol::user::{self, Unproven, Why};

impl World {
    pub(super) fn req(&mut self, seat: usize, request: RequestNumber) -> Verdict<&mut Req> {
        let found = self.users[seat].requests.get_mut(&request);
        found.ok_or_else(|| Violation::new(format!("{request:?} is unknown")))
    }

    pub(super) fn before_user(
        &mut self,
        seat: usize,
        now: Duration,
        input: &user::Input,
    ) -> Verdict {
        match input {
            user::Input::Ask(ask) => self.asked(seat, now, ask),
            user::Input::Publish { request, parts, .. } => {
                if let Some(req) = self.users[seat].requests.get(request)
                    && self.jobs[req.job].before == 0
                    && !req.over
                {
                    for part in parts {
                        self.produce(seat, *request, part.number);
                    }
                }
            }
            user::Input::Abort { request } => {
                if let Some(req) = self.users[seat].requests.get_mut(request) {
                    req.aborted = true;
                }
            }
            user::Input::Settled { transfer, .. } => self.told_settled(seat, *transfer),
            user::Input::StageDone { stage, ok } => {
                if let Some(place) = self.users[seat].stages.remove(stage) {
                    self.user_staged(seat, place, *ok)?;
                }
            }
            user::Input::PeerFailed { peer }
            | user::Input::PeerDown { peer }
            | user::Input::PeerGone { peer } => {
                for req in self.users[seat].requests.values_mut() {
                    req.lost.insert(*peer);
                }
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn ready(&mut self, seat: usize, request: RequestNumber) -> Verdict {
        self.report.ready += 1;
        let req = self.req(seat, request)?.clone();
        ensure!(!req.over, "{request:?} is ready, and was over");
        ensure!(req.flying + req.staging == 0, "{request:?} is ready, and something still moves");
        let leased = self.jobs[req.job].access;
        ensure!(req.access == leased, "{request:?} is ready, and the lease is {leased}");
        ensure!(!req.edited, "{request:?} is ready, and moved other blocks than are leased");
        let lease = self.jobs[req.job].lease;
        for (owner, life) in &req.sources {
            let owner = &self.owners[*owner];
            if let Some(spec) = owner.specs.get(&lease).filter(|_| owner.process.life == *life) {
                let confirmed = spec.has_confirmed(req.reader);
                ensure!(confirmed, "{request:?} is ready, and {lease} is not confirmed");
            }
        }
        for (source, part) in req.blocks.keys() {
            self.holds(seat, request, *source, *part)?;
        }
        self.ended(seat, request, false)
    }

    pub(super) fn part_proven(
        &mut self,
        seat: usize,
        request: RequestNumber,
        source: u16,
        part: u32,
    ) -> Verdict {
        let req = self.req(seat, request)?;
        ensure!(!req.over, "{request:?} is over, and proven");
        ensure!(!req.edited, "{request:?} has proven what was never leased");
        self.holds(seat, request, source, part)
    }

    /// A part is good: the consumer has what the producer had.
    fn holds(&mut self, seat: usize, request: RequestNumber, source: u16, part: u32) -> Verdict {
        let req = self.req(seat, request)?.clone();
        let job = &self.jobs[req.job];
        let Some((block, after)) = req.blocks.get(&(source, part)) else { return Ok(()) };
        let owner = req.sources[usize::from(source)].0;
        if job.access == Access::Write {
            return Ok(());
        }
        let raw = self.users[seat].process.memory.tags[*block];
        let is = if job.after == 0 { raw } else { *after };
        let should = job.tags[&(owner, seat, part)];
        ensure!(is == should, "{request:?}: part {part} of source {source} has {is}, not {should}");
        Ok(())
    }

    pub(super) fn failed(
        &mut self,
        seat: usize,
        now: Duration,
        request: RequestNumber,
        why: Why,
        unproven: &[Unproven],
    ) -> Verdict {
        self.report.failed += 1;
        self.report.stale += u64::from(matches!(why, Why::Stale(_)));
        let req = self.req(seat, request)?.clone();
        ensure!(
            self.setting.climate == Climate::Wild,
            "{request:?} failed in fair weather: {why:?}"
        );
        let peers = || req.sources.iter().map(|(_, life)| life);
        let lease = self.jobs[req.job].lease;
        let over = |reason: Reason| {
            let ended = |(owner, life): &(usize, Incarnation)| {
                let owner = &self.owners[*owner];
                let spec = owner.specs.get(&lease);
                owner.process.life != *life
                    || spec.is_none_or(|it| it.over == Some(reason) || it.cause == Some(reason))
            };
            // The last: its own process contradicted itself, see `lie`.
            let own = [Reason::Access, Reason::Ticket];
            let other = [Reason::Unknown, Reason::Revoked, Reason::Contradiction];
            own.contains(&reason) || other.contains(&reason) || req.sources.iter().any(ended)
        };
        let right = match why {
            Why::Ended(reason) => over(reason),
            // The owner's verdicts are checked.
            Why::Stale(_) => true,
            Why::PeerFailed | Why::PeerDown | Why::PeerGone => {
                peers().any(|life| req.lost.contains(life))
            }
            Why::Transfer => req.transfer_failed,
            Why::Stage => req.stage_failed,
            Why::Deadline => now >= req.deadline,
            Why::Contradiction => false,
        };
        ensure!(right, "{request:?} failed without cause: {why:?}");
        for Unproven { source, proven, .. } in unproven {
            for part in proven {
                self.holds(seat, request, *source, *part)?;
            }
        }
        for source in 0..u16::try_from(req.sources.len()).unwrap_or(0) {
            if !unproven.iter().any(|it| it.source == source) {
                let parts = req.blocks.keys().filter(|(one, _)| *one == source);
                parts
                    .into_iter()
                    .try_for_each(|(_, part)| self.holds(seat, request, source, *part))?;
            }
        }
        Ok(())
    }

    /// A request is over: nothing may move in its blocks, unless they are quarantined.
    pub(super) fn ended(
        &mut self,
        seat: usize,
        request: RequestNumber,
        quarantined: bool,
    ) -> Verdict {
        let req = self.req(seat, request)?;
        ensure!(!std::mem::replace(&mut req.over, true), "{request:?} is over twice");
        if quarantined {
            ensure!(
                req.severed || req.flying == 0,
                "{request:?} is quarantined, and was not severed"
            );
            req.quarantined = true;
            self.report.quarantined += 1;
            return Ok(());
        }
        ensure!(req.flying + req.staging == 0, "{request:?} is over, and something still moves");
        self.release_blocks(seat, request)
    }

    pub(super) fn release_blocks(&mut self, seat: usize, request: RequestNumber) -> Verdict {
        let blocks = std::mem::take(&mut self.req(seat, request)?.blocks);
        for (block, _) in blocks.into_values() {
            let junk = self.junk();
            self.users[seat].process.memory.release(block, junk);
        }
        Ok(())
    }
}
