//! When to look at what again, whose turn it is, and chance.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// One time for each key.
#[derive(Debug)]
pub(super) struct Timers<K> {
    by_key: BTreeMap<K, Duration>,
    by_time: BTreeSet<(Duration, K)>,
}

impl<K: Copy + Ord> Timers<K> {
    pub(super) const fn new() -> Self {
        Self { by_key: BTreeMap::new(), by_time: BTreeSet::new() }
    }

    /// Sets or clears the time of a key.
    pub(super) fn set(&mut self, key: K, at: Option<Duration>) {
        let before = match at {
            Some(at) => self.by_key.insert(key, at),
            None => self.by_key.remove(&key),
        };
        if before == at {
            return;
        }
        if let Some(before) = before {
            self.by_time.remove(&(before, key));
        }
        if let Some(at) = at {
            self.by_time.insert((at, key));
        }
    }

    /// The earliest time.
    pub(super) fn next(&self) -> Option<Duration> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Takes a key whose time has come.
    pub(super) fn due(&mut self, now: Duration) -> Option<K> {
        let (at, key) = *self.by_time.first()?;
        if at > now {
            return None;
        }
        self.set(key, None);
        Some(key)
    }

    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }
}

/// Attempts that wait for their turn. First ones go before repeated ones, but not always.
#[derive(Debug)]
pub(super) struct Queue<T> {
    first: VecDeque<T>,
    again: VecDeque<T>,
    taken: u64,
}

impl<T> Queue<T> {
    pub(super) const fn new() -> Self {
        Self { first: VecDeque::new(), again: VecDeque::new(), taken: 0 }
    }

    pub(super) fn push(&mut self, one: T, again: bool) {
        if again { self.again.push_back(one) } else { self.first.push_back(one) }
    }

    pub(super) fn pop(&mut self) -> Option<T> {
        self.taken += 1;
        if self.taken.is_multiple_of(4) {
            self.again.pop_front().or_else(|| self.first.pop_front())
        } else {
            self.first.pop_front().or_else(|| self.again.pop_front())
        }
    }

    pub(super) fn len(&self) -> usize {
        self.first.len() + self.again.len()
    }
}

/// Chance for pauses (SplitMix64): what matters is that two ranks do not draw the same.
#[derive(Debug)]
pub(super) struct Chance(u64);

impl Chance {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The pause after this many failures in a row: doubled with each up to `longest`, then shortened by up to half.
    pub(super) fn pause(&mut self, failures: u32, first: Duration, longest: Duration) -> Duration {
        let doubled = first.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(longest);
        let part = u32::try_from(self.draw() % 1024).unwrap_or(0);
        doubled - doubled * part / 2048
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_one_time() {
        let at = Duration::from_secs;
        let mut timers = Timers::new();
        timers.set(1, Some(at(5)));
        timers.set(1, Some(at(3)));
        timers.set(2, Some(at(4)));
        assert_eq!((timers.next(), timers.len()), (Some(at(3)), 2));
        assert_eq!(timers.due(at(2)), None);
        assert_eq!(
            (timers.due(at(9)), timers.due(at(9)), timers.due(at(9))),
            (Some(1), Some(2), None)
        );
        timers.set(3, Some(at(1)));
        timers.set(3, None);
        assert_eq!((timers.next(), timers.len()), (None, 0));
    }

    #[test]
    fn repeated_ones_come_to_their_turn() {
        let mut queue = Queue::new();
        (0..8).for_each(|n| queue.push(n, n >= 4));
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [0, 1, 2, 4, 3, 5, 6, 7]);
    }

    #[test]
    fn pauses_double_and_stay_within_bounds() {
        let (first, longest) = (Duration::from_millis(100), Duration::from_secs(2));
        let mut chance = Chance::new(7);
        for failures in 1..100 {
            let full = first.saturating_mul(1 << (failures - 1).min(20)).min(longest);
            let pause = chance.pause(failures, first, longest);
            assert!(pause > full / 2 - Duration::from_millis(1) && pause <= full, "{pause:?}");
        }
        let (mut one, mut other) = (Chance::new(1), Chance::new(2));
        assert_ne!(one.pause(9, first, longest), other.pause(9, first, longest));
    }
}
