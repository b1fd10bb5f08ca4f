//! All pairs of ranks of two engines, ready to list segments.

use kvx_core::Result;
use kvx_core::layout::RankLayout;
use kvx_core::plan::{Pair, Pairing, PeerPlan};

/// One producer rank and one consumer rank, and the plan between them.
#[derive(Clone, Debug)]
pub(crate) struct PairPlan {
    /// Which ranks, and what one gives the other.
    pub(crate) pair: Pair,
    /// How their layouts map.
    pub(crate) plan: PeerPlan,
}

/// Compiles the plan of every pair of `pairing`.
///
/// # Errors
///
/// As for [`PeerPlan::compile`]: the two layouts cannot be mapped onto each other.
pub(crate) fn compile(
    pairing: &Pairing,
    producers: &[RankLayout],
    consumers: &[RankLayout],
) -> Result<Vec<PairPlan>> {
    pairing
        .pairs()
        .iter()
        .map(|pair| {
            let plan =
                PeerPlan::compile(&producers[pair.producer], &consumers[pair.consumer], pair)?;
            Ok(PairPlan { pair: pair.clone(), plan })
        })
        .collect()
}
