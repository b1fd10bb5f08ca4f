//! What a rank's worker is made of.

use std::sync::Arc;

use kvx_core::backend::TransferBackend;
use kvx_core::card::{Address, EngineName};
use kvx_core::facts::Facts;
use kvx_core::id::Incarnation;
use kvx_core::layout::RankLayout;
use kvx_core::memory::Region;

use super::CopyBlocks;
use crate::control::Security;
use crate::protocol::peers::Choosing;

/// What a rank's worker is made of.
#[derive(Debug)]
#[non_exhaustive]
pub struct WorkerSetup {
    /// The engine's name.
    pub engine: EngineName,
    /// The engine's life: that of its scheduler
    /// ([`SchedulerConnector::with_incarnation`](crate::scheduler::SchedulerConnector::with_incarnation)). Whoever starts the
    /// engine's processes draws it, so that a worker can be there before the scheduler is.
    pub life: Incarnation,
    /// Where this rank's control channel listens: a host, and a port of 0 to take any. That of the rank that serves the engine's
    /// cards is what tickets name.
    pub listen: Address,
    /// Who may talk to it.
    pub security: Security,
    /// What must be equal on both sides.
    pub facts: Facts,
    /// The rank's layout: of the host's buffer, where caches go through one.
    pub layout: RankLayout,
    /// Its memory, in the layout's order.
    pub regions: Vec<Region>,
    /// Its backends.
    pub backends: Vec<Arc<dyn TransferBackend>>,
    /// Which of them for whom.
    pub choosing: Box<dyn Choosing>,
    /// The engine's copy functions, where caches go through a buffer of the host: then the scheduler's
    /// [`host_buffer`](crate::scheduler::SchedulerConfig::host_buffer) is to be set, too.
    pub copies: Option<Box<dyn CopyBlocks>>,
    /// Whether digests are compared before what was loaded is confirmed.
    pub digests: bool,
}

impl WorkerSetup {
    /// A worker without a host's buffer and without digests.
    #[must_use]
    pub fn new(
        (engine, life): (EngineName, Incarnation),
        (listen, security): (Address, Security),
        facts: Facts,
        (layout, regions): (RankLayout, Vec<Region>),
        (backends, choosing): (Vec<Arc<dyn TransferBackend>>, Box<dyn Choosing>),
    ) -> Self {
        let (copies, digests) = (None, false);
        Self {
            engine,
            life,
            listen,
            security,
            facts,
            layout,
            regions,
            backends,
            choosing,
            copies,
            digests,
        }
    }

    /// With the engine's copy functions: caches go through a buffer of the host.
    #[must_use]
    pub fn with_copies(mut self, copies: Box<dyn CopyBlocks>) -> Self {
        self.copies = Some(copies);
        self
    }

    /// With digests compared, or not.
    #[must_use]
    pub const fn with_digests(mut self, digests: bool) -> Self {
        self.digests = digests;
        self
    }
}
