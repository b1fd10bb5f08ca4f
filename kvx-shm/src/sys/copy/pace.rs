//! Which of several ways to copy is the fastest, measured on the copies themselves.
//!
//! No way is the best on every machine: of two processors of one maker, four streams of stores past the cache had 1.5 times the
//! speed of `memcpy` on the one, and 0.8 times on the other, where one stream had 1.4 times. So each thread now and then makes
//! some copies by each way in turn, takes their times, and makes those that follow by the way with the least median. Both the first
//! look and every later one take [`SAMPLES`] copies by each way.
//!
//! Invariant: between two looks `chosen` is a number below that of the ways that the caller has.

use std::cell::{Cell, RefCell};
use std::time::Instant;

/// The most ways that there can be.
pub(super) const WAYS: usize = 4;

/// Copies by each way in one look: their median is not that of the first ones, whose pages are new, nor of one that was interrupted.
const SAMPLES: usize = 9;

/// Copies between the first look and the second; between later ones it is four times as many each time, up to the last. A look takes
/// less than one in 400 of the copies by then.
const FIRST: u32 = 64;
const LAST: u32 = 16 << 10;

/// What a thread knows of copies of about one size.
#[derive(Debug)]
pub(super) struct Pace {
    chosen: Cell<usize>,
    /// Copies until the next look, and between that one and the one after.
    left: Cell<u32>,
    interval: Cell<u32>,
    look: RefCell<Look>,
}

#[derive(Debug)]
struct Look {
    taken: usize,
    /// Nanoseconds per MiB, by way.
    times: [[u64; SAMPLES]; WAYS],
}

impl Pace {
    pub(super) const fn new() -> Self {
        Self {
            chosen: Cell::new(0),
            left: Cell::new(0),
            interval: Cell::new(FIRST),
            look: RefCell::new(Look { taken: 0, times: [[0; SAMPLES]; WAYS] }),
        }
    }

    /// Makes one copy of so many bytes by one of so many ways: `copy` is given its number.
    pub(super) fn copies(&self, ways: usize, bytes: usize, copy: impl FnOnce(usize)) {
        let left = self.left.get();
        if left > 0 {
            self.left.set(left - 1);
            return copy(self.chosen.get());
        }
        let way = self.look.borrow().taken % ways;
        let begun = Instant::now();
        copy(way);
        let nanos = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.took(ways, nanos.saturating_mul(1 << 20) / bytes.max(1) as u64);
    }

    fn took(&self, ways: usize, time: u64) {
        let mut look = self.look.borrow_mut();
        let (way, sample) = (look.taken % ways, look.taken / ways);
        look.times[way][sample] = time;
        look.taken += 1;
        if look.taken < ways * SAMPLES {
            return;
        }
        look.taken = 0;
        let median = |way: usize| {
            let mut times = look.times[way];
            times.sort_unstable();
            times[SAMPLES / 2]
        };
        self.chosen.set((0..ways).min_by_key(|way| median(*way)).unwrap_or(0));
        let interval = self.interval.get();
        self.left.set(interval);
        self.interval.set((interval * 4).min(LAST));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies so many times, with these times for each way; says how often each was used.
    fn goes(pace: &Pace, times: [u64; 3], copies: usize) -> [usize; 3] {
        let mut used = [0; 3];
        for _ in 0..copies {
            let looks = pace.left.get() == 0;
            let way = Cell::new(0);
            if looks {
                way.set(pace.look.borrow().taken % 3);
                pace.took(3, times[way.get()]);
            } else {
                pace.copies(3, 1, |chosen| way.set(chosen));
            }
            used[way.get()] += 1;
        }
        used
    }

    #[test]
    fn the_fastest_is_taken_and_found_again_when_it_is_another() {
        let pace = Pace::new();
        let look = 3 * SAMPLES;
        assert_eq!(goes(&pace, [3, 1, 2], look), [SAMPLES; 3]);
        assert_eq!(goes(&pace, [3, 1, 2], 64), [0, 64, 0]);
        assert_eq!(goes(&pace, [3, 2, 1], look), [SAMPLES; 3]);
        assert_eq!(goes(&pace, [3, 2, 1], 256), [0, 0, 256]);
    }

    #[test]
    fn some_copies_that_take_long_choose_nothing() {
        let pace = Pace::new();
        for sample in 0..SAMPLES {
            for way in 0..3 {
                let interrupted = way == 1 && sample % 3 == 0;
                pace.took(3, if interrupted { 1_000_000 } else { [3, 1, 2][way] });
            }
        }
        assert_eq!(pace.chosen.get(), 1);
    }

    #[test]
    fn looks_become_rare() {
        let pace = Pace::new();
        let used = goes(&pace, [1, 2, 3], 1_000_000);
        assert!(used[1] + used[2] < 2500, "{used:?}");
        assert!(used[1] > 5 * SAMPLES, "it goes on looking: {used:?}");
    }

    #[test]
    fn every_copy_is_made_once() {
        let pace = Pace::new();
        let made = Cell::new(0);
        for _ in 0..1000 {
            pace.copies(2, 1 << 15, |way| {
                assert!(way < 2);
                made.set(made.get() + 1);
            });
        }
        assert_eq!(made.get(), 1000);
    }
}
