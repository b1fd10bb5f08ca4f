//! One rank's memory as a strip from top to bottom: where each byte is drawn.

use super::cells::Cell;

/// Height of the mark that stands for memory left out.
pub(super) const GAP: f64 = 18.0;

/// A stretch of memory that is drawn to scale, or the mark for one that is not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Span {
    pub(super) region: u32,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) top: f64,
    pub(super) bottom: f64,
    /// Left out: between two that are drawn.
    pub(super) gap: bool,
}

/// The memory that `cells` take, everything else left out.
#[derive(Clone, Debug, Default)]
pub(super) struct Strip {
    pub(super) spans: Vec<Span>,
}

impl Strip {
    /// Draws `cells` (sorted by where they lie) from `top` on, at `scale` points per byte.
    pub(super) fn new(cells: &[Cell], top: f64, scale: f64) -> Self {
        let mut spans: Vec<Span> = Vec::new();
        let mut y = top;
        for cell in cells {
            let end = cell.at + cell.bytes;
            if let Some(last) = spans.last_mut() {
                if last.region == cell.region && last.end >= cell.at {
                    y += height(end.saturating_sub(last.end), scale);
                    last.end = last.end.max(end);
                    last.bottom = y;
                    continue;
                }
                let before = if last.region == cell.region { last.end } else { cell.at };
                let gap = Span {
                    region: cell.region,
                    start: before,
                    end: cell.at,
                    top: y,
                    bottom: y + GAP,
                    gap: true,
                };
                spans.push(gap);
                y += GAP;
            }
            let bottom = y + height(cell.bytes, scale);
            spans.push(Span {
                region: cell.region,
                start: cell.at,
                end,
                top: y,
                bottom,
                gap: false,
            });
            y = bottom;
        }
        Self { spans }
    }

    /// Where the strip ends.
    pub(super) fn bottom(&self) -> f64 {
        self.spans.last().map_or(0.0, |span| span.bottom)
    }

    /// Bytes drawn and marks for what is left out: what the height is made of.
    pub(super) fn extent(&self) -> (u64, usize) {
        let drawn = self.spans.iter().filter(|span| !span.gap);
        let gaps = self.spans.iter().filter(|span| span.gap).count();
        (drawn.map(|span| span.end - span.start).sum(), gaps)
    }

    /// Where a range of bytes is drawn, if all of it is.
    pub(super) fn place(&self, region: u32, start: u64, end: u64) -> Option<(f64, f64)> {
        let span = self.spans.iter().find(|span| {
            !span.gap && span.region == region && span.start <= start && end <= span.end
        })?;
        let bytes = height(span.end - span.start, 1.0);
        let y =
            |at: u64| span.top + (span.bottom - span.top) * height(at - span.start, 1.0) / bytes;
        Some((y(start), y(end)))
    }

    /// The parts of a range of bytes that are drawn, as offsets from its start.
    pub(super) fn drawn(&self, region: u32, start: u64, bytes: u64) -> Vec<(u64, u64)> {
        self.spans
            .iter()
            .filter(|span| !span.gap && span.region == region)
            .filter_map(|span| {
                let (low, high) = (span.start.max(start), span.end.min(start + bytes));
                (low < high).then(|| (low - start, high - start))
            })
            .collect()
    }
}

/// Points that so many bytes take.
#[expect(clippy::cast_precision_loss, reason = "for drawing, far below 2^53 bytes")]
fn height(bytes: u64, scale: f64) -> f64 {
    bytes as f64 * scale
}
