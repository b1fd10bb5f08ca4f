//! What can be seen of engines: metrics, traces, status.
#![cfg(feature = "shm")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod capture;
mod document;
#[path = "../engine/pair.rs"]
mod pair;
mod record;

use std::time::Duration;

use kvx_connector::control::Key;
use kvx_connector::engine::EngineSetup;
use kvx_connector::observe::{METRICS, RankStatus, TraceId};
use kvx_connector::protocol::{Reason, TransferKey};
use kvx_core::layout::NamedLayout::{FlashAttentionHnd as Hnd, FlashAttentionNhd as Nhd};

use pair::{Over, Shape, Side, model, side};

const TOKENS: u64 = 64;

fn key(text: &str) -> TransferKey {
    TransferKey::new(text).unwrap()
}

/// Two engines of these names, and of two shapes.
async fn engines(
    (producer, consumer): (&str, &str),
    change: impl FnOnce(&mut EngineSetup),
) -> (Side, Side) {
    let (secret, model, shm) = (Key::generate().unwrap(), model(), Over::new("shm"));
    let (from, to) = (Shape::new(Hnd, 2, 1, 16), Shape::new(Nhd, 1, 1, 16));
    let producer = side(producer, &model, from, TOKENS, (&secret, &shm), change).await;
    let consumer =
        side(consumer, &model, to, TOKENS, (&secret, &shm), |setup| setup.digests = true).await;
    (producer, consumer)
}

/// Moves a request of this name, and waits until it is over on both sides.
async fn moved((producer, consumer): (&Side, &Side), name: &str) {
    let (theirs, ours) = (producer.tables(TOKENS, 0), consumer.tables(TOKENS, 1));
    producer.fill(&theirs, 0..TOKENS);
    let published = producer.engine.publish(key(name), TOKENS, &theirs).unwrap();
    consumer.engine.fetch(published.ticket(), 0..TOKENS, &ours).unwrap().over().await.unwrap();
    assert_eq!(consumer.wrong(&ours, 0..TOKENS), 0);
    let over = tokio::time::timeout(Duration::from_secs(20), published.over());
    assert_eq!(over.await.unwrap().unwrap(), [Reason::Done]);
}

/// Lets a request fail: its lease is over before it is asked for. Gives what is said of it.
async fn failed((producer, consumer): (&Side, &Side), name: &str) -> String {
    let (theirs, ours) = (producer.tables(TOKENS, 0), consumer.tables(TOKENS, 1));
    let published = producer.engine.publish(key(name), TOKENS, &theirs).unwrap();
    let ticket = published.ticket().clone();
    published.withdraw(Reason::Aborted);
    assert_eq!(published.over().await.unwrap(), [Reason::Aborted]);
    let fetch = consumer.engine.fetch(&ticket, 0..TOKENS, &ours).unwrap();
    fetch.over().await.unwrap_err().error.to_string()
}

#[tokio::test]
async fn each_fact_is_counted_by_each_rank() {
    let recorder = record::installed();
    let names = ("counted-prefill", "counted-decode");
    let (producer, consumer) = engines(names, |_| {}).await;
    for request in 0..3 {
        moved((&producer, &consumer), &format!("counted-{request}")).await;
    }
    failed((&producer, &consumer), "counted-failed").await;

    let of = |series: &str| recorder.value(names.1, 0, series);
    assert_eq!(of("kvx_requests_asked_total{mode=\"read\"}"), 4.0);
    assert_eq!(of("kvx_requests_ready_total"), 3.0);
    assert_eq!(of("kvx_requests_aborted_total"), 0.0);
    // Which of the answers to heartbeat, confirmation and digests comes first decides on the reason.
    assert_eq!(recorder.sum(names.1, 0, "kvx_requests_failed_total"), 1.0);
    assert_eq!(of("kvx_requests{state=\"active\"}"), 0.0);
    assert_eq!(of("kvx_peers{state=\"connected\"}"), 2.0);
    assert!(of("kvx_digests_compared_total{result=\"equal\"}") >= 6.0);
    for (histogram, count) in [
        ("kvx_request_elapsed_seconds{outcome=\"ready\"}", 3),
        ("kvx_request_elapsed_seconds{outcome=\"failed\"}", 1),
        ("kvx_request_routing_seconds", 4),
        ("kvx_request_confirm_seconds", 3),
        ("kvx_request_bytes", 3),
    ] {
        let values = recorder.values(names.1, 0, histogram);
        assert_eq!(values.len(), count, "{histogram}");
        assert!(values.iter().all(|value| *value > 0.0), "{histogram}: {values:?}");
    }
    // Two ranks give half of each layer: 6 layers of keys and values, 8 heads of 16 numbers of two bytes.
    let bytes = f64::from(u32::try_from(TOKENS).unwrap() * 6 * 2 * 8 * 16 * 2);
    assert!(recorder.values(names.1, 0, "kvx_request_bytes").iter().all(|one| *one == bytes));
    let sum = |name: &str| recorder.sum(names.1, 0, name);
    assert!(sum("kvx_transfer_bytes_total") >= 3.0 * bytes);
    assert!(sum("kvx_transfers_total") >= 6.0);
    assert!(sum("kvx_transfer_segments_total") >= sum("kvx_transfers_total"));

    for rank in 0..2 {
        let of = |series: &str| recorder.value(names.0, rank, series);
        assert_eq!(of("kvx_leases_granted_total"), 4.0);
        assert_eq!(of("kvx_leases_ended_total{reason=\"done\"}"), 3.0);
        assert_eq!(of("kvx_leases_ended_total{reason=\"aborted\"}"), 1.0);
        assert_eq!(of("kvx_leases_freed_total"), 4.0);
        assert_eq!(of("kvx_leases{state=\"held\"}"), 0.0);
        assert!(of("kvx_lease_messages_total{message=\"confirm\"}") >= 3.0);
        assert_eq!(recorder.values(names.0, rank, "kvx_lease_held_seconds").len(), 4);
    }
}

