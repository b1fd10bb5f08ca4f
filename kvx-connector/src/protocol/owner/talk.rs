//! What readers say of a lease that is known, and what they are answered.

use std::time::Duration;

use kvx_core::id::Incarnation;

use super::lease::{Lease, Stand, State, User, Users};
use super::{Output, Owner};
use crate::protocol::id::{LeaseName, Part, Reader};
use crate::protocol::message::{
    Confirm, Ended, Hold, PartList, Released, ToOwner, ToUser, Verdict,
};
use crate::protocol::plant::Plant;
use crate::protocol::terms::Reason;

impl Owner {
    /// Answers that a message cannot be taken.
    pub(super) fn refuse(
        &mut self,
        peer: Incarnation,
        message: &ToOwner,
        reason: Reason,
        out: &mut Vec<Output>,
    ) {
        let (lease, reader) = (message.lease(), message.reader());
        let reason = self.named(reason);
        let message = match message {
            ToOwner::Hold(_) => ToUser::Ended(Ended { lease, reader, reason }),
            ToOwner::Confirm(Confirm { nonce, .. }) => {
                self.counts.stale += 1;
                let (nonce, why) = (*nonce, Some(reason));
                ToUser::Verdict(Verdict { lease, reader, nonce, held: false, why })
            }
            ToOwner::Release(_) => ToUser::Released(Released { lease, reader }),
        };
        out.push(Output::Send { peer, message });
    }

    /// The reason as it is told.
    fn named(&self, reason: Reason) -> Reason {
        if self.planted.has(Plant::ReasonGuessed) { Reason::Expired } else { reason }
    }

    /// Answers a message about a lease of which only this is known: why it ended.
    pub(super) fn long_after(
        &mut self,
        peer: Incarnation,
        message: &ToOwner,
        why: Reason,
        out: &mut Vec<Output>,
    ) {
        self.counts.late += 1;
        self.counts.late_holds += u64::from(matches!(message, ToOwner::Hold(_)));
        let (lease, reader) = (message.lease(), message.reader());
        match message {
            ToOwner::Hold(_) if why == Reason::Empty => {
                send_parts(lease, reader, peer, &[], Some(0), out);
            }
            ToOwner::Confirm(confirm) if is_of_nothing(why, confirm) => {
                let nonce = confirm.nonce;
                let verdict = Verdict { lease, reader, nonce, held: true, why: None };
                out.push(Output::Send { peer, message: ToUser::Verdict(verdict) });
            }
            _ => self.refuse(peer, message, why, out),
        }
    }

    /// Answers a message about a lease that is known, and ends the lease if that was the last to wait for.
    pub(super) fn answer_one(
        &mut self,
        now: Duration,
        name: LeaseName,
        peer: Incarnation,
        message: ToOwner,
        out: &mut Vec<Output>,
    ) {
        self.answer(now, name, peer, message, out);
        self.conclude(now, name, out);
    }

    /// Answers a message about a lease that is known.
    pub(super) fn answer(
        &mut self,
        now: Duration,
        name: LeaseName,
        peer: Incarnation,
        message: ToOwner,
        out: &mut Vec<Output>,
    ) {
        let any = self.planted.has(Plant::AnyPeerSpeaks);
        let replaces = self.planted.has(Plant::SetReplaced);
        let most = self.config.max_attempts;
        let Some(lease) = self.leases.get_mut(&name) else { return };
        let held = lease.is_held();
        let refused = lease
            .forbids(&message)
            .filter(|why| !self.planted.ignores(*why))
            .or_else(|| find(lease, peer, &message, most, any, replaces).err());
        match (refused, &lease.state) {
            (None, State::Held { .. }) => self.while_held(now, name, peer, message, out),
            (None | Some(Reason::Unknown), State::Draining { why, .. })
            | (None | Some(Reason::Unknown), State::Quarantined { why })
            | (None | Some(Reason::Unknown), State::Ended { why, .. }) => {
                let why = *why;
                self.after_end(now, name, peer, message, why, out);
            }
            (Some(reason), _) => {
                match reason {
                    Reason::Full => self.counts.full += 1,
                    _ => self.counts.contradictions += 1,
                }
                self.refuse(peer, &message, reason, out);
            }
        }
        debug_assert!(held || !self.leases.get(&name).is_some_and(Lease::is_held));
    }

