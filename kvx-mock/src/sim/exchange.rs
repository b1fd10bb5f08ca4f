//! The scenario: engines that move data among each other while everything goes wrong.

use std::fmt;
use std::sync::Arc;

use kvx_core::backend::TransferBackend;

use super::driver::World;
use super::violation::Failure;
use crate::backend::MockBackend;
use crate::fabric::Fabric;
use crate::preset::Preset;

/// Entries of the event log that a failure shows.
const TAIL: usize = 60;

/// Four engines that read and write each other's memory, under [`Weather`](super::Weather), held to the contract by a
/// [`Checker`](super::Checker).
///
/// Each has met the three others. They post reads and writes of one to four segments with tags that nobody else has, with and
/// without notifications, and bare notifications; they use their memory again as soon as it is theirs; they cancel, sever and
/// revoke, use stale handles, are killed, come again and meet again. Rules, partitions, flapping links and stopped processes
/// come and go, up to four rules at a time; in one seed of eight every rule is installed at once and all the time, each with a
/// small chance. What is stale, over a limit or of another incarnation is tried, and must be refused. In the end all faults end, everything must settle within a bound of virtual time, and after closing nothing
/// may be left.
///
/// The preset is one of `rc`, `efa`, `ucx-tcp`, and two with tiny limits and little room, by the seed.
pub struct Exchange<'a> {
    pub(super) seed: u64,
    pub(super) steps: u32,
    pub(super) preset: Preset,
    pub(super) wrap: Box<Wrap<'a>>,
}

/// Puts something between the scenario and a backend.
pub(super) type Wrap<'a> = dyn Fn(Arc<MockBackend>) -> Arc<dyn TransferBackend> + 'a;

/// What happened in a run that broke nothing.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The fabric, with its [log](Fabric::log) and [digest](Fabric::digest).
    pub fabric: Fabric,
    /// Transfers that were posted.
    pub posted: u64,
    /// Posts that were refused, or for which there was no room.
    pub refused: u64,
    /// Transfers that settled as done.
    pub done: u64,
    /// Transfers that settled otherwise.
    pub undone: u64,
    /// Notifications that arrived.
    pub notified: u64,
    /// Connections that ended, counted on each side that lived to hear of it.
    pub downs: u64,
    /// Engines that were killed.
    pub killed: u64,
}

impl<'a> Exchange<'a> {
    /// The run of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed, steps: 200, preset: preset(seed), wrap: Box::new(|backend| backend) }
    }

    /// Takes this many steps before the faults end; 200 unless said.
    #[must_use]
    pub fn steps(mut self, steps: u32) -> Self {
        self.steps = steps;
        self
    }

    /// With this preset, whatever the seed.
    #[must_use]
    pub fn preset(mut self, preset: Preset) -> Self {
        self.preset = preset;
        self
    }

    /// Puts something between the scenario and each backend: to show that a fault is found.
    #[must_use]
    pub fn wrap(
        mut self,
        wrap: impl Fn(Arc<MockBackend>) -> Arc<dyn TransferBackend> + 'a,
    ) -> Self {
        self.wrap = Box::new(wrap);
        self
    }

    /// Runs it.
    ///
    /// # Errors
    ///
    /// The first promise that was broken.
    pub fn run(self) -> Result<Report, Box<Failure>> {
        let seed = self.seed;
        let fabric = Fabric::manual(seed);
        World::run(&fabric, self).map_err(|violation| {
            let (at, log) = (fabric.now(), fabric.log_tail(TAIL));
            Box::new(Failure { seed, at, violation, log })
        })
    }
}

impl fmt::Debug for Exchange<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange")
            .field("seed", &self.seed)
            .field("steps", &self.steps)
            .field("preset", &self.preset.name())
            .finish_non_exhaustive()
    }
}

fn preset(seed: u64) -> Preset {
    let tiny = |like: Preset, room| {
        let mut capabilities = like.capabilities().clone();
        capabilities.limits.max_segment_bytes = 24;
        capabilities.limits.max_batch_segments = 2;
        capabilities.limits.max_notification_bytes = 8;
        capabilities.limits.max_in_flight = 2;
        let custom = Preset::custom(capabilities).unwrap_or(like);
        custom.with_most_notifications(room)
    };
    match seed % 5 {
        0 => Preset::rc(),
        1 => Preset::efa(),
        2 => Preset::ucx_tcp(),
        3 => tiny(Preset::rc(), 1),
        _ => tiny(Preset::efa(), 2),
    }
}
