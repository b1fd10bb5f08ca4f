//! One request between two engines.

use std::ops::Range;

use kvx_core::layout::{RankLayout, Tensor, TensorKey};
use kvx_core::plan::{BlockTable, Request};

/// A block table that owns its ids: see [`BlockTable`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Logical block of the request that the first entry stands for.
    pub first: u64,
    /// Ids of logical blocks, in token order.
    pub ids: Vec<u32>,
}

impl Table {
    /// A table that begins with the request's first token.
    #[must_use]
    pub fn new(ids: impl Into<Vec<u32>>) -> Self {
        Self { first: 0, ids: ids.into() }
    }

    /// The same as the planner takes it.
    #[must_use]
    pub fn borrowed(&self) -> BlockTable<'_> {
        BlockTable::starting_at(self.first, &self.ids)
    }
}

/// One engine: all ranks of one of its replicas, and the request's block tables.
#[derive(Clone, Debug)]
pub struct Side {
    /// Layouts of the ranks.
    pub ranks: Vec<RankLayout>,
    /// One table per cache group. All ranks of an engine use the same.
    pub tables: Vec<Table>,
}

impl Side {
    /// The tables as the planner takes them.
    #[must_use]
    pub fn borrowed_tables(&self) -> Vec<BlockTable<'_>> {
        self.tables.iter().map(Table::borrowed).collect()
    }

    /// The tensor of this name on the first rank that holds it.
    pub(crate) fn any_tensor(&self, key: TensorKey) -> Option<(&RankLayout, &Tensor)> {
        self.ranks.iter().find_map(|rank| {
            let tensor = rank.tensors().iter().find(|tensor| tensor.key() == key)?;
            Some((rank, tensor))
        })
    }
}

/// One request between two engines, or a part of one.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The engine that has the request's cache.
    pub producer: Side,
    /// The engine that needs it.
    pub consumer: Side,
    /// Tokens that the request has in its cache.
    pub tokens: u64,
    /// Which of them are asked for.
    pub range: Range<u64>,
    /// Which global layers are asked for.
    pub layers: Range<u32>,
}

impl Scene {
    /// Asks the planner's question. The tables are those of [`Side::borrowed_tables`].
    #[must_use]
    pub fn request<'a>(
        &self,
        producer: &'a [BlockTable<'a>],
        consumer: &'a [BlockTable<'a>],
    ) -> Request<'a> {
        Request::whole(self.tokens, producer, consumer)
            .with_range(self.range.clone())
            .with_layers(self.layers.clone())
    }
}
