//! Joins two engines: lets ranks meet, plans every pair.

use std::time::Duration;

use kvx_core::Result;
use kvx_core::layout::RankLayout;
use kvx_core::plan::Pairing;
use kvx_core::transfer::Mode;

use crate::engine::Replica;
use crate::engine::rank::meet;
use crate::fabric::Fabric;
use crate::pairs::{self, PairPlan};

/// Longest time for two ranks to connect.
const CONNECT: Duration = Duration::from_secs(30);

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

/// Lets all ranks of two replicas meet that have something to say to each other. Numbers count over all replicas: those of
/// the producer begin at `first_producer`.
pub(crate) fn join(
    fabric: &Fabric,
    link: &Link,
    mode: Mode,
    (producer, first_producer): (&mut Replica, usize),
    (consumer, first_consumer): (&mut Replica, usize),
) -> Result<()> {
    for (from, to) in link.acquaintances() {
        let source = (&mut producer.ranks[from], first_producer + from);
        let reader = (&mut consumer.ranks[to], first_consumer + to);
        let met = match mode {
            Mode::Read => meet(reader, source, CONNECT),
            Mode::Write => meet(source, reader, CONNECT),
        };
        fabric.runtime.block_on(met)?;
    }
    Ok(())
}