    fn while_held(
        &mut self,
        now: Duration,
        name: LeaseName,
        peer: Incarnation,
        message: ToOwner,
        out: &mut Vec<Output>,
    ) {
        let mixed = self.planted.has(Plant::WritersMixed);
        let Some(lease) = self.leases.get_mut(&name) else { return };
        let reader = message.reader();
        let admits = lease.admits(reader.attempt) || mixed;
        let Some(user) = lease
            .attempts
            .get_mut(&reader.attempt)
            .and_then(|users| users.readers.get_mut(&reader.rank))
        else {
            return;
        };
        let stand = user.stand;
        match message {
            ToOwner::Hold(hold) => match stand {
                Stand::Waiting if !admits => self.extend(now, name),
                Stand::Waiting | Stand::Active => {
                    user.stand = Stand::Active;
                    self.extend(now, name);
                    self.tell_parts(name, peer, &hold, out);
                }
                Stand::Gone { .. } => {
                    self.refuse(peer, &ToOwner::Hold(hold), Reason::Revoked, out);
                }
                // Overtaken by what the same reader said later.
                Stand::Confirmed | Stand::Released => {}
            },
            ToOwner::Confirm(confirm) => {
                let Confirm { nonce, parts, last, left_ms, .. } = confirm;
                let first = user.learn(nonce);
                #[cfg(any(test, feature = "sim"))]
                {
                    user.confirms += u32::from(last);
                }
                if last && !stand.is_final() {
                    user.stand = Stand::Confirmed;
                }
                let left = Duration::from_millis(left_ms.into()).min(self.config.keep_at_most);
                // The reader's clock may be slower.
                lease.asked_until = lease.asked_until.max(now + left + left / 8);
                if first && lease.is_written() {
                    out.push(Output::Written { lease: name, reader, parts, last });
                }
                let verdict = Verdict { lease: name, reader, nonce, held: true, why: None };
                let message = ToUser::Verdict(verdict);
                out.push(Output::Send { peer, message });
                if !last && stand.is_open() {
                    self.extend(now, name);
                }
            }
            ToOwner::Release(_) => {
                if !stand.is_final() {
                    user.stand = Stand::Released;
                }
                let message = ToUser::Released(Released { lease: name, reader });
                out.push(Output::Send { peer, message });
            }
        }
    }

    fn after_end(
        &mut self,
        now: Duration,
        name: LeaseName,
        peer: Incarnation,
        message: ToOwner,
        why: Reason,
        out: &mut Vec<Output>,
    ) {
        self.counts.late += 1;
        self.counts.late_holds += u64::from(matches!(message, ToOwner::Hold(_)));
        let reader = message.reader();
        let forgets = self.planted.has(Plant::VerdictForgotten);
        let ignores = self.planted.has(Plant::OwnerIgnoresNonce);
        let Some(lease) = self.leases.get_mut(&name) else { return };
        let user = lease
            .attempts
            .get_mut(&reader.attempt)
            .and_then(|users| users.readers.get_mut(&reader.rank));
        match &message {
            ToOwner::Hold(hold) if why == Reason::Empty => {
                self.tell_parts(name, peer, &Hold { asks: true, ..hold.clone() }, out);
            }
            ToOwner::Hold(_) => self.refuse(peer, &message, why, out),
            ToOwner::Confirm(confirm @ Confirm { nonce, last, .. }) => {
                let knows = |user: &User| {
                    (user.knows(*nonce) && !forgets) || (ignores && !user.held.is_empty())
                };
                let held = is_of_nothing(why, confirm) || user.as_deref().is_some_and(knows);
                if let Some(user) = user
                    && *last
                    && !user.stand.is_final()
                {
                    user.stand = Stand::Released;
                }
                self.counts.stale += u64::from(!held);
                let why = (!held).then(|| self.named(why));
                let verdict = Verdict { lease: name, reader, nonce: *nonce, held, why };
                let message = ToUser::Verdict(verdict);
                out.push(Output::Send { peer, message });
                self.settle(now, name, out);
            }
            ToOwner::Release(_) => {
                if let Some(user) = user
                    && !user.stand.is_final()
                {
                    user.stand = Stand::Released;
                }
                self.refuse(peer, &message, why, out);
                self.settle(now, name, out);
            }
        }
    }

