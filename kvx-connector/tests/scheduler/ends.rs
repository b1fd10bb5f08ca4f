//! How requests end that are not simply loaded: aborted at each moment, preempted, rejected, without anything to load.

use std::time::Duration;

use kvx_connector::control::Key;
use kvx_connector::scheduler::{FinishStatus, LastToken, OnFailure, SchedulerConfig};
use serde_json::Value;

use crate::kit::{Engine, Shape, both_idle, id, pair, until};

fn small() -> Shape {
    Shape::new(1, 1, 16)
}

/// The producer's ticket for 40 tokens, and both engines.
fn published() -> (Engine, Engine, Value) {
    published_to(&Shape::new(2, 1, 16))
}

fn published_to(to: &Shape) -> (Engine, Engine, Value) {
    let (mut p, mut d) = pair(&small(), to);
    let params = p.prefill("p", 40, 40, 9);
    d.arrive("d", 40, &params, 9);
    (p, d, params)
}

/// Known failures 36, 40 and 114 (vllm PR#43509, vllm#46283, dynamo PR#7489): aborted before its hold was sent.
#[test]
fn aborted_before_it_is_held() {
    let (mut p, mut d, _) = published();
    assert!(!d.finish("d", FinishStatus::Aborted).hold);
    both_idle(&mut p, &mut d);
    assert_eq!((p.c.stats().sent, p.c.stats().expired), (1, 0));
}

/// Known failures 38 and 55 (vllm PR#29906, sglang PR#28651): aborted while it waits for blocks: the producer has its own back at once,
/// not when the lease expires.
#[test]
fn aborted_while_it_is_held() {
    let (mut p, mut d, _) = published();
    for _ in 0..3 {
        p.step();
        d.step();
    }
    until(&mut p, &mut d, "held", |_, d| !d.seats[0].worker.peers().is_empty());
    assert!(!d.finish("d", FinishStatus::Aborted).hold);
    let begun = std::time::Instant::now();
    both_idle(&mut p, &mut d);
    assert!(begun.elapsed() < p.c.config().lease, "{:?}", begun.elapsed());
    assert_eq!((p.c.stats().sent, p.c.stats().expired), (1, 0));
}

/// Known failures 41, 54 and 94 (vllm-ascend#16662, sglang#32564, nixl#2067): aborted while it loads: its blocks are held until every rank
/// has said that nothing is written there any more.
#[test]
fn aborted_while_it_loads() {
    for steps in 0..4 {
        let (mut p, mut d, _) = published();
        d.admit("d", 0);
        for _ in 0..steps {
            d.step();
        }
        let loading = d.c.tables().loads == 1;
        let hold = d.finish("d", FinishStatus::Aborted).hold;
        assert_eq!(hold, loading, "after {steps} steps");
        both_idle(&mut p, &mut d);
        assert_eq!(p.c.stats().expired, 0);
    }
}

#[test]
fn aborted_after_it_was_loaded() {
    let (mut p, mut d, _) = published();
    d.admit("d", 0);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    assert!(!d.finish("d", FinishStatus::Aborted).hold);
    both_idle(&mut p, &mut d);
    assert_eq!((d.c.stats().received, d.c.stats().aborted), (1, 0));
}

/// Known failure 33 (vllm#26896): all of a prompt is elsewhere: one token is left to compute, with blocks that are full and with one
/// that is not.
#[test]
fn of_a_prompt_that_is_elsewhere_one_token_is_computed() {
    for prompt in [48, 40] {
        let (mut p, mut d) = pair(&small(), &small());
        let params = p.prefill("p", prompt, prompt, 9);
        d.arrive("d", prompt, &params, 9);
        assert_eq!(d.admit("d", 0), prompt);
        until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
        assert_eq!(prompt - d.received["d"], 1);
        d.decoded("d", prompt - 1);
        both_idle(&mut p, &mut d);
    }
}

/// Known failures 60 and 63 (sglang#6857, vllm PR#18631): preempted while it loads, and again admitted: it computes all itself, and what
/// was under way is over before its blocks are used again.
#[test]
fn preempted_while_it_loads() {
    let (mut p, mut d, _) = published();
    d.admit("d", 0);
    d.step();
    let live = d.live["d"].clone();
    let held = d.c.preempted(&live.id);
    if held {
        d.held.insert("d".into(), live.clone());
    } else {
        d.put_back(&live.tables);
    }
    assert_eq!(held, !d.received.contains_key("d"));
    until(&mut p, &mut d, "drained", |_, d| d.held.is_empty());
    d.received.clear();
    assert_eq!(d.c.matched_tokens(&live.request(), 0).unwrap().tokens(), Some(0));
    d.live.get_mut("d").unwrap().tables.clear();
    d.admit("d", 0);
    d.finish("d", FinishStatus::Stopped);
    both_idle(&mut p, &mut d);
}

