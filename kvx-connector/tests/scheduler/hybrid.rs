//! Several cache groups: windows, states, and a group of which nothing is loaded.

use kvx_connector::scheduler::{FinishStatus, StepMetadata};
use kvx_core::layout::{
    AttentionGeometry, ConvPart, Dtype, GroupKind, LayerKind, ModelGeometry, StateGeometry, Window,
};

use crate::kit::{Engine, Shape, both_idle, pair, until};

fn attention(window: Window) -> LayerKind {
    LayerKind::Attention(AttentionGeometry::new(4, 8, Dtype::Bf16).with_window(window))
}

fn windowed() -> Shape {
    let layer = |layer: u32| match layer % 2 {
        0 => attention(Window::Sliding(32)),
        _ => attention(Window::Full),
    };
    let model = ModelGeometry::new("windowed", (0..4).map(layer).collect()).unwrap();
    Shape { model, group_by_window: true, ..Shape::new(1, 1, 16) }
}

fn stateful() -> Shape {
    let state = LayerKind::State(StateGeometry {
        conv: vec![ConvPart { heads: 4, channels: 2 }],
        taps: 3,
        conv_dtype: Dtype::Bf16,
        ssm: None,
    });
    let layer = |layer: u32| match layer % 2 {
        0 => state.clone(),
        _ => attention(Window::Full),
    };
    let model = ModelGeometry::new("stateful", (0..4).map(layer).collect()).unwrap();
    Shape { model, ..Shape::new(1, 1, 16) }
}

/// Known failure 24 (vllm#42024): groups stay groups, each with its own blocks. A group with a window, on both sides.
#[test]
fn a_window_and_a_full_group() {
    let to = Shape { grid: (2, 1), ..windowed() };
    let (mut p, mut d) = pair(&windowed(), &to);
    assert_eq!(d.seats[0].layout.groups().len(), 2);
    let params = p.prefill("p", 100, 100, 5);
    d.arrive("d", 100, &params, 5);
    assert_eq!(d.admit("d", 0), 100);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 99);
    both_idle(&mut p, &mut d);
}

/// Known failures 21 and 61 (sglang PR#18939, sglang#30233): a state is moved with the cache that it belongs to, whole.
#[test]
fn a_state_and_a_full_group() {
    let (mut p, mut d) = pair(&stateful(), &Shape { grid: (2, 1), ..stateful() });
    let kinds: Vec<_> = d.seats[0].layout.groups().iter().map(|group| group.kind).collect();
    assert!(kinds.contains(&GroupKind::State) && kinds.contains(&GroupKind::Attention));
    // There is no way back from a state: the producer stops before the last token.
    let prompt = d.c.config().tokens_to_produce(41);
    assert_eq!(prompt, 40);
    let params = p.prefill("p", prompt, 40, 5);
    d.arrive("d", 41, &params, 5);
    assert_eq!(d.admit("d", 0), 40);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    assert_eq!(d.received.remove("d"), Some(40));
    let live = kit_live(&d, "d", 40);
    assert_eq!(d.wrong(&live, &(0..40)), 0);
    d.finish("d", FinishStatus::Stopped);
    both_idle(&mut p, &mut d);
}

/// As if its prompt had been so long.
fn kit_live(engine: &Engine, name: &str, prompt: u64) -> crate::kit::Live {
    crate::kit::Live { prompt, ..engine.live[name].clone() }
}

/// A group of which nothing is loaded, because the engine has all of it: nothing is written there, the other is whole.
#[test]
fn of_a_group_without_blocks_nothing_is_loaded() {
    let (mut p, mut d) = pair(&windowed(), &windowed());
    let params = p.prefill("p", 64, 64, 5);
    d.arrive("d", 64, &params, 5);
    d.admit("d", 0);
    let step = d.c.build_step(&[], d.now()).unwrap();
    let mut step = StepMetadata::decode(&step.encode().unwrap()).unwrap();
    let kept = step.loads[0].local[0].clone();
    step.loads[0].local[0].ids.clear();
    d.deliver(&step);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    // What is left of the table that was taken out is what was there: nothing.
    let mut live = d.live["d"].clone();
    let other = live.tables.remove(0);
    assert_eq!(other.ids[usize::try_from(kept.first).unwrap()..], kept.ids[..]);
    let empty = kvx_connector::ticket::Table::default();
    live.tables.insert(0, empty.clone());
    assert_eq!(d.wrong(&live, &(0..64)), 0);
    live.tables = vec![other, empty];
    let seat = &d.seats[0];
    let (all, wrong) =
        crate::bytes::wrong(&seat.layout, &seat.device, &live.tables, (&(0..64), 64), live.seed);
    assert!(all > 0 && wrong == all, "{wrong} of {all}");
    d.received.clear();
    d.finish("d", FinishStatus::Stopped);
    both_idle(&mut p, &mut d);
}

/// Known failures 67 and 23 (vllm PR#50388, vllm#42554): what fails in a model with several groups names blocks of all of them, and
/// the engine serves the next request.
#[test]
fn a_failure_names_the_blocks_of_every_group() {
    let (mut p, mut d) = pair(&windowed(), &windowed());
    let params = p.prefill("p", 64, 64, 5);
    p.abort_held("p");
    d.arrive("d", 64, &params, 5);
    d.admit("d", 0);
    let tables = d.live["d"].tables.clone();
    until(&mut p, &mut d, "failed", |_, d| d.failed.contains_key("d"));
    let failed = d.failed.remove("d").unwrap();
    for (group, table) in (0_u16..).zip(&tables) {
        for id in &table.ids {
            assert!(failed.blocks.contains(&(group, *id)), "{group} {id}: {failed:?}");
        }
    }
    d.finish("d", FinishStatus::Failed);
    let params = p.prefill("p2", 64, 64, 6);
    d.arrive("d2", 64, &params, 6);
    d.admit("d2", 0);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d2"));
    d.decoded("d2", 63);
    both_idle(&mut p, &mut d);
}
