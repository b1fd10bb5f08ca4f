//! Which of several ways to copy is the fastest, measured on the copies themselves.
//!
//! No way is the best on every machine: of two processors of one maker, four streams of stores past the cache had 1.5 times the
//! speed of `memcpy` on the one, and 0.8 times on the other, where one stream had 1.4 times. So each thread now and then makes
//! some copies by each way in turn, takes their times, and makes those that follow by the way with the least median. One copy says
//! nothing, as it goes on while the next one begins: a sample is as many, one after the other, as have [`SAMPLE`] bytes. Of jobs that
//! have fewer it is several, and the time between them does not count. The two kinds are measured apart, as what a copy leaves to
//! be done after it is hidden in a large job and not in a small one.
//!
//! Invariant: `chosen` and `taken % ways` are numbers below that of the ways that the caller has.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

/// The most ways that there can be.
pub(super) const WAYS: usize = 3;

/// Samples of each way in one look: their median is not that of the first ones, whose pages are new, nor of one that was interrupted.
const SAMPLES: usize = 9;

/// Bytes of a sample.
const SAMPLE: u64 = 192 << 10;

/// Bytes between the first look and the second; between later ones it is four times as many each time, up to the last. A look takes
/// less than one in 300 of the bytes by then.
const FIRST: u64 = 2 << 20;
const LAST: u64 = 2 << 30;

/// What a thread knows.
#[derive(Debug)]
pub(super) struct Pace {
    /// Whether the job that goes on has a sample's bytes.
    large: Cell<bool>,
    of_small: RefCell<State>,
    of_large: RefCell<State>,
}

#[derive(Debug)]
struct State {
    chosen: usize,
    /// Bytes until the next look, and between that one and the one after.
    left: u64,
    interval: u64,
    /// Of the look: samples that were taken, and picoseconds per byte, by way.
    taken: usize,
    times: [[u64; SAMPLES]; WAYS],
    /// The sample that is being taken.
    sample: Option<Sample>,
}

/// Copies by one way, one after the other.
#[derive(Debug, Default)]
struct Sample {
    /// What jobs before this one took, and this one up to its last copy.
    before: Duration,
    job: Duration,
    /// When this job's first copy began.
    since: Option<Instant>,
    bytes: u64,
}

impl Pace {
    pub(super) const fn new() -> Self {
        Self {
            large: Cell::new(false),
            of_small: RefCell::new(State::new()),
            of_large: RefCell::new(State::new()),
        }
    }

    /// What is copied from here on is for a job of so many bytes, and does not follow at once on what was copied before.
    pub(super) fn job(&self, bytes: u64) {
        self.of_large.borrow_mut().sample = None;
        if let Some(sample) = &mut self.of_small.borrow_mut().sample {
            sample.before += std::mem::take(&mut sample.job);
            sample.since = None;
        }
        self.large.set(bytes >= SAMPLE);
    }

    /// Makes one copy of so many bytes by one of so many ways: `copy` is given its number.
    pub(super) fn copies(&self, ways: usize, bytes: usize, copy: impl FnOnce(usize)) {
        let state = if self.large.get() { &self.of_large } else { &self.of_small };
        let way = state.borrow_mut().begins(ways, bytes as u64);
        copy(way);
        state.borrow_mut().ends(ways, bytes as u64);
    }
}

impl State {
    const fn new() -> Self {
        Self {
            chosen: 0,
            left: 0,
            interval: FIRST,
            taken: 0,
            times: [[0; SAMPLES]; WAYS],
            sample: None,
        }
    }

    /// By which way a copy is to be made.
    fn begins(&mut self, ways: usize, bytes: u64) -> usize {
        if self.left > 0 {
            self.left = self.left.saturating_sub(bytes);
            return self.chosen;
        }
        self.sample.get_or_insert_default().since.get_or_insert_with(Instant::now);
        self.taken % ways
    }

    fn ends(&mut self, ways: usize, bytes: u64) {
        let Some(Sample { before, job, since: Some(since), bytes: so_far }) = &mut self.sample
        else {
            return;
        };
        *so_far += bytes;
        *job = since.elapsed();
        if *so_far >= SAMPLE {
            let (took, bytes) = (*before + *job, *so_far);
            self.sample = None;
            self.took(ways, took, bytes);
        }
    }

