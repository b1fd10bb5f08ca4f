//! Comparing digests: between the last byte of a transfer and its report as settled, so before it is confirmed, while the lease
//! still holds. A transfer whose digests differ has failed, and may be tried again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::id::Incarnation;
use kvx_core::layout::RankLayout;
use kvx_core::memory::Region;
use kvx_core::wire::{Text, printable};
use kvx_core::{Error, ErrorKind, Result, Retry};

use super::channel::Channel;
use super::fetch::borrowed;
use super::frame::{self, Digests, MAX_WHY};
use super::{Flying, Rank, Todo};
use crate::integrity::{Answer, Digest, Extent, Question, Rows, digest, rows};
use crate::protocol::message::{Ended, ToUser};
use crate::protocol::{Access, LeaseName, Part, Reader, RequestNumber, TransferNumber, user};
use crate::ticket::Table;

/// Transfers that have settled and whose digests are not compared yet. None waits for longer than [`PATIENCE`].
#[derive(Debug, Default)]
pub(super) struct Comparing {
    list: BTreeMap<TransferNumber, Waiting>,
    /// Whether somebody else computes digests: whoever takes the [`jobs`](Self::jobs).
    elsewhere: bool,
    jobs: VecDeque<DigestJob>,
    /// Digests that are being computed, by the number of their job.
    computing: BTreeMap<u64, Computing>,
    next_job: u64,
    layout: Option<Arc<RankLayout>>,
    /// Questions about leases that are not granted yet, and until when they are kept.
    early: VecDeque<(Duration, Incarnation, Digests)>,
}

/// What a digest is for.
#[derive(Debug)]
enum Computing {
    /// To be compared with that of a peer, who is asked for it next.
    Here {
        transfer: TransferNumber,
        request: RequestNumber,
        peer: Incarnation,
        ask: Digests,
        grain: u64,
    },
    /// For a peer that has asked.
    There { transfer: u64, lease: LeaseName, reader: Reader, peer: Incarnation },
}

/// Most digests that are computed for peers at one time. Who asks for more gets no answer, and asks once more, in time.
const MAX_ASKED: usize = 1024;

/// Digests of some rows of this rank's memory, to be computed by whoever has the time.
#[derive(Debug)]
pub struct DigestJob {
    number: u64,
    layout: Arc<RankLayout>,
    regions: Vec<Region>,
    tables: Vec<Table>,
    rows: Vec<Rows>,
    grain: u64,
}

impl DigestJob {
    /// Its number, for [`Rank::digested`].
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// Computes them.
    ///
    /// # Errors
    ///
    /// Those of [`digest`].
    pub fn run(&self) -> Result<BTreeMap<u64, Digest>> {
        let tables = borrowed(&self.tables);
        let extent = Extent { layout: &self.layout, regions: &self.regions, tables: &tables };
        digest(extent, &self.rows, self.grain)
    }
}

/// How long an answer is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Waiting {
    request: RequestNumber,
    until: Duration,
    peer: Incarnation,
    here: BTreeMap<u64, Digest>,
    grain: u64,
}

/// An error as the other side is told it.
fn why(error: &Error) -> Text<MAX_WHY> {
    let mut text = printable(&error.to_string());
    while text.len() > MAX_WHY {
        text.pop();
    }
    Text::new(text).unwrap_or_default()
}

fn over(lease: LeaseName) -> Error {
    Error::peer("digests", "the lease is over").with_context("lease", lease)
}

impl<C: Channel> Rank<C> {
    /// Asks the other side for its digests of what has arrived.
    pub(super) fn compare(
        &mut self,
        transfer: TransferNumber,
        Flying { request, source, part, .. }: &Flying,
    ) {
        match self.question(transfer, *request, *source, part) {
            Ok(true) => {}
            Ok(false) => self.compared(transfer, user::Outcome::Done),
            Err(error) => self.differs(transfer, *request, error),
        }
    }

    /// Leaves computing digests to whoever calls [`next_digest`](Self::next_digest) after each step. Otherwise it is done within
    /// steps.
    pub fn digest_elsewhere(&mut self) {
        self.comparing.elsewhere = true;
    }

    /// The next digests to be computed.
    pub fn next_digest(&mut self) -> Option<DigestJob> {
        self.comparing.jobs.pop_front()
    }

