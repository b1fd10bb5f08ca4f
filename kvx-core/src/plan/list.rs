//! The segments of one request, and what they cost.

use std::collections::BTreeMap;

use super::fold::Folded;
use super::pieces::Piece;
use crate::capability::Limits;
use crate::transfer::Segment;

/// Segments of one request: filled by [`PeerPlan::segments`](super::PeerPlan::segments), reused for the next.
#[derive(Clone, Debug)]
pub struct SegmentList {
    pub(super) segments: Vec<Segment>,
    /// For sorting.
    pub(super) scratch: Vec<Segment>,
    /// By class of the plan.
    pub(super) pieces: Vec<Vec<Piece>>,
    pub(super) folds: Vec<Option<(u32, Folded)>>,
    pub(super) batch: usize,
}

impl Default for SegmentList {
    fn default() -> Self {
        Self {
            segments: Vec::new(),
            scratch: Vec::new(),
            pieces: Vec::new(),
            folds: Vec::new(),
            batch: usize::MAX,
        }
    }
}

impl SegmentList {
    /// An empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The segments: those of a region together, sorted by where they are written.
    #[must_use]
    pub fn as_slice(&self) -> &[Segment] {
        &self.segments
    }

    /// The segments in batches of as many as the limits allowed.
    pub fn batches(&self) -> impl Iterator<Item = &[Segment]> {
        self.segments.chunks(self.batch)
    }

    /// How many segments there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// Whether nothing is to be moved.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Sum over the segments, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }

    /// What they cost.
    #[must_use]
    pub fn cost(&self) -> Cost {
        Cost::of(self.segments.iter().map(|segment| segment.bytes))
    }

    pub(super) fn set_limits(&mut self, limits: &Limits) {
        self.batch = usize::try_from(limits.max_batch_segments).unwrap_or(usize::MAX).max(1);
    }
}

/// What a list of segments costs, for a policy to weigh: short runs are dear on every fabric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Cost {
    /// How many segments.
    pub segments: u64,
    /// Bytes in all.
    pub bytes: u64,
    /// Bytes of the shortest segment; 0 where there are none.
    pub shortest_run: u64,
    /// Bytes of the middle segment by length (the lower one of two); 0 where there are none.
    pub median_run: u64,
    /// Bytes of the longest segment; 0 where there are none.
    pub longest_run: u64,
}

impl Cost {
    /// The cost of segments of these many bytes each.
    #[must_use]
    pub fn of(bytes: impl IntoIterator<Item = u64>) -> Self {
        let mut counts = BTreeMap::new();
        count_lengths(bytes, &mut counts);
        Self::of_counts(&counts)
    }

    /// The cost of segments that were [counted](count_lengths) by their length in bytes.
    #[must_use]
    pub fn of_counts(counts: &BTreeMap<u64, u64>) -> Self {
        let segments: u64 = counts.values().sum();
        let (Some((&shortest_run, _)), Some((&longest_run, _))) =
            (counts.first_key_value(), counts.last_key_value())
        else {
            return Self::default();
        };
        let middle = segments.saturating_sub(1) / 2;
        let mut before = 0;
        let median_run = counts.iter().find(|(_, count)| {
            before += *count;
            before > middle
        });
        Self {
            segments,
            bytes: counts.iter().map(|(length, count)| length * count).sum(),
            shortest_run,
            median_run: median_run.map_or(longest_run, |(length, _)| *length),
            longest_run,
        }
    }
}

/// Adds segments of these many bytes each to those counted by length so far. Lists have few lengths, most of them many times
/// over, so this takes next to no memory, however many segments there are.
pub fn count_lengths(bytes: impl IntoIterator<Item = u64>, counts: &mut BTreeMap<u64, u64>) {
    let mut add = |(length, count): (u64, u64)| {
        if count > 0 {
            *counts.entry(length).or_insert(0) += count;
        }
    };
    let mut same = (0, 0);
    for length in bytes {
        if length != same.0 {
            add(std::mem::replace(&mut same, (length, 0)));
        }
        same.1 += 1;
    }
    add(same);
}
