//! How long things take on a fabric, in virtual time.

use std::time::Duration;

use kvx_core::backend::SEVER_BOUND;
use kvx_core::{Error, Result};

/// Virtual time, in nanoseconds since the fabric was made.
pub(crate) type Nanos = u64;

/// A duration as virtual time; what does not fit is as long as can be.
pub(crate) fn nanos(duration: Duration) -> Nanos {
    Nanos::try_from(duration.as_nanos()).unwrap_or(Nanos::MAX)
}

/// A range of durations, both ends included, from which the seed draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The shortest.
    pub shortest: Duration,
    /// The longest.
    pub longest: Duration,
}

impl Span {
    /// Always zero.
    pub const ZERO: Self = Self::new(Duration::ZERO, Duration::ZERO);

    /// From `shortest` to `longest`.
    #[must_use]
    pub const fn new(shortest: Duration, longest: Duration) -> Self {
        Self { shortest, longest }
    }

    pub(crate) const fn micros(shortest: u64, longest: u64) -> Self {
        Self::new(Duration::from_micros(shortest), Duration::from_micros(longest))
    }
}

/// How long things take on the fabric of a [`Preset`](crate::Preset), in virtual time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timing {
    /// One way from engine to engine: of data, of an acknowledgement, of a notification, and of the news that a connection
    /// is over.
    pub latency: Span,
    /// What a kibibyte of data adds. One side's data to one peer goes one after the other.
    pub per_kib: Duration,
    /// From the death of a process, or from the loss of what a rule dropped, until the other side has found out.
    pub death: Span,
    /// From a partition until each side gives the other up.
    pub silence: Span,
    /// From [`sever`](kvx_core::backend::TransferBackend::sever) until everything has settled and the peer is down: at most
    /// [`SEVER_BOUND`].
    pub sever: Span,
}

impl Timing {
    /// Everything at once, in the order in which it is asked for.
    pub const ZERO: Self = Self {
        latency: Span::ZERO,
        per_kib: Duration::ZERO,
        death: Span::ZERO,
        silence: Span::ZERO,
        sever: Span::ZERO,
    };

    /// Refuses what cannot be, or would break the contract.
    pub(crate) fn check(&self) -> Result<()> {
        for (name, span) in [
            ("latency", self.latency),
            ("death", self.death),
            ("silence", self.silence),
            ("sever", self.sever),
        ] {
            if span.shortest > span.longest {
                return Err(Error::misuse("preset", "the shortest is longer than the longest")
                    .with_context("timing", name)
                    .with_context("shortest_ns", span.shortest.as_nanos())
                    .with_context("longest_ns", span.longest.as_nanos()));
            }
        }
        if self.sever.longest > SEVER_BOUND {
            return Err(Error::misuse("preset", "the contract bounds what sever takes")
                .with_context("longest_ns", self.sever.longest.as_nanos())
                .with_context("bound_ns", SEVER_BOUND.as_nanos()));
        }
        Ok(())
    }

    /// What `bytes` bytes of data take, latency apart.
    pub(crate) fn cost(&self, bytes: u64) -> Nanos {
        let per_kib = nanos(self.per_kib);
        let whole = (bytes / 1024).saturating_mul(per_kib);
        whole.saturating_add((bytes % 1024).saturating_mul(per_kib) / 1024)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        Timing::ZERO.check().unwrap();
        let backwards = Span::micros(2, 1);
        let error = Timing { silence: backwards, ..Timing::ZERO }.check().unwrap_err().to_string();
        assert!(error.contains("timing=silence") && error.contains("shortest_ns=2000"), "{error}");
        let late = Span::new(Duration::ZERO, SEVER_BOUND + Duration::from_nanos(1));
        let error = Timing { sever: late, ..Timing::ZERO }.check().unwrap_err().to_string();
        assert!(error.contains("bound_ns=2000000000"), "{error}");
    }

    #[test]
    fn bytes_cost_what_they_say() {
        let timing = Timing { per_kib: Duration::from_nanos(100), ..Timing::ZERO };
        assert_eq!([0, 512, 1024, 1536].map(|bytes| timing.cost(bytes)), [0, 50, 100, 150]);
        assert_eq!(timing.cost(u64::MAX), u64::MAX / 1024 * 100 + 99);
        assert_eq!(nanos(Duration::MAX), u64::MAX);
    }
}
