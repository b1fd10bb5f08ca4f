//! So many warnings in so much time.

use std::time::Duration;

/// Lets a burst pass, then one at each interval.
#[derive(Debug)]
pub(crate) struct Quota {
    burst: u32,
    every: Duration,
    left: u32,
    at: Duration,
    suppressed: u64,
}

impl Quota {
    pub(crate) const fn new(burst: u32, every: Duration) -> Self {
        Self { burst, every, left: burst, at: Duration::ZERO, suppressed: 0 }
    }

    /// Whether one may pass; if so, how many have not since the last that did.
    pub(crate) fn pass(&mut self, now: Duration) -> Option<u64> {
        let grown = now.saturating_sub(self.at).as_nanos() / self.every.as_nanos().max(1);
        let grown = u32::try_from(grown).unwrap_or(u32::MAX);
        if grown > 0 {
            self.left = self.left.saturating_add(grown).min(self.burst);
            // What is left of an interval counts for the next.
            self.at = match self.left == self.burst {
                true => now,
                false => self.at + self.every * grown,
            };
        }
        if self.left == 0 {
            self.suppressed += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_then_one_at_each_interval() {
        let second = Duration::from_secs(1);
        let mut quota = Quota::new(3, second);
        let passed = |quota: &mut Quota, at| (0..10).filter_map(|_| quota.pass(at)).count();
        assert_eq!(passed(&mut quota, second), 3);
        assert_eq!(passed(&mut quota, second + second / 2), 0);
        assert_eq!(quota.pass(2 * second), Some(17));
        assert_eq!(quota.pass(2 * second), None);
        assert_eq!(passed(&mut quota, 100 * second), 3);
        assert_eq!(passed(&mut quota, Duration::MAX), 3);
    }
}