    /// Digests are computed.
    pub fn digested(&mut self, number: u64, result: Result<BTreeMap<u64, Digest>>) {
        match self.comparing.computing.remove(&number) {
            Some(Computing::Here { transfer, request, peer, ask, grain }) => match result {
                Ok(here) => {
                    let until = self.now + PATIENCE;
                    let waiting = Waiting { request, until, peer, here, grain };
                    self.comparing.list.insert(transfer, waiting);
                    self.send(peer, frame::digests(&ask), false);
                }
                Err(error) => self.differs(transfer, request, error),
            },
            Some(Computing::There { transfer, lease, reader, peer }) => {
                if self.grants.contains_key(&lease) {
                    return self.tell_digests(peer, (lease, reader, transfer), result);
                }
                self.refuse_digests(peer, (lease, reader, transfer));
            }
            // It was given up meanwhile.
            None => {}
        }
    }

    /// A lease is granted: what was asked about it before is answered.
    pub(super) fn answer_early_digests(&mut self, granted: LeaseName) {
        let of = |ask: &Digests| matches!(ask, Digests::Ask { lease, .. } if *lease == granted);
        let early = std::mem::take(&mut self.comparing.early);
        let (now, later): (Vec<_>, Vec<_>) = early.into_iter().partition(|(.., ask)| of(ask));
        self.comparing.early = later.into();
        now.into_iter().for_each(|(_, peer, ask)| self.digests(peer, ask));
    }

    fn tell_digests(
        &mut self,
        peer: Incarnation,
        (lease, reader, transfer): (LeaseName, Reader, u64),
        result: Result<BTreeMap<u64, Digest>>,
    ) {
        let answer = result.map(|buckets| Answer { buckets }).map_err(|error| why(&error));
        let tell = Digests::Tell { lease, reader, transfer, answer };
        self.send(peer, frame::digests(&tell), false);
    }

    /// The lease is over: first its reader is told why, which it may never have been, as nothing had to be said of it before.
    fn refuse_digests(
        &mut self,
        peer: Incarnation,
        (lease, reader, transfer): (LeaseName, Reader, u64),
    ) {
        if let Some(reason) = self.owner.ended(lease) {
            let ended = ToUser::Ended(Ended { lease, reader, reason });
            self.send(peer, frame::to_user(&ended), false);
        }
        self.tell_digests(peer, (lease, reader, transfer), Err(over(lease)));
    }

    /// Computes digests, or has them computed.
    fn compute(&mut self, what: Computing, tables: Vec<Table>, rows: Vec<Rows>, grain: u64) {
        let comparing = &mut self.comparing;
        let layout = comparing.layout.get_or_insert_with(|| Arc::new(self.layout.clone()));
        let (layout, regions) = (Arc::clone(layout), self.regions.clone());
        comparing.next_job += 1;
        let number = comparing.next_job;
        let job = DigestJob { number, layout, regions, tables, rows, grain };
        comparing.computing.insert(number, what);
        if comparing.elsewhere {
            comparing.jobs.push_back(job);
        } else {
            self.digested(number, job.run());
        }
    }

    /// A transfer is given up: nobody waits for its digests any more.
    pub(super) fn cancel_compare(&mut self, transfer: TransferNumber) {
        let comparing = &mut self.comparing;
        let of = |what: &Computing| matches!(what, Computing::Here { transfer: it, .. } if *it == transfer);
        let job = comparing.computing.iter().find(|(_, what)| of(what)).map(|(number, _)| *number);
        if let Some(number) = job {
            comparing.computing.remove(&number);
            comparing.jobs.retain(|job| job.number != number);
        }
        if comparing.list.remove(&transfer).is_some() || job.is_some() {
            self.compared(transfer, user::Outcome::Cancelled);
        }
    }

    /// It is not shown that what arrived is what was sent.
    fn differs(&mut self, transfer: TransferNumber, request: RequestNumber, error: Error) {
        let retry = error.retry() == Retry::Backoff;
        let span = self.fetches.get(&request).map(|fetch| &fetch.span);
        self.watch.unsettled(span, &error);
        self.note(request, error);
        self.compared(transfer, user::Outcome::Failed { retry });
    }

    /// When the next answer is given up.
    pub(super) fn digests_due(&self) -> Option<Duration> {
        self.comparing.list.values().map(|waiting| waiting.until).min()
    }

    /// Gives up answers that do not come: in time, from those who are gone, and of requests that are over.
    pub(super) fn give_up_digests(&mut self) {
        let now = self.now;
        self.comparing.early.retain(|(until, ..)| *until > now);
        let gone = |waiting: &Waiting| {
            !self.sessions.values().any(|remote| remote.incarnation == waiting.peer)
        };
        let late: Vec<TransferNumber> = (self.comparing.list.iter())
            .filter(|(_, waiting)| waiting.until <= self.now || gone(waiting))
            .map(|(transfer, _)| *transfer)
            .collect();
        for transfer in late {
            let Some(waiting) = self.comparing.list.remove(&transfer) else { continue };
            let error = Error::peer("digests", "the other side did not give its digests in time")
                .with_retry(Retry::Backoff);
            self.differs(transfer, waiting.request, error);
        }
    }

