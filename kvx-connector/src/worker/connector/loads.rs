//! Loads, from when their leases are held until their ends are reported.
//!
//! ```text
//!               load               Ready                copied, or no host's buffer
//!   hold ▶ Held ─────▶ Loading ───────────▶ (Copying) ─────────────────────────────▶ reported: loaded
//!            │            │ │ may be tried again                replaced by another load: reported as loaded at once
//!     release│            │ └─────────▶ Kept ── load that replaces it ──▶ Loading, as the same reader
//!            ▼            │ abort         │ reported: retry
//!         released        ▼               │ release
//!                      Aborting           ▼
//!                         └─▶ reported  released
//! ```
//!
//! A rank that tries again does so as the reader that it was: the lease is done when the whole set of one attempt has confirmed, and
//! other ranks of the set have perhaps confirmed already. It reads only from those of the other engine's ranks from which not
//! everything is there.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::id::Incarnation;

mod ends;

use super::book::Book;
use super::copies::{CopyOf, Direction};
use super::outbox::Past;
use crate::protocol::user::Prove;
use crate::protocol::{Access, Attempt as AttemptName, Part, RequestNumber};
use crate::rank::{
    Channel, FetchOptions, FetchOrder, FetchReport, FillOrder, Kept, Rank, RankEvent,
};
use crate::scheduler::{Hold, Load, LoadEnd, LoadOutcome, Release, Source, WorkerReport};

/// How long the ranks of a lease that is only to be released are sought. It ends by itself where they are not found.
const RELEASE: Duration = Duration::from_secs(30);

/// An attempt that is not over here.
#[derive(Debug)]
pub(super) struct Attempt {
    source: Source,
    /// By which number the other engine knows this reader: that of the first attempt, where this one is a retry.
    reader: u64,
    /// Ranks of the other engine from which everything is there.
    proven: BTreeSet<Incarnation>,
    /// For how long the lease is extended at most.
    patience: Duration,
    /// The rank's request that holds the lease, or moves the data.
    request: Option<RequestNumber>,
    pub(super) stage: Stage,
}

/// Where an attempt stands: see the [module](self).
#[derive(Debug)]
pub(super) enum Stage {
    Held,
    Loading(Box<Load>),
    Aborting(Box<Load>),
    Copying,
    Kept,
}

impl Book {
    fn number(&mut self, attempt: u64) -> RequestNumber {
        let request = RequestNumber(self.next_request);
        self.next_request += 1;
        self.requests.insert(request, attempt);
        request
    }

    /// An order for the lease, of nothing yet.
    fn order(&self, request: RequestNumber, attempt: &Attempt, deadline: Duration) -> FetchOrder {
        let source = &attempt.source;
        FetchOrder {
            request,
            key: source.key.clone(),
            engine: source.engine.clone(),
            address: source.cards.clone(),
            replica: source.replica,
            lease: source.lease,
            access: Access::Read,
            attempt: AttemptName { user: self.life, number: attempt.reader },
            tokens: 0,
            range: 0..0,
            theirs: Vec::new(),
            ours: Vec::new(),
            parts: Vec::new(),
            total: None,
            deadline,
            begin: false,
            prove: Prove::Whole,
            digests: self.digests,
            stages: (0, 0),
            options: FetchOptions {
                ttl: Some(source.ttl),
                fingerprint: Some(source.fingerprint),
                keep: true,
                proven: attempt.proven.clone(),
                without: Vec::new(),
                kept: Kept::default(),
            },
        }
    }

    /// Has the rank extend the lease of an attempt.
    fn keep<C: Channel>(&mut self, number: u64, now: Duration, rank: &mut Rank<C>) {
        let request = self.number(number);
        let Some(attempt) = self.attempts.get(&number) else { return };
        let order = self.order(request, attempt, attempt.patience);
        let held = rank.fetch(now, order);
        if let Some(attempt) = self.attempts.get_mut(&number) {
            attempt.request = held.is_ok().then_some(request);
        }
        if let Err(error) = held {
            self.requests.remove(&request);
            tracing::error!(attempt = number, %error, "a lease cannot be held");
        }
    }

