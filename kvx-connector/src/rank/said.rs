//! What the machines of leases say is done, and told to the engine.

use std::sync::Arc;

use kvx_core::{Error, ErrorKind, Retry};

use super::channel::Channel;
use super::explain::{explain, reason};
use super::fetch::Stage;
use super::frame;
use super::orders::{RankEvent, StageOf};
use super::watch::Watch;
use super::{Rank, Todo, is_ghost};
use crate::observe::Outcome;
use crate::protocol::message::ToUser;
use crate::protocol::peers::Connection;
use crate::protocol::user::{self, Unproven, Why};
use crate::protocol::{RequestNumber, owner};

impl<C: Channel> Rank<C> {
    pub(super) fn owner_said(&mut self, output: owner::Output) {
        match output {
            owner::Output::Send { peer, message } => {
                let granted = self.grants.get(&message.lease());
                self.watch.answered(self.now, peer, &message, granted);
                let fast = matches!(message, ToUser::Verdict(_));
                self.send(peer, frame::to_user(&message), fast);
            }
            owner::Output::RunStage { stage, lease, part, which } => {
                self.events.push_back(RankEvent::Stage {
                    stage,
                    of: StageOf::Lease(lease),
                    part,
                    which,
                });
            }
            owner::Output::Revoke { peer } => {
                let connections: Vec<Connection> = self.connections_of(peer).collect();
                let quiet = connections.iter().all(|connection| self.fabrics.revoke(*connection));
                if quiet && !connections.is_empty() {
                    self.todo.push_back(Todo::Owner(owner::Input::Quiescent { peer }));
                }
            }
            owner::Output::Written { .. } => {}
            owner::Output::Over { lease, why } => {
                self.watch.over(self.now, lease, why, self.grants.get_mut(&lease));
            }
            owner::Output::Free { lease, why } => {
                if let Some(granted) = self.grants.remove(&lease) {
                    self.watch.freed(&granted, why);
                }
                self.events.push_back(RankEvent::Freed { lease, why });
            }
            owner::Output::Quarantined { lease, why } => {
                let granted = self.grants.get_mut(&lease);
                self.watch.lease_quarantined(self.now, lease, why, granted);
                self.events.push_back(RankEvent::LeaseQuarantined { lease, why });
            }
        }
    }

    pub(super) fn user_said(&mut self, output: user::Output) {
        match output {
            user::Output::NeedPeer { peer } => {
                // A route was there, so it was met, or can at least be told; where it is gone since, this is what there is to say.
                let met = self.is_met(peer);
                if !met && self.user.owes(peer) {
                    self.reach(peer);
                }
                self.todo.push_back(Todo::User(match met {
                    true => user::Input::PeerReady { peer },
                    false => user::Input::PeerFailed { peer },
                }));
            }
            user::Output::Send { peer, message, route } => {
                Watch::asking(peer, &message, self.fetches.values().map(AsRef::as_ref));
                let fast = route == user::Route::WithData;
                self.send(peer, frame::to_owner(&message), fast);
            }
            user::Output::Post { transfer, request, source, part } => {
                self.post(transfer, request, source, &part);
            }
            user::Output::Cancel { transfer } => {
                self.fabrics.cancel(transfer);
                self.cancel_compare(transfer);
            }
            user::Output::Sever { peer } => {
                let connections: Vec<Connection> = self.connections_of(peer).collect();
                connections.into_iter().for_each(|connection| self.fabrics.sever(connection));
            }
            user::Output::RunStage { stage, request, source, part, which } => {
                let of = StageOf::Request(request, source);
                self.events.push_back(RankEvent::Stage { stage, of, part, which });
            }
            user::Output::PartProven { request, source, part } => {
                self.part_proven(request, source, part);
            }
            user::Output::Ready { request } => {
                if let Some(mut fetch) = self.fetches.remove(&request) {
                    fetch.report.elapsed = self.now.saturating_sub(fetch.begun);
                    self.watch.ready(&fetch);
                    self.ended(request, RankEvent::Ready { request, report: fetch.report });
                }
            }
            user::Output::Failed { request, why, unproven, quarantined } => {
                self.failed(request, why, &unproven, quarantined);
            }
            user::Output::Aborted { request, quarantined } => {
                if let Some(fetch) = self.fetches.get_mut(&request).filter(|_| !is_ghost(request)) {
                    self.watch.aborted(fetch, quarantined);
                }
                self.over(request, quarantined);
                self.ended(request, RankEvent::Aborted { request, quarantined });
            }
            user::Output::Unquarantined { request } => {
                if let Some(fetch) = self.fetches.remove(&request) {
                    self.watch.unquarantined(&fetch);
                }
                self.ended(request, RankEvent::Unquarantined { request });
            }
            user::Output::Refused { request } => {
                let error = Error::new(
                    ErrorKind::Resources,
                    "fetch",
                    "there are too many requests, or it contradicts itself",
                )
                .with_retry(Retry::Backoff);
                if let Some(fetch) = self.fetches.get_mut(&request) {
                    fetch.error = Some(Arc::new(error));
                }
                self.failed(request, Why::Contradiction, &[], false);
            }
        }
    }

    pub(super) fn over(&mut self, request: RequestNumber, quarantined: bool) {
        if !quarantined {
            self.fetches.remove(&request);
        } else if let Some(fetch) = self.fetches.get_mut(&request) {
            fetch.stage = Stage::Quarantined;
        }
    }

    pub(super) fn failed(
        &mut self,
        request: RequestNumber,
        why: Why,
        unproven: &[Unproven],
        quarantined: bool,
    ) {
        let Some(fetch) = self.fetches.get_mut(&request) else { return };
        fetch.report.elapsed = self.now.saturating_sub(fetch.begun);
        let error = fetch
            .error
            .take()
            .filter(|_| matches!(why, Why::Transfer | Why::Stage | Why::Contradiction));
        let error = error.unwrap_or_else(|| Arc::new(explain(why, fetch)));
        let (blocks, report) = (fetch.spoilt(unproven, &self.layout), fetch.report.clone());
        let proven = fetch.proven_but(unproven);
        if !is_ghost(request) {
            let (outcome, kept) = (Outcome::Failed(why), (&blocks, quarantined));
            self.watch.failed(self.now, fetch, outcome, &error, kept);
        }
        self.over(request, quarantined);
        let reason = reason(why);
        let event =
            RankEvent::Failed { request, error, reason, blocks, quarantined, proven, report };
        self.ended(request, event);
    }

    /// Tells the engine how a request ended, unless it was over for it before.
    pub(super) fn ended(&mut self, request: RequestNumber, event: RankEvent) {
        if !is_ghost(request) {
            self.events.push_back(event);
        }
    }

    pub(super) fn part_proven(&mut self, request: RequestNumber, source: u16, part: u32) {
        let Some(fetch) = self.fetches.get_mut(&request) else { return };
        let Stage::Asked { links, .. } = &fetch.stage else { return };
        let all = links.len();
        let proven = fetch.proven.entry(part).or_default();
        if proven.insert(source) && proven.len() == all {
            self.events.push_back(RankEvent::PartReady { request, part });
        }
    }
}
