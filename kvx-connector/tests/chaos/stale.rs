//! Reads during which the lease ends and the producer uses the blocks for something else, at once.
//!
//! The consumer's backend stops in the middle of each read; then the lease ends, the blocks are overwritten as soon as they are
//! free, and the read goes on. So the first half of each segment is of the request and the second of another one.
//!
//! Known failures 44 and 45 (vllm#20139, vllm#25897, aws-do-eks#84): blocks that were freed and reused while they were read, reported as good.

use std::sync::Arc;
use std::time::Duration;

use kvx_connector::control::Key;
use kvx_connector::protocol::{Plant, Reason};
use kvx_connector::ticket::Table;
use kvx_connector::worker::Fetched;
use kvx_core::backend::TransferBackend;
use kvx_core::layout::NamedLayout::{self, FlashAttentionHnd as Hnd, FlashAttentionNhd as Nhd};

use crate::cache::{EMPTY, FREE, blocks};
use crate::held::Held;
use crate::node::{Node, Recipe};
use crate::poll_once;

/// Reads in each of the tests that want them to fail.
const TIMES: u64 = 1000;

/// Tokens of each request.
const TOKENS: u64 = 40;

const LONG: Duration = Duration::from_secs(60);

/// How the lease ends in mid-read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The engine takes the blocks back, and the consumer is told.
    Withdrawn,
    /// Its time is over.
    Expired,
    /// It does not: the consumer confirms before it has read.
    Confirmed,
}

/// Two engines, the consumer's backends held.
struct Pair {
    producer: Node,
    consumer: Node,
    held: Vec<Arc<Held>>,
    /// Reads of each request: one per pair of ranks that have heads in common.
    reads: usize,
}

impl Pair {
    /// `told`: whether the producer knows its readers before they confirm, and so tells them of the end.
    async fn new(
        from: (NamedLayout, u32),
        to: (NamedLayout, u32),
        told: bool,
        plant: Option<Plant>,
    ) -> Self {
        let key = Key::generate().unwrap();
        let producer = Recipe::new("prefill", &key, from.0, from.1, 16);
        let producer = Node::start(&producer, |backend| backend, |_| {}).await;
        let held = std::sync::Mutex::new(Vec::new());
        let hold = |backend| -> Arc<dyn TransferBackend> {
            let one = Held::new(backend);
            held.lock().unwrap().push(Arc::clone(&one));
            one
        };
        let consumer = Recipe::new("decode", &key, to.0, to.1, 16);
        let consumer = Node::start(&consumer, hold, |setup| {
            setup.plant = plant;
            setup.user.hold_first = if told { Duration::ZERO } else { LONG };
        })
        .await;
        let held = held.into_inner().unwrap();
        Self { producer, consumer, held, reads: from.1.max(to.1) as usize }
    }

    /// One request, of which the lease ends in mid-read. Returns how its ranks ended.
    async fn read(&self, number: u64, end: End) -> Vec<Fetched> {
        let count = u32::try_from(blocks(TOKENS)).unwrap();
        let theirs = Table { first: 0, ids: (0..count).map(|id| 1 + 2 * id).collect() };
        let ours = Table { first: 0, ids: (0..count).rev().map(|id| 3 * id).collect() };
        self.producer.cache.fill(&theirs, 0..TOKENS, number);
        self.consumer.cache.fill(&ours, 0..TOKENS, EMPTY);
        let hard = if end == End::Expired { Duration::from_millis(4) } else { LONG };
        let (ticket, granted) = self.producer.publish(number, TOKENS, &theirs, (LONG, hard));
        let fetch = self.consumer.fetch(number, &ticket, 0..TOKENS, &ours, LONG);

        let each = self.reads / self.held.len();
        let half = self.held.iter().all(|held| held.wait(each, LONG));
        assert!(half, "request {number}: not in mid-read");
        if end == End::Withdrawn {
            for worker in &self.producer.workers {
                worker.withdraw(ticket.lease, Reason::Preempted);
            }
        }
        for granted in granted {
            let why = match end {
                End::Withdrawn => Reason::Preempted,
                End::Expired => Reason::Expired,
                End::Confirmed => Reason::Done,
            };
            assert_eq!(granted.await.unwrap(), why);
        }
        // They are free: the next request's bytes come at once.
        self.producer.cache.fill(&theirs, 0..TOKENS, FREE);
        let (mut all, mut open) = (Vec::new(), Vec::new());
        for mut fetch in fetch {
            match poll_once(&mut fetch) {
                None => open.push(fetch),
                early if end == End::Confirmed => all.extend(early),
                Some(early) => panic!("request {number} ended in mid-read: {early:?}"),
            }
        }
        self.held.iter().for_each(|held| held.go_on());
        for fetch in open {
            all.push(tokio::time::timeout(LONG, fetch).await.expect("it ends"));
        }
        assert!(self.held.iter().all(|held| held.is_quiet_within(LONG)));
        // It was really in mid-read: there are bytes of both, and none that were not written.
        let wrong = |whose| self.consumer.cache.wrong(&ours, 0..TOKENS, whose);
        let runs = wrong(EMPTY);
        assert!(
            runs > 0 && (1..=runs).contains(&wrong(number)) && (1..=runs).contains(&wrong(FREE))
        );
        all
    }
}

