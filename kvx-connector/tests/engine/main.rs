//! The whole connector: cards, handshakes, leases and data, between engines of different shapes.
#![cfg(feature = "shm")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod blocks;
mod late;
mod pair;

use std::time::Duration;

use kvx_connector::control::{Key, Security};
use kvx_connector::engine::{Engine, EngineSetup, Fetch, Published, RankParts};
use kvx_connector::protocol::{Reason, TransferKey};
use kvx_connector::ticket::{Table, Ticket};
use kvx_core::layout::NamedLayout::{FlashAttentionHnd as Hnd, FlashAttentionNhd as Nhd};
use kvx_core::layout::{Dtype, ModelGeometry};

use pair::{Over, Shape, Side, model, setup, side};

fn key(text: &str) -> TransferKey {
    TransferKey::new(text).unwrap()
}

/// Two engines of one shape over shared memory, and a request's blocks in each.
struct Two {
    producer: Side,
    consumer: Side,
    theirs: Vec<Table>,
    ours: Vec<Table>,
}

const TOKENS: u64 = 64;

/// Tensor parallel, block sizes, layouts and pipeline stages both ways.
const SHAPES: [(Shape, Shape); 7] = [
    (Shape::new(Hnd, 1, 1, 16), Shape::new(Hnd, 1, 1, 16)),
    (Shape::new(Hnd, 2, 1, 16), Shape::new(Hnd, 1, 1, 16)),
    (Shape::new(Hnd, 1, 1, 16), Shape::new(Nhd, 4, 1, 16)),
    (Shape::new(Nhd, 8, 1, 16), Shape::new(Hnd, 2, 1, 64)),
    (Shape::new(Hnd, 2, 1, 64), Shape::new(Hnd, 4, 1, 16)),
    (Shape::new(Hnd, 1, 2, 16), Shape::new(Hnd, 2, 1, 16)),
    (Shape::new(Nhd, 2, 1, 16), Shape::new(Nhd, 1, 3, 32)),
];

impl Two {
    async fn new(
        change_producer: impl FnOnce(&mut EngineSetup),
        change_consumer: impl FnOnce(&mut EngineSetup),
    ) -> Self {
        let (secret, model, shm) = (Key::generate().unwrap(), model(), Over::new("shm"));
        let shape = Shape::new(Hnd, 1, 1, 16);
        let producer =
            side("prefill", &model, shape, TOKENS, (&secret, &shm), change_producer).await;
        let consumer =
            side("decode", &model, shape, TOKENS, (&secret, &shm), change_consumer).await;
        let (theirs, ours) = (producer.tables(TOKENS, 0), consumer.tables(TOKENS, 1));
        producer.fill(&theirs, 0..TOKENS);
        Self { producer, consumer, theirs, ours }
    }

    fn publish(&self, name: &str) -> Published<'_> {
        self.producer.engine.publish(key(name), TOKENS, &self.theirs).unwrap()
    }

    fn fetch(&self, ticket: &Ticket) -> Fetch {
        self.consumer.engine.fetch(ticket, 0..TOKENS, &self.ours).unwrap()
    }
}

/// Moves a request from one shape to another, with digests, and looks at every byte.
async fn moved(from: Shape, to: Shape, tokens: u64, over: &Over) {
    moved_of(&model(), from, to, tokens, over).await;
}

async fn moved_of(model: &ModelGeometry, from: Shape, to: Shape, tokens: u64, over: &Over) {
    let secret = Key::generate().unwrap();
    let producer = side("prefill", model, from, tokens, (&secret, over), |_| {}).await;
    let consumer =
        side("decode", model, to, tokens, (&secret, over), |setup| setup.digests = true).await;
    let (theirs, ours) = (producer.tables(tokens, 0), consumer.tables(tokens, 1));
    producer.fill(&theirs, 0..tokens);
    let published = producer.engine.publish(key("r-1"), tokens, &theirs).unwrap();
    let fetch = consumer.engine.fetch(published.ticket(), 0..tokens, &ours).unwrap();
    let reports =
        fetch.over().await.unwrap_or_else(|failure| panic!("{from:?} -> {to:?}: {failure}"));
    assert_eq!(reports.len(), consumer.layouts.len());
    assert_eq!(consumer.wrong(&ours, 0..tokens), 0, "{from:?} -> {to:?}");
    assert!(
        reports
            .iter()
            .all(|report| report.transports.iter().all(|one| one.starts_with(over.backend)))
    );
    let over = tokio::time::timeout(Duration::from_secs(5), published.over());
    assert_eq!(over.await.unwrap().unwrap(), [Reason::Done], "{from:?} -> {to:?}");
    for worker in consumer.engine.workers() {
        assert!(worker.counts().digests_equal > 0 && worker.counts().digests_differing == 0);
        assert_eq!(worker.open(), (0, 0));
    }
}

