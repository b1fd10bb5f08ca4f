//! The whole connector: cards, handshakes, leases and data, between engines of different shapes.
#![cfg(feature = "shm")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod pair;

use std::time::Duration;

use kvx_connector::control::Key;
use kvx_connector::protocol::{Reason, TransferKey};
use kvx_core::layout::NamedLayout::{FlashAttentionHnd as Hnd, FlashAttentionNhd as Nhd};

use pair::{Over, Shape, model, side};

fn key(text: &str) -> TransferKey {
    TransferKey::new(text).unwrap()
}

/// Moves a request from one shape to another, with digests, and looks at every byte.
async fn moved(from: Shape, to: Shape, tokens: u64, over: &Over) {
    let (secret, model) = (Key::generate().unwrap(), model());
    let producer = side("prefill", &model, from, tokens, (&secret, over), |_| {}).await;
    let consumer =
        side("decode", &model, to, tokens, (&secret, over), |setup| setup.digests = true).await;
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

/// Known failures 1, 10, 13, 15 and 25 (vllm#43523, vllm#26744, TRT-LLM#6507, vllm#23587, vllm#22976): tensor parallel both
/// ways, block sizes both ways, layouts both ways, pipeline stages both ways.
#[tokio::test]
async fn any_shape_to_any_other() {
    let shm = Over::new("shm");
    for (from, to) in [
        (Shape::new(Hnd, 1, 1, 16), Shape::new(Hnd, 1, 1, 16)),
        (Shape::new(Hnd, 2, 1, 16), Shape::new(Hnd, 1, 1, 16)),
        (Shape::new(Hnd, 1, 1, 16), Shape::new(Nhd, 4, 1, 16)),
        (Shape::new(Nhd, 8, 1, 16), Shape::new(Hnd, 2, 1, 64)),
        (Shape::new(Hnd, 2, 1, 64), Shape::new(Hnd, 4, 1, 16)),
        (Shape::new(Hnd, 1, 2, 16), Shape::new(Hnd, 2, 1, 16)),
        (Shape::new(Nhd, 2, 1, 16), Shape::new(Nhd, 1, 3, 32)),
    ] {
        moved(from, to, 100, &shm).await;
    }
}

#[tokio::test]
async fn requests_one_after_another_and_at_once_share_one_connection() {
    let (secret, model, shm) = (Key::generate().unwrap(), model(), Over::new("shm"));
    let shape = Shape::new(Hnd, 1, 1, 16);
    let producer = side("prefill", &model, shape, 64, (&secret, &shm), |_| {}).await;
    let consumer = side("decode", &model, shape, 64, (&secret, &shm), |_| {}).await;
    let (theirs, ours) = (producer.tables(64, 0), consumer.tables(64, 1));
    producer.fill(&theirs, 0..64);
    let mut all = Vec::new();
    for number in 0..20 {
        let published = producer.engine.publish(key(&format!("r-{number}")), 64, &theirs).unwrap();
        let fetch = consumer.engine.fetch(published.ticket(), 0..64, &ours).unwrap();
        all.push((published, fetch));
    }
    for (published, fetch) in all {
        fetch.over().await.unwrap();
        assert_eq!(published.over().await.unwrap(), [Reason::Done]);
    }
    assert_eq!(consumer.wrong(&ours, 0..64), 0);
    assert_eq!(consumer.engine.workers()[0].peers().len(), 1);
}

/// Known failure 44 (vllm#20139, vllm#25897): the lease is over and the blocks are used again before they are read. Never ready.
#[tokio::test]
async fn what_was_read_after_the_lease_ended_is_never_ready() {
    let (secret, model, shm) = (Key::generate().unwrap(), model(), Over::new("shm"));
    let shape = Shape::new(Hnd, 1, 1, 16);
    let brief =
        |setup: &mut kvx_connector::engine::EngineSetup| setup.ttl = Duration::from_millis(50);
    let producer = side("prefill", &model, shape, 64, (&secret, &shm), brief).await;
    let consumer = side("decode", &model, shape, 64, (&secret, &shm), |_| {}).await;
    let (theirs, ours) = (producer.tables(64, 0), consumer.tables(64, 1));
    let published = producer.engine.publish(key("r"), 64, &theirs).unwrap();
    let ticket = published.ticket().clone();
    assert_eq!(published.over().await.unwrap(), [Reason::Expired]);
    let failure = consumer.engine.fetch(&ticket, 0..64, &ours).unwrap().over().await.unwrap_err();
    assert_eq!(failure.blocks, ours[0].ids.iter().map(|id| (0, *id)).collect(), "{failure}");
    assert!(!failure.quarantined);
}

#[tokio::test]
async fn a_lease_that_is_taken_back_fails_its_reader_at_once() {
    let (secret, model, shm) = (Key::generate().unwrap(), model(), Over::new("shm"));
    let shape = Shape::new(Hnd, 1, 1, 16);
    let producer = side("prefill", &model, shape, 64, (&secret, &shm), |_| {}).await;
    let consumer = side("decode", &model, shape, 64, (&secret, &shm), |_| {}).await;
    let (theirs, ours) = (producer.tables(64, 0), consumer.tables(64, 1));
    let published = producer.engine.publish(key("r"), 64, &theirs).unwrap();
    let ticket = published.ticket().clone();
    published.withdraw(Reason::Aborted);
    assert_eq!(published.over().await.unwrap(), [Reason::Aborted]);
    let begun = std::time::Instant::now();
    let failure = consumer.engine.fetch(&ticket, 0..64, &ours).unwrap().over().await.unwrap_err();
    // Whichever answer comes first: to the heartbeat, or to the confirmation.
    let told = ["aborted by the owner's engine", "ended before the last byte"];
    assert!(told.iter().any(|told| failure.to_string().contains(told)), "{failure}");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

/// Known failure 76 (vllm#27083): another engine is at the address. The error names both and the address.
#[tokio::test]
async fn another_engine_at_the_address_is_named() {
    let (secret, model, shm) = (Key::generate().unwrap(), model(), Over::new("shm"));
    let shape = Shape::new(Hnd, 1, 1, 16);
    let producer = side("prefill", &model, shape, 64, (&secret, &shm), |_| {}).await;
    let consumer = side("decode", &model, shape, 64, (&secret, &shm), |_| {}).await;
    let (theirs, ours) = (producer.tables(64, 0), consumer.tables(64, 1));
    let published = producer.engine.publish(key("r"), 64, &theirs).unwrap();
    let mut ticket = published.ticket().clone();
    ticket.engine = kvx_core::card::EngineName::new("prefill-2").unwrap();
    let failure = consumer.engine.fetch(&ticket, 0..64, &ours).unwrap().over().await.unwrap_err();
    let text = failure.to_string();
    let address = producer.engine.address().to_string();
    assert!(
        text.contains("prefill-2") && text.contains("prefill") && text.contains(&address),
        "{text}"
    );
    published.withdraw(Reason::Aborted);
}

/// Known failure 15 (vllm#23587), 16 and 17: another model is refused for this request; the engine serves the next.
#[tokio::test]
async fn another_model_is_refused_by_name_and_the_next_request_is_served() {
    let (secret, shm) = (Key::generate().unwrap(), Over::new("shm"));
    let shape = Shape::new(Hnd, 1, 1, 16);
    let producer = side("prefill", &model(), shape, 64, (&secret, &shm), |_| {}).await;
    let narrow =
        kvx_core::layout::ModelGeometry::llama_like(6, 4, 16, kvx_core::layout::Dtype::Bf16)
            .unwrap();
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

/// A producer that goes away in mid-life: requests end, and the next producer of that name at that address serves.
#[tokio::test]
async fn a_producer_that_is_gone_fails_what_asks_it() {
    let (secret, model, shm) = (Key::generate().unwrap(), model(), Over::new("shm"));
    let shape = Shape::new(Hnd, 1, 1, 16);
    let producer = side("prefill", &model, shape, 64, (&secret, &shm), |_| {}).await;
    let quick =
        |setup: &mut kvx_connector::engine::EngineSetup| setup.deadline = Duration::from_secs(3);
    let consumer = side("decode", &model, shape, 64, (&secret, &shm), quick).await;
    let (theirs, ours) = (producer.tables(64, 0), consumer.tables(64, 1));
    producer.fill(&theirs, 0..64);
    let published = producer.engine.publish(key("r"), 64, &theirs).unwrap();
    let ticket = published.ticket().clone();
    consumer.engine.fetch(&ticket, 0..64, &ours).unwrap().over().await.unwrap();
    drop(published);
    drop(producer);
    let begun = std::time::Instant::now();
    let failure = consumer.engine.fetch(&ticket, 0..64, &ours).unwrap().over().await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(6), "{failure}");
    assert_eq!(failure.blocks.len(), 4);
}
