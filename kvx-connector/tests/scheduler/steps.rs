//! Steps that cannot be carried out, and what is not said in steps.

use std::time::{Duration, Instant};

use kvx_connector::control::Key;
use kvx_connector::scheduler::{FinishStatus, SchedulerConfig, StepMetadata};
use kvx_core::ErrorKind;
use kvx_core::id::Incarnation;

use crate::kit::{Engine, Shape, both_idle, pair, seat, until};

fn refused(engine: &Engine, step: &StepMetadata) -> String {
    let error = engine.seats[0].worker.start_load(&step.encode().unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    error.to_string()
}

#[test]
fn steps_come_once_each_in_order_and_of_this_life() {
    let (mut p, mut d) = pair(&Shape::new(1, 1, 16), &Shape::new(1, 1, 16));
    let life = p.c.incarnation();
    assert!(refused(&p, &StepMetadata::new(life, 0)).contains("carried out already"));
    assert!(refused(&p, &StepMetadata::new(life, 2)).contains("left out"));
    p.step();
    let text = refused(&p, &StepMetadata::new(life, 1));
    assert!(text.contains("carried out already") && text.contains("expected=2"), "{text}");
    let other = Incarnation::from_bytes([9; 16]);
    assert!(refused(&p, &StepMetadata::new(other, 2)).contains("another life"));
    let error = p.seats[0].worker.start_load(&[1, 0, 7]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Peer);
    // Nothing has changed: the step that was meant is carried out.
    let params = p.prefill("p", 20, 20, 1);
    d.arrive("d", 20, &params, 1);
    d.admit("d", 0);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 19);
    both_idle(&mut p, &mut d);
}

/// What contradicts what was said before is refused whole.
#[test]
fn a_step_that_contradicts_another_changes_nothing() {
    let (mut p, mut d) = pair(&Shape::new(1, 1, 16), &Shape::new(1, 1, 16));
    let params = p.prefill("p", 20, 20, 1);
    let granting = p.c.build_step(&[], p.now()).unwrap();
    p.deliver(&granting);
    let mut again = StepMetadata::new(granting.engine, granting.step + 1);
    again.grants = granting.grants.clone();
    assert!(refused(&p, &again).contains("granted already"));
    again.grants[0].lease.number += 7;
    again.grants[0].tables.clear();
    assert!(refused(&p, &again).contains("block table for each cache group"));
    again.grants[0] = granting.grants[0].clone();
    again.grants[0].lease.owner = Incarnation::from_bytes([9; 16]);
    assert!(refused(&p, &again).contains("another life"));
    d.arrive("d", 20, &params, 1);
    let holding = d.c.build_step(&[], d.now()).unwrap();
    d.deliver(&holding);
    let mut again = StepMetadata::new(holding.engine, holding.step + 1);
    again.holds = holding.holds.clone();
    assert!(refused(&d, &again).contains("held already"));
    d.admit("d", 0);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 19);
    both_idle(&mut p, &mut d);
}

/// Copies to the host need a function, loads need to know the engine's ranks.
#[test]
fn what_was_not_set_up_is_said() {
    let key = Key::generate().unwrap();
    let hosted = |config: &mut SchedulerConfig| config.host_buffer = true;
    let mut p = Engine::new("prefill", &Shape::new(1, 1, 16), &key, hosted);
    let live = crate::kit::Live {
        id: crate::kit::id("p"),
        prompt: 16,
        params: crate::kit::for_decode(),
        tables: p.take(16),
        seed: 1,
        whole: false,
    };
    p.c.on_new_request(&live.request()).unwrap();
    let tables: Vec<_> = live.tables.iter().map(kvx_connector::ticket::Table::as_plan).collect();
    p.c.after_alloc(&live.id, &tables, 0).unwrap();
    let scheduled = [kvx_connector::scheduler::Scheduled {
        request: &live.id,
        computed: 0,
        tokens: 16,
        appended: &[],
    }];
    let step = p.c.build_step(&scheduled, p.now()).unwrap();
    assert!(refused(&p, &step).contains("no copy function"));

    let mut d = Engine::new("decode", &Shape::new(1, 1, 16), &key, |_| {});
    let shape = Shape::new(2, 1, 16);
    let (life, layouts) = (d.c.incarnation(), shape.layouts());
    let lone = seat("decode", life, &layouts[0], &shape, &key);
    let one = lone.worker.handshake_metadata();
    let error = lone.worker.serve_cards(std::slice::from_ref(&one)).unwrap_err();
    assert!(error.to_string().contains("cards of all ranks"), "{error}");
    let error = lone.worker.serve_cards(&[one.clone(), one]).unwrap_err();
    assert!(error.to_string().contains("of=0, 0"), "{error}");
    let mut q = Engine::new("prefill-2", &Shape::new(1, 1, 16), &key, |_| {});
    let params = q.prefill("p", 16, 16, 1);
    d.arrive("d", 16, &params, 1);
    let step = d.c.build_step(&[], d.now()).unwrap();
    let error = lone.worker.carry_out(step).unwrap_err();
    assert!(error.to_string().contains("serve_cards"), "{error}");
    assert!(!d.finish("d", FinishStatus::Aborted).hold);
}