/// Known failures 39 and 42 (vllm PR#41269, vllm#50425): rejected before the scheduler ever saw it.
#[test]
fn rejected_before_it_was_seen() {
    let (mut p, mut d) = pair(&Shape::new(2, 1, 16), &small());
    let params = p.prefill("p", 40, 40, 9);
    let id = id("d");
    let request =
        kvx_connector::scheduler::Request { id: &id, prompt_tokens: 40, params: Some(&params) };
    d.c.rejected(&request);
    both_idle(&mut p, &mut d);
    assert_eq!((p.c.stats().sent, p.c.stats().expired, d.c.stats().released), (1, 0, 1));
}

/// Known failures 28 and 84 (vllm PR#18632, vllm PR#58108): the consumer has all of it: the producer hears so.
#[test]
fn a_full_prefix_hit_gives_the_lease_back() {
    let (mut p, mut d, _) = published();
    assert_eq!(d.admit("d", 40), 0);
    both_idle_after(&mut p, &mut d);
}

/// Known failure 30 (vllm#52617): all but the last token is there, where the connector withholds that: nothing is to come.
#[test]
fn all_but_the_last_token_gives_the_lease_back() {
    let key = Key::generate().unwrap();
    let mut p = Engine::new("prefill", &small(), &key, |_| {});
    let withheld = |config: &mut SchedulerConfig| config.last_token = LastToken::Withheld;
    let mut d = Engine::new("decode", &small(), &key, withheld);
    let params = p.prefill("p", 40, 40, 9);
    d.arrive("d", 40, &params, 9);
    assert_eq!(d.admit("d", 39), 0);
    both_idle_after(&mut p, &mut d);
}

fn both_idle_after(p: &mut Engine, d: &mut Engine) {
    assert!(!d.finish("d", FinishStatus::Stopped).hold);
    both_idle(p, d);
    assert_eq!((p.c.stats().sent, p.c.stats().expired), (1, 0));
    let loads: u64 = d.c.rank_stats().map(|(_, stats)| stats.loads + stats.bytes).sum();
    assert_eq!(loads, 0);
}

/// Known failures 28 and 22 (vllm PR#18632, sglang#25698): a request without blocks is free at once, and whoever has its ticket asks
/// nobody.
#[test]
fn a_request_without_blocks_is_nobodys() {
    let (mut p, mut d) = pair(&small(), &small());
    p.arrive("p", 40, &crate::kit::for_decode(), 9);
    let finished = p.finish("p", FinishStatus::LengthCapped);
    assert!(!finished.hold);
    d.arrive("d", 40, &finished.params.unwrap().into(), 9);
    assert_eq!(d.admit("d", 0), 0);
    d.finish("d", FinishStatus::Stopped);
    both_idle(&mut p, &mut d);
    assert_eq!(d.seats[0].worker.peers().len(), 0);
}

/// Known failures 36 and 58 (vllm PR#43509, sglang#40125): siblings with one ticket: one loads, the others compute; the lease is given
/// back once.
#[test]
fn siblings_share_a_ticket_and_one_loads() {
    let (mut p, mut d, params) = published();
    d.arrive("d-2", 40, &params, 9);
    d.admit("d", 0);
    let second = d.live["d-2"].clone();
    assert_eq!(d.c.matched_tokens(&second.request(), 0).unwrap().tokens(), None);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 39);
    assert_eq!(d.admit("d-2", 0), 0);
    d.finish("d-2", FinishStatus::Stopped);
    both_idle(&mut p, &mut d);
    assert_eq!((p.c.stats().sent, d.c.stats().used_tickets), (1, 1));
}

/// Known failures 37 and 95 (vllm PR#25067, vllm PR#24268): aborted after it finished, while it is read, and confirmed at about that
/// moment: freed once, whichever comes first.
#[test]
fn aborted_after_it_was_published() {
    for steps in 0..6 {
        let (mut p, mut d, _) = published();
        d.admit("d", 0);
        for _ in 0..steps {
            d.step();
            p.step();
        }
        if p.held.contains_key("p") {
            p.abort_held("p");
        }
        until(&mut p, &mut d, "over", |_, d| {
            d.received.contains_key("d") || d.failed.contains_key("d")
        });
        match d.failed.remove("d") {
            None => d.decoded("d", 39),
            Some(failed) => {
                assert_eq!((failed.blocks.len(), failed.computed), (3, 0));
                d.finish("d", FinishStatus::Failed);
            }
        }
        both_idle(&mut p, &mut d);
    }
}

