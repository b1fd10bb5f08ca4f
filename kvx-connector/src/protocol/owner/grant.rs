//! What the engine grants, and publishes.

use std::collections::BTreeMap;
use std::time::Duration;

use super::lease::{Known, Lease, State};
use super::{Grant, Output, Owner, Running};
use crate::protocol::few::Few;
use crate::protocol::id::{LeaseName, Part};
use crate::protocol::plant::Plant;
use crate::protocol::terms::{Reason, StageNumber};

impl Owner {
    pub(super) fn grant(&mut self, now: Duration, grant: Grant, out: &mut Vec<Output>) {
        let Grant { lease: name, key, access, fingerprint, ttl, hard, parts, total, stages } =
            grant;
        let later = |known: &&LeaseName| known.number == name.number && known.epoch > name.epoch;
        let near = LeaseName { epoch: 0, ..name }..=LeaseName { epoch: u32::MAX, ..name };
        let epochs: Vec<LeaseName> = self.leases.range(near).map(|(name, _)| *name).collect();
        if epochs.contains(&name) || epochs.iter().any(|known| later(&known)) {
            self.counts.ignored += 1;
            return;
        }
        // An epoch has ended before the next begins.
        for epoch in epochs {
            if self.leases.get(&epoch).is_some_and(Lease::is_held) {
                self.end(now, epoch, Reason::Preempted, out);
            }
        }
        self.expected.remove(&name);
        self.past.forget(name);
        self.counts.granted += 1;
        let hard_at = now + hard;
        let state = State::Held { expires: (now + ttl).min(hard_at) };
        let lease = Lease {
            key,
            granted: Some(access),
            fingerprint,
            ttl,
            hard_at,
            state,
            parts: BTreeMap::new(),
            total: None,
            stages,
            running: 0,
            attempts: Few::new(),
            asked_until: Duration::ZERO,
            due: None,
        };
        let refused = if name.owner != self.config.life {
            Some(Reason::OtherLife)
        } else if self.live() >= self.config.max_leases {
            self.counts.full += 1;
            Some(Reason::Full)
        } else if total == Some(0) {
            Some(Reason::Empty)
        } else {
            None
        };
        self.leases.insert(name, lease);
        if let Some(why) = refused {
            self.end(now, name, why, out);
        } else {
            self.retime(name);
            self.publish(name, parts, total, out);
        }
        // All of it came before anything could end: no confirm of one attempt makes another's late.
        for (peer, message) in self.early.take(name) {
            self.answer(now, name, peer, message, out);
        }
        self.conclude(now, name, out);
    }

    pub(super) fn publish(
        &mut self,
        name: LeaseName,
        parts: Vec<Part>,
        total: Option<u32>,
        out: &mut Vec<Output>,
    ) {
        let Some(lease) = self.leases.get_mut(&name).filter(|lease| lease.is_held()) else {
            self.counts.ignored += 1;
            return;
        };
        if let Some(total) = total {
            let known = lease.parts.keys().next_back().map_or(0, |last| last + 1);
            if lease.total.is_none_or(|before| before == total) && known <= total {
                lease.total = Some(total);
            } else {
                self.counts.ignored += 1;
            }
        }
        let most = lease.total.unwrap_or(u32::MAX).min(self.config.max_parts);
        let staged = !lease.is_written() && lease.stages > 0;
        let early = self.planted.has(Plant::PublishedBeforeStage);
        let mut fresh = Vec::new();
        for part in parts {
            let number = part.number;
            if number >= most || lease.parts.contains_key(&number) {
                self.counts.ignored += 1;
                continue;
            }
            let published = !staged || early;
            lease.parts.insert(number, Known { part: part.clone(), published });
            if staged {
                lease.running += 1;
                let stage = StageNumber(self.next_stage);
                self.next_stage += 1;
                self.stages.insert(stage, Running { lease: name, part: number, which: 0 });
                out.push(Output::RunStage { stage, lease: name, part: part.clone(), which: 0 });
            }
            if published {
                fresh.push(part);
            }
        }
        if !fresh.is_empty() || total.is_some() {
            self.push(name, &fresh, out);
        }
    }
}
