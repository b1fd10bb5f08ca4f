//! What the ranks of an engine do together with their memory, and what they hear.

use kvx_core::Result;
use kvx_core::port::Port;
use serde::{Deserialize, Serialize};

use super::memories::{Memories, RankMemory, absent};
use super::rank::Rank;
use super::tags::Prompt;
use super::work::Share;

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
    pub(crate) memories: Memories,
}

impl Ranks {
    pub(crate) fn new(list: Vec<Rank>) -> Self {
        let memory =
            |rank: &Rank| RankMemory { layout: rank.layout.clone(), regions: rank.regions.clone() };
        let memories = Memories::new(list.iter().map(memory).collect());
        Self { list, memories }
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
    pub(super) const fn share(&self) -> Share<'_> {
        Share { prompt: &self.prompt, tables: self.tables.as_slice() }
    }
}
