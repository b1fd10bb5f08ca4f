//! How loads end, and what is reported of them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::id::Incarnation;
use kvx_core::{Error, Result, Retry};

use super::super::book::Book;
use super::super::outbox::Past;
use super::Stage;
use crate::protocol::RequestNumber;
use crate::rank::{Channel, Rank, RankEvent};
use crate::scheduler::{Load, LoadEnd, LoadOutcome};

impl Book {
    /// Reports the end of a load that did not load.
    pub(super) fn end(&mut self, end: LoadEnd) {
        self.recent.insert(end.attempt, Past::Over);
        self.out.load(end);
    }

    /// What was loaded is copied to where the engine has its cache.
    pub(in crate::worker::connector) fn load_copied(&mut self, number: u64, result: Result<()>) {
        match result {
            Ok(()) => self.loaded(number),
            Err(error) => {
                let outcome = match error.retry() {
                    Retry::Never => LoadOutcome::Failed,
                    _ => LoadOutcome::Retry,
                };
                self.attempts.remove(&number);
                self.recent.insert(number, Past::Loaded { copied: false });
                let why = format!("blocks could not be copied from the host: {error}");
                self.out.load(LoadEnd::new(number, outcome, why));
            }
        }
    }

    /// Something happened to a request of the rank.
    pub(in crate::worker::connector) fn load_event<C: Channel>(
        &mut self,
        event: RankEvent,
        now: Duration,
        rank: &mut Rank<C>,
    ) {
        match event {
            RankEvent::Ready { request, report } => {
                self.out.moved(&report);
                let Some(number) = self.requests.remove(&request) else { return };
                let Some(attempt) = self.attempts.get_mut(&number) else { return };
                match std::mem::replace(&mut attempt.stage, Stage::Held) {
                    Stage::Loading(load) if self.host => self.copy(number, &load),
                    // Aborted, and there all the same: it is not copied any more, where it would have to be.
                    Stage::Aborting(_) if self.host => {
                        self.attempts.remove(&number);
                        self.end(LoadEnd::new(number, LoadOutcome::Aborted, "aborted"));
                    }
                    _ => self.loaded(number),
                }
            }
            RankEvent::Failed { request, error, blocks, quarantined, proven, report, .. } => {
                self.out.moved(&report);
                let failure = Failure { error, blocks, quarantined, proven };
                self.failed(request, failure, now, rank);
            }
            RankEvent::Aborted { request, quarantined } => {
                let Some(number) = self.requests.remove(&request) else { return };
                let Some(attempt) = self.attempts.remove(&number) else { return };
                if let Stage::Aborting(load) | Stage::Loading(load) = attempt.stage {
                    let end = LoadEnd::new(number, LoadOutcome::Aborted, "aborted");
                    let end = self.with_blocks(end, &load, BTreeSet::new());
                    self.end_in(end, quarantined.then_some((request, &*load)));
                }
            }
            RankEvent::Unquarantined { request } => {
                if let Some((number, blocks)) = self.unquiet.remove(&request) {
                    self.out.quiet(number, blocks);
                }
            }
            _ => {}
        }
    }

    fn failed<C: Channel>(
        &mut self,
        request: RequestNumber,
        failure: Failure,
        now: Duration,
        rank: &mut Rank<C>,
    ) {
        let Failure { error, blocks, quarantined, proven } = failure;
        let Some(number) = self.requests.remove(&request) else { return };
        let Some(mut attempt) = self.attempts.remove(&number) else { return };
        attempt.request = None;
        attempt.proven.extend(proven);
        let retry = error.retry() != Retry::Never && !quarantined;
        match std::mem::replace(&mut attempt.stage, Stage::Kept) {
            stage @ (Stage::Held | Stage::Kept | Stage::Copying) => {
                tracing::warn!(attempt = number, %error, "a lease could not be held");
                // A load may come all the same, and asks anew.
                attempt.stage = stage;
                if !retry && !quarantined {
                    self.give_back(number, &attempt, now, rank);
                }
                self.attempts.insert(number, attempt);
            }
            Stage::Aborting(load) => {
                let end = LoadEnd::new(number, LoadOutcome::Aborted, error.to_string());
                let end = self.with_blocks(end, &load, blocks);
                self.end_in(end, quarantined.then_some((request, &*load)));
                if !quarantined {
                    self.give_back(number, &attempt, now, rank);
                }
            }
            Stage::Loading(load) => {
                let outcome = if retry { LoadOutcome::Retry } else { LoadOutcome::Failed };
                let end = LoadEnd::new(number, outcome, error.to_string());
                let end = self.with_blocks(end, &load, blocks);
                if retry {
                    self.out.load(end);
                    self.attempts.insert(number, attempt);
                    return self.keep(number, now, rank);
                }
                self.end_in(end, quarantined.then_some((request, &*load)));
                if !quarantined {
                    self.give_back(number, &attempt, now, rank);
                }
            }
        }
    }

    /// With the blocks that are not proven good. None means all of them.
    fn with_blocks(&self, mut end: LoadEnd, load: &Load, blocks: BTreeSet<(u16, u32)>) -> LoadEnd {
        end.blocks = match blocks.is_empty() {
            true => self.blocks(load),
            false => blocks.into_iter().collect(),
        };
        end
    }

    /// Ends a load, perhaps with all of its blocks in quarantine.
    fn end_in(&mut self, mut end: LoadEnd, quarantine: Option<(RequestNumber, &Load)>) {
        if let Some((request, load)) = quarantine {
            end.quarantined = self.blocks(load);
            self.unquiet.insert(request, (end.attempt, end.quarantined.len() as u64));
        }
        self.end(end);
    }

    /// All blocks of a load.
    fn blocks(&self, load: &Load) -> Vec<(u16, u32)> {
        let mut all = BTreeSet::new();
        for (number, (group, table)) in (0..).zip(self.groups.iter().zip(&load.local)) {
            let ids = table.ids.iter().filter(|id| Some(**id) != group.null_block);
            all.extend(ids.map(|id| (number, *id)));
        }
        all.into_iter().collect()
    }
}

/// How a request of the rank failed.
struct Failure {
    error: Arc<Error>,
    blocks: BTreeSet<(u16, u32)>,
    quarantined: bool,
    proven: BTreeSet<Incarnation>,
}
