//! From a scene to an SVG document.

use kvx_core::layout::Role;
use svg::Document;
use svg::node::element::path::Data;
use svg::node::element::{
    Definitions, Description, Group, Line, Path, Pattern, Rectangle, Style, Text, Title,
};

use super::cells::{self, Cell};
use super::strip::{GAP, Strip};
use super::words::{plural, reason, subject, summary, title};
use super::{MAX_TOKENS, Scene};
use crate::plan::{Verdict, rank};
use crate::shape::Shape;
use crate::size;

const WIDTH: f64 = 1200.0;
/// Left edges of the producer's and of the consumer's strip.
const STRIPS: [f64; 2] = [280.0, 810.0];
const STRIP_WIDTH: f64 = 110.0;
/// Where strips begin.
const TOP: f64 = 190.0;
/// Height that the longer strip should have.
const HEIGHT: f64 = 900.0;
/// Largest and smallest height of a cell.
const CELL: (f64, f64) = (26.0, 1.5);
/// Least distance between two labels.
const LABEL: f64 = 11.5;

const PALETTE: [&str; 8] =
    ["#3b76af", "#ef8636", "#519d3e", "#c53a32", "#8d69b8", "#84584e", "#d57dbe", "#4cb7bd"];
/// Of a run of several heads.
const MIXED: &str = "#64748b";
const STYLE: &str = "\
text { font-family: Inter, 'Helvetica Neue', Helvetica, Arial, sans-serif; fill: #1f2937 }\
.title { font-size: 21px; font-weight: 600 }\
.what { font-size: 13px; fill: #4b5563 }\
.verdict { font-size: 15px; font-weight: 600 }\
.side { font-size: 14px; font-weight: 600 }\
.shape { font-size: 11.5px; fill: #4b5563 }\
.label { font-size: 10.5px; fill: #374151 }\
.small { font-size: 10px; fill: #6b7280 }";

/// Which side of the picture.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

/// The whole picture.
pub(super) fn document(scene: &Scene<'_>) -> Document {
    let scale = scale(scene);
    let left = Strip::new(&scene.producer, TOP, scale);
    let right = Strip::new(&scene.consumer, TOP, scale);
    let bottom = left.bottom().max(right.bottom());
    let height = bottom + 130.0;
    let background =
        Rectangle::new().set("width", WIDTH).set("height", height).set("fill", "#ffffff");
    Document::new()
        .set("viewBox", (0, 0, WIDTH, height))
        .set("width", WIDTH)
        .set("height", height)
        .add(Title::new(title(scene)))
        .add(Description::new().add(svg::node::Text::new(summary(scene))))
        .add(Definitions::new().add(Style::new(STYLE)).add(stripes()))
        .add(background)
        .add(head(scene))
        .add(ribbons(scene, &left, &right))
        .add(strip(&scene.producer, &left, Side::Left, layers(scene)))
        .add(strip(&scene.consumer, &right, Side::Right, layers(scene)))
        .add(more(STRIPS[0], left.bottom(), scene.source_cut))
        .add(more(STRIPS[1], right.bottom(), scene.cut))
        .add(foot(scene, bottom + 34.0))
}

/// The mark under a strip whose last block goes on beyond what is drawn.
fn more(x: f64, bottom: f64, cut: bool) -> Group {
    let mark = text("small", x + STRIP_WIDTH / 2.0, bottom + 13.0, "⋮ the block goes on");
    let group = Group::new();
    if cut { group.add(mark.set("text-anchor", "middle")) } else { group }
}

