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
//! # fn main() -> kvx_core::Result<()> {
//! for seed in kvx_mock::sim::seeds(3)? {
//!     let report = Exchange::new(seed).run().unwrap_or_else(|failure| panic!("{failure}"));
//!     assert!(report.posted > 0);
//! }
//! # Ok(())
//! # }
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
pub use violation::{Failure, Violation, ensure};
pub use weather::Weather;

use std::ops::Range;

use kvx_core::{Error, Result};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

/// The seeds to run: the one that `KVX_SEED` names, or as many as `KVX_SEEDS` says (`COUNT`, or `FROM..TO` without the last),
/// or `count`.
///
/// # Errors
///
/// [`ErrorKind::Config`](kvx_core::ErrorKind::Config), naming the variable and what it says, when that is no number from 0 to
/// 18446744073709551614, and no range of them.
pub fn seeds(count: u64) -> Result<Range<u64>> {
    if let Some(seed) = said("KVX_SEED") {
        let seed = parsed("KVX_SEED", &seed)?;
        return Ok(seed..seed + 1);
    }
    said("KVX_SEEDS").map_or(Ok(0..count), |text| range("KVX_SEEDS", &text))
}

#[expect(clippy::disallowed_methods, reason = "it chooses which runs are made, not what happens")]
fn said(name: &'static str) -> Option<String> {
    std::env::var_os(name).map(|text| text.to_string_lossy().into_owned())
}

fn range(name: &'static str, text: &str) -> Result<Range<u64>> {
    match text.split_once("..") {
        Some((from, to)) => Ok(parsed(name, from)?..parsed(name, to)?),
        None => Ok(0..parsed(name, text)?),
    }
}

/// The number that a variable says. The largest of 64 bits would have no end.
fn parsed(name: &'static str, text: &str) -> Result<u64> {
    text.parse().ok().filter(|number| *number < u64::MAX).ok_or_else(|| {
        Error::config("seeds", format!("{name} says {text:?}, which is not a number"))
            .with_remedy(format!("set {name} to a number from 0 to {}, or unset it", u64::MAX - 1))
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_number_or_refused() {
        for (text, number) in [("0", 0), ("48", 48), ("18446744073709551614", u64::MAX - 1)] {
            assert_eq!(parsed("KVX_SEED", text).unwrap(), number);
        }
        for text in ["", "abc", "-1", " 1", "1.5", "18446744073709551615", "18446744073709551616"] {
            let error = parsed("KVX_SEED", text).unwrap_err().to_string();
            let said = format!("KVX_SEED says {text:?}");
            assert!(error.contains(&said) && error.contains("or unset it"), "{error}");
            assert!(range("KVX_SEEDS", &format!("{text}..5")).is_err(), "{text}");
            assert!(range("KVX_SEEDS", &format!("5..{text}")).is_err(), "{text}");
        }
        assert_eq!(range("KVX_SEEDS", "7").unwrap(), 0..7);
        assert_eq!(range("KVX_SEEDS", "7..9").unwrap(), 7..9);
    }
}
