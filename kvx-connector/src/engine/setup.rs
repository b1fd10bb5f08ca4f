//! What an engine is made of.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::TransferBackend;
use kvx_core::card::{Address, EngineName};
use kvx_core::facts::Facts;
use kvx_core::layout::RankLayout;
use kvx_core::memory::Region;

use crate::control::Security;
use crate::protocol::peers::Choosing;

/// What an engine is made of.
#[derive(Debug)]
pub struct EngineSetup {
    /// Its name.
    pub name: EngineName,
    /// Where its control channels listen: a host, and a port of 0 to take any. The first rank's serves the cards.
    pub listen: Address,
    /// Who may talk to it.
    pub security: Security,
    /// What must be equal on both sides.
    pub facts: Facts,
    /// Its ranks, in the order of the replica.
    pub ranks: Vec<RankParts>,
    /// For how long a lease holds without a heartbeat.
    pub ttl: Duration,
    /// For how long a lease holds at most.
    pub hard: Duration,
    /// Within which time a fetch must end.
    pub deadline: Duration,
    /// Whether digests are compared before what was fetched is confirmed.
    pub digests: bool,
}

/// One rank.
pub struct RankParts {
    /// Its layout.
    pub layout: RankLayout,
    /// Its memory, in the layout's order.
    pub regions: Vec<Region>,
    /// Its backends.
    pub backends: Vec<Arc<dyn TransferBackend>>,
    /// Which of them for whom.
    pub choosing: Box<dyn Choosing>,
}

impl fmt::Debug for RankParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankParts")
            .field("coords", self.layout.coords())
            .field("regions", &self.regions.len())
            .field("backends", &self.backends)
            .finish_non_exhaustive()
    }
}

impl EngineSetup {
    /// An engine with the usual times: leases of 30 s, an hour at most, fetches within 60 s.
    #[must_use]
    pub const fn new(
        name: EngineName,
        listen: Address,
        security: Security,
        facts: Facts,
        ranks: Vec<RankParts>,
    ) -> Self {
        Self {
            name,
            listen,
            security,
            facts,
            ranks,
            ttl: Duration::from_secs(30),
            hard: Duration::from_secs(3600),
            deadline: Duration::from_secs(60),
            digests: false,
        }
    }
}