/// Points per byte: such that the longer strip has the height that it should, and cells are neither huge nor invisible.
fn scale(scene: &Scene<'_>) -> f64 {
    let both = [&scene.producer, &scene.consumer];
    let smallest = both.iter().flat_map(|cells| cells.iter().map(|cell| cell.bytes)).min();
    let longest = both
        .iter()
        .map(|cells| Strip::new(cells, 0.0, 1.0).extent())
        .map(|(bytes, gaps)| (points(bytes), (HEIGHT - GAP * points(gaps as u64)).max(200.0)))
        .map(|(bytes, room)| room / bytes.max(1.0))
        .fold(f64::INFINITY, f64::min);
    let cell = points(smallest.unwrap_or(1).max(1));
    if longest.is_finite() { longest.clamp(CELL.1 / cell, CELL.0 / cell) } else { 1.0 }
}

#[expect(clippy::cast_precision_loss, reason = "for drawing, far below 2^53")]
const fn points(number: u64) -> f64 {
    number as f64
}

/// Whether several layers are drawn, so that labels must name them.
fn layers(scene: &Scene<'_>) -> bool {
    let mut layers = scene.keys.iter().map(|key| key.layer);
    let first = layers.next();
    layers.any(|layer| Some(layer) != first)
}

fn text(class: &str, x: f64, y: f64, content: impl Into<String>) -> Text {
    Text::new(content).set("class", class).set("x", x).set("y", y)
}

fn head(scene: &Scene<'_>) -> Group {
    let verdict = scene.report.verdict;
    let colour = match verdict {
        Verdict::Costly => "#b91c1c",
        Verdict::Fair => "#b45309",
        Verdict::Cheap => "#15803d",
    };
    let verdict = format!("{}: {}", verdict.word(), reason(scene));
    let mut group = Group::new()
        .add(text("title", 30.0, 42.0, title(scene)))
        .add(text("what", 30.0, 66.0, format!("{}.", summary(scene))))
        .add(text(
            "what",
            30.0,
            85.0,
            format!("{}. Memory runs from top to bottom.", subject(scene)),
        ))
        .add(text("verdict", 30.0, 112.0, verdict).set("style", format!("fill: {colour}")));
    let sides = [
        ("Producer", &scene.planned.engines.producer, STRIPS[0] + STRIP_WIDTH, "end"),
        ("Consumer", &scene.planned.engines.consumer, STRIPS[1], "start"),
    ];
    for ((name, shape, x, anchor), layout) in sides.into_iter().zip([scene.from(), scene.to()]) {
        group = group
            .add(
                text("side", x, TOP - 36.0, format!("{name} {}", rank(layout)))
                    .set("text-anchor", anchor),
            )
            .add(text("shape", x, TOP - 19.0, about(shape)).set("text-anchor", anchor));
    }
    group
}

fn about(shape: &Shape) -> String {
    shape.to_string().replace(',', ", ")
}

/// White stripes over values, to tell them from keys.
fn stripes() -> Pattern {
    Pattern::new()
        .set("id", "stripes")
        .set("width", 6)
        .set("height", 6)
        .set("patternUnits", "userSpaceOnUse")
        .set("patternTransform", "rotate(45)")
        .add(
            Line::new()
                .set("y2", 6)
                .set("stroke", "#ffffff")
                .set("stroke-width", 3)
                .set("stroke-opacity", 0.45),
        )
}

fn colour(cell: &Cell) -> &'static str {
    if cell.moved { PALETTE[cell.heads.0 as usize % PALETTE.len()] } else { "#d1d5db" }
}

/// Neighbouring tokens differ a little, so that rows can be told apart: paler from the first of the block to its last.
fn shade(cell: &Cell) -> f64 {
    let place = cell.tokens.map_or_else(|| u64::from(cell.heads.0) % 16 * 4, |tokens| tokens.0);
    0.95 - 0.5 * points(place % MAX_TOKENS) / points(MAX_TOKENS)
}

fn is_second(cell: &Cell) -> bool {
    matches!(cell.key.role, Role::Value | Role::ValueScale | Role::IndexKey | Role::IndexScale)
}

