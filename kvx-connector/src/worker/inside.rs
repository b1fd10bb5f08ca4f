//! What a worker has behind its lock: the rank, and whoever waits for what becomes of orders.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result};
use tokio::sync::oneshot;

use super::connector::{self, Book};
use super::digests::Digester;
use super::handles::{FetchFailure, Fetched};
use super::news::News;
use super::shared::LONGEST_SLEEP;
use super::{ControlChannel, Stages};
use crate::protocol::{LeaseName, Reason, RequestNumber};
use crate::rank::{FetchOrder, Rank, RankEvent};

pub(super) struct Inside {
    pub(super) rank: Rank<ControlChannel>,
    /// Until when the thread sleeps, if nothing wakes it.
    pub(super) sleeps_until: Duration,
    /// When the last order came.
    pub(super) ordered: Duration,
    /// Requests that were not taken.
    pub(super) refused: Vec<(oneshot::Sender<Fetched>, Error)>,
    pub(super) fetches: BTreeMap<RequestNumber, oneshot::Sender<Fetched>>,
    pub(super) leases: BTreeMap<LeaseName, oneshot::Sender<Reason>>,
    pub(super) stages: Option<Box<dyn Stages>>,
    /// What a scheduler has said, where there is one.
    pub(super) book: Option<Book>,
    pub(super) news: Arc<News>,
    pub(super) digester: Option<Digester>,
    /// What nobody here waits for.
    pub(super) others: Vec<RankEvent>,
}

/// Answers that are given once no lock is held: whoever waits for one may call again at once.
#[derive(Default)]
pub(super) struct Told {
    fetched: Vec<(oneshot::Sender<Fetched>, Fetched)>,
    freed: Vec<(oneshot::Sender<Reason>, Reason)>,
    news: Option<Arc<News>>,
}

impl Drop for Told {
    fn drop(&mut self) {
        // Whoever no longer waits is told nothing.
        for (sender, fetched) in self.fetched.drain(..) {
            let _gone = sender.send(fetched);
        }
        for (sender, why) in self.freed.drain(..) {
            let _gone = sender.send(why);
        }
        if let Some(news) = self.news.take() {
            news.tell();
        }
    }
}

impl Inside {
    /// Moves a request, and tells `sender` what becomes of it.
    pub(super) fn fetch(
        &mut self,
        now: Duration,
        order: FetchOrder,
        sender: oneshot::Sender<Fetched>,
    ) {
        let request = order.request;
        match self.rank.fetch(now, order) {
            Ok(()) => drop(self.fetches.insert(request, sender)),
            Err(error) => self.refused.push((sender, error)),
        }
    }

    pub(super) fn book(&mut self) -> Result<&mut Book> {
        self.book.as_mut().ok_or_else(connector::no_book)
    }

    /// Steps, and says when the next step is due.
    pub(super) fn step(&mut self, now: Duration, told: &mut Told) -> Duration {
        loop {
            let due = self.rank.step(now).unwrap_or(Duration::MAX).min(now + LONGEST_SLEEP);
            self.dispatch(now, told);
            self.give_digests();
            // A stage may have been over at once.
            if !self.rank.has_orders() {
                return due;
            }
        }
    }

    /// Has digests computed, here where nobody else can.
    fn give_digests(&mut self) {
        while let Some(job) = self.rank.next_digest() {
            let given = match &mut self.digester {
                Some(digester) => digester.give(job),
                None => Err(job),
            };
            if let Err(job) = given {
                self.rank.digested(job.number(), job.run());
            }
        }
    }

    /// Finds out whom the rank's events are for.
    fn dispatch(&mut self, now: Duration, told: &mut Told) {
        for (sender, error) in self.refused.drain(..) {
            told.fetched.push((sender, Err(FetchFailure::without_blocks(error, false))));
        }
        while let Some(event) = self.rank.next_event() {
            let event = match &mut self.book {
                None => Some(event),
                Some(book) => {
                    let rest = book.hear(event, now, &mut self.rank);
                    if book.has_news() {
                        told.news = Some(Arc::clone(&self.news));
                    }
                    rest
                }
            };
            let Some(event) = event else { continue };
            match event {
                RankEvent::Ready { request, report } => {
                    if let Some(sender) = self.fetches.remove(&request) {
                        told.fetched.push((sender, Ok(report)));
                    }
                }
                RankEvent::Failed { request, error, reason, blocks, quarantined, .. } => {
                    if let Some(sender) = self.fetches.remove(&request) {
                        let failure = FetchFailure { error, reason, blocks, quarantined };
                        told.fetched.push((sender, Err(failure)));
                    }
                }
                RankEvent::Aborted { request, quarantined } => {
                    if let Some(sender) = self.fetches.remove(&request) {
                        let error =
                            Error::new(ErrorKind::Closed, "fetch", "it was given up on this side");
                        let failure = FetchFailure::without_blocks(error, quarantined);
                        told.fetched.push((sender, Err(failure)));
                    }
                }
                RankEvent::Freed { lease, why } => {
                    if let Some(sender) = self.leases.remove(&lease) {
                        told.freed.push((sender, why));
                    }
                }
                RankEvent::Stage { stage, of, part, which } => match &mut self.stages {
                    Some(stages) => {
                        if let Some(ok) = stages.run(stage, of, &part, which) {
                            self.rank.stage_done(of, stage, ok);
                        }
                    }
                    None => {
                        tracing::error!(?of, "a stage was ordered, and nobody runs stages");
                        self.rank.stage_done(of, stage, false);
                    }
                },
                other => self.others.push(other),
            }
        }
    }
}
