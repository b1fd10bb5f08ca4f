//! What can be seen of a rank, and handing it on.

use std::time::Duration;

use super::channel::Channel;
use super::fetch::{Fetch, Stage};
use super::watch::Known;
use super::{Rank, is_ghost};
use crate::observe::{Leases, PeerView, Quarantine, RankStatus, RequestView, Requests, TraceId};
use crate::protocol::peers::PeerStatus;

impl<C: Channel> Rank<C> {
    /// Hands on what has been counted since the last time.
    pub(super) fn hand_on(&mut self) {
        let known = Known {
            owner: &self.owner,
            user: &self.user,
            peers: &self.peers,
            counts: &self.counts,
            requests: self.fetches.len(),
            routing: self.wants.len(),
            flying: self.flying.len(),
            connections: self.connections.len(),
        };
        self.watch.publish(self.now, &known, || self.channel.stats());
    }

    /// What there is now. `now` is the time that steps are told.
    pub fn status(&self, now: Duration) -> RankStatus {
        let now = now.max(self.now);
        let gauges = self.watch.gauges();
        let control = self.channel.stats().unwrap_or_default();
        let peers = self.peers.status();
        let mut oldest: Vec<&Fetch> = self
            .fetches
            .iter()
            .filter(|(request, _)| !is_ghost(**request))
            .map(|(_, fetch)| fetch.as_ref())
            .collect();
        oldest.sort_by_key(|fetch| fetch.begun);
        oldest.truncate(RankStatus::SHOWN_REQUESTS);
        let granted = self.grants.values().map(|granted| granted.at).min();
        RankStatus {
            engine: self.engine.to_string(),
            replica: self.place.replica,
            rank: self.place.rank,
            address: self.address.to_string(),
            up_ms: millis(now),
            peers_known: peers.len() as u64,
            peers_connected: gauges.peers_connected,
            peers: peers
                .into_iter()
                .take(RankStatus::SHOWN_PEERS)
                .map(|peer| peer_view(peer, now))
                .collect(),
            sessions: control.up,
            queued_bytes: control.queued_bytes,
            leases: Leases {
                held: gauges.leases_held,
                draining: gauges.leases_draining,
                quarantined: gauges.leases_quarantined,
                oldest_ms: granted.map(|at| millis(now.saturating_sub(at))),
            },
            requests: Requests {
                routing: gauges.requests_routing,
                active: gauges.requests_active,
                quarantined: gauges.requests_quarantined,
                transfers: gauges.transfers_in_flight,
                oldest: oldest.into_iter().map(|fetch| request_view(fetch, now)).collect(),
            },
            quarantine: Quarantine {
                request_blocks: gauges.blocks_of_requests,
                lease_blocks: gauges.blocks_of_leases,
            },
            counters: self.watch.meters().counters(),
        }
    }
}

fn peer_view(peer: PeerStatus, now: Duration) -> PeerView {
    PeerView {
        state: peer.state.as_str().to_owned(),
        for_ms: millis(now.saturating_sub(peer.since)),
        engine: peer.engine,
        replica: peer.replica,
        rank: peer.rank,
        incarnation: peer.incarnation,
        address: peer.address,
        sessions: peer.sessions,
        backend: peer.backend,
        transport: peer.transport,
        reason: peer.reason,
        last_error: peer.last_error,
    }
}

fn request_view(fetch: &Fetch, now: Duration) -> RequestView {
    let state = match fetch.stage {
        Stage::Routing { .. } => "routing",
        Stage::Asked { .. } => "active",
        Stage::Quarantined => "quarantined",
    };
    RequestView {
        key: fetch.order.key.to_string(),
        trace: TraceId::from(&fetch.order.key).to_string(),
        engine: fetch.order.engine.to_string(),
        lease: fetch.order.lease.to_string(),
        mode: fetch.mode().to_string(),
        state: state.to_owned(),
        age_ms: millis(now.saturating_sub(fetch.begun)),
        bytes: fetch.report.bytes,
        transfers: fetch.report.transfers,
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
