//! What will happen, and when: ordered by virtual time, and at one time by the order in which it was scheduled.

use std::collections::BTreeMap;

use kvx_core::id::PeerId;

use crate::net::EngineId;
use crate::timing::Nanos;

/// What one side of a connection posted to the other, and what becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lane {
    pub(crate) engine: EngineId,
    /// The other side, as `engine` knows it.
    pub(crate) peer: PeerId,
}

/// Something that is going to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Happening {
    /// The next part of a transfer's data arrives.
    Data(Lane, u64),
    /// A transfer is reported to its initiator.
    Completion(Lane, u64),
    /// A notification arrives.
    Note(Lane, u64),
    /// This side learns that the other one has ended the connection.
    Notice(Lane),
    /// This side gives up a peer that does not answer.
    Silence(Lane),
    /// This side gives up the connection because something was lost for good.
    Loss(Lane),
    /// All that is left of this side's ended connection settles.
    Finish(Lane),
    /// A link that flaps changes its state.
    Flap(u64),
}

/// A place in the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) at: Nanos,
    number: u64,
}

/// Everything that is going to happen. Nothing in it is stale: what no longer applies is taken out.
#[derive(Default)]
pub(crate) struct Schedule {
    pub(crate) now: Nanos,
    next: u64,
    list: BTreeMap<Key, Happening>,
}

impl Schedule {
    /// Adds what happens after a delay.
    pub(crate) fn after(&mut self, delay: Nanos, what: Happening) -> Key {
        let key = Key { at: self.now.saturating_add(delay), number: self.next };
        self.next += 1;
        self.list.insert(key, what);
        key
    }

    pub(crate) fn remove(&mut self, key: Key) {
        self.list.remove(&key);
    }

    /// Takes out what happens next, and moves the clock to it.
    pub(crate) fn pop(&mut self) -> Option<Happening> {
        let (key, what) = self.list.pop_first()?;
        self.now = key.at;
        Some(what)
    }

    /// When the next thing happens.
    pub(crate) fn next_at(&self) -> Option<Nanos> {
        self.list.first_key_value().map(|(key, _)| key.at)
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_first_then_the_order_of_scheduling() {
        let mut schedule = Schedule::default();
        let late = schedule.after(7, Happening::Flap(0));
        schedule.after(5, Happening::Flap(1));
        schedule.after(5, Happening::Flap(2));
        schedule.after(9, Happening::Flap(3));
        schedule.remove(late);
        assert_eq!(schedule.next_at(), Some(5));
        let order = std::iter::from_fn(|| schedule.pop().map(|what| (schedule.now, what)));
        let order: Vec<_> = order.collect();
        let expected = [(5, 1), (5, 2), (9, 3)].map(|(at, n)| (at, Happening::Flap(n)));
        assert_eq!(order, expected);
        assert!(schedule.is_empty());
        assert_eq!(schedule.after(u64::MAX, Happening::Flap(4)).at, u64::MAX);
    }
}
