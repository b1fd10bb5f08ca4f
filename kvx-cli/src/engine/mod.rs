//! Two engines in miniature: ranks with memory and a port each, a block allocator, and requests whose every element is
//! known.

use kvx_core::layout::RankLayout;
use kvx_core::transfer::Mode;

pub(crate) mod live;
pub(crate) mod memories;
pub(crate) mod place;
pub(crate) mod pool;
pub(crate) mod rank;
pub(crate) mod ranks;
pub(crate) mod sweep;
pub(crate) mod tags;
#[cfg(test)]
mod tests;
pub(crate) mod watch;
pub(crate) mod work;
pub(crate) mod workers;

use place::Place;
use pool::Pool;

/// One engine: its data parallel replicas, and all their ranks.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) replicas: Vec<Replica>,
    pub(crate) place: Place,
}

/// One data parallel replica: its blocks, and the layouts of its ranks.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) pool: Pool,
    pub(crate) layouts: Vec<RankLayout>,
}

impl Engine {
    /// An engine with these replicas, whose ranks are at `place`.
    pub(crate) fn new(replicas: Vec<Vec<RankLayout>>, place: Place) -> Self {
        let replica = |layouts: Vec<RankLayout>| Replica { pool: Pool::new(&layouts), layouts };
        Self { replicas: replicas.into_iter().map(replica).collect(), place }
    }

    /// Number of the first rank of a replica. All replicas have as many.
    pub(crate) fn first(&self, replica: usize) -> usize {
        replica * self.replicas.first().map_or(0, |first| first.layouts.len())
    }

    /// Ranks of a replica, by number.
    pub(crate) fn numbers(&self, replica: usize) -> std::ops::Range<usize> {
        self.first(replica)..self.first(replica + 1)
    }
}

/// The engine that starts transfers.
pub(crate) const fn initiator(mode: Mode) -> &'static str {
    match mode {
        Mode::Read => "consumer",
        Mode::Write => "producer",
    }
}