/// An engine whose loads end within the step that needs them waits for them itself.
#[test]
fn loads_within_a_step_are_waited_for() {
    let key = Key::generate().unwrap();
    let mut p = Engine::new("prefill", &Shape::new(1, 1, 16), &key, |_| {});
    let within = |config: &mut SchedulerConfig| config.asynchronous = false;
    let mut d = Engine::new("decode", &Shape::new(1, 1, 16), &key, within);
    let params = p.prefill("p", 20, 20, 1);
    p.step();
    d.arrive("d", 20, &params, 1);
    assert!(d.seats[0].worker.wait_until_loaded(Duration::ZERO), "nothing is under way");
    d.admit("d", 0);
    let step = d.c.build_step(&[], d.now()).unwrap();
    let step = d.tells(&step);
    d.seats[0].worker.start_load(&step).unwrap();
    assert!(d.seats[0].worker.wait_until_loaded(crate::kit::PATIENCE));
    let live = d.live["d"].clone();
    assert_eq!(d.wrong(&live, &(0..20)), 0);
    d.collect();
    d.decoded("d", 19);
    both_idle(&mut p, &mut d);
}

/// Known failures 65 and 89 (local-inference-lab/vllm#191, TRT-LLM PR#12313): an engine with nothing to do sleeps until there is
/// something, and is woken by it.
#[test]
fn an_idle_engine_is_woken_by_what_finishes() {
    let (mut p, mut d) = pair(&Shape::new(1, 1, 16), &Shape::new(1, 1, 16));
    let params = p.prefill("p", 20, 20, 1);
    p.step();
    let begun = Instant::now();
    assert!(!p.seats[0].worker.wait_for_report(Duration::from_millis(20)));
    assert!(begun.elapsed() >= Duration::from_millis(20));
    d.arrive("d", 20, &params, 1);
    d.admit("d", 0);
    let step = d.c.build_step(&[], d.now()).unwrap();
    let step = d.tells(&step);
    d.seats[0].worker.start_load(&step).unwrap();
    assert!(d.seats[0].worker.wait_for_report(crate::kit::PATIENCE));
    assert!(p.seats[0].worker.wait_for_report(crate::kit::PATIENCE));
    d.collect();
    d.decoded("d", 19);
    both_idle(&mut p, &mut d);
}

/// Known failure 118 (vllm PR#25388): what is counted is of a rank: two ranks of one request have each their own bytes and one load.
#[test]
fn counts_are_of_ranks() {
    let (mut p, mut d) = pair(&Shape::new(1, 1, 16), &Shape::new(2, 1, 16));
    let params = p.prefill("p", 32, 32, 1);
    d.arrive("d", 32, &params, 1);
    d.admit("d", 0);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 31);
    // 4 layers, keys and values, 4 heads of 8 elements of 2 bytes, 32 tokens: half of it at each rank.
    let whole = 4 * 2 * 4 * 8 * 2 * 32;
    let stats: Vec<_> = d.c.rank_stats().map(|(_, it)| (it.loads, it.bytes)).collect();
    assert_eq!(stats, [(1, whole / 2), (1, whole / 2)]);
    assert!(d.c.rank_stats().all(|(_, it)| it.transfer_us > 0));
    assert_eq!(d.c.stats().received, 1);
    both_idle(&mut p, &mut d);
    let Engine { seats, .. } = d;
    seats.into_iter().for_each(|seat| seat.worker.shutdown());
}
