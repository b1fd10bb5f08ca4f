//! Modes, limits, rotations.

use kvx_core::capability::Limits;
use kvx_core::transfer::Mode;
use proptest::prelude::*;

use crate::planner::Trial;

/// Who carries a scene out, and within which limits: often none, else a few bytes and a few segments.
pub fn trial() -> impl Strategy<Value = Trial> {
    let mode = prop_oneof![Just(Mode::Read), Just(Mode::Write)];
    let bytes = prop_oneof![Just(u64::MAX), 1_u64..40];
    let segments = prop_oneof![Just(u32::MAX), 1_u32..8];
    (mode, bytes, segments, 0_u32..5).prop_map(|(mode, bytes, segments, rotation)| {
        let mut limits = Limits::unlimited();
        limits.max_segment_bytes = bytes;
        limits.max_batch_segments = segments;
        Trial { mode, limits, rotation }
    })
}