fn strip(cells: &[Cell], strip: &Strip, side: Side, layers: bool) -> Group {
    let x = if side == Side::Left { STRIPS[0] } else { STRIPS[1] };
    let mut group = Group::new();
    for cell in cells {
        let Some((top, bottom)) = strip.place(cell.region, cell.at, cell.at + cell.bytes) else {
            continue;
        };
        let thin = if bottom - top > 4.0 { 0.6 } else { 0.25 };
        let rectangle = || {
            Rectangle::new()
                .set("x", x)
                .set("y", round(top))
                .set("width", STRIP_WIDTH)
                .set("height", round(bottom - top))
        };
        group = group.add(
            rectangle()
                .set("fill", colour(cell))
                .set("fill-opacity", round(shade(cell)))
                .set("stroke", "#ffffff")
                .set("stroke-width", thin),
        );
        if is_second(cell) {
            group = group.add(rectangle().set("fill", "url(#stripes)"));
        }
    }
    group = labels(group, cells, strip, side, layers);
    for span in &strip.spans {
        let middle = f64::midpoint(span.top, span.bottom);
        if span.gap {
            let left_out = span.end - span.start;
            let what = if left_out == 0 {
                "other memory".to_owned()
            } else {
                format!("{} left out", size::bytes(left_out))
            };
            let x = x + STRIP_WIDTH / 2.0;
            let mark = text("small", x, middle + 3.5, format!("⋮ {what}"));
            group = group.add(mark.set("text-anchor", "middle"));
        }
    }
    group
}

/// Labels beside the strip, and brackets for the blocks beside the labels.
fn labels(mut group: Group, cells: &[Cell], strip: &Strip, side: Side, layers: bool) -> Group {
    let (x, anchor, out) = match side {
        Side::Left => (STRIPS[0] - 8.0, "end", -1.0),
        Side::Right => (STRIPS[1] + STRIP_WIDTH + 8.0, "start", 1.0),
    };
    let mut free = f64::MIN;
    let rows = cells::rows(cells);
    for (start, end) in cells::stretches(&rows) {
        let (first, last) = (&rows[start], &rows[end]);
        let Some((top, bottom)) = strip.place(first.region, first.at, last.at + last.bytes) else {
            continue;
        };
        let y = f64::midpoint(top, bottom) + 3.5;
        if y < free {
            continue;
        }
        free = y + LABEL;
        let class = if first.moved { "label" } else { "small" };
        let words = cells::label(first, last, layers);
        group = group.add(text(class, x, y, words).set("text-anchor", anchor));
    }
    // Blocks, each from its first to its last cell.
    let edge = x + out * 200.0;
    let mut from = 0;
    while from < cells.len() {
        let same =
            |cell: &&Cell| (cell.block, cell.region) == (cells[from].block, cells[from].region);
        let until = from + cells[from..].iter().take_while(same).count();
        let (first, last) = (&cells[from], &cells[until - 1]);
        let top = strip.place(first.region, first.at, first.at + first.bytes);
        let bottom = strip.place(last.region, last.at, last.at + last.bytes);
        if let (Some((top, _)), Some((_, bottom))) = (top, bottom) {
            let data = Data::new()
                .move_to((edge - out * 6.0, round(top + 1.0)))
                .line_to((edge, round(top + 1.0)))
                .line_to((edge, round(bottom - 1.0)))
                .line_to((edge - out * 6.0, round(bottom - 1.0)));
            let bracket = Path::new().set("d", data).set("fill", "none").set("stroke", "#9ca3af");
            let middle = f64::midpoint(top, bottom);
            let name =
                text("label", edge + out * 6.0, middle + 3.5, format!("block {}", first.block));
            group = group.add(bracket).add(name.set("text-anchor", anchor));
        }
        from = until;
    }
    group
}

