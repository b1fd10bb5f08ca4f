//! What owners say to a user.

use std::time::Duration;

use kvx_core::id::Incarnation;

use super::request::{Phase, Request, State};
use super::{Output, User, Why};
use crate::protocol::message::{Ended, PartList, Released, ToUser, Verdict};
use crate::protocol::plant::Plant;
use crate::protocol::terms::{Access, RequestNumber};

impl User {
    pub(super) fn hear(
        &mut self,
        now: Duration,
        peer: Incarnation,
        message: ToUser,
        out: &mut Vec<Output>,
    ) {
        let (lease, reader) = (message.lease(), message.reader());
        if let ToUser::Released(Released { .. }) = message {
            if !self.releases.answered(peer, lease, reader) {
                self.shared.counts.strays += 1;
            }
            return;
        }
        let any = self.shared.planted.has(Plant::AnyPeerAnswers);
        let number = self.readers.get(&(lease, reader)).copied();
        let Some((number, request)) = number.and_then(|it| Some((it, self.requests.get_mut(&it)?)))
        else {
            self.shared.counts.strays += 1;
            return;
        };
        let place = request.sources.iter().position(|source| source.peer == peer);
        let first = || (any && !request.sources.is_empty()).then_some(0);
        let Some(at) = place.or_else(first) else {
            self.shared.counts.strays += 1;
            return;
        };
        match message {
            ToUser::Parts(list) => self.parts(now, number, at, list, out),
            ToUser::Verdict(verdict) => self.verdict(now, number, at, &verdict, out),
            ToUser::Ended(Ended { reason, .. }) => {
                let beats = self.shared.planted.has(Plant::EndBeatsVerdict);
                match &mut request.sources[at].phase {
                    Phase::Open { .. } => self.fail(now, number, Some(at), Why::Ended(reason), out),
                    Phase::Closing { .. } if beats => {
                        self.fail(now, number, Some(at), Why::Ended(reason), out);
                    }
                    // Its confirm may have come in time: the verdict decides, and may be had at once.
                    Phase::Closing { asking } => {
                        asking.next = asking.next.min(now + self.shared.config.again_first);
                        self.retime(number);
                    }
                    Phase::Proven | Phase::Failed(_) => {}
                }
            }
            ToUser::Released(_) => {}
        }
    }

    fn parts(
        &mut self,
        now: Duration,
        number: RequestNumber,
        at: usize,
        list: PartList,
        out: &mut Vec<Output>,
    ) {
        let most = self.shared.config.max_parts;
        let Some(request) = self.requests.get_mut(&number).filter(|it| it.is_alive()) else {
            return;
        };
        let (access, every) = (request.access, request.hold_every);
        let source = &mut request.sources[at];
        if !matches!(source.phase, Phase::Open { .. }) {
            return;
        }
        if access == Access::Write {
            if !std::mem::replace(&mut source.admitted, true) {
                source.hold_at = now + every;
            }
        } else if let Err(why) = request.learn(at, list.parts, list.total, most) {
            return self.fail(now, number, Some(at), why, out);
        }
        self.advance(now, number, out);
    }

    fn verdict(
        &mut self,
        now: Duration,
        number: RequestNumber,
        at: usize,
        verdict: &Verdict,
        out: &mut Vec<Output>,
    ) {
        let any = self.shared.planted.has(Plant::UserIgnoresNonce);
        // What is quarantined was reported.
        let open = |it: &&mut Box<Request>| it.state != State::Quarantined;
        let Some(request) = self.requests.get_mut(&number).filter(open) else { return };
        let (asking, last) = match &request.sources[at].phase {
            Phase::Open { asking: Some(asking) } => (asking.clone(), false),
            Phase::Closing { asking } => (asking.clone(), true),
            _ => return self.shared.counts.strays += 1,
        };
        if asking.nonce != verdict.nonce && !any {
            self.shared.counts.strays += 1;
        } else if verdict.held {
            request.prove(at, &asking, last, out);
            self.advance(now, number, out);
        } else {
            self.shared.counts.stale += 1;
            self.fail(now, number, Some(at), Why::Stale(verdict.why), out);
        }
    }
}
