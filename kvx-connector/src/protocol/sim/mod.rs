//! A simulation of leases: owners, users, and everything that can go wrong between them, held to the promises after every
//! event.
//!
//! [`Leases`] is a run of one seed: one to three ranks of an owner's engine and as many of a user's, each with a clock of its
//! own rate, with requests of random shapes to read and to write: parts that are published with the grant or later, stages on both
//! sides, ranks that are only told, requests of no parts, requests that wait to be admitted, second attempts. Each block
//! of memory holds a tag. A transfer copies tags at random moments between its post and its settling, and a block is used for
//! something else in the moment in which it is freed.
//!
//! What can go wrong depends on the [`Climate`]. In the wildest, messages are lost, doubled and late; transfers fail, find no
//! room, are stuck; stages fail; engines abort, withdraw, grant anew; processes stop, die and come again; connections
//! break; users are revoked; and somebody says what is not theirs to say.
//!
//! What is checked:
//!
//! - whatever is ready, or proven part by part, holds the tags that the owner published (promises 1 and 2);
//! - no tag is copied into a block that was freed, by either side (promise 3);
//! - every request and every lease ends within its time on its own clock (promise 4);
//! - whatever fails has a cause that concerns it (promise 6);
//! - owners end leases when and only when they may, once, and free them once; they tell whoever uses them; their
//!   verdicts are those of a second, simpler description of leases;
//! - in fair weather and where messages are only lost, every request is ready;
//! - in the end nothing is left: no lease, no request, no block, no memory of either.
//!
//! ```
//! use kvx_connector::protocol::sim::Leases;
//!
//! # fn main() -> kvx_core::Result<()> {
//! for seed in kvx_mock::sim::seeds(3)? {
//!     let report = Leases::new(seed).run().unwrap_or_else(|failure| panic!("{failure}"));
//!     assert!(report.events > 0);
//! }
//! # Ok(())
//! # }
//! ```

mod act;
mod book;
mod check;
mod engine;
mod fabric;
mod fate;
mod script;
mod seat;
mod spec;
mod weather;
mod world;

pub use script::Climate;

use std::time::Duration;

use kvx_mock::sim::{Failure, Violation, ensure};

use super::plant::Plant;
use world::World;

/// Most entries of the log that a failure shows.
const TAIL: usize = 80;

/// A run of one seed. See the [module documentation](self).
#[derive(Clone, Debug)]
pub struct Leases {
    seed: u64,
    plant: Option<Plant>,
}

/// What happened in a run that broke nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Events.
    pub events: u64,
    /// Requests asked for.
    pub asked: u64,
    /// Requests that were ready.
    pub ready: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests that were aborted.
    pub aborted: u64,
    /// Verdicts that a lease had not held.
    pub stale: u64,
    /// Leases granted, at each rank.
    pub granted: u64,
    /// Leases and requests that were quarantined.
    pub quarantined: u64,
    /// Processes that died.
    pub died: u64,
}

impl Leases {
    /// The run of this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed, plant: None }
    }

    /// With a fault in every machine: to show that it is found.
    #[must_use]
    pub const fn plant(mut self, plant: Plant) -> Self {
        self.plant = Some(plant);
        self
    }

    /// Runs it.
    ///
    /// # Errors
    ///
    /// The first promise that was broken.
    pub fn run(&self) -> Result<Report, Box<Failure<String>>> {
        let mut world = World::new(self.seed, self.plant, false);
        if world.run().is_ok() {
            return Ok(world.report);
        }
        // Once more, with a log.
        let mut world = World::new(self.seed, self.plant, true);
        let violation = world.run().err();
        let violation = violation.unwrap_or_else(|| Violation::new("it differs from run to run"));
        let at = Duration::from_micros(world.now);
        let from = world.log.len().saturating_sub(TAIL);
        Err(Box::new(Failure { seed: self.seed, at, violation, log: world.log.split_off(from) }))
    }

    /// Runs it, and says only whether a promise was broken.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        World::new(self.seed, self.plant, false).run().is_ok()
    }
}
