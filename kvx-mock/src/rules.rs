//! Rules that are ready made: a [`Verdict`] and the operations that it is for.
//!
//! ```
//! use std::time::Duration;
//! use kvx_mock::{Fabric, Kind, rules};
//!
//! let fabric = Fabric::new(7);
//! // The third notification from the producer to the consumer is late.
//! let late = rules::delay(Duration::from_millis(5)).kind(Kind::Notification).from("producer").to("consumer").nth(2);
//! let _guard = fabric.rule(late);
//! // One in a hundred parts of anybody's data is lost.
//! let _other = fabric.rule(rules::drop().kind(Kind::Data).chance(1, 100));
//! ```

use std::sync::Arc;
use std::time::Duration;

use kvx_core::ErrorKind;
use kvx_core::transfer::Mode;

use crate::rule::{Chance, Kind, Operation, Rule, Verdict};

/// Loses operations: see [`Verdict::Drop`].
pub fn drop() -> Matched {
    always(Verdict::Drop)
}

/// Makes operations late by this much virtual time: see [`Verdict::Delay`].
pub fn delay(by: Duration) -> Matched {
    always(Verdict::Delay(by))
}

/// Makes operations come twice: see [`Verdict::Double`].
pub fn double() -> Matched {
    always(Verdict::Double)
}

/// Lets others overtake operations: see [`Verdict::Reorder`].
pub fn reorder() -> Matched {
    always(Verdict::Reorder)
}

/// Keeps operations back until the guard releases them or is dropped: see [`Verdict::Hold`].
pub fn hold() -> Matched {
    always(Verdict::Hold)
}

/// Fails operations with an error of this kind: see [`Verdict::Fail`].
pub fn fail(kind: ErrorKind) -> Matched {
    always(Verdict::Fail(kind))
}

/// Fails posts with an error of this kind: nothing is posted.
pub fn fail_post(kind: ErrorKind) -> Matched {
    fail(kind).kind(Kind::Post)
}

/// Reports transfers as failed with an error of this kind, although all their data arrived.
pub fn fail_completion(kind: ErrorKind) -> Matched {
    fail(kind).kind(Kind::Completion)
}

/// Answers posts with full.
pub fn full() -> Matched {
    always(Verdict::Full)
}

const fn always(verdict: Verdict) -> Matched {
    Matched {
        verdict,
        kind: None,
        from: None,
        to: None,
        mode: None,
        nth: None,
        times: None,
        chance: None,
        matched: 0,
        used: 0,
    }
}

/// One verdict for the operations that match. As made it is for every operation for which the verdict
/// [means something](Verdict::applies_to).
#[derive(Clone, Debug)]
#[must_use = "a rule does nothing until it is installed: `fabric.rule(...)`"]
pub struct Matched {
    verdict: Verdict,
    kind: Option<Kind>,
    from: Option<Arc<str>>,
    to: Option<Arc<str>>,
    mode: Option<Mode>,
    nth: Option<u64>,
    times: Option<u64>,
    chance: Option<(u32, u32)>,
    matched: u64,
    used: u64,
}

impl Matched {
    /// Only operations of this kind.
    pub const fn kind(mut self, kind: Kind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// Only those of the engine of this name.
    pub fn from(mut self, name: impl Into<Arc<str>>) -> Self {
        self.from = Some(name.into());
        self
    }

    /// Only those whose peer has this name.
    pub fn to(mut self, name: impl Into<Arc<str>>) -> Self {
        self.to = Some(name.into());
        self
    }

    /// Only those of transfers of this mode.
    pub const fn mode(mut self, mode: Mode) -> Self {
        self.mode = Some(mode);
        self
    }

    /// Only one of those that match otherwise: the first has number 0.
    pub const fn nth(mut self, number: u64) -> Self {
        self.nth = Some(number);
        self
    }

    /// Only so many times.
    pub const fn times(mut self, times: u64) -> Self {
        self.times = Some(times);
        self
    }

    /// Only in `numerator` of `denominator` cases, drawn by the seed.
    pub const fn chance(mut self, numerator: u32, denominator: u32) -> Self {
        self.chance = Some((numerator, denominator));
        self
    }

    fn matches(&self, operation: &Operation) -> bool {
        let named = |wanted: &Option<Arc<str>>, name: &Arc<str>| {
            wanted.as_ref().is_none_or(|wanted| wanted == name)
        };
        self.verdict.applies_to(operation.kind)
            && self.kind.is_none_or(|kind| kind == operation.kind)
            && named(&self.from, &operation.from.name)
            && named(&self.to, &operation.to.name)
            && (self.mode.is_none() || self.mode == operation.mode)
    }
}

impl Rule for Matched {
    fn judge(&mut self, operation: &Operation, chance: &mut Chance) -> Verdict {
        if !self.matches(operation) {
            return Verdict::Pass;
        }
        let number = self.matched;
        self.matched += 1;
        let meant = self.nth.is_none_or(|nth| nth == number)
            && self.times.is_none_or(|times| self.used < times)
            && self.chance.is_none_or(|(numerator, denominator)| chance.of(numerator, denominator));
        if !meant {
            return Verdict::Pass;
        }
        self.used += 1;
        self.verdict
    }
}