#[tokio::test]
async fn what_is_recorded_is_what_is_described_and_nothing_else() {
    let recorder = record::installed();
    let names = ("described-prefill", "described-decode");
    let (producer, consumer) = engines(names, |_| {}).await;
    moved((&producer, &consumer), "described").await;
    let recorded = recorder.recorded();
    let described = recorder.described();
    for metric in METRICS {
        let mut labels = vec!["engine", "replica", "rank"];
        labels.extend(metric.labels);
        labels.sort_unstable();
        let (kind, found) =
            recorded.get(metric.name).unwrap_or_else(|| panic!("{} is not recorded", metric.name));
        assert_eq!(*kind, metric.kind, "{}", metric.name);
        for of in found {
            assert_eq!(*of, labels, "{}", metric.name);
        }
        let (unit, help) = &described[metric.name];
        assert_eq!((*unit, help.as_str()), (metric.unit, metric.help), "{}", metric.name);
    }
    let known = |name: &&String| METRICS.iter().any(|metric| metric.name == name.as_str());
    let unknown: Vec<_> = recorded.keys().filter(|name| !known(name)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

/// Labels stay bounded whatever peers call themselves.
#[tokio::test]
async fn names_of_peers_are_no_labels() {
    let recorder = record::installed();
    let names = ("bounded-prefill", "a-name-that-a-peer-has-chosen");
    let (producer, consumer) = engines(names, |_| {}).await;
    moved((&producer, &consumer), "bounded").await;
    assert!(recorder.mentions(names.0, names.0) > 0);
    assert_eq!(recorder.mentions(names.0, names.1), 0);
    assert_eq!(recorder.mentions(names.1, "bounded"), 0, "a request's key is no label");
}

#[tokio::test]
async fn one_trace_joins_both_sides() {
    let captured = capture::installed();
    let (producer, consumer) = engines(("traced-prefill", "traced-decode"), |_| {}).await;
    moved((&producer, &consumer), "traced-1").await;
    moved((&producer, &consumer), "traced-2").await;
    let trace = TraceId::from(&key("traced-1")).to_string();
    let said = |engine: &str| captured.said(&trace, engine);

    let consumed = said("traced-decode");
    for event in ["asked", "routed", "posted", "settled", "confirming", "ready"] {
        assert!(consumed.iter().any(|one| one.is(event)), "{event}: {consumed:#?}");
    }
    let order: Vec<_> = ["asked", "routed", "posted", "settled", "ready"]
        .map(|event| place(&consumed, event))
        .into();
    assert!(order.is_sorted(), "{order:?}");
    let settled = consumed.iter().find(|one| one.is("settled")).unwrap();
    for field in ["backend", "transport", "bytes", "segments", "took", "part", "source"] {
        assert!(settled.fields.contains_key(field), "{field}: {settled:#?}");
    }
    let ready = consumed.iter().find(|one| one.is("ready")).unwrap();
    for field in ["bytes", "transports", "routing", "confirming", "elapsed", "key", "lease"] {
        assert!(ready.fields.contains_key(field), "{field}: {ready:#?}");
    }

    let produced = said("traced-prefill");
    let mut ranks: Vec<_> = produced.iter().map(|one| one.fields["rank"].clone()).collect();
    ranks.sort();
    ranks.dedup();
    assert_eq!(ranks, ["0", "1"]);
    for event in ["granted", "asked whether it holds", "confirmed", "ended", "freed"] {
        assert_eq!(
            produced.iter().filter(|one| one.is(event)).count(),
            2,
            "{event}: {produced:#?}"
        );
    }
    let leases = |said: &[capture::Said]| said[0].fields["lease"].clone();
    assert_eq!(leases(&consumed), leases(&produced));
    let warned = consumed.iter().chain(&produced).filter(|one| one.level <= tracing::Level::INFO);
    assert_eq!(warned.count(), 0, "what goes well is said at DEBUG");
    assert!(captured.open(&trace) == 0, "every span is closed when what it is about is over");
}

fn place(said: &[capture::Said], event: &str) -> usize {
    said.iter().position(|one| one.is(event)).unwrap()
}

#[tokio::test]
async fn a_failure_is_said_once_with_what_failed_and_why() {
    let captured = capture::installed();
    let (producer, consumer) = engines(("failing-prefill", "failing-decode"), |_| {}).await;
    let error = failed((&producer, &consumer), "failing-1").await;
    let trace = TraceId::from(&key("failing-1")).to_string();
    let warnings: Vec<_> = captured
        .said(&trace, "failing-decode")
        .into_iter()
        .filter(|one| one.level == tracing::Level::WARN)
        .collect();
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    let fields = &warnings[0].own;
    assert_eq!(fields["message"], "failed");
    assert_eq!(fields["error"], error);
    assert_eq!(fields["kind"], "peer");
    assert_eq!(fields["key"], "failing-1");
    assert_eq!(fields["from"], "failing-prefill");
    // The warning names the trace itself: spans may be filtered out.
    assert_eq!(fields["trace"], trace);
    assert_eq!(fields["blocks"], "4");
    assert_eq!(fields["quarantined"], "false");

    // One whose way is not found says what to do about it, where that is known.
    let (theirs, ours) = (producer.tables(TOKENS, 0), consumer.tables(TOKENS, 1));
    let published = producer.engine.publish(key("failing-2"), TOKENS, &theirs).unwrap();
    let mut ticket = published.ticket().clone();
    ticket.engine = kvx_core::card::EngineName::new("failing-other").unwrap();
    let failure =
        consumer.engine.fetch(&ticket, 0..TOKENS, &ours).unwrap().over().await.unwrap_err();
    published.withdraw(Reason::Aborted);
    let trace = TraceId::from(&key("failing-2")).to_string();
    let said = captured.said(&trace, "failing-decode");
    let warning = said.iter().find(|one| one.level == tracing::Level::WARN).unwrap();
    assert_eq!(warning.own["error"], failure.error.to_string());
    // What to do is part of it, and is not said once more.
    let remedy = failure.error.remedy().unwrap();
    assert_eq!(warning.own["error"].matches(remedy).count(), 1);
    assert_eq!(warning.own.get("remedy"), None);
}

#[tokio::test]
async fn a_status_shows_what_there_is() {
    let (producer, consumer) = engines(("shown-prefill", "shown-decode"), |_| {}).await;
    moved((&producer, &consumer), "shown-1").await;
    let theirs = producer.tables(TOKENS, 0);
    let held = producer.engine.publish(key("shown-2"), TOKENS, &theirs).unwrap();

    let json = serde_json::to_string(&producer.engine.status()).unwrap();
    let status: kvx_connector::observe::EngineStatus = serde_json::from_str(&json).unwrap();
    assert_eq!(status, serde_json::from_str(&json).unwrap());
    assert_eq!((status.engine.as_str(), status.ranks.len()), ("shown-prefill", 2));
    for (number, rank) in status.ranks.iter().enumerate() {
        assert_eq!((rank.replica, rank.rank as usize), (0, number));
        assert_eq!((rank.leases.held, rank.leases.draining), (1, 0));
        assert!(rank.leases.oldest_ms.is_some());
        assert_eq!(rank.counter("kvx_leases_granted_total"), 2);
        assert_eq!(rank.counter("kvx_leases_ended_total"), 1);
    }
    let rank: RankStatus = consumer.engine.workers()[0].status();
    assert_eq!((rank.peers.len(), rank.peers_known, rank.peers_connected), (2, 2, 2));
    for peer in &rank.peers {
        assert_eq!((peer.engine.as_str(), peer.state.as_str()), ("shown-prefill", "connected"));
        assert_eq!(peer.backend.as_deref(), Some("shm"));
        assert!(peer.transport.is_some() && peer.address.is_some() && peer.reason.is_some());
    }
    assert!(rank.requests.oldest.is_empty() && rank.sessions >= 2);
    assert_eq!(rank.counter("kvx_requests_ready_total"), 1);
    assert!(rank.counter("kvx_transfer_bytes_total") > 0);

    // A request that waits for somebody who is not there is shown with its age.
    let ours = consumer.tables(TOKENS, 1);
    let mut ticket = held.ticket().clone();
    ticket.cards = "127.0.0.1:1".parse().unwrap();
    ticket.engine = kvx_core::card::EngineName::new("nobody").unwrap();
    let fetch = consumer.engine.fetch(&ticket, 0..TOKENS, &ours).unwrap();
    let rank = consumer.engine.workers()[0].status();
    let [request] = &rank.requests.oldest[..] else { panic!("{:#?}", rank.requests) };
    assert_eq!((request.key.as_str(), request.engine.as_str()), ("shown-2", "nobody"));
    assert_eq!((request.state.as_str(), request.mode.as_str()), ("routing", "read"));
    assert_eq!(request.trace, TraceId::from(&key("shown-2")).to_string());
    assert_eq!(rank.requests.routing, 1);
    fetch.abort();
    fetch.over().await.unwrap_err();
    let status = consumer.engine.status();
    assert_eq!(status.ranks[0].counter("kvx_requests_aborted_total"), 1);
    held.withdraw(Reason::Aborted);
}

/// Waits until a counter is above a value: the control channel's are looked at a few times a second.
async fn grows(recorder: &record::Record, engine: &str, series: &str) {
    let until = std::time::Instant::now() + Duration::from_secs(30);
    while recorder.value(engine, 0, series) < 1.0 {
        assert!(std::time::Instant::now() < until, "{series} does not grow");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn strangers_and_those_with_another_key_are_counted_by_cause() {
    use std::io::Write as _;
    let recorder = record::installed();
    let name = "strange-prefill";
    let (producer, _) = engines((name, "strange-decode"), |_| {}).await;
    let address = producer.engine.address().to_string();
    let mut stranger = std::net::TcpStream::connect(&address).unwrap();
    stranger
        .write_all(b"GET / HTTP/1.1\r\nHost: somewhere-or-other\r\nAccept: everything\r\n\r\n")
        .unwrap();
    grows(&recorder, name, "kvx_control_refused_total{cause=\"not_ours\"}").await;

    // Another deployment's engine.
    let (secret, model, shm) = (Key::generate().unwrap(), model(), Over::new("shm"));
    let shape = Shape::new(Nhd, 1, 1, 16);
    let other = side("strange-other", &model, shape, TOKENS, (&secret, &shm), |setup| {
        setup.deadline = Duration::from_secs(2);
    });
    let other = other.await;
    let published =
        producer.engine.publish(key("strange"), TOKENS, &producer.tables(TOKENS, 0)).unwrap();
    let ours = other.tables(TOKENS, 1);
    let fetch = other.engine.fetch(published.ticket(), 0..TOKENS, &ours).unwrap();
    fetch.over().await.unwrap_err();
    grows(&recorder, name, "kvx_control_refused_total{cause=\"wrong_key\"}").await;
    assert_eq!(recorder.value(name, 0, "kvx_control_established_total{key=\"own\"}"), 0.0);
    assert!(recorder.sum("strange-other", 0, "kvx_handshakes_failed_total") >= 1.0);
    assert!(recorder.sum("strange-other", 0, "kvx_requests_failed_total") == 1.0);
    published.withdraw(Reason::Aborted);
}

/// A lease that nobody comes for expires, and that is said once, at WARN, with the trace.
#[tokio::test]
async fn a_lease_that_expires_is_counted_and_said() {
    let (recorder, captured) = (record::installed(), capture::installed());
    let name = "expired-prefill";
    let brief = |setup: &mut EngineSetup| setup.ttl = Duration::from_millis(50);
    let (producer, consumer) = engines((name, "expired-decode"), brief).await;
    let theirs = producer.tables(TOKENS, 0);
    let published = producer.engine.publish(key("expired"), TOKENS, &theirs).unwrap();
    let ticket = published.ticket().clone();
    assert_eq!(published.over().await.unwrap(), [Reason::Expired]);
    assert_eq!(recorder.value(name, 1, "kvx_leases_ended_total{reason=\"expired\"}"), 1.0);
    let trace = TraceId::from(&key("expired")).to_string();
    let said = captured.said(&trace, name);
    let warned: Vec<_> = said.iter().filter(|one| one.level == tracing::Level::WARN).collect();
    assert_eq!(warned.len(), 2, "one for each rank: {warned:#?}");
    assert!(warned.iter().all(|one| one.own["reason"] == "expired" && one.own["trace"] == trace));

    // Who comes too late is told so, and that is counted.
    let ours = consumer.tables(TOKENS, 1);
    consumer.engine.fetch(&ticket, 0..TOKENS, &ours).unwrap().over().await.unwrap_err();
    assert_eq!(recorder.sum(name, 0, "kvx_leases_freed_total"), 1.0);
    assert_eq!(recorder.sum("expired-decode", 0, "kvx_requests_failed_total"), 1.0);
}
