//! What the picture says about a plan, in words.

use kvx_core::layout::Role;

use super::Scene;
use super::cells;
use crate::plan::rank;
use crate::size;

/// Which ranks are drawn.
pub(super) fn title(scene: &Scene<'_>) -> String {
    let (from, to) = (rank(scene.from()), rank(scene.to()));
    format!("{}: from producer {from} to consumer {to}", scene.report.model)
}

/// What is drawn, in a sentence.
pub(super) fn subject(scene: &Scene<'_>) -> String {
    let names: Vec<String> = scene.keys.iter().map(ToString::to_string).collect();
    let names = if names.len() > 4 {
        format!("{} … {}", names[0], names[names.len() - 1])
    } else {
        names.join(", ")
    };
    let has = |role| scene.keys.iter().any(|key| key.role == role);
    let alike = if has(Role::Key) && !has(Role::Value) { " (V lies apart, and alike)" } else { "" };
    let part = if scene.cut { ", in part" } else { "" };
    format!("Drawn: one block of {} tokens of {names}{alike}{part}", scene.tokens)
}

/// What the whole request costs.
pub(super) fn summary(scene: &Scene<'_>) -> String {
    let (report, cost) = (scene.report, &scene.report.total);
    let [shortest, median, longest] =
        [cost.shortest_run, cost.median_run, cost.longest_run].map(size::bytes);
    let lengths = if shortest == longest {
        format!("of {shortest}")
    } else {
        format!("of {shortest} to {longest}, half of them at most {median}")
    };
    format!(
        "{} of ranks, {} tokens, blocks {}: {} in {} {lengths}",
        plural(report.pairs.len() as u64, "pair"),
        size::count(report.tokens),
        report.blocks,
        size::bytes(cost.bytes),
        plural(cost.segments, "run"),
    )
}

/// A number of things.
pub(super) fn plural(number: u64, what: &str) -> String {
    format!("{} {what}{}", size::count(number), if number == 1 { "" } else { "s" })
}

/// What a row is.
fn row_name(scene: &Scene<'_>) -> &'static str {
    if scene.keys.iter().any(|key| cells::has_heads(key.role)) {
        "one head of one token"
    } else {
        "one token"
    }
}

/// What the block comes to, and why.
pub(super) fn reason(scene: &Scene<'_>) -> String {
    let cost = &scene.cost;
    let row = scene.consumer.iter().map(|cell| cell.bytes).max().unwrap_or(1);
    let run = cost.median_run;
    let why = if cost.segments <= 1 {
        "all of it is one run".to_owned()
    } else if run < row.min(scene.producer.iter().map(|cell| cell.bytes).max().unwrap_or(1)) {
        "rows are taken apart".to_owned()
    } else if run <= row {
        format!("every row ({}) moves alone", row_name(scene))
    } else {
        format!("{} rows stay together", size::count(run / row))
    };
    let runs = plural(cost.segments, "run");
    format!("the block is {runs} of {}; {why}", size::bytes(run))
}
