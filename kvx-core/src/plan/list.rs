//! The segments of one request, and what they cost.

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
        let mut runs: Vec<u64> = bytes.into_iter().collect();
        let (Some(&shortest_run), Some(&longest_run)) = (runs.iter().min(), runs.iter().max())
        else {
            return Self::default();
        };
        let middle = (runs.len() - 1) / 2;
        let median_run = *runs.select_nth_unstable(middle).1;
        Self {
            segments: runs.len() as u64,
            bytes: runs.iter().sum(),
            shortest_run,
            median_run,
            longest_run,
        }
    }
}
