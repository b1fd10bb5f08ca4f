//! Two engines in miniature: ranks with memory and a port each, a block allocator, and requests whose every element is
//! known.

use kvx_core::Result;
use kvx_core::layout::RankLayout;
use kvx_core::port::Port;

pub(crate) mod pool;
pub(crate) mod rank;
pub(crate) mod sweep;
pub(crate) mod tags;
#[cfg(test)]
mod tests;
pub(crate) mod watch;
pub(crate) mod work;

use pool::Pool;
use rank::Rank;

/// One data parallel replica of an engine.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) pool: Pool,
    pub(crate) ranks: Vec<Rank>,
}

impl Replica {
    /// Makes the memory of ranks with these layouts, each with a port of its own.
    pub(crate) fn new(
        layouts: Vec<RankLayout>,
        mut port: impl FnMut() -> Result<Port>,
    ) -> Result<Self> {
        let pool = Pool::new(&layouts);
        let ranks =
            layouts.into_iter().map(|layout| Rank::new(layout, port()?)).collect::<Result<_>>()?;
        Ok(Self { pool, ranks })
    }
}