    /// Releases what is left of an attempt's lease.
    fn give_back<C: Channel>(
        &mut self,
        number: u64,
        attempt: &Attempt,
        now: Duration,
        rank: &mut Rank<C>,
    ) {
        let request = self.number(number);
        self.requests.remove(&request);
        let patience = attempt.source.ttl.min(RELEASE).max(Duration::from_secs(1));
        if let Err(error) = rank.release(now, self.order(request, attempt, patience)) {
            tracing::error!(attempt = number, %error, "a lease cannot be released");
        }
    }

    /// Ends a request of the rank that nobody waits for.
    fn drop_request<C: Channel>(&mut self, request: RequestNumber, rank: &mut Rank<C>) {
        self.requests.remove(&request);
        rank.abort(request);
    }

    pub(super) fn hold<C: Channel>(&mut self, hold: Hold, now: Duration, rank: &mut Rank<C>) {
        let attempt = Attempt {
            source: hold.source,
            reader: hold.attempt,
            proven: BTreeSet::new(),
            patience: hold.deadline,
            request: None,
            stage: Stage::Held,
        };
        self.attempts.insert(hold.attempt, attempt);
        self.keep(hold.attempt, now, rank);
    }

    pub(super) fn load<C: Channel>(&mut self, load: Load, now: Duration, rank: &mut Rank<C>) {
        let number = load.attempt;
        let before = load.replaces.unwrap_or(number);
        if load.replaces.is_some()
            && let Some(Past::Loaded { copied }) = self.recent.get(before)
        {
            // All of it is there; it was another rank that failed.
            return self.there(load, copied);
        }
        let mut attempt = self.attempts.remove(&before).unwrap_or_else(|| Attempt {
            source: load.source.clone(),
            reader: number,
            proven: BTreeSet::new(),
            patience: load.deadline,
            request: None,
            stage: Stage::Held,
        });
        attempt.patience = attempt.patience.max(load.deadline);
        let blocks: usize = load.local.iter().map(|table| table.ids.len()).sum();
        if blocks > WorkerReport::MAX_BLOCKS {
            let why = format!("{blocks} blocks; the limit is {}", WorkerReport::MAX_BLOCKS);
            self.forsake(number, attempt, now, rank);
            return self.end(LoadEnd::new(number, LoadOutcome::Failed, why));
        }
        let fill = filled(&load);
        let load = Box::new(load);
        if let Some(request) = attempt.request {
            self.requests.insert(request, number);
            attempt.stage = Stage::Loading(load);
            self.attempts.insert(number, attempt);
            rank.fill(now, request, fill);
            rank.begin(request);
            return;
        }
        let request = self.number(number);
        attempt.request = Some(request);
        let mut order = self.order(request, &attempt, fill.deadline);
        (order.tokens, order.range) = (fill.tokens, fill.range);
        (order.theirs, order.ours) = (fill.theirs, fill.ours);
        (order.parts, order.total) = (fill.parts, fill.total);
        order.options.without = fill.without;
        order.begin = true;
        attempt.stage = Stage::Loading(load);
        self.attempts.insert(number, attempt);
        if let Err(error) = rank.fetch(now, order) {
            let report = FetchReport::default();
            let (blocks, proven) = (BTreeSet::new(), BTreeSet::new());
            let (error, quarantined) = (Arc::new(error), false);
            let reason = None;
            let event =
                RankEvent::Failed { request, error, reason, blocks, quarantined, proven, report };
            self.load_event(event, now, rank);
        }
    }

    /// A load whose bytes are there already.
    fn there(&mut self, load: Load, copied: bool) {
        let number = load.attempt;
        if copied || !self.host {
            return self.loaded(number);
        }
        let attempt = Attempt {
            source: load.source.clone(),
            reader: number,
            proven: BTreeSet::new(),
            patience: Duration::ZERO,
            request: None,
            stage: Stage::Held,
        };
        self.attempts.insert(number, attempt);
        self.copy(number, &load);
    }

