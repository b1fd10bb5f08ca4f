//! How requests end that are not ready: everything is cancelled, and pinned until it has settled.

use std::collections::BTreeSet;
use std::time::Duration;

use kvx_core::id::Incarnation;

use super::request::{How, Phase, State, Work};
use super::{Output, User, Why};
use crate::protocol::plant::Plant;
use crate::protocol::terms::{Access, Reason, RequestNumber};

impl User {
    /// A request fails, by one of its sources or as a whole.
    pub(super) fn fail(
        &mut self,
        now: Duration,
        number: RequestNumber,
        at: Option<usize>,
        why: Why,
        out: &mut Vec<Output>,
    ) {
        if let Some(request) = self.requests.get_mut(&number)
            && let Some(source) = at.and_then(|at| request.sources.get_mut(at))
            && source.phase != Phase::Proven
        {
            source.phase = Phase::Failed(why);
        }
        self.begin_end(now, number, How::Failed(why), out);
    }

    /// The engine gives a request up.
    pub(super) fn abort(&mut self, now: Duration, number: RequestNumber, out: &mut Vec<Output>) {
        self.begin_end(now, number, How::Aborted, out);
    }

    fn begin_end(&mut self, now: Duration, number: RequestNumber, how: How, out: &mut Vec<Output>) {
        let until = now + self.shared.config.grace;
        let Some(request) = self.requests.get_mut(&number).filter(|it| it.is_alive()) else {
            return;
        };
        request.state = State::Ending { how, until, severed: false };
        for source in &mut request.sources {
            source.queue.clear();
            source.unbegun.clear();
            for piece in source.parts.values_mut() {
                match piece.work {
                    Work::Flying { transfer } => out.push(Output::Cancel { transfer }),
                    Work::Known | Work::Queued => piece.work = Work::Lost,
                    _ => {}
                }
            }
        }
        for at in 0..request.sources.len() {
            self.release(now, number, at, out);
        }
        let planted = &self.shared.planted;
        let hasty = match how {
            How::Failed(_) => planted.has(Plant::FailureBeforeSiblings),
            How::Aborted => planted.has(Plant::AbortUnpinsEarly),
        };
        let quiet = self.requests.get(&number).is_some_and(|it| it.is_quiet());
        if quiet || hasty {
            return self.finish(number, how, out);
        }
        self.retime(number);
    }

    /// Releases a source that is not proven: at once to read, once all has settled to write. Not where whoever asked goes on.
    fn release(&mut self, now: Duration, number: RequestNumber, at: usize, out: &mut Vec<Output>) {
        let hasty = self.shared.planted.has(Plant::ReleaseBeforeSettled);
        let Some(request) = self.requests.get_mut(&number) else { return };
        if request.keeps && matches!(request.state, State::Ending { how: How::Failed(_), .. }) {
            return;
        }
        let (lease, reader, access) = (request.lease, request.reader, request.access);
        let does = (access, request.fingerprint);
        let source = &mut request.sources[at];
        let over = match source.phase {
            // It was never let in.
            Phase::Failed(
                Why::Ended(Reason::Access | Reason::Ticket)
                | Why::Stale(Some(Reason::Access | Reason::Ticket)),
            ) => true,
            Phase::Failed(Why::Ended(_) | Why::Stale(_)) => access == Access::Read,
            _ => false,
        };
        // Its owner is told even so, should it come back: it keeps what may be written.
        let gone = access == Access::Read && source.phase == Phase::Failed(Why::PeerGone);
        if source.released || source.phase == Phase::Proven || over || gone {
            source.released = true;
            return;
        }
        if access == Access::Write && source.flying > 0 && !hasty {
            return;
        }
        source.released = true;
        let (peer, set) = (source.peer, source.set.clone());
        let entry = self.peers.entry(peer).or_default();
        entry.need(peer, out);
        let ready = entry.ready;
        self.releases.begin(now, (peer, lease, reader), (set, does), ready, &mut self.shared);
    }

