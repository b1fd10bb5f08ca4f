//! Whether there is memory for what is measured.

use kvx_core::layout::RankLayout;
use kvx_core::{Error, ErrorKind, Result};

use super::busy;
use crate::memory;
use crate::pairs::PairPlan;
use crate::size;

/// What there is to be memory for besides the caches of both engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    Nothing,
    /// Copies of the caches of each two ranks that meet, which show what the machine can do, and those that every core makes.
    Limits,
}

/// Bytes of a rank's cache.
fn bytes(layout: &RankLayout) -> u64 {
    sum(layout.regions().iter().map(|region| region.bytes))
}

fn sum(all: impl Iterator<Item = u64>) -> u64 {
    all.fold(0, u64::saturating_add)
}

/// Refuses what there is no memory for. Without this the system would end some process.
///
/// # Errors
///
/// [`ErrorKind::Resources`], with how much there is.
pub(super) fn check(
    producers: &[RankLayout],
    consumers: &[RankLayout],
    pairs: &[PairPlan],
    beside: Beside,
) -> Result<()> {
    let caches = producers.iter().chain(consumers).map(bytes);
    let copied = pairs.iter().map(|pair| {
        let (producer, consumer) = (pair.pair.producer, pair.pair.consumer);
        bytes(&producers[producer]).saturating_add(bytes(&consumers[consumer]))
    });
    let needed = match beside {
        Beside::Nothing => sum(caches),
        Beside::Limits => sum(caches.chain(copied).chain([busy::bytes()])),
    };
    match memory::free() {
        Some(free) if needed > free => {
            Err(Error::new(ErrorKind::Resources, "bench", "there is too little memory")
                .with_context("needed", size::bytes(needed))
                .with_context("free", size::bytes(free))
                .with_remedy(memory::remedy(
                    free,
                    "",
                    "give fewer --tokens, smaller pools (blocks=N), or a smaller --model",
                )))
        }
        _ => Ok(()),
    }
}