    fn copy(&mut self, number: u64, load: &Load) {
        let (tokens, tables) = (load.tokens.clone(), load.local.clone());
        self.copies.add(Direction::FromHost, CopyOf::Load(number), tokens, tables);
        if let Some(attempt) = self.attempts.get_mut(&number) {
            attempt.request = None;
            attempt.stage = Stage::Copying;
        }
    }

    fn loaded(&mut self, number: u64) {
        self.attempts.remove(&number);
        self.recent.insert(number, Past::Loaded { copied: true });
        self.out.load(LoadEnd::new(number, LoadOutcome::Loaded, ""));
    }

    /// A load that has begun ends; its end is reported once nothing moves. What has not begun, or has ended here, is only
    /// released.
    pub(super) fn abort<C: Channel>(&mut self, number: u64, now: Duration, rank: &mut Rank<C>) {
        let Some(mut attempt) = self.attempts.remove(&number) else { return };
        match attempt.stage {
            Stage::Held | Stage::Kept => return self.forsake(number, attempt, now, rank),
            Stage::Loading(load) => {
                attempt.stage = Stage::Aborting(load);
                if let Some(request) = attempt.request {
                    rank.abort(request);
                }
            }
            // Its end comes by itself.
            Stage::Aborting(_) | Stage::Copying => {}
        }
        self.attempts.insert(number, attempt);
    }

    /// The lease of an attempt is not wanted any more, and nothing moves under it.
    fn forsake<C: Channel>(
        &mut self,
        number: u64,
        attempt: Attempt,
        now: Duration,
        rank: &mut Rank<C>,
    ) {
        self.recent.insert(number, Past::Over);
        match attempt.request {
            Some(request) => self.drop_request(request, rank),
            None => self.give_back(number, &attempt, now, rank),
        }
    }

    pub(super) fn release<C: Channel>(
        &mut self,
        release: Release,
        now: Duration,
        rank: &mut Rank<C>,
    ) {
        let Release { attempt: number, source } = release;
        // One that is kept goes by the number of the attempt that failed, where another was to follow.
        let of_lease = |(_, attempt): &(&u64, &Attempt)| attempt.source.lease == source.lease;
        let held = match self.attempts.contains_key(&number) {
            true => Some(number),
            false => self.attempts.iter().find(of_lease).map(|(held, _)| *held),
        };
        if let Some(held) = held {
            return self.abort(held, now, rank);
        }
        // Of one that ended here, the lease is confirmed or released.
        if self.recent.get(number).is_none() {
            let (proven, request, stage) = (BTreeSet::new(), None, Stage::Held);
            let patience = source.ttl;
            let never = Attempt { source, reader: number, proven, patience, request, stage };
            self.give_back(number, &never, now, rank);
            self.recent.insert(number, Past::Over);
        }
    }

    /// Whether loads are under way.
    pub(super) fn loads(&self) -> bool {
        self.attempts.values().any(|attempt| {
            matches!(attempt.stage, Stage::Loading(_) | Stage::Aborting(_) | Stage::Copying)
        })
    }
}

/// What a load is to move.
fn filled(load: &Load) -> FillOrder {
    let tokens = load.tokens.end;
    let part = Part { number: 0, group: None, layers: 0..u32::MAX, tokens: 0..tokens };
    let (parts, total) = match (load.announced, tokens) {
        (true, _) => (Vec::new(), None),
        (false, 0) => (Vec::new(), Some(0)),
        (false, _) => (vec![part], Some(1)),
    };
    let empty = (0..).zip(&load.local).filter(|(_, table)| table.ids.is_empty());
    FillOrder {
        tokens,
        range: load.tokens.clone(),
        theirs: load.remote.iter().map(|group| group.table.clone()).collect(),
        ours: load.local.clone(),
        parts,
        total,
        without: empty.map(|(group, _)| group).collect(),
        deadline: load.deadline,
    }
}
