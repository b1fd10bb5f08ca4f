//! Tests of the picture: what is drawn where, and what it says.

use kvx_core::layout::{Dtype, ModelGeometry, NamedLayout};
use kvx_core::transfer::Mode;

use super::*;
use crate::args::{Engines, Order};
use crate::shape::Shape;

const TOKENS: u64 = 512;

fn planned(from: &str, to: &str, order: Order) -> Planned {
    let base = Shape::new(1, NamedLayout::FlashAttentionNhd, 16).unwrap();
    let engines = Engines {
        model: ModelGeometry::llama_like(4, 8, 128, Dtype::Bf16).unwrap(),
        producer: base.changed_by("--producer", from).unwrap(),
        consumer: base.changed_by("--consumer", to).unwrap(),
        mode: Mode::Read,
    };
    Planned::new(engines, TOKENS, order).unwrap()
}

/// Every byte of every drawn run lies in a drawn cell on both sides, of the same head and the same token.
fn check(scene: &Scene<'_>) {
    let find = |cells: &'_ [Cell], region, at| {
        cells
            .iter()
            .find(|cell| cell.region == region && cell.at <= at && at < cell.at + cell.bytes)
            .cloned()
    };
    let mut seen = 0;
    for run in &scene.runs {
        for byte in (0..run.bytes).step_by(2) {
            let to = find(&scene.consumer, run.local_region, run.local_offset + byte).unwrap();
            assert!(to.moved);
            if let Some(from) = find(&scene.producer, run.remote_region, run.remote_offset + byte) {
                assert!(from.moved);
                assert_eq!((from.key, from.heads), (to.key, to.heads));
                let (from, to) = (from.tokens.unwrap(), to.tokens.unwrap());
                assert!(from.0 <= to.1 && to.0 <= from.1, "{from:?} {to:?}");
                seen += 1;
            }
        }
    }
    assert!(seen > 0);
}

#[test]
fn runs_join_cells_of_the_same_head_and_token() {
    for from in NamedLayout::ALL {
        for to in NamedLayout::ALL {
            let planned = planned(
                &format!("layout={from}"),
                &format!("tp=2,layout={to},block=32"),
                Order::Permuted,
            );
            let report = planned.report(33).unwrap();
            let scene = Scene::new(&planned, &report).unwrap();
            check(&scene);
            assert!(scene.consumer.len() <= MAX_CELLS, "{from} {to}");
            assert!(scene.runs.len() <= MAX_RUNS, "{from} {to}");
            let text = draw::document(&scene).to_string();
            assert!(text.len() < 400_000, "{from} {to}: {} bytes", text.len());
            assert!(text.matches("<path").count() >= scene.runs.len().min(8), "{from} {to}");
        }
    }
}

#[test]
fn a_cheap_pair_is_one_ribbon_and_a_costly_one_is_many() {
    let cheap = planned("", "", Order::Contiguous);
    let report = cheap.report(TOKENS).unwrap();
    let scene = Scene::new(&cheap, &report).unwrap();
    assert_eq!((scene.runs.len(), scene.cost.segments, scene.tokens), (1, 1, 16));
    assert!(!scene.cut && !scene.source_cut);
    assert!(draw::document(&scene).to_string().contains("Cheap: the block is 1 run of 32 KiB"));

    let costly = planned("layout=hnd", "tp=2", Order::Contiguous);
    let report = costly.report(TOKENS).unwrap();
    let scene = Scene::new(&costly, &report).unwrap();
    assert_eq!(scene.cost.segments, 64);
    assert_eq!(scene.runs.len(), 64);
    let text = draw::document(&scene).to_string();
    assert!(text.contains("Costly: the block is 64 runs of 256 B"), "{text}");
    assert!(text.contains("64 runs in the block, all drawn"), "{text}");
    assert!(text.contains("paler: later token") && text.contains("the block goes on"), "{text}");
}

#[test]
fn a_picture_too_large_says_what_it_leaves_out() {
    let planned = planned("layout=cpu-transposed", "", Order::Contiguous);
    let report = planned.report(TOKENS).unwrap();
    let scene = Scene::new(&planned, &report).unwrap();
    assert!(scene.cut);
    let text = draw::document(&scene).to_string();
    assert!(text.contains("The first 256 of the block's"), "{text}");
    assert!(text.contains("the block goes on"), "{text}");
}

#[test]
fn a_strip_leaves_out_what_is_not_drawn() {
    let planned = planned("", "tp=4", Order::Permuted);
    let report = planned.report(TOKENS).unwrap();
    let scene = Scene::new(&planned, &report).unwrap();
    let strip = Strip::new(&scene.producer, 10.0, 0.5);
    let (bytes, _) = strip.extent();
    assert_eq!(bytes, scene.producer.iter().map(|cell| cell.bytes).sum::<u64>());
    let mut last = 10.0;
    for span in &strip.spans {
        assert!((span.top - last).abs() < 1e-9, "{:?}", strip.spans);
        last = span.bottom;
    }
    let first = &scene.producer[0];
    let place = strip.place(first.region, first.at, first.at + first.bytes);
    assert_eq!(place, Some((10.0, 10.0 + 128.0)));
    assert_eq!(strip.place(first.region, first.at - 1, first.at), None);
    assert_eq!(strip.drawn(first.region, first.at, 100), [(0, 100)]);
}

#[test]
fn what_is_together_has_one_label() {
    let labels = |layout: &str| -> Vec<String> {
        let planned = planned(&format!("layout={layout}"), "", Order::Contiguous);
        let report = planned.report(TOKENS).unwrap();
        let scene = Scene::new(&planned, &report).unwrap();
        let rows = cells::rows(&scene.producer);
        let name = |(first, last): (usize, usize)| cells::label(&rows[first], &rows[last], false);
        cells::stretches(&rows).into_iter().map(name).take(2).collect()
    };
    assert_eq!(labels("nhd"), ["K · token 0 · heads 0–7", "K · token 1 · heads 0–7"]);
    assert_eq!(labels("hnd"), ["K · head 0 · tokens 0–15", "K · head 1 · tokens 0–15"]);
    assert_eq!(labels("packed-hnd"), ["K|V · head 0 · tokens 0–15", "K|V · head 1 · tokens 0–15"]);
    assert_eq!(
        labels("cpu-transposed"),
        ["K · head 0 · dim 0 · tokens 0–15", "K · head 0 · dim 1 · tokens 0–15"]
    );
}

/// A latent is for all heads: none of them is named.
#[test]
fn a_latent_has_no_head() {
    let shape = Shape::new(1, NamedLayout::FlashAttentionNhd, 64).unwrap();
    let engines = Engines {
        model: ModelGeometry::preset("deepseek-v3").unwrap(),
        producer: shape,
        consumer: shape,
        mode: Mode::Read,
    };
    let planned = Planned::new(engines, TOKENS, Order::Contiguous).unwrap();
    let report = planned.report(TOKENS).unwrap();
    let text = draw::document(&Scene::new(&planned, &report).unwrap()).to_string();
    assert!(text.contains("latent") && !text.contains("head 0"), "{text}");
    assert!(text.contains("for all heads"), "{text}");
}
