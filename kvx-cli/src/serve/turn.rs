//! Whose turn it is where the pool has no room for all: requests are served in the order in which they were first asked for.
//!
//! Without that, a request that needs many blocks would never get them while small ones pass. Whoever is told that there is no room
//! asks again, so one that has not done so for a while is taken to want nothing any more.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// For how long a request that does not ask again keeps its turn. Consumers ask again after a small part of it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Requests that wait for room, the one that has waited longest first. `K` is whose they are.
#[derive(Debug)]
pub(super) struct Turns<K> {
    waiting: VecDeque<(K, Instant)>,
    most: usize,
}

impl<K: PartialEq> Turns<K> {
    /// At most so many are remembered; of one more, it is as if it had not asked.
    pub(super) const fn new(most: usize) -> Self {
        Self { waiting: VecDeque::new(), most }
    }

    /// A request asks for room: whether it is its turn.
    pub(super) fn asks(&mut self, request: &K, now: Instant) -> bool {
        self.waiting.retain_mut(|(waiting, asked)| {
            if waiting == request {
                *asked = now;
            }
            now.saturating_duration_since(*asked) < PATIENCE
        });
        self.waiting.front().is_none_or(|(first, _)| first == request)
    }

    /// There was no room for it, or it was not its turn.
    pub(super) fn waits(&mut self, request: K, now: Instant) {
        let known = self.waiting.iter().any(|(waiting, _)| *waiting == request);
        if !known && self.waiting.len() < self.most {
            self.waiting.push_back((request, now));
        }
    }

    /// What does not wait any more: it was served, or is not wanted.
    pub(super) fn leave(&mut self, of: impl Fn(&K) -> bool) {
        self.waiting.retain(|(waiting, _)| !of(waiting));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool of 10 blocks, of which small requests have 2 each, again and again, and one request needs all.
    #[test]
    fn who_needs_much_is_not_passed_by_those_who_need_little() {
        let (mut turns, now) = (Turns::new(8), Instant::now());
        assert!(turns.asks(&"small", now));
        assert!(turns.asks(&"large", now));
        turns.waits("large", now);
        for _ in 0..100 {
            assert!(!turns.asks(&"another small one", now));
            turns.waits("another small one", now);
        }
        assert!(turns.asks(&"large", now));
        turns.leave(|one| *one == "large");
        assert!(turns.asks(&"another small one", now));
        assert!(!turns.asks(&"a third", now));
    }

    #[test]
    fn who_does_not_ask_again_loses_the_turn() {
        let (mut turns, now) = (Turns::new(2), Instant::now());
        turns.waits("gone", now);
        turns.waits("there", now);
        let later = now + PATIENCE / 2;
        assert!(!turns.asks(&"there", later));
        assert!(turns.asks(&"there", now + PATIENCE));
        // No more are remembered than that.
        turns.waits("second", now + PATIENCE);
        turns.waits("too many", now + PATIENCE);
        turns.leave(|one| *one == "there" || *one == "second");
        assert!(turns.asks(&"whoever", now + PATIENCE));
    }
}
