//! What went wrong, and how to see it again.

use std::fmt;
use std::time::Duration;

use crate::trace::Entry;

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(String);

impl Violation {
    /// In words: which promise, and by what.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Violation {}

/// A run that broke a promise. Printed with its seed and the end of its log, whose entries are `E`.
#[derive(Clone, Debug)]
pub struct Failure<E = Entry> {
    /// The seed of the run.
    pub seed: u64,
    /// When, in virtual time.
    pub at: Duration,
    /// What was broken.
    pub violation: Violation,
    /// The newest entries of the log, oldest first.
    pub log: Vec<E>,
}

impl<E: fmt::Display> fmt::Display for Failure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}, after {:?}: {}", self.seed, self.at, self.violation)?;
        writeln!(f, "KVX_SEED={} runs it again; the end of its log:", self.seed)?;
        self.log.iter().try_for_each(|entry| writeln!(f, "{entry}"))
    }
}

impl<E: fmt::Debug + fmt::Display> std::error::Error for Failure<E> {}

/// Returns a [`Violation`] unless a condition holds: `ensure!(holds, "what is broken, with {values}")`.
#[macro_export]
macro_rules! ensure {
    ($holds:expr, $($text:tt)+) => {
        if !$holds {
            return Err($crate::sim::Violation::new(format!($($text)+)));
        }
    };
}
pub use ensure;
