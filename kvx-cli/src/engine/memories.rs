//! The memory of an engine's ranks, and what is done with it together.

use kvx_core::layout::RankLayout;
use kvx_core::memory::Region;
use kvx_core::{Error, Result};

use super::ranks::{Bystanders, Piece};
use super::watch::{Changed, Watch};
use super::work::{Checked, Sample};
use super::workers::spread;

/// One rank's memory.
#[derive(Clone, Debug)]
pub(crate) struct RankMemory {
    pub(crate) layout: RankLayout,
    /// In the layout's order.
    pub(crate) regions: Vec<Region>,
}

/// The memory of all ranks of an engine, replica after replica.
#[derive(Debug)]
pub(crate) struct Memories {
    list: Vec<RankMemory>,
    watches: Vec<(usize, Watch)>,
}

impl Memories {
    pub(crate) const fn new(list: Vec<RankMemory>) -> Self {
        Self { list, watches: Vec::new() }
    }

    fn get(&self, number: usize) -> Result<&RankMemory> {
        self.list.get(number).ok_or_else(|| absent(number, self.list.len()))
    }

    /// Writes tags.
    pub(crate) fn fill(&self, pieces: &[Piece]) -> Result<()> {
        spread(pieces, |worker, piece| {
            let rank = self.get(piece.rank)?;
            worker.fill(&rank.layout, &rank.regions, piece.share(), piece.from)
        })?;
        Ok(())
    }

    /// Compares tags, piece by piece.
    pub(crate) fn check(&self, pieces: &[Piece]) -> Result<Vec<Checked>> {
        spread(pieces, |worker, piece| {
            let rank = self.get(piece.rank)?;
            worker.check(&rank.layout, &rank.regions, piece.share())
        })
    }

    /// Watches blocks until [`changed`](Self::changed) is asked: how many.
    pub(crate) fn watch(&mut self, bystanders: &[Bystanders]) -> Result<u64> {
        self.watches = spread(bystanders, |_, Bystanders { rank, blocks }| {
            let known = self.get(*rank)?;
            Ok((*rank, Watch::new(&known.layout, &known.regions, blocks)?))
        })?;
        Ok(self.watches.iter().map(|(_, watch)| watch.len() as u64).sum())
    }

    /// Those that changed, by rank.
    pub(crate) fn changed(&mut self) -> Result<Vec<(usize, Changed)>> {
        let mut all = Vec::new();
        for (rank, watch) in std::mem::take(&mut self.watches) {
            let known = self.get(rank)?;
            let changed = watch.changed(&known.layout, &known.regions)?;
            all.extend(changed.into_iter().map(|changed| (rank, changed)));
        }
        Ok(all)
    }

    /// Flips a bit of an element.
    pub(crate) fn flip(&self, rank: usize, sample: &Sample) -> Result<()> {
        let rank = self.get(rank)?;
        let region = &rank.regions[sample.region as usize];
        let mut byte = [0];
        region.read_at(sample.offset, &mut byte)?;
        byte[0] ^= 0x10;
        region.write_at(sample.offset, &byte)
    }
}

pub(super) fn absent(rank: usize, ranks: usize) -> Error {
    Error::misuse("engine", "there is no such rank")
        .with_context("rank", rank)
        .with_context("ranks", ranks)
}
