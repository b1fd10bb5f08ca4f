//! Messages for leases that are not granted yet.

use std::collections::BTreeMap;

use kvx_core::id::Incarnation;

use super::Config;
use crate::protocol::id::LeaseName;
use crate::protocol::message::ToOwner;

/// Bounded in count, for each peer, and in time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Early {
    leases: BTreeMap<LeaseName, Waiting>,
    count: usize,
    per_peer: BTreeMap<Incarnation, usize>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Waiting {
    messages: Vec<(Incarnation, ToOwner)>,
}

/// What became of a message.
pub(super) enum Kept {
    /// It is the first for its lease.
    First,
    More,
    /// The same is there.
    Again,
    /// There is no room.
    Refused,
}

impl Early {
    pub(super) fn keep(&mut self, peer: Incarnation, message: ToOwner, config: &Config) -> Kept {
        let name = message.lease();
        if let Some(waiting) = self.leases.get_mut(&name) {
            let same = |(from, other): &&mut (Incarnation, ToOwner)| {
                *from == peer && is_again(other, &message)
            };
            if let Some((_, kept)) = waiting.messages.iter_mut().find(same) {
                *kept = message;
                return Kept::Again;
            }
        }
        let mine = self.per_peer.get(&peer).copied().unwrap_or(0);
        if self.count >= config.max_early || mine >= config.max_early_per_peer {
            return Kept::Refused;
        }
        self.count += 1;
        *self.per_peer.entry(peer).or_default() += 1;
        let first = !self.leases.contains_key(&name);
        let waiting = self.leases.entry(name).or_insert(Waiting { messages: Vec::new() });
        waiting.messages.push((peer, message));
        if first { Kept::First } else { Kept::More }
    }

    /// All messages for a lease, in the order in which they came.
    pub(super) fn take(&mut self, name: LeaseName) -> Vec<(Incarnation, ToOwner)> {
        let messages = self.leases.remove(&name).map_or_else(Vec::new, |waiting| waiting.messages);
        for (peer, _) in &messages {
            self.less(*peer);
        }
        messages
    }

    /// A peer is gone.
    pub(super) fn forget(&mut self, peer: Incarnation) {
        if !self.per_peer.contains_key(&peer) {
            return;
        }
        let mut gone = 0;
        self.leases.retain(|_, waiting| {
            let before = waiting.messages.len();
            waiting.messages.retain(|(from, _)| *from != peer);
            gone += before - waiting.messages.len();
            !waiting.messages.is_empty()
        });
        self.count -= gone;
        self.per_peer.remove(&peer);
    }

    fn less(&mut self, peer: Incarnation) {
        self.count -= 1;
        if let Some(count) = self.per_peer.get_mut(&peer) {
            *count -= 1;
            if *count == 0 {
                self.per_peer.remove(&peer);
            }
        }
    }

    pub(super) const fn len(&self) -> usize {
        self.count
    }
}

/// Whether a message says again what another said.
fn is_again(one: &ToOwner, other: &ToOwner) -> bool {
    if one.reader() != other.reader() || one.set() != other.set() {
        return false;
    }
    match (one, other) {
        (ToOwner::Hold(_), ToOwner::Hold(_)) | (ToOwner::Release(_), ToOwner::Release(_)) => true,
        (ToOwner::Confirm(one), ToOwner::Confirm(other)) => one.nonce == other.nonce,
        _ => false,
    }
}