/// The runs, as ribbons between the strips.
fn ribbons(scene: &Scene<'_>, left: &Strip, right: &Strip) -> Group {
    let (x1, x2) = (STRIPS[0] + STRIP_WIDTH, STRIPS[1]);
    let bend = (x2 - x1) * 0.45;
    let mut group = Group::new();
    for run in &scene.runs {
        for (low, high) in left.drawn(run.remote_region, run.remote_offset, run.bytes) {
            let from = (run.remote_offset + low, run.remote_offset + high);
            let to = (run.local_offset + low, run.local_offset + high);
            let (Some((a, b)), Some((c, d))) = (
                left.place(run.remote_region, from.0, from.1),
                right.place(run.local_region, to.0, to.1),
            ) else {
                continue;
            };
            let inside = |cell: &&Cell| {
                cell.region == run.local_region && cell.at < to.1 && to.0 < cell.at + cell.bytes
            };
            let mut fills = scene.consumer.iter().filter(inside).map(colour);
            let first = fills.next().unwrap_or(MIXED);
            let fill = if fills.all(|fill| fill == first) { first } else { MIXED };
            let data = Data::new()
                .move_to((x1, round(a)))
                .cubic_curve_to((x1 + bend, round(a), x2 - bend, round(c), x2, round(c)))
                .line_to((x2, round(d)))
                .cubic_curve_to((x2 - bend, round(d), x1 + bend, round(b), x1, round(b)))
                .close();
            group = group.add(
                Path::new()
                    .set("d", data)
                    .set("fill", fill)
                    .set("fill-opacity", 0.3)
                    .set("stroke", fill)
                    .set("stroke-opacity", 0.75)
                    .set("stroke-width", 0.7),
            );
        }
    }
    group
}

fn both<'a>(scene: &'a Scene<'_>) -> impl Iterator<Item = &'a Cell> {
    scene.producer.iter().chain(&scene.consumer)
}

fn foot(scene: &Scene<'_>, mut y: f64) -> Group {
    let mut group = Group::new();
    let mut x = 30.0;
    let mut swatch = |group: Group, fill: &str, stripes: bool, words: &str| {
        let width = 44.0 + 5.6 * points(words.chars().count() as u64);
        if x + width > WIDTH {
            (x, y) = (30.0, y + 18.0);
        }
        let rectangle =
            || Rectangle::new().set("x", x).set("y", y - 9.0).set("width", 18).set("height", 11);
        let mut group =
            group.add(rectangle().set("fill", fill)).add(text("label", x + 24.0, y, words));
        if stripes {
            group = group.add(rectangle().set("fill", "url(#stripes)"));
        }
        x += width;
        group
    };
    let mut heads: Vec<u32> =
        scene.consumer.iter().filter(|cell| cell.moved).map(|cell| cell.heads.0).collect();
    heads.sort_unstable();
    heads.dedup();
    for head in heads.iter().take(PALETTE.len()) {
        let fill = PALETTE[*head as usize % PALETTE.len()];
        let alike = !scene.keys.iter().any(|key| cells::has_heads(key.role));
        let words = if alike { "for all heads".to_owned() } else { format!("head {head}") };
        group = swatch(group, fill, false, &words);
    }
    if both(scene).any(is_second) {
        group = swatch(group, "#6b7280", true, "hatched: values, or an index");
    }
    if both(scene).any(|cell| !cell.moved) {
        group = swatch(group, "#d1d5db", false, "grey: other ranks' heads");
    }
    if both(scene).any(|cell| cell.tokens.is_some()) {
        group = swatch(group, "#9ca3af", false, "paler: later token");
    }
    group = swatch(group, "#c1c9d4", false, "ribbon: one run, contiguous on both sides");
    let drawn = scene.runs.len() as u64;
    let all = scene.cost.segments;
    let count = if drawn < all {
        format!("The first {} of the block's {} are drawn.", size::count(drawn), plural(all, "run"))
    } else {
        format!("{} in the block, all drawn.", plural(all, "run"))
    };
    group
        .add(text("what", 30.0, y + 28.0, count))
        .add(text(
            "small",
            30.0,
            y + 48.0,
            "A fabric moves long runs at its full rate and pays for each run: the fewer ribbons, and the wider, the cheaper.",
        ))
}

/// To a hundredth of a point: smaller files.
fn round(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}
