//! Who has confirmed: a set of ranks, never a count.

use std::collections::BTreeSet;

use crate::{Error, Result};

/// The ranks from which one producer rank must hear before it may forget a request: a set, so that a message that comes
/// twice counts once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roster {
    expected: BTreeSet<usize>,
    missing: BTreeSet<usize>,
}

/// What a confirmation changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Confirmed {
    /// Others are still missing.
    Waiting,
    /// This was the last one. Given once.
    Complete,
    /// This rank had confirmed before: nothing changed.
    Repeated,
}

/// Ranks, as a message lists them.
fn numbers(ranks: &BTreeSet<usize>) -> String {
    let numbers: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    if numbers.is_empty() { "none".to_owned() } else { numbers.join(", ") }
}

impl Roster {
    /// A roster of these ranks. An empty one is complete from the start.
    #[must_use]
    pub fn new(ranks: impl IntoIterator<Item = usize>) -> Self {
        let expected: BTreeSet<_> = ranks.into_iter().collect();
        Self { missing: expected.clone(), expected }
    }

    /// Notes that `rank` has confirmed.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Peer`](crate::ErrorKind::Peer) when the rank is not on the roster; nothing changes.
    pub fn confirm(&mut self, rank: usize) -> Result<Confirmed> {
        if !self.expected.contains(&rank) {
            return Err(Error::peer("roster", format!("rank {rank} is not expected to confirm"))
                .with_context("expected", numbers(&self.expected)));
        }
        Ok(match (self.missing.remove(&rank), self.missing.is_empty()) {
            (false, _) => Confirmed::Repeated,
            (true, false) => Confirmed::Waiting,
            (true, true) => Confirmed::Complete,
        })
    }

    /// Whether all have confirmed.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
    }

    /// Those that have not confirmed yet.
    pub fn missing(&self) -> impl Iterator<Item = usize> + '_ {
        self.missing.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_once_and_only_after_all() {
        let mut roster = Roster::new([0, 1, 2, 3]);
        assert_eq!(roster.confirm(2).unwrap(), Confirmed::Waiting);
        assert_eq!(roster.confirm(2).unwrap(), Confirmed::Repeated);
        assert_eq!(roster.confirm(0).unwrap(), Confirmed::Waiting);
        assert_eq!(roster.confirm(1).unwrap(), Confirmed::Waiting);
        assert!(!roster.is_complete());
        assert_eq!(roster.missing().collect::<Vec<_>>(), [3]);
        assert_eq!(roster.confirm(3).unwrap(), Confirmed::Complete);
        assert_eq!(roster.confirm(3).unwrap(), Confirmed::Repeated);
        assert!(roster.confirm(4).is_err());
        assert!(Roster::new([]).is_complete());
    }
}