/// Writes a request from one shape into another's blocks, and looks at every byte.
async fn stored(from: Shape, to: Shape, tokens: u64, over: &Over) {
    let (secret, model) = (Key::generate().unwrap(), model());
    let producer = side("prefill", &model, from, tokens, (&secret, over), |_| {}).await;
    let consumer = side("decode", &model, to, tokens, (&secret, over), |_| {}).await;
    let (ours, theirs) = (producer.tables(tokens, 0), consumer.tables(tokens, 1));
    producer.fill(&ours, 0..tokens);
    let invited = consumer.engine.invite(key("r-1"), tokens, &theirs).unwrap();
    let store = producer.engine.store(invited.ticket(), 0..tokens, &ours).unwrap();
    let reports =
        store.over().await.unwrap_or_else(|failure| panic!("{from:?} -> {to:?}: {failure}"));
    assert_eq!(reports.len(), producer.layouts.len());
    let over = tokio::time::timeout(Duration::from_secs(5), invited.over());
    assert_eq!(over.await.unwrap().unwrap(), [Reason::Done], "{from:?} -> {to:?}");
    assert_eq!(consumer.wrong(&theirs, 0..tokens), 0, "{from:?} -> {to:?}");
    for worker in producer.engine.workers().iter().chain(consumer.engine.workers()) {
        assert_eq!(worker.open(), (0, 0));
    }
}

/// The same shapes, where the producer writes.
#[tokio::test]
async fn any_shape_into_any_other() {
    let shm = Over::new("shm");
    for (from, to) in SHAPES {
        stored(from, to, 100, &shm).await;
    }
}

/// Blocks that may be written are the engine's again only when nobody can write there any more: taken back before anybody wrote, and
/// from a writer that comes too late, who is told.
#[tokio::test]
async fn a_writer_that_is_not_wanted_any_more_writes_nothing() {
    let two = Two::new(|_| {}, |_| {}).await;
    // The roles of the two are the other way round here: the one that reads elsewhere is written into.
    let (writer, owner) = (&two.producer, &two.consumer);
    let invited = owner.engine.invite(key("r"), TOKENS, &two.ours).unwrap();
    let ticket = invited.ticket().clone();
    invited.withdraw(Reason::Aborted);
    assert_eq!(invited.over().await.unwrap(), [Reason::Aborted]);
    let before = owner.wrong(&two.ours, 0..TOKENS);
    assert!(before > 0, "nothing was written yet");
    let store = writer.engine.store(&ticket, 0..TOKENS, &two.theirs).unwrap();
    let failure = store.over().await.unwrap_err();
    assert_eq!(failure.reason, Some(Reason::Aborted), "{failure}");
    assert_eq!(owner.wrong(&two.ours, 0..TOKENS), before);
    // And the next one is served.
    let invited = owner.engine.invite(key("r-2"), TOKENS, &two.ours).unwrap();
    writer.engine.store(invited.ticket(), 0..TOKENS, &two.theirs).unwrap().over().await.unwrap();
    assert_eq!(invited.over().await.unwrap(), [Reason::Done]);
    assert_eq!(owner.wrong(&two.ours, 0..TOKENS), 0);
}

/// Known failures 1, 10, 13, 15 and 25 (vllm#43523, vllm#26744, TRT-LLM#6507, vllm#23587, vllm#22976): tensor parallel both
/// ways, block sizes both ways, layouts both ways, pipeline stages both ways.
#[tokio::test]
async fn any_shape_to_any_other() {
    let shm = Over::new("shm");
    for (from, to) in SHAPES {
        moved(from, to, 100, &shm).await;
    }
}