    /// A reader is alive.
    fn extend(&mut self, now: Duration, name: LeaseName) {
        let unbounded = self.planted.has(Plant::HoldBeyondHard);
        let Some(lease) = self.leases.get_mut(&name) else { return };
        let until = now + lease.ttl;
        let until = if unbounded { until } else { until.min(lease.hard_at) };
        if let State::Held { expires } = &mut lease.state {
            *expires = (*expires).max(until);
        }
        self.retime(name);
    }

    /// Tells a reader of parts that it does not know, if there are.
    fn tell_parts(&self, name: LeaseName, peer: Incarnation, hold: &Hold, out: &mut Vec<Output>) {
        let Some(lease) = self.leases.get(&name) else { return };
        let all = !self.planted.has(Plant::LateUserGetsNothing);
        let known = lease.parts.range(hold.have..).filter(|(_, known)| known.published && all);
        let parts: Vec<Part> = known.map(|(_, known)| known.part.clone()).collect();
        let total = if lease.is_held() { lease.total } else { Some(0) };
        if !parts.is_empty() || hold.asks || (total.is_some() && !hold.total) {
            send_parts(name, hold.reader, peer, &parts, total, out);
        }
    }

    /// Tells all active readers of parts that are published.
    pub(super) fn push(&self, name: LeaseName, parts: &[Part], out: &mut Vec<Output>) {
        let Some(lease) = self.leases.get(&name) else { return };
        for (attempt, rank, user) in lease.users() {
            if user.stand == Stand::Active {
                let reader = Reader { attempt, rank };
                send_parts(name, reader, user.peer, parts, lease.total, out);
            }
        }
    }
}

/// Whether there was nothing to transfer, and nothing was: then nothing can be stale.
fn is_of_nothing(why: Reason, confirm: &Confirm) -> bool {
    why == Reason::Empty && confirm.parts == 0
}

/// One message for each [`PartList::MAX`] parts, and one at least.
fn send_parts(
    lease: LeaseName,
    reader: Reader,
    peer: Incarnation,
    parts: &[Part],
    total: Option<u32>,
    out: &mut Vec<Output>,
) {
    let mut rest = parts;
    loop {
        let (some, more) = rest.split_at(rest.len().min(PartList::MAX));
        let list = PartList { lease, reader, parts: some.to_vec(), total };
        out.push(Output::Send { peer, message: ToUser::Parts(list) });
        rest = more;
        if rest.is_empty() {
            return;
        }
    }
}

/// Finds the reader that a message is from, or makes it known while the lease is held.
fn find<'a>(
    lease: &'a mut Lease,
    peer: Incarnation,
    message: &ToOwner,
    most: usize,
    any: bool,
    replaces: bool,
) -> Result<&'a mut User, Reason> {
    let reader = message.reader();
    let (held, writes) = (lease.is_held(), lease.is_written());
    let known = lease.attempts.len();
    if !lease.attempts.contains_key(&reader.attempt) {
        if !held {
            return Err(Reason::Unknown);
        }
        if known >= most {
            return Err(Reason::Full);
        }
    }
    let set = || Users::new(message.set().clone());
    let users = lease.attempts.get_or_insert_with(reader.attempt, set);
    if users.set != *message.set() {
        if !replaces {
            return Err(Reason::Contradiction);
        }
        users.set = message.set().clone();
    }
    if !users.readers.contains_key(&reader.rank) && !held {
        return Err(Reason::Unknown);
    }
    let user = users.readers.get_or_insert_with(reader.rank, || User::new(peer, writes));
    if user.peer != peer && !any {
        return Err(Reason::Contradiction);
    }
    Ok(user)
}
