//! Simulation: a scenario of several engines under random faults, and a checker of what the contract promises.
//!
//! - [`Checker`] is told what engines do and what they are told, holds a model of every engine's memory, and says which
//!   promise was broken. It knows nothing of the fabric, so whoever drives a backend can use it.
//! - [`Weather`] does to a fabric, at random, everything that a fabric can do to engines.
//! - [`Exchange`] is a scenario made of both: four engines that read and write each other's memory, notify, cancel, sever,
//!   revoke, die and come again.
//!
//! All of it follows from one seed; whatever fails says which.
//!
//! ```
//! use kvx_mock::sim::Exchange;
//!
//! for seed in kvx_mock::sim::seeds(3) {
//!     let report = Exchange::new(seed).run().unwrap_or_else(|failure| panic!("{failure}"));
//!     assert!(report.posted > 0);
//! }
//! ```

mod checker;
mod driver;
mod exchange;
mod flight;
mod memory;
mod seat;
mod violation;
mod weather;

pub use checker::{Checker, LifeId, Seen};
pub use exchange::{Exchange, Report};
pub use flight::Posted;
pub use violation::{Failure, Violation};
pub use weather::Weather;

use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

/// The seeds to run: the one that `KVX_SEED` names, or as many as `KVX_SEEDS` says, or `count`.
#[must_use]
pub fn seeds(count: u64) -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|text: String| text.parse::<u64>().ok());
    match number("KVX_SEED") {
        Some(seed) => seed..seed.saturating_add(1),
        None => 0..number("KVX_SEEDS").unwrap_or(count),
    }
}

/// A source of chance for one purpose. The fabric's own streams are 0 and 1, those of its rules begin at 16.
fn stream(seed: u64, purpose: Purpose) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(purpose as u64);
    rng
}

/// What chance is drawn for.
#[derive(Clone, Copy, Debug)]
enum Purpose {
    /// What engines do.
    Script = 2,
    /// What is done to them.
    Weather = 3,
}
