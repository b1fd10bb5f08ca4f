//! How leases end: over, drained, free.

use std::time::Duration;

use kvx_core::id::Incarnation;

use super::lease::{Lease, Stand, State, Users};
use super::{Output, Owner, Running};
use crate::protocol::id::{LeaseName, Reader, TransferKey};
use crate::protocol::message::{Ended, ToUser};
use crate::protocol::plant::Plant;
use crate::protocol::terms::{Reason, StageNumber};

impl Owner {
    /// Ends a held lease if its readers have left it nothing to wait for.
    pub(super) fn conclude(&mut self, now: Duration, name: LeaseName, out: &mut Vec<Output>) {
        let Some(lease) = self.leases.get(&name).filter(|lease| lease.is_held()) else { return };
        if lease.attempts.values().any(Users::is_done) || self.planted_done(lease) {
            return self.end(now, name, Reason::Done, out);
        }
        let gave_up = lease.attempts.values().any(Users::gave_up);
        if gave_up && lease.attempts.values().all(Users::is_over) {
            return self.end(now, name, Reason::Released, out);
        }
        let careless = self.planted.has(Plant::ReleaseIgnoresAttempt);
        if careless && lease.attempts.values().any(|users| users.gave_up() && users.is_over()) {
            self.end(now, name, Reason::Released, out);
        }
    }

    #[cfg(not(any(test, feature = "sim")))]
    #[expect(clippy::unused_self, reason = "it is the same call where faults can be planted")]
    const fn planted_done(&self, _: &Lease) -> bool {
        false
    }

    /// Whether a lease is done as some plants see it.
    #[cfg(any(test, feature = "sim"))]
    fn planted_done(&self, lease: &Lease) -> bool {
        let confirmed = |stand: Stand| stand == Stand::Confirmed;
        if self.planted.has(Plant::FreeBeforeConfirm) {
            return lease.users().any(|(_, _, user)| confirmed(user.stand));
        }
        if self.planted.has(Plant::CountNotSet) {
            return lease.attempts.values().any(|users| {
                let count: u32 = users.readers.values().map(|user| user.confirms).sum();
                count as usize >= users.set.as_slice().len()
            });
        }
        if self.planted.has(Plant::SetsMerged) {
            return lease.attempts.values().any(|users| {
                users.set.as_slice().iter().all(|wanted| {
                    lease.users().any(|(_, rank, user)| rank == *wanted && confirmed(user.stand))
                })
            });
        }
        false
    }

    /// A lease that was expected will not be granted: whoever has spoken of it is told, and whoever will.
    pub(super) fn never(
        &mut self,
        now: Duration,
        (name, key): (LeaseName, TransferKey),
        why: Reason,
        out: &mut Vec<Output>,
    ) {
        let forget_at = now + self.config.keep_for;
        self.leases.insert(name, Lease::never(key, why, forget_at));
        self.forget.insert((forget_at, name));
        for (peer, message) in self.early.take(name) {
            self.answer(now, name, peer, message, out);
        }
    }

    /// The epoch of a held lease ends.
    pub(super) fn end(
        &mut self,
        now: Duration,
        name: LeaseName,
        why: Reason,
        out: &mut Vec<Output>,
    ) {
        let Some(lease) = self.leases.get_mut(&name).filter(|lease| lease.is_held()) else {
            return;
        };
        match why {
            Reason::Done => self.counts.done += 1,
            Reason::Released => self.counts.released += 1,
            Reason::Expired => self.counts.expired += 1,
            _ => self.counts.withdrawn += 1,
        }
        #[cfg(any(test, feature = "sim"))]
        let tie = matches!(lease.state, State::Held { expires } if expires == now);
        if why == Reason::Empty {
            // Whoever comes later is told that there is nothing, not that it is unknown.
            lease.asked_until = lease.hard_at.min(now + self.config.keep_at_most);
        }
        lease.state = State::Draining {
            why,
            revoke_at: self.config.revoke_after.map(|after| now + after),
            quarantine_at: now + self.config.quarantine_after,
        };
        out.push(Output::Over { lease: name, why });
        for (attempt, rank, user) in lease.users() {
            if user.stand.is_open() && !self.planted.has(Plant::EndNotTold) {
                let reader = Reader { attempt, rank };
                let message = ToUser::Ended(Ended { lease: name, reader, reason: why });
                out.push(Output::Send { peer: user.peer, message });
            }
        }
        if why == Reason::Done && lease.is_written() && lease.stages > 0 {
            for known in lease.parts.values() {
                lease.running += 1;
                let (stage, part) = (StageNumber(self.next_stage), known.part.clone());
                self.next_stage += 1;
                self.stages.insert(stage, Running { lease: name, part: part.number, which: 0 });
                out.push(Output::RunStage { stage, lease: name, part, which: 0 });
            }
        }
        #[cfg(any(test, feature = "sim"))]
        if tie && self.planted.has(Plant::DoubleFreeAtTie) {
            out.push(Output::Free { lease: name, why });
        }
        self.settle(now, name, out);
    }

