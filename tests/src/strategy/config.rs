//! How many cases, from which seed.

use std::env;
use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;

use proptest::test_runner::{Config, FileFailurePersistence, RngSeed};

/// Cases per property where `KVX_CASES` says nothing.
const CASES: u32 = 500;

fn number<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = env::var(name).ok()?;
    let number = text.trim().parse().ok();
    assert!(number.is_some(), "{name} is {text:?}: not a number that it can be");
    number
}

/// Cases per property: `KVX_CASES`, or 500. Never 0: a property that ran no case has failed.
#[must_use]
pub fn cases() -> u32 {
    let cases = number("KVX_CASES").unwrap_or(CASES);
    assert!(cases > 0, "KVX_CASES is 0: a property that runs no case shows nothing");
    cases
}

/// The seed of this process: `KVX_SEED`, or proptest's own `PROPTEST_RNG_SEED`, or a new one.
#[must_use]
pub fn seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    *SEED.get_or_init(|| {
        number("KVX_SEED").unwrap_or_else(|| match Config::default().rng_seed {
            RngSeed::Fixed(seed) => seed,
            RngSeed::Random => RandomState::new().hash_one(0),
        })
    })
}

/// Configuration for `proptest!`: [`cases`] cases from [`seed`], both printed to standard error so that a failure can be
/// replayed. Failures are also kept beside the test's source, in a file whose name ends in `.proptest-regressions`, and
/// tried first the next time, unless `PROPTEST_DISABLE_FAILURE_PERSISTENCE` is set.
#[must_use]
pub fn config() -> Config {
    let (cases, seed) = (cases(), seed());
    eprintln!("replay with KVX_SEED={seed} KVX_CASES={cases}");
    let mut config = Config { cases, rng_seed: RngSeed::Fixed(seed), ..Config::default() };
    if config.failure_persistence.is_some() {
        let beside = FileFailurePersistence::WithSource("proptest-regressions");
        config.failure_persistence = Some(Box::new(beside));
    }
    config
}