    fn compared(&mut self, transfer: TransferNumber, outcome: user::Outcome) {
        self.todo.push_back(Todo::User(user::Input::Settled { transfer, outcome }));
    }

    /// Returns whether there is anything to be asked.
    fn question(
        &mut self,
        transfer: TransferNumber,
        request: RequestNumber,
        source: u16,
        part: &Part,
    ) -> Result<bool> {
        let Some(fetch) = self.fetches.get(&request) else { return Ok(false) };
        let Some(Some(link)) = fetch.link(source) else { return Ok(false) };
        let order = &fetch.order;
        if order.access == Access::Write {
            return Err(Error::unsupported("digests", "digests of what is written")
                .with_remedy("compare digests where a request is read"));
        }
        let range = part.tokens.start.max(order.range.start)..part.tokens.end.min(order.range.end);
        let layouts = (link.card.layout(), &self.layout);
        let mut rows = rows(layouts, &link.plan, order.tokens, &range, &part.layers);
        let group = |key| self.layout.tensor(key).and_then(|it| u16::try_from(it.group).ok());
        rows.retain(|row| group(row.key).is_none_or(|it| !order.options.without.contains(&it)));
        if rows.is_empty() {
            return Ok(false);
        }
        let grain = self.layout.groups().iter().map(|group| group.block_tokens).max();
        let grain = u64::from(grain.unwrap_or(1));
        let tables = order.ours.clone();
        let rank = u16::try_from(self.place.rank).unwrap_or(u16::MAX);
        let reader = Reader { attempt: order.attempt, rank };
        let (lease, peer) = (order.lease, link.incarnation);
        let question = Question { rows: rows.clone(), grain };
        let ask = Digests::Ask { lease, reader, transfer: transfer.0, question };
        let what = Computing::Here { transfer, request, peer, ask, grain };
        self.compute(what, tables, rows, grain);
        Ok(true)
    }

    /// A message about digests.
    pub(super) fn digests(&mut self, peer: Incarnation, message: Digests) {
        match message {
            Digests::Ask { lease, reader, transfer, question } => {
                let Some(grant) = self.grants.get(&lease) else {
                    let full = self.comparing.early.len() >= MAX_ASKED;
                    if full || self.owner.ended(lease).is_some() {
                        return self.refuse_digests(peer, (lease, reader, transfer));
                    }
                    // What comes before the grant waits for it.
                    let ask = Digests::Ask { lease, reader, transfer, question };
                    self.comparing.early.push_back((self.now + PATIENCE, peer, ask));
                    return;
                };
                let tables = grant.order.tables.clone();
                let there = |what: &&Computing| matches!(what, Computing::There { .. });
                if self.comparing.computing.values().filter(there).count() >= MAX_ASKED {
                    return tracing::warn!(%peer, "too many digests are asked for");
                }
                let what = Computing::There { transfer, lease, reader, peer };
                self.compute(what, tables, question.rows, question.grain);
            }
            Digests::Tell { transfer, answer, .. } => {
                let transfer = TransferNumber(transfer);
                let waiting = self.comparing.list.remove(&transfer);
                match waiting {
                    Some(waiting) if waiting.peer == peer => self.judge(transfer, &waiting, answer),
                    Some(waiting) => {
                        self.comparing.list.insert(transfer, waiting);
                    }
                    None => {}
                }
            }
        }
    }

    fn judge(
        &mut self,
        transfer: TransferNumber,
        waiting: &Waiting,
        answer: std::result::Result<Answer, Text<MAX_WHY>>,
    ) {
        let answer = match answer {
            Ok(answer) => answer,
            Err(why) => {
                let error = Error::peer("digests", "the other side gives no digests")
                    .with_context("why", why.as_str());
                return self.differs(transfer, waiting.request, error);
            }
        };
        let differing = answer.differing(&waiting.here);
        if differing.is_empty() {
            self.counts.digests_equal += 1;
            if let Some(fetch) = self.fetches.get_mut(&waiting.request) {
                fetch.settled = Some(Instant::now());
            }
            return self.compared(transfer, user::Outcome::Done);
        }
        self.counts.digests_differing += 1;
        let tokens: Vec<String> = differing
            .iter()
            .take(8)
            .map(|bucket| format!("{}..{}", bucket * waiting.grain, (bucket + 1) * waiting.grain))
            .collect();
        let error = Error::new(ErrorKind::Fabric, "digests", "what arrived is not what was sent")
            .with_context("tokens", tokens.join(", "))
            .with_context("blocks_differing", differing.len())
            .with_retry(Retry::Backoff);
        tracing::error!(%error, "digests differ");
        self.differs(transfer, waiting.request, error);
    }
}