    fn took(&mut self, ways: usize, time: Duration, bytes: u64) {
        let picos = u64::try_from(time.as_nanos().saturating_mul(1000)).unwrap_or(u64::MAX);
        self.times[self.taken % ways][self.taken / ways] = picos / bytes;
        self.taken += 1;
        if self.taken < ways * SAMPLES {
            return;
        }
        self.taken = 0;
        let median = |way: usize| {
            let mut times = self.times[way];
            times.sort_unstable();
            times[SAMPLES / 2]
        };
        self.chosen = (0..ways).min_by_key(|way| median(*way)).unwrap_or(0);
        self.left = self.interval;
        self.interval = (self.interval * 4).min(LAST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPY: usize = 32 << 10;
    const BYTES: u64 = COPY as u64;

    /// Copies so many bytes, with these times for each way; says how many went by each.
    fn goes(state: &mut State, times: [u64; 3], bytes: u64) -> [u64; 3] {
        let mut used = [0; 3];
        for _ in 0..bytes / BYTES {
            let way = state.begins(3, BYTES);
            used[way] += BYTES;
            if let Some(sample) = &mut state.sample {
                sample.bytes += BYTES;
                if sample.bytes >= SAMPLE {
                    state.sample = None;
                    state.took(3, Duration::from_nanos(times[way] * SAMPLE), SAMPLE);
                }
            }
        }
        used
    }

    const LOOK: u64 = 3 * SAMPLES as u64 * SAMPLE;

    #[test]
    fn the_fastest_is_taken_and_found_again_when_it_is_another() {
        let state = &mut State::new();
        assert_eq!(goes(state, [3, 1, 2], LOOK), [LOOK / 3; 3]);
        assert_eq!(goes(state, [3, 1, 2], FIRST), [0, FIRST, 0]);
        assert_eq!(goes(state, [3, 2, 1], LOOK), [LOOK / 3; 3]);
        assert_eq!(goes(state, [3, 2, 1], 4 * FIRST), [0, 0, 4 * FIRST]);
    }

    #[test]
    fn some_samples_that_take_long_choose_nothing() {
        let state = &mut State::new();
        for sample in 0..SAMPLES {
            for way in 0..3 {
                let interrupted = way == 1 && sample % 3 == 0;
                let time = if interrupted { 1_000_000 } else { [3, 1, 2][way] };
                state.took(3, Duration::from_nanos(time * SAMPLE), SAMPLE);
            }
        }
        assert_eq!(state.chosen, 1);
    }

    #[test]
    fn looks_become_rare() {
        let state = &mut State::new();
        let all = 40 * LAST;
        let used = goes(state, [1, 2, 3], all);
        assert!((used[1] + used[2]) * 300 < all, "{used:?}");
        assert!(used[1] > 30 * LOOK / 3, "it goes on looking: {used:?}");
    }

    /// What was copied before a large job is no part of its sample: the time between them would be, too.
    #[test]
    fn a_sample_of_a_large_job_ends_with_it() {
        let pace = Pace::new();
        let sampled = || pace.of_large.borrow().sample.as_ref().map(|sample| sample.bytes);
        pace.job(SAMPLE);
        pace.copies(2, 1000, |_| {});
        assert_eq!(sampled(), Some(1000));
        pace.job(SAMPLE);
        assert_eq!(sampled(), None);
        pace.copies(2, 10, |way| assert_eq!(way, 0, "the same way again"));
        assert_eq!(sampled(), Some(10));
    }

    /// Between small jobs much time passes that no copy took.
    #[test]
    fn a_sample_of_small_jobs_has_their_times_alone() {
        let pace = Pace::new();
        let (mut least, mut most) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..SAMPLE / BYTES {
            pace.job(BYTES);
            let outside = Instant::now();
            pace.copies(2, COPY, |way| {
                assert_eq!(way, 0, "all of one sample");
                let inside = Instant::now();
                std::thread::sleep(Duration::from_micros(100));
                least += inside.elapsed();
            });
            most += outside.elapsed();
            std::thread::sleep(Duration::from_millis(5));
        }
        let picos = pace.of_small.borrow().times[0][0];
        let per_byte = |time: Duration| u64::try_from(time.as_nanos() * 1000).unwrap() / SAMPLE;
        assert!((per_byte(least)..=per_byte(most)).contains(&picos), "{picos}: {least:?} to {most:?}");
        assert_eq!(pace.of_small.borrow().taken, 1, "one sample");
        assert_eq!(pace.of_large.borrow().taken, 0, "of small jobs");
    }

    /// A thread that has no job as large as a sample ends its looks all the same.
    #[test]
    fn small_jobs_choose_too() {
        let pace = Pace::new();
        for _ in 0..2 * SAMPLES as u64 * SAMPLE / BYTES {
            pace.job(BYTES);
            pace.copies(2, COPY, |_| {});
        }
        let state = pace.of_small.borrow();
        assert_eq!((state.taken, state.left), (0, FIRST), "a look has ended");
    }

    #[test]
    fn every_copy_is_made_once() {
        let (pace, mut made) = (Pace::new(), 0);
        for _ in 0..1000 {
            pace.copies(2, 1 << 15, |way| {
                assert!(way < 2);
                made += 1;
            });
        }
        assert_eq!(made, 1000);
    }
}
