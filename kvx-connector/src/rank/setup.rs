//! What a rank is made of.

use std::sync::Arc;

use kvx_core::backend::TransferBackend;
use kvx_core::card::{Address, EngineName};
use kvx_core::facts::Facts;
use kvx_core::id::Incarnation;
use kvx_core::layout::RankLayout;
use kvx_core::memory::Region;
use kvx_core::{Error, Result};

use crate::protocol::peers::{self, Choosing};
use crate::protocol::{owner, user};

/// What a rank is made of.
#[derive(Debug)]
#[non_exhaustive]
pub struct RankSetup {
    /// The engine.
    pub engine: EngineName,
    /// This life of the rank: what its control channel says, too.
    pub incarnation: Incarnation,
    /// The life of the engine, drawn by its scheduler: the same for all ranks.
    pub life: Incarnation,
    /// Where this rank's control channel listens.
    pub control: Address,
    /// What must be equal on both sides.
    pub facts: Facts,
    /// This rank's layout.
    pub layout: RankLayout,
    /// The layouts of all ranks of its replica, in order, this one's included.
    pub replica: Vec<RankLayout>,
    /// Its memory, in the layout's order.
    pub regions: Vec<Region>,
    /// The backends to be used.
    pub backends: Vec<Arc<dyn TransferBackend>>,
    /// Which of them for whom.
    pub choosing: Box<dyn Choosing>,
    /// Bounds of the machine that knows peers.
    pub peers: peers::Limits,
    /// Bounds of the machine that grants.
    pub owner: owner::Config,
    /// Bounds of the machine that uses leases.
    pub user: user::Config,
    /// Where chance begins: drawn at random, but for simulations.
    pub seed: u64,
    /// A fault of the machines of leases: to show that it would be found.
    #[cfg(feature = "sim")]
    pub plant: Option<crate::protocol::Plant>,
}

impl RankSetup {
    /// A rank with the usual bounds, that reaches others by the given backends.
    #[must_use]
    pub fn new(
        (engine, incarnation, life): (EngineName, Incarnation, Incarnation),
        control: Address,
        facts: Facts,
        (layout, regions): (RankLayout, Vec<Region>),
        backends: Vec<Arc<dyn TransferBackend>>,
        choosing: Box<dyn Choosing>,
        seed: u64,
    ) -> Self {
        Self {
            engine,
            incarnation,
            life,
            control,
            facts,
            replica: vec![layout.clone()],
            layout,
            regions,
            backends,
            choosing,
            peers: peers::Limits::default(),
            owner: owner::Config::new(life),
            user: user::Config::default(),
            seed,
            #[cfg(feature = "sim")]
            plant: None,
        }
    }

    /// With the layouts of all ranks of the replica.
    #[must_use]
    pub fn with_replica(mut self, layouts: Vec<RankLayout>) -> Self {
        self.replica = layouts;
        self
    }
}

pub(super) fn check_regions(layout: &RankLayout, regions: &[Region]) -> Result<()> {
    if layout.regions().len() != regions.len() {
        return Err(Error::config("rank", "the layout has another number of regions")
            .with_context("layout", layout.regions().len())
            .with_context("regions", regions.len()));
    }
    for (index, (spec, region)) in layout.regions().iter().zip(regions).enumerate() {
        if region.bytes() < spec.bytes || region.kind() != spec.memory {
            return Err(Error::config(
                "rank",
                "a region is smaller than its layout says, or of another kind",
            )
            .with_context("region", index)
            .with_context("layout", format!("{} bytes of {}", spec.bytes, spec.memory))
            .with_context("memory", format!("{} bytes of {}", region.bytes(), region.kind())));
        }
    }
    Ok(())
}