/// Known failures 42, 44 and 45 (vllm#50425, vllm#20139, aws-do-eks PR#84): nobody comes in time: the lease expires, is counted, and
/// whoever comes later fails with all its blocks.
#[test]
fn what_nobody_reads_expires_and_is_never_read_again() {
    let key = Key::generate().unwrap();
    let brief = |config: &mut SchedulerConfig| config.lease = Duration::from_millis(300);
    let mut p = Engine::new("prefill", &small(), &key, brief);
    let fails = |config: &mut SchedulerConfig| config.on_failure = OnFailure::Fail;
    let mut d = Engine::new("decode", &small(), &key, fails);
    let params = p.prefill("p", 40, 40, 9);
    until(&mut p, &mut d, "expired", |p, _| p.held.is_empty());
    assert_eq!((p.c.stats().expired, p.c.stats().sent), (1, 0));
    // Its blocks have another request's cache by now.
    let other = p.prefill("p-2", 40, 40, 10);
    d.arrive("d", 40, &params, 9);
    d.admit("d", 0);
    until(&mut p, &mut d, "failed", |_, d| d.failed.contains_key("d"));
    let failed = d.failed.remove("d").unwrap();
    assert_eq!((failed.blocks.len(), failed.then, d.c.stats().retries), (3, OnFailure::Fail, 0));
    d.finish("d", FinishStatus::Failed);
    d.arrive("d-2", 40, &other, 10);
    d.admit("d-2", 0);
    until(&mut p, &mut d, "over", |_, d| {
        d.received.contains_key("d-2") || d.failed.contains_key("d-2")
    });
    // On a slow machine the second may have expired, too.
    match d.failed.remove("d-2") {
        None => d.decoded("d-2", 39),
        Some(_) => assert!(!d.finish("d-2", FinishStatus::Failed).hold),
    }
    both_idle(&mut p, &mut d);
}

/// Known failures 46 and 49 (aibrix#1772, vllm#53095): a request that waits for much longer than its lease runs is held, by heartbeats
/// as often as that needs; and is loaded.
#[test]
fn a_request_that_waits_for_long_is_held() {
    let key = Key::generate().unwrap();
    let brief = |config: &mut SchedulerConfig| config.lease = Duration::from_millis(2500);
    let mut p = Engine::new("prefill", &small(), &key, brief);
    let mut d = Engine::new("decode", &small(), &key, |_| {});
    let params = p.prefill("p", 40, 40, 9);
    d.arrive("d", 40, &params, 9);
    let begun = std::time::Instant::now();
    until(&mut p, &mut d, "a while", |p, _| {
        assert!(p.held.contains_key("p"), "expired after {:?}", begun.elapsed());
        begun.elapsed() > Duration::from_millis(5500)
    });
    d.admit("d", 0);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 39);
    both_idle(&mut p, &mut d);
    assert_eq!(p.c.stats().expired, 0);
}

/// Known failures 15, 16 and 18 (vllm#23587, sglang PR#19398, vllm PR#49230): another model is refused, for good, by name; the engine
/// serves the next request.
#[test]
fn another_model_fails_the_request_and_not_the_engine() {
    let key = Key::generate().unwrap();
    let other = kvx_core::layout::ModelGeometry::llama_like(4, 2, 8, kvx_core::layout::Dtype::Bf16);
    let other = Shape { model: other.unwrap(), ..small() };
    let mut stranger = Engine::new("prefill", &other, &key, |_| {});
    let mut p = Engine::new("prefill-2", &small(), &key, |_| {});
    let mut d = Engine::new("decode", &small(), &key, |_| {});
    let params = stranger.prefill("p", 40, 40, 9);
    d.arrive("d", 40, &params, 9);
    d.admit("d", 0);
    until(&mut stranger, &mut d, "failed", |_, d| d.failed.contains_key("d"));
    let failed = d.failed.remove("d").unwrap();
    assert!(failed.reason.contains("heads"), "{}", failed.reason);
    assert_eq!(d.c.stats().retries, 0, "what cannot change is not tried again");
    d.finish("d", FinishStatus::Failed);
    let params = p.prefill("p", 40, 40, 9);
    d.arrive("d", 40, &params, 9);
    d.admit("d", 0);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 39);
    both_idle(&mut p, &mut d);
    stranger.abort_held("p");
    until(&mut stranger, &mut d, "withdrawn", |stranger, _| stranger.held.is_empty());
}