#[tokio::test]
async fn requests_one_after_another_and_at_once_share_one_connection() {
    const AT_ONCE: u32 = 20;
    let (secret, model, shm) = (Key::generate().unwrap(), model(), Over::new("shm"));
    let shape = Shape::new(Hnd, 1, 1, 16);
    let room = TOKENS * u64::from(AT_ONCE);
    let producer = side("prefill", &model, shape, TOKENS, (&secret, &shm), |_| {}).await;
    let consumer = side("decode", &model, shape, room, (&secret, &shm), |_| {}).await;
    let theirs = producer.tables(TOKENS, 0);
    producer.fill(&theirs, 0..TOKENS);
    let mut all = Vec::new();
    for number in 0..AT_ONCE {
        let published =
            producer.engine.publish(key(&format!("r-{number}")), TOKENS, &theirs).unwrap();
        let ours = [Table { first: 0, ids: (4 * number..4 * number + 4).collect() }];
        let fetch = consumer.engine.fetch(published.ticket(), 0..TOKENS, &ours).unwrap();
        all.push((published, fetch, ours));
    }
    for (published, fetch, ours) in all {
        fetch.over().await.unwrap();
        assert_eq!(published.over().await.unwrap(), [Reason::Done]);
        assert_eq!(consumer.wrong(&ours, 0..TOKENS), 0);
    }
    assert_eq!(consumer.engine.workers()[0].peers().len(), 1);
}

/// Known failure 3 (sglang#31295, PR#31968): two heads, of which each of four ranks needs one. And 2 and 4, through the whole.
#[tokio::test]
async fn fewer_heads_than_ranks() {
    let two_heads = ModelGeometry::llama_like(6, 2, 16, Dtype::Bf16).unwrap();
    let shm = Over::new("shm");
    for (from, to) in [(1, 4), (2, 4), (8, 2), (4, 1)] {
        let (from, to) = (Shape::new(Hnd, from, 1, 16), Shape::new(Hnd, to, 1, 16));
        moved_of(&two_heads, from, to, 40, &shm).await;
    }
}

/// Known failure 112 (vllm#44238): five requests at once, of eight blocks each: every one's bytes are its own.
#[tokio::test]
async fn requests_at_once_keep_to_their_own_blocks() {
    const AT_ONCE: u32 = 5;
    let (secret, model, shm) = (Key::generate().unwrap(), model(), Over::new("shm"));
    let shape = Shape::new(Hnd, 1, 1, 16);
    let room = 8 * 16 * u64::from(AT_ONCE);
    let producer = side("prefill", &model, shape, room, (&secret, &shm), |_| {}).await;
    let digests = |setup: &mut EngineSetup| setup.digests = true;
    let consumer = side("decode", &model, shape, room, (&secret, &shm), digests).await;
    for round in 0..4_u32 {
        let tokens = |request: u32| u64::from(request) * 128..u64::from(request + 1) * 128;
        // Interleaved, and in another order on the other side.
        let blocks = |request: u32, turn: u32| {
            let ids = (0..8).map(|block| block * AT_ONCE + (request * turn + round) % AT_ONCE);
            Table { first: u64::from(request) * 8, ids: ids.collect() }
        };
        let mut all = Vec::new();
        for request in 0..AT_ONCE {
            let (theirs, ours) = (blocks(request, 1), blocks(request, 2));
            producer.fill(&from_the_first(&theirs), tokens(request));
            let theirs = [Table { first: 0, ..theirs }];
            let name = format!("r-{round}-{request}");
            let published = producer.engine.publish(key(&name), 128, &theirs).unwrap();
            let mine = [Table { first: 0, ..ours.clone() }];
            let fetch = consumer.engine.fetch(published.ticket(), 0..128, &mine).unwrap();
            all.push((request, ours, published, fetch));
        }
        for (request, ours, published, fetch) in all {
            fetch.over().await.unwrap();
            assert_eq!(published.over().await.unwrap(), [Reason::Done]);
            let wrong = consumer.wrong(&from_the_first(&ours), tokens(request));
            assert_eq!(wrong, 0, "request {request} of round {round}");
        }
    }
}

/// A table that begins at a later block, as one that begins at the first: what is before it is never asked for.
fn from_the_first(table: &Table) -> [Table; 1] {
    let before = usize::try_from(table.first).unwrap();
    let ids = std::iter::repeat_n(u32::MAX, before).chain(table.ids.iter().copied());
    [Table { first: 0, ids: ids.collect() }]
}

