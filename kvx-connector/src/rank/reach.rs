//! Peers that cannot be reached while something is still to be said to them.
//!
//! A writer that has given up owes its owner a word: until it is heard, the owner keeps the blocks. So the owner is sought again,
//! by the way by which it was found, for as long as a release may wait.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_core::card::{Address, EngineName};
use kvx_core::id::Incarnation;

use super::orders::FetchOrder;
use super::{Channel, Rank, Todo};
use crate::protocol::peers::{self, Role, WantId};
use crate::protocol::user;

/// Most peers of which the way is remembered. Of one more, its owner learns by revoking or by quarantine.
const MOST: usize = 4096;

/// By which ways peers were found, and who is sought now.
#[derive(Debug)]
pub(super) struct Reaching {
    /// For how long.
    until: Duration,
    ways: BTreeMap<Incarnation, Way>,
    wants: BTreeMap<WantId, Incarnation>,
}

#[derive(Clone, Debug)]
struct Way {
    engine: EngineName,
    address: Address,
    replica: u32,
    life: Incarnation,
    role: Role,
}

impl Reaching {
    pub(super) const fn new(until: Duration) -> Self {
        Self { until, ways: BTreeMap::new(), wants: BTreeMap::new() }
    }

    /// A peer was found for this order.
    pub(super) fn found(&mut self, peer: Incarnation, order: &FetchOrder, role: Role) {
        if self.ways.len() >= MOST && !self.ways.contains_key(&peer) {
            return;
        }
        let way = Way {
            engine: order.engine.clone(),
            address: order.address.clone(),
            replica: order.replica,
            life: order.lease.owner,
            role,
        };
        self.ways.insert(peer, way);
    }

    /// Another life has taken a peer's place.
    pub(super) fn forget(&mut self, peer: Incarnation) {
        self.ways.remove(&peer);
    }

    /// Whether somebody was sought by this want; who.
    pub(super) fn ended(&mut self, want: WantId) -> Option<Incarnation> {
        self.wants.remove(&want)
    }
}

impl<C: Channel> Rank<C> {
    /// Seeks a peer, unless it is sought already, or nobody knows how it was found.
    pub(super) fn reach(&mut self, peer: Incarnation) {
        if self.reaching.wants.values().any(|sought| *sought == peer) {
            return;
        }
        let Some(way) = self.reaching.ways.get(&peer).cloned() else { return };
        let id = WantId(self.next_want);
        self.next_want += 1;
        self.reaching.wants.insert(id, peer);
        let want = peers::Want {
            id,
            engine: way.engine,
            replica: way.replica,
            address: way.address,
            life: Some(way.life),
            role: way.role,
            until: self.now + self.reaching.until,
        };
        self.todo.push_back(Todo::Peers(peers::Input::Want(want)));
    }

    /// A way to a peer has ended: it is sought where it was the last, and the peer is still to be told something.
    pub(super) fn seek(&mut self, peer: Incarnation) {
        if self.user.owes(peer) && !self.is_met(peer) {
            self.reach(peer);
        }
    }

    /// Whoever was sought by this want was found, or was not.
    pub(super) fn reached(&mut self, peer: Incarnation) {
        if self.is_met(peer) {
            self.todo.push_back(Todo::User(user::Input::PeerReady { peer }));
        }
    }

    /// Whether something can be said to a peer.
    pub(super) fn is_met(&self, peer: Incarnation) -> bool {
        self.connections_of(peer).next().is_some() || self.session_of(peer).is_some()
    }
}
