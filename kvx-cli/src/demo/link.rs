//! Joins two engines: lets ranks meet, plans every pair.

use kvx_core::Result;
use kvx_core::layout::RankLayout;
use kvx_core::plan::Pairing;
use kvx_core::transfer::Mode;

use crate::engine::Engine;
use crate::fabric::Fabric;
use crate::pairs::{self, PairPlan};

/// What two replicas have to do with each other: ranks are numbered within their replica.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) pairs: Vec<PairPlan>,
    /// For each producer rank: the consumer ranks that it must hear from.
    pub(crate) rosters: Vec<Vec<usize>>,
}

impl Link {
    /// Plans every pair of a producer's replica and the consumer's replica number `rotation`.
    pub(crate) fn new(
        producers: &[RankLayout],
        consumers: &[RankLayout],
        rotation: u32,
    ) -> Result<Self> {
        let pairing = Pairing::new(producers, consumers, rotation)?;
        let pairs = pairs::compile(&pairing, producers, consumers)?;
        let rosters =
            (0..producers.len()).map(|rank| pairing.roster_of(rank).missing().collect()).collect();
        Ok(Self { pairs, rosters })
    }

    /// Pairs of ranks (producer, consumer) that have something to say to each other.
    fn acquaintances(&self) -> Vec<(usize, usize)> {
        let mut all: Vec<(usize, usize)> = self
            .rosters
            .iter()
            .enumerate()
            .flat_map(|(producer, roster)| roster.iter().map(move |consumer| (producer, *consumer)))
            .chain(self.pairs.iter().map(|pair| (pair.pair.producer, pair.pair.consumer)))
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// Lets all ranks of two replicas meet that have something to say to each other.
pub(crate) fn join(
    fabric: &Fabric,
    link: &Link,
    mode: Mode,
    (producer, from): (&mut Engine, usize),
    (consumer, to): (&mut Engine, usize),
) -> Result<()> {
    let firsts = (producer.first(from), consumer.first(to));
    for (from, to) in link.acquaintances() {
        let (from, to) = (firsts.0 + from, firsts.1 + to);
        match mode {
            Mode::Read => consumer.place.meet(fabric, to, (&mut producer.place, from))?,
            Mode::Write => producer.place.meet(fabric, from, (&mut consumer.place, to))?,
        }
    }
    Ok(())
}
