//! What the benchmarks share: two engines and their block tables.

use kvx_core::Result;
use kvx_core::layout::{Grid, LayoutBuilder, ModelGeometry, NamedLayout, RankLayout};
use kvx_core::plan::{BlockTable, Pairing, PeerPlan, Request};

/// How a request's blocks lie in the cache.
#[derive(Clone, Copy, Debug)]
pub enum Blocks {
    /// One after the other on both sides.
    Contiguous,
    /// No two neighbours are consecutive on both sides.
    Permuted,
}

/// One rank of a model's engine.
#[derive(Clone, Copy, Debug)]
pub struct Side {
    /// Layout.
    pub layout: NamedLayout,
    /// Tokens per block.
    pub block_tokens: u32,
}

impl Side {
    /// This layout with blocks of 16 tokens.
    #[must_use]
    pub const fn new(layout: NamedLayout) -> Self {
        Self { layout, block_tokens: 16 }
    }

    /// Another block size.
    #[must_use]
    pub const fn block_tokens(mut self, tokens: u32) -> Self {
        self.block_tokens = tokens;
        self
    }
}

/// A producer rank and a consumer rank that hold all heads of a model, and a request of `tokens` tokens.
#[derive(Debug)]
pub struct Pair {
    /// The producer's layout.
    pub producer: RankLayout,
    /// The consumer's layout.
    pub consumer: RankLayout,
    /// What they share.
    pub pairing: Pairing,
    tokens: u64,
    from: Vec<u32>,
    to: Vec<u32>,
}

impl Pair {
    /// Two ranks of `model` with a cache of `pool` tokens each.
    ///
    /// # Errors
    ///
    /// As the constructors that it calls.
    pub fn new(
        model: &str,
        (producer, consumer): (Side, Side),
        blocks: Blocks,
        tokens: u32,
        pool: u32,
    ) -> Result<Self> {
        let model = ModelGeometry::preset(model)?;
        let rank = |side: Side| -> Result<RankLayout> {
            let count = pool.div_ceil(side.block_tokens);
            let builder = LayoutBuilder::new(&model, side.layout)
                .block_tokens(side.block_tokens)
                .blocks(count);
            Ok(builder.build_replica(Grid::new(1, 1, 1)?, 0)?.remove(0))
        };
        let count = |side: Side| tokens.div_ceil(side.block_tokens);
        let mut from: Vec<u32> = (0..count(producer)).collect();
        let to: Vec<u32> = (0..count(consumer)).collect();
        if matches!(blocks, Blocks::Permuted) {
            from.reverse();
        }
        let (producer, consumer) = (rank(producer)?, rank(consumer)?);
        let pairing =
            Pairing::new(std::slice::from_ref(&producer), std::slice::from_ref(&consumer), 0)?;
        Ok(Self { producer, consumer, pairing, tokens: tokens.into(), from, to })
    }

    /// The compiled plan.
    ///
    /// # Errors
    ///
    /// As [`PeerPlan::compile`].
    pub fn plan(&self) -> Result<PeerPlan> {
        PeerPlan::compile(&self.producer, &self.consumer, &self.pairing.pairs()[0])
    }

    /// Calls `use_it` with the whole request.
    pub fn with_request<T>(&self, use_it: impl FnOnce(&Request<'_>) -> T) -> T {
        let (from, to) = ([BlockTable::new(&self.from)], [BlockTable::new(&self.to)]);
        use_it(&Request::whole(self.tokens, &from, &to))
    }
}
