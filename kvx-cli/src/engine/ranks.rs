//! What the ranks of an engine do together with their memory, and what they hear.

use kvx_core::port::Port;
use kvx_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::rank::Rank;
use super::tags::Prompt;
use super::watch::{Changed, Watch};
use super::work::{Checked, Sample, Share};
use super::workers::spread;

/// A request's cache on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Piece {
    pub(crate) rank: usize,
    pub(crate) prompt: Prompt,
    /// Block ids by cache group.
    pub(crate) tables: Vec<Vec<u32>>,
    /// First token that is filled.
    pub(crate) from: u64,
}

/// Blocks of one rank that must not change, by cache group.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Bystanders {
    pub(crate) rank: usize,
    pub(crate) blocks: Vec<Vec<u32>>,
}

/// A notification that must come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Awaited {
    /// Who hears it.
    pub(crate) rank: usize,
    /// Which rank of the other engine sends it.
    pub(crate) from: usize,
    pub(crate) request: u64,
}

/// All ranks of an engine in this process, replica after replica.
#[derive(Debug)]
pub(crate) struct Ranks {
    list: Vec<Rank>,
    watches: Vec<(usize, Watch)>,
}

impl Ranks {
    pub(crate) const fn new(list: Vec<Rank>) -> Self {
        Self { list, watches: Vec::new() }
    }

    /// All of them, in order.
    pub(crate) fn list(&self) -> &[Rank] {
        &self.list
    }

    /// Rank number `number`.
    pub(crate) fn get_mut(&mut self, number: usize) -> Result<&mut Rank> {
        let ranks = self.list.len();
        self.list.get_mut(number).ok_or_else(|| absent(number, ranks))
    }

    fn get(&self, number: usize) -> Result<&Rank> {
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

    /// Takes what has been heard out of `missing`: how much.
    pub(crate) fn hear(&mut self, missing: &mut Vec<Awaited>) -> Result<u64> {
        for rank in &mut self.list {
            rank.listen()?;
        }
        let mut heard = 0;
        let mut error = None;
        missing.retain(|Awaited { rank, from, request }| {
            let Some(rank) = self.list.get_mut(*rank) else { return true };
            match rank.told(*from, *request) {
                Ok(told) => {
                    heard += u64::from(told);
                    !told
                }
                Err(wrong) => {
                    error = Some(wrong);
                    true
                }
            }
        });
        error.map_or(Ok(heard), Err)
    }

    /// Notifications that came and that nobody waited for.
    pub(crate) fn strays(&self) -> usize {
        self.list.iter().map(Rank::strays).sum()
    }

    pub(crate) fn ports(&self) -> impl Iterator<Item = &Port> {
        self.list.iter().map(|rank| &rank.port)
    }
}

impl Piece {
    const fn share(&self) -> Share<'_> {
        Share { prompt: &self.prompt, tables: self.tables.as_slice() }
    }
}

fn absent(rank: usize, ranks: usize) -> Error {
    Error::misuse("engine", "there is no such rank")
        .with_context("rank", rank)
        .with_context("ranks", ranks)
}