/// Known failure 44 (vllm#20139, vllm#25897): the lease is over and the blocks are used again before they are read. Never ready.
#[tokio::test]
async fn what_was_read_after_the_lease_ended_is_never_ready() {
    let brief = |setup: &mut EngineSetup| setup.ttl = Duration::from_millis(50);
    let two = Two::new(brief, |_| {}).await;
    let published = two.publish("r");
    let ticket = published.ticket().clone();
    assert_eq!(published.over().await.unwrap(), [Reason::Expired]);
    let failure = two.fetch(&ticket).over().await.unwrap_err();
    assert_eq!(failure.blocks, two.ours[0].ids.iter().map(|id| (0, *id)).collect(), "{failure}");
    assert!(!failure.quarantined);
}

#[tokio::test]
async fn a_lease_that_is_taken_back_fails_its_reader_at_once() {
    let two = Two::new(|_| {}, |_| {}).await;
    let published = two.publish("r");
    let ticket = published.ticket().clone();
    published.withdraw(Reason::Aborted);
    assert_eq!(published.over().await.unwrap(), [Reason::Aborted]);
    let begun = std::time::Instant::now();
    let failure = two.fetch(&ticket).over().await.unwrap_err();
    // Whichever answer comes first: to the heartbeat, or to the confirmation.
    assert_eq!(failure.reason, Some(Reason::Aborted), "{failure}");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

/// Known failure 76 (vllm#27083): another engine is at the address. The error names both and the address.
#[tokio::test]
async fn another_engine_at_the_address_is_named() {
    let two = Two::new(|_| {}, |_| {}).await;
    let published = two.publish("r");
    let mut ticket = published.ticket().clone();
    ticket.engine = kvx_core::card::EngineName::new("prefill-2").unwrap();
    let text = two.fetch(&ticket).over().await.unwrap_err().to_string();
    let address = two.producer.engine.address().to_string();
    for named in ["prefill-2", "prefill", &address] {
        assert!(text.contains(named), "{text}");
    }
    published.withdraw(Reason::Aborted);
}

/// Known failure 15 (vllm#23587), 16 and 17: another model is refused for this request; the engine serves the next.
#[tokio::test]
async fn another_model_is_refused_by_name_and_the_next_request_is_served() {
    let (secret, shm) = (Key::generate().unwrap(), Over::new("shm"));
    let shape = Shape::new(Hnd, 1, 1, 16);
    let producer = side("prefill", &model(), shape, 64, (&secret, &shm), |_| {}).await;
    let narrow = ModelGeometry::llama_like(6, 4, 16, Dtype::Bf16).unwrap();
    let stranger = side("other", &narrow, shape, 64, (&secret, &shm), |_| {}).await;
    let consumer = side("decode", &model(), shape, 64, (&secret, &shm), |_| {}).await;
    let theirs = producer.tables(64, 0);
    producer.fill(&theirs, 0..64);
    let published = producer.engine.publish(key("r"), 64, &theirs).unwrap();
    let ours = stranger.tables(64, 1);
    let failure =
        stranger.engine.fetch(published.ticket(), 0..64, &ours).unwrap().over().await.unwrap_err();
    assert!(failure.to_string().contains("heads"), "{failure}");
    let ours = consumer.tables(64, 1);
    consumer.engine.fetch(published.ticket(), 0..64, &ours).unwrap().over().await.unwrap();
    assert_eq!(consumer.wrong(&ours, 0..64), 0);
    assert_eq!(published.over().await.unwrap(), [Reason::Done]);
}

/// Plans are made by a rank's place in the list: ranks in another order would be given each other's heads.
#[tokio::test]
async fn ranks_that_are_not_a_replica_in_order_are_refused() {
    let shm = Over::new("shm");
    let of_two = Shape::new(Hnd, 2, 1, 16);
    for (change, why) in [
        ((|ranks: &mut Vec<RankParts>| ranks.reverse()) as fn(&mut Vec<RankParts>), "found_tp=1"),
        (|ranks| drop(ranks.pop()), "ranks=1, of=2"),
        (|ranks| drop(ranks.remove(0)), "ranks=1, of=2, at=0"),
    ] {
        let security = Security::with_key(Key::generate().unwrap());
        let (mut setup, ..) = setup("prefill", &model(), of_two, 64, (security, &shm)).await;
        change(&mut setup.ranks);
        let error = Engine::start(setup).unwrap_err().to_string();
        assert!(error.contains("not all ranks of one replica, in order"), "{error}");
        assert!(error.contains(why), "{error}");
    }
}

/// A ticket says what it allows: what is leased to be read is never written into, and the other way round.
#[tokio::test]
async fn a_ticket_to_read_is_not_written_by() {
    let two = Two::new(|_| {}, |_| {}).await;
    let published = two.publish("r");
    let bytes = published.ticket().to_bytes().unwrap();
    let carried = Ticket::from_bytes(&bytes).unwrap();
    let store = two.consumer.engine.store(&carried, 0..TOKENS, &two.ours);
    let error = store.map(drop).unwrap_err().to_string();
    assert!(
        error.contains("it is leased to be read") && error.contains("Engine::fetch"),
        "{error}"
    );
    let invited = two.consumer.engine.invite(key("w"), TOKENS, &two.ours).unwrap();
    let carried = Ticket::from_bytes(&invited.ticket().to_bytes().unwrap()).unwrap();
    let fetch = two.producer.engine.fetch(&carried, 0..TOKENS, &two.theirs);
    let error = fetch.map(drop).unwrap_err().to_string();
    assert!(error.contains("it is leased to be written"), "{error}");
    assert_eq!(two.producer.wrong(&two.theirs, 0..TOKENS), 0);
    invited.withdraw(Reason::Aborted);
    published.withdraw(Reason::Aborted);
}

/// Tables hold the tokens, and no more is leased than holds them.
#[tokio::test]
async fn tables_hold_the_tokens() {
    let two = Two::new(|_| {}, |_| {}).await;
    let short = [Table { first: 0, ids: two.theirs[0].ids[..3].to_vec() }];
    let error = two.producer.engine.publish(key("r"), TOKENS, &short).map(drop).unwrap_err();
    assert!(error.to_string().contains("ends before the tokens do"), "{error}");
    let mut long = two.theirs.clone();
    long[0].ids.push(1);
    let published = two.producer.engine.publish(key("r"), TOKENS, &long).unwrap();
    assert_eq!(published.ticket().groups[0].table.ids, two.theirs[0].ids);
    let twice = [two.ours.clone(), two.ours.clone()].concat();
    let error = two.consumer.engine.fetch(published.ticket(), 0..TOKENS, &twice).map(drop);
    assert!(error.unwrap_err().to_string().contains("groups=1, tables=2"));
    two.fetch(published.ticket()).over().await.unwrap();
}

/// A ticket may be used before its lease is granted: what is asked meanwhile waits, digests too.
#[tokio::test]
async fn digests_that_are_asked_for_early_wait_for_the_lease() {
    let two = Two::new(|_| {}, |setup| setup.digests = true).await;
    // They know each other.
    let published = two.publish("r-1");
    two.fetch(published.ticket()).over().await.unwrap();
    let mut ticket = published.ticket().clone();
    assert_eq!(published.over().await.unwrap(), [Reason::Done]);
    // The next lease of this engine: granted 300 ms after its ticket is used.
    ticket.lease.number += 1;
    ticket.key = key("r-2");
    let fetch = two.fetch(&ticket);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let published = two.publish("r-2");
    assert_eq!(published.ticket().lease, ticket.lease);
    fetch.over().await.unwrap();
    assert_eq!(published.over().await.unwrap(), [Reason::Done]);
    assert_eq!(two.consumer.wrong(&two.ours, 0..TOKENS), 0);
}

/// A producer that goes away in mid-life: requests end, and say which blocks are not there.
#[tokio::test]
async fn a_producer_that_is_gone_fails_what_asks_it() {
    let quick = |setup: &mut EngineSetup| setup.deadline = Duration::from_secs(3);
    let Two { producer, consumer, theirs, ours } = Two::new(|_| {}, quick).await;
    let published = producer.engine.publish(key("r"), TOKENS, &theirs).unwrap();
    let ticket = published.ticket().clone();
    consumer.engine.fetch(&ticket, 0..TOKENS, &ours).unwrap().over().await.unwrap();
    drop(published);
    drop(producer);
    let begun = std::time::Instant::now();
    let fetch = consumer.engine.fetch(&ticket, 0..TOKENS, &ours).unwrap();
    let failure = fetch.over().await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(6), "{failure}");
    assert_eq!(failure.blocks.len(), 4);
}
