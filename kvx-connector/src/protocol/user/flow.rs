//! What a request does while it is alive: it holds, posts, confirms, and is ready.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

use super::request::{Asking, Phase, Piece, Request, Source, State, Work};
use super::{Config, Counts, Output, Prove, Route, Why};
use crate::protocol::id::{Nonce, Part};
use crate::protocol::message::{Confirm, Hold, ToOwner};
use crate::protocol::plant::{Plant, Planted};
use crate::protocol::terms::{Access, RequestNumber, StageNumber, TransferNumber};

/// What all requests of a user share.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shared {
    pub(super) config: Config,
    pub(super) transfers: BTreeMap<TransferNumber, Place>,
    pub(super) stages: BTreeMap<StageNumber, Place>,
    next: u64,
    seed: u64,
    pub(super) counts: Counts,
    pub(super) planted: Planted,
}

/// Of which request, source and part.
pub(super) type Place = (RequestNumber, usize, u32);

impl Shared {
    pub(super) fn new(config: Config, seed: u64) -> Self {
        Self {
            config,
            transfers: BTreeMap::new(),
            stages: BTreeMap::new(),
            next: 0,
            seed,
            counts: Counts::default(),
            planted: Planted::default(),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Draws a nonce: none is drawn twice from one seed.
    fn nonce(&mut self) -> Nonce {
        let state = self.seed.wrapping_add(self.number().wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Nonce(mixed ^ (mixed >> 31))
    }

    fn stage(&mut self, place: Place, part: Part, which: u8, out: &mut Vec<Output>) -> StageNumber {
        let stage = StageNumber(self.number());
        self.stages.insert(stage, place);
        let source = index(place.1);
        out.push(Output::RunStage { stage, request: place.0, source, part, which });
        stage
    }

    /// How long an answer is waited for after a message was sent so many times.
    pub(super) fn again(&self, sent: u32) -> Duration {
        let factor = 1_u32 << sent.saturating_sub(1).min(16);
        self.config.again_first.saturating_mul(factor).min(self.config.again_most)
    }
}

/// Sources are numbered with 16 bits: no request has more.
pub(super) fn index(source: usize) -> u16 {
    u16::try_from(source).unwrap_or(u16::MAX)
}

impl Request {
    /// Does all that can be done now. An error ends the request.
    pub(super) fn advance(
        &mut self,
        now: Duration,
        shared: &mut Shared,
        out: &mut Vec<Output>,
    ) -> Result<(), Why> {
        if now >= self.deadline_at {
            return Err(Why::Deadline);
        }
        for at in 0..self.sources.len() {
            self.hold(now, at, shared, out);
            if self.state == State::Active {
                self.begin_parts(now, at, shared, out);
                self.post(now, at, shared, out);
                self.ask(now, at, shared);
            }
            self.confirm(now, at, shared, out);
        }
        Ok(())
    }

    /// Whether everything is there and proven.
    pub(super) fn is_ready(&self, planted: &Planted) -> bool {
        let one = planted.has(Plant::OneSourceIsAll) && !self.sources.is_empty();
        let mut sources = self.sources.iter();
        let careless = planted.has(Plant::ReadyBeforeStage);
        let good =
            |source: &Source| source.is_good() || (careless && source.phase == Phase::Proven);
        self.state == State::Active && if one { sources.any(good) } else { sources.all(good) }
    }

    /// A part is known now. An error: it contradicts what was known.
    pub(super) fn learn(
        &mut self,
        at: usize,
        parts: Vec<Part>,
        total: Option<u32>,
        most: u32,
    ) -> Result<(), Why> {
        let Some(source) = self.sources.get_mut(at).filter(|source| source.data) else {
            return Ok(());
        };
        if total.is_some() {
            let known = source.parts.keys().next_back().map_or(0, |last| last + 1);
            let other = source.total.is_some_and(|before| Some(before) != total);
            if other || total.is_some_and(|total| known > total || total > most) {
                return Err(Why::Contradiction);
            }
            source.total = total;
        }
        for part in parts {
            if part.number >= source.total.unwrap_or(most) {
                return Err(Why::Contradiction);
            }
            if let Entry::Vacant(entry) = source.parts.entry(part.number) {
                source.unbegun.push(part.number);
                entry.insert(Box::new(Piece { part, work: Work::Known, proven: false, tries: 0 }));
            }
        }
        Ok(())
    }

    fn hold(&mut self, now: Duration, at: usize, shared: &Shared, out: &mut Vec<Output>) {
        let active = self.state == State::Active;
        let planted = &shared.planted;
        let every = self.hold_every;
        let source = &mut self.sources[at];
        let open = matches!(source.phase, Phase::Open { .. });
        if !open || !source.linked || source.hold_at > now {
            return;
        }
        let forgets = if active { Plant::ReadNotHeld } else { Plant::QueueNotHeld };
        let writes = self.access == Access::Write;
        source.holds += 1;
        let wait =
            if writes && !source.admitted { shared.again(source.holds).min(every) } else { every };
        source.hold_at = now + wait;
        if planted.has(forgets) && source.holds > 1 {
            return;
        }
        // A writer knows the parts itself.
        let known = writes || !source.data;
        let message = ToOwner::Hold(Hold {
            lease: self.lease,
            reader: self.reader,
            set: source.set.clone(),
            have: if known { u32::MAX } else { source.have() },
            total: known || source.total.is_some(),
            asks: writes && !source.admitted,
            access: Some(self.access),
            fingerprint: self.fingerprint,
        });
        out.push(Output::Send { peer: source.peer, message, route: Route::Control });
    }

    /// Starts what parts need before they can be posted.
    fn begin_parts(
        &mut self,
        now: Duration,
        at: usize,
        shared: &mut Shared,
        out: &mut Vec<Output>,
    ) {
        let (number, stages) = (self.number, self.before);
        let source = &mut self.sources[at];
        for id in source.unbegun.drain(..) {
            let Some(piece) = source.parts.get_mut(&id) else { continue };
            if stages == 0 {
                piece.work = Work::Queued;
                source.queue.insert((now, id));
            } else {
                let stage = shared.stage((number, at, id), piece.part.clone(), 0, out);
                piece.work = Work::Before { stage, which: 0 };
                self.staging += 1;
            }
        }
    }

    fn post(&mut self, now: Duration, at: usize, shared: &mut Shared, out: &mut Vec<Output>) {
        let unasked = shared.planted.has(Plant::WriteUnasked);
        let source = &mut self.sources[at];
        let may = source.may_post(true, self.access) || (unasked && source.linked);
        if !may {
            return;
        }
        while source.flying < shared.config.window
            && let Some((due, id)) = source.queue.first().copied()
            && due <= now
        {
            source.queue.pop_first();
            let Some(piece) = source.parts.get_mut(&id) else { continue };
            let transfer = TransferNumber(shared.number());
            piece.work = Work::Flying { transfer };
            source.flying += 1;
            shared.transfers.insert(transfer, (self.number, at, id));
            shared.counts.posted += 1;
            let (request, source) = (self.number, index(at));
            out.push(Output::Post { transfer, request, source, part: piece.part.clone() });
        }
    }

    /// Draws a nonce when there is something to be proven.
    fn ask(&mut self, now: Duration, at: usize, shared: &mut Shared) {
        let early = shared.planted.has(Plant::ConfirmBeforeSettle);
        let guessed = shared.planted.has(Plant::TotalGuessed);
        let source = &mut self.sources[at];
        let Phase::Open { asking } = &source.phase else { return };
        let posted = |source: &Source| {
            source.queue.is_empty() && source.unbegun.is_empty() && self.staging == 0
        };
        let known = u32::try_from(source.parts.len()).unwrap_or(u32::MAX);
        let last = source.is_settled()
            || (early && source.total == Some(known) && posted(source))
            || (guessed && known > 0 && source.settled == known);
        let each = self.prove == Prove::EachPart && asking.is_none() && !source.fresh.is_empty();
        if !last && !each {
            return;
        }
        if shared.planted.has(Plant::ClocksCompared) && last {
            source.phase = Phase::Proven;
            source.parts.values_mut().for_each(|piece| piece.proven = true);
            return;
        }
        let asking = Asking {
            nonce: shared.nonce(),
            covers: source.covered(),
            parts: std::mem::take(&mut source.fresh),
            sent: 0,
            next: now,
        };
        source.phase =
            if last { Phase::Closing { asking } } else { Phase::Open { asking: Some(asking) } };
    }

    /// Sends a confirm, or sends it again.
    fn confirm(&mut self, now: Duration, at: usize, shared: &mut Shared, out: &mut Vec<Output>) {
        let left = self.deadline_at.saturating_sub(now);
        let once = shared.planted.has(Plant::ConfirmNotRepeated);
        let source = &mut self.sources[at];
        let (asking, last) = match &mut source.phase {
            Phase::Open { asking: Some(asking) } => (asking, false),
            Phase::Closing { asking } => (asking, true),
            _ => return,
        };
        if !source.linked || asking.next > now {
            return;
        }
        if asking.sent == 0 {
            shared.counts.confirms += 1;
        } else {
            shared.counts.repeated += 1;
        }
        asking.sent += 1;
        asking.next = now + shared.again(asking.sent);
        if once && asking.sent > 1 {
            return;
        }
        let message = ToOwner::Confirm(Confirm {
            lease: self.lease,
            reader: self.reader,
            set: source.set.clone(),
            nonce: asking.nonce,
            parts: asking.covers,
            last,
            left_ms: Confirm::millis(left),
            access: Some(self.access),
            fingerprint: self.fingerprint,
        });
        // What is repeated may have been lost with the data.
        let route = if asking.sent == 1 && source.data { Route::WithData } else { Route::Control };
        out.push(Output::Send { peer: source.peer, message, route });
    }

    /// A stage of this request did what it should.
    pub(super) fn staged(
        &mut self,
        now: Duration,
        place: Place,
        shared: &mut Shared,
        out: &mut Vec<Output>,
    ) {
        let (before, after) = (self.before, self.after);
        let Some(source) = self.sources.get_mut(place.1) else { return };
        let Some(piece) = source.parts.get_mut(&place.2) else { return };
        let part = piece.part.clone();
        match piece.work {
            Work::Before { which, .. } if which + 1 < before => {
                let stage = shared.stage(place, part, which + 1, out);
                piece.work = Work::Before { stage, which: which + 1 };
                self.staging += 1;
            }
            Work::Before { .. } => {
                piece.work = Work::Queued;
                source.queue.insert((now, place.2));
            }
            Work::After { which, .. } if which + 1 < after => {
                let stage = shared.stage(place, part, before.saturating_add(which + 1), out);
                piece.work = Work::After { stage, which: which + 1 };
                self.staging += 1;
            }
            Work::After { .. } => {
                piece.work = Work::Here;
                source.here += 1;
                if piece.proven && self.prove == Prove::EachPart {
                    let (request, source) = (self.number, index(place.1));
                    out.push(Output::PartProven { request, source, part: place.2 });
                }
            }
            _ => {}
        }
    }

    /// The bytes of a part are there.
    pub(super) fn settled(&mut self, place: Place, shared: &mut Shared, out: &mut Vec<Output>) {
        let Some(source) = self.sources.get_mut(place.1) else { return };
        let Some(piece) = source.parts.get_mut(&place.2) else { return };
        source.settled += 1;
        if self.prove == Prove::EachPart {
            source.fresh.push(place.2);
            if shared.planted.has(Plant::LatePartProven)
                && let Phase::Open { asking: Some(asking) } = &mut source.phase
            {
                asking.parts.append(&mut source.fresh);
            }
        }
        if self.after == 0 {
            piece.work = Work::Here;
            source.here += 1;
        } else {
            let stage = shared.stage(place, piece.part.clone(), self.before, out);
            piece.work = Work::After { stage, which: 0 };
            self.staging += 1;
        }
    }

    /// The lease held after what a confirm covers had settled.
    pub(super) fn prove(&mut self, at: usize, asking: &Asking, last: bool, out: &mut Vec<Output>) {
        let (number, each) = (self.number, self.prove == Prove::EachPart);
        let Some(source) = self.sources.get_mut(at) else { return };
        let mut good = |piece: &mut Box<Piece>| {
            let first = !std::mem::replace(&mut piece.proven, true);
            if first && each && piece.work == Work::Here {
                let (request, source, part) = (number, index(at), piece.part.number);
                out.push(Output::PartProven { request, source, part });
            }
        };
        if last {
            source.parts.values_mut().for_each(&mut good);
            source.phase = Phase::Proven;
        } else {
            for id in &asking.parts {
                if let Some(piece) = source.parts.get_mut(id) {
                    good(piece);
                }
            }
            source.phase = Phase::Open { asking: None };
        }
    }
}