/// How many of `times` reads were reported as ready. All others must name all their blocks.
async fn ready(pair: &Pair, times: u64, ends: &[End]) -> u64 {
    let count = u32::try_from(blocks(TOKENS)).unwrap();
    let all = (0..count).map(|id| (0, 3 * id)).collect();
    let mut ready = 0;
    for number in 1..=times {
        let end = ends[usize::try_from(number).unwrap() % ends.len()];
        for fetched in pair.read(number, end).await {
            match fetched {
                Ok(_) => ready += 1,
                Err(failure) => {
                    assert_eq!(failure.blocks, all, "request {number}, {end:?}: {failure}");
                    assert!(!failure.quarantined, "request {number}, {end:?}: {failure}");
                }
            }
        }
    }
    for node in [&pair.producer, &pair.consumer] {
        assert!(node.workers.iter().all(|worker| worker.open() == (0, 0)));
    }
    ready
}

/// The readers are not told that the lease has ended: only the answer to their confirmation says so.
#[tokio::test]
async fn what_was_reused_in_mid_read_is_never_ready() {
    for (from, to) in [((Hnd, 1), (Hnd, 1)), ((Nhd, 2), (Hnd, 1)), ((Hnd, 1), (Nhd, 2))] {
        let pair = Pair::new(from, to, false, None).await;
        let times = TIMES / if (from.1, to.1) == (1, 1) { 2 } else { 4 };
        assert_eq!(ready(&pair, times, &[End::Withdrawn, End::Expired]).await, 0);
        assert_eq!(pair.held.iter().map(|held| held.cancelled()).sum::<u64>(), 0);
    }
}

/// The readers are told in mid-read. The failure is reported when nothing is written any more, not before.
#[tokio::test]
async fn who_is_told_in_mid_read_waits_for_what_is_written() {
    let pair = Pair::new((Hnd, 1), (Nhd, 1), true, None).await;
    assert_eq!(ready(&pair, TIMES / 4, &[End::Withdrawn, End::Expired]).await, 0);
    // Most hear of it before the read goes on.
    println!("{} of {} were told in mid-read", pair.held[0].cancelled(), TIMES / 4);
}

/// Without confirmation, and with one that comes too early, each of these reads is reported as ready, with the bytes of
/// another request: what the test above would find.
#[tokio::test]
async fn without_confirmation_each_is_ready_and_wrong() {
    let times = TIMES / 10;
    let without = Pair::new((Hnd, 1), (Hnd, 1), false, Some(Plant::ClocksCompared)).await;
    assert_eq!(ready(&without, times, &[End::Withdrawn, End::Expired]).await, times);
    let early = Pair::new((Hnd, 1), (Hnd, 1), false, Some(Plant::ConfirmBeforeSettle)).await;
    assert_eq!(ready(&early, times, &[End::Confirmed]).await, times);
}