    /// Something of a request that ends has settled.
    pub(super) fn quieter(
        &mut self,
        now: Duration,
        number: RequestNumber,
        at: usize,
        out: &mut Vec<Output>,
    ) {
        self.release(now, number, at, out);
        let Some(request) = self.requests.get(&number).filter(|it| it.is_quiet()) else { return };
        match request.state {
            State::Ending { how, .. } => self.finish(number, how, out),
            State::Quarantined => {
                self.shared.counts.unquarantined += 1;
                out.push(Output::Unquarantined { request: number });
                self.remove(number);
            }
            State::Holding | State::Active => {}
        }
    }

    /// A request is over, and nothing of it moves.
    fn finish(&mut self, number: RequestNumber, how: How, out: &mut Vec<Output>) {
        self.report(number, how, false, out);
        self.remove(number);
    }

    fn report(
        &mut self,
        request: RequestNumber,
        how: How,
        quarantined: bool,
        out: &mut Vec<Output>,
    ) {
        let Some(it) = self.requests.get(&request) else { return };
        self.shared.counts.quarantined += u64::from(quarantined);
        match how {
            How::Failed(why) => {
                self.shared.counts.failed += 1;
                let unproven = it.unproven();
                out.push(Output::Failed { request, why, unproven, quarantined });
            }
            How::Aborted => {
                self.shared.counts.aborted += 1;
                out.push(Output::Aborted { request, quarantined });
            }
        }
    }

    /// Something of a request is due.
    pub(super) fn lapse(&mut self, now: Duration, number: RequestNumber, out: &mut Vec<Output>) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        let State::Ending { how, until, severed } = &mut request.state else {
            return self.advance(now, number, out);
        };
        if *until > now {
            return self.retime(number);
        }
        if *severed {
            let how = *how;
            request.state = State::Quarantined;
            for at in 0..request.sources.len() {
                self.release(now, number, at, out);
            }
            return self.report(number, how, true, out);
        }
        *severed = true;
        *until = now + self.shared.config.sever_for;
        let moving = request.sources.iter().filter(|source| source.flying > 0);
        let peers: BTreeSet<Incarnation> = moving.map(|source| source.peer).collect();
        if !self.shared.planted.has(Plant::NeverSevers) {
            self.shared.counts.severed += peers.len() as u64;
            out.extend(peers.into_iter().map(|peer| Output::Sever { peer }));
        }
        self.retime(number);
    }

    /// A peer cannot be reached: for now, or for ever.
    pub(super) fn peer_lost(
        &mut self,
        now: Duration,
        peer: Incarnation,
        why: Why,
        out: &mut Vec<Output>,
    ) {
        let Some(entry) = self.peers.get_mut(&peer) else { return };
        // It was reached since.
        if why == Why::PeerFailed && entry.ready {
            return;
        }
        entry.ready = false;
        entry.needed = false;
        let numbers: Vec<RequestNumber> = if self.shared.planted.has(Plant::OneFailsAll) {
            self.requests.keys().copied().collect()
        } else {
            entry.requests.iter().copied().collect()
        };
        self.releases.unreached(peer);
        let mut needed = why == Why::PeerDown && self.releases.has(peer);
        let over_new = self.shared.planted.has(Plant::WritesOverNewConnection);
        for number in numbers {
            let Some(request) = self.requests.get_mut(&number) else { continue };
            let (access, alive) = (request.access, request.is_alive());
            let of_peer = request.sources.iter().position(|source| source.peer == peer);
            let any = || (!request.sources.is_empty()).then_some(0);
            let Some(at) = of_peer.or_else(any) else { continue };
            let source = &mut request.sources[at];
            source.linked = false;
            // Nobody is left to be told that it is not read any more.
            let gone = why == Why::PeerGone && source.peer == peer;
            source.released |= gone && access == Access::Read;
            if !alive || source.phase == Phase::Proven {
                continue;
            }
            let open = matches!(source.phase, Phase::Open { .. });
            // Whoever has asked may still be answered from before, and that says nothing of another connection.
            let asked = source.admitted || source.holds > 0;
            let writing = access == Access::Write && open && asked && !over_new;
            if why == Why::PeerDown && !writing {
                needed = true;
                self.retime(number);
            } else {
                self.fail(now, number, Some(at), why, out);
            }
        }
        let Some(entry) = self.peers.get_mut(&peer) else { return };
        if needed {
            entry.need(peer, out);
        } else if entry.requests.is_empty() && !self.releases.has(peer) {
            self.peers.remove(&peer);
        }
    }
}
