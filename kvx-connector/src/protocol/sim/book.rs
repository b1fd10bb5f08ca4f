//! What the checker writes down of requests.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::seat::Req;
use super::world::{Event, Verdict, World};
use crate::protocol::terms::{Access, RequestNumber, TransferNumber};
use crate::protocol::user::Ask;

impl World {
    /// A request is asked for: it gets blocks.
    pub(super) fn asked(&mut self, seat: usize, now: Duration, ask: &Ask) {
        self.report.asked += 1;
        let Some(job) = self.job(ask.lease) else { return };
        let mut blocks = BTreeMap::new();
        let mut sources = Vec::new();
        for (at, source) in (0..).zip(&ask.sources) {
            let life = source.peer;
            let owner = self.granted[job].lives.iter().position(|one| *one == life).unwrap_or(0);
            sources.push((owner, life));
            for part in 0..self.jobs[job].parts {
                if self.jobs[job].tags.contains_key(&(owner, seat, part)) {
                    let block = self.users[seat].process.memory.allocate();
                    blocks.insert((at, part), (block, 0));
                }
            }
        }
        let req = Req {
            job,
            reader: ask.reader,
            access: ask.access,
            edited: ask.fingerprint != Some(self.jobs[job].fingerprint()),
            sources,
            blocks,
            deadline: now + ask.deadline,
            flying: 0,
            staging: 0,
            over: false,
            quarantined: false,
            aborted: false,
            severed: false,
            lost: BTreeSet::new(),
            transfer_failed: false,
            stage_failed: false,
        };
        let user = &mut self.users[seat];
        user.requests.insert(ask.request, req);
        let config = &self.setting.user;
        let ends = ask.deadline + config.grace + config.sever_for;
        let (at, stopped) = (user.process.clock.span(ends) + 2_000, user.process.stopped);
        let life = user.process.life;
        self.after(at, Event::MustEnd(seat, life, ask.request, stopped));
    }

    /// A producer that writes has a part in its blocks.
    pub(super) fn produce(&mut self, seat: usize, request: RequestNumber, part: u32) {
        let user = &mut self.users[seat];
        let Some(req) = user.requests.get(&request) else { return };
        let job = &self.jobs[req.job];
        for ((source, one), (block, _)) in &req.blocks {
            if *one == part {
                let owner = req.sources[usize::from(*source)].0;
                user.process.memory.tags[*block] = job.tags[&(owner, seat, part)];
            }
        }
    }

    /// A user is told that a transfer has settled.
    pub(super) fn told_settled(&mut self, seat: usize, transfer: TransferNumber) {
        let user = &mut self.users[seat];
        let request = user.transfers.remove(&transfer);
        if let Some(req) = request.and_then(|request| user.requests.get_mut(&request)) {
            req.flying -= 1;
        }
    }

    /// A stage of a user's is over.
    pub(super) fn user_staged(
        &mut self,
        seat: usize,
        (request, source, part, which): (RequestNumber, u16, u32, u8),
        ok: bool,
    ) -> Verdict {
        let job = self.req(seat, request)?.job;
        let (access, before, after) =
            (self.jobs[job].access, self.jobs[job].before, self.jobs[job].after);
        let memory = &self.users[seat].process.memory;
        let req = &self.users[seat].requests[&request];
        let raw = req.blocks.get(&(source, part)).map(|(block, _)| memory.tags[*block]);
        let req = self.req(seat, request)?;
        req.staging -= 1;
        req.stage_failed |= !ok;
        if ok && which + 1 == before + after && after > 0 {
            if let (Some((_, after)), Some(raw)) = (req.blocks.get_mut(&(source, part)), raw) {
                *after = raw;
            }
        } else if ok && access == Access::Write && which + 1 == before {
            // The copy that is written from.
            let owner = req.sources[usize::from(source)].0;
            if let Some((block, _)) = req.blocks.get(&(source, part)).copied() {
                let tag = self.jobs[job].tags[&(owner, seat, part)];
                self.users[seat].process.memory.tags[block] = tag;
            }
        }
        Ok(())
    }
}