    /// Frees a lease that is over, if nothing can move in its blocks any more.
    pub(super) fn settle(&mut self, now: Duration, name: LeaseName, out: &mut Vec<Output>) {
        let ignores_writers = self.planted.has(Plant::WritersIgnored);
        let ignores_stages = self.planted.has(Plant::FreedUnderStage);
        let Some(lease) = self.leases.get_mut(&name) else { return };
        let quiet = lease.is_quiet()
            || (ignores_writers && lease.running == 0)
            || (ignores_stages && !lease.is_written());
        if let State::Draining { why, .. } | State::Quarantined { why } = lease.state
            && quiet
        {
            let forget_at = (now + self.config.keep_for).max(lease.asked_until);
            lease.state = State::Ended { why, forget_at };
            // What readers are answered from now on needs no parts.
            lease.parts.clear();
            self.counts.freed += 1;
            self.forget.insert((forget_at, name));
            out.push(Output::Free { lease: name, why });
        }
        self.retime(name);
    }

    /// A bound of draining has passed.
    pub(super) fn drain(&mut self, now: Duration, name: LeaseName, out: &mut Vec<Output>) {
        let Some(lease) = self.leases.get_mut(&name) else { return };
        let State::Draining { why, revoke_at, quarantine_at } = &mut lease.state else { return };
        let (why, quarantine) = (*why, *quarantine_at <= now);
        let revoke = revoke_at.take_if(|at| *at <= now).is_some();
        if revoke && lease.is_written() {
            for (_, _, user) in lease.users() {
                if user.stand.may_move() && self.revoking.insert(user.peer) {
                    out.push(Output::Revoke { peer: user.peer });
                }
            }
        }
        if quarantine {
            lease.state = State::Quarantined { why };
            self.counts.quarantined += 1;
            out.push(Output::Quarantined { lease: name, why });
            if self.planted.has(Plant::QuarantineFreed) {
                out.push(Output::Free { lease: name, why });
            }
        }
        self.retime(name);
    }

    /// A stage is over.
    pub(super) fn stage_done(
        &mut self,
        now: Duration,
        stage: StageNumber,
        ok: bool,
        out: &mut Vec<Output>,
    ) {
        let Some(Running { lease: name, part, which }) = self.stages.remove(&stage) else {
            self.counts.ignored += 1;
            return;
        };
        let Some(lease) = self.leases.get_mut(&name) else { return };
        // Once it is over, only what was written still has to pass its stages.
        let goes_on = match lease.state {
            State::Held { .. } => true,
            State::Draining { why, .. } | State::Quarantined { why } => {
                why == Reason::Done && lease.is_written()
            }
            State::Ended { .. } => false,
        };
        let Some(known) = lease.parts.get_mut(&part).filter(|_| ok && goes_on) else {
            lease.running = lease.running.saturating_sub(1);
            if !ok && goes_on {
                match &mut lease.state {
                    State::Draining { why, .. } | State::Quarantined { why } => {
                        *why = Reason::Stage
                    }
                    State::Held { .. } | State::Ended { .. } => {}
                }
                self.end(now, name, Reason::Stage, out);
            }
            return self.settle(now, name, out);
        };
        if which + 1 < lease.stages {
            let stage = StageNumber(self.next_stage);
            self.next_stage += 1;
            self.stages.insert(stage, Running { lease: name, part, which: which + 1 });
            let part = known.part.clone();
            return out.push(Output::RunStage { stage, lease: name, part, which: which + 1 });
        }
        known.published = true;
        let part = known.part.clone();
        lease.running -= 1;
        if lease.is_held() {
            self.push(name, &[part], out);
        } else {
            self.settle(now, name, out);
        }
    }

    /// A peer will say nothing more.
    pub(super) fn peer_gone(&mut self, now: Duration, peer: Incarnation, out: &mut Vec<Output>) {
        self.early.forget(peer);
        // Whoever revokes says so all the same; a later lease asks anew.
        self.revoking.remove(&peer);
        let quiet = self.planted.has(Plant::GoneIsQuiet);
        self.change(now, peer, Stand::Gone { quiet }, out);
    }

    /// Nothing of a peer moves any more.
    pub(super) fn quiescent(&mut self, now: Duration, peer: Incarnation, out: &mut Vec<Output>) {
        self.revoking.remove(&peer);
        self.change(now, peer, Stand::Gone { quiet: true }, out);
    }

    /// All readers of a peer that may still do something are gone now. Quiescence concerns those that write.
    fn change(&mut self, now: Duration, peer: Incarnation, to: Stand, out: &mut Vec<Output>) {
        let mut changed = Vec::new();
        for (name, lease) in &mut self.leases {
            let (name, held, writes) = (*name, lease.is_held(), lease.is_written());
            let quiet = to == Stand::Gone { quiet: true };
            if matches!(lease.state, State::Ended { .. }) || (quiet && !writes) {
                continue;
            }
            let before = changed.len();
            for (attempt, rank, user) in lease.users_mut() {
                if user.peer != peer || (!user.stand.is_open() && !user.stand.may_move()) {
                    continue;
                }
                if user.stand == Stand::Waiting && quiet {
                    // It has not begun: this was not about what it will do.
                    continue;
                }
                if quiet && held && user.stand == Stand::Active {
                    let (reader, reason) = (Reader { attempt, rank }, Reason::Revoked);
                    let message = ToUser::Ended(Ended { lease: name, reader, reason });
                    out.push(Output::Send { peer, message });
                }
                let waited = user.stand == Stand::Waiting;
                user.stand = if waited { Stand::Gone { quiet: true } } else { to };
                changed.truncate(before);
                changed.push(name);
            }
        }
        for name in changed {
            self.conclude(now, name, out);
            self.settle(now, name, out);
        }
    }
}
