//! Making a trace of the shape that real ones have.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Entry, HASH_TOKENS};

/// Most conversations that may be gone on with.
const OPEN: usize = 32;
/// Beginnings that many conversations share: system prompts.
const BEGINNINGS: u64 = 4;

/// What a generated trace is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generator {
    /// The same seed gives the same trace.
    pub seed: u64,
    /// Tokens of the longest prompt. Prompts are a few hundred to some thousand tokens long, with a heavy tail; where the
    /// longest is short, all are shorter.
    pub longest: u64,
}

/// Makes a trace of `requests` requests.
///
/// Conversations begin with one of a few shared beginnings; about a third of the requests go on with an earlier conversation,
/// so that all of its whole blocks are a prefix of theirs.
#[must_use]
pub fn generate(generator: Generator, requests: usize) -> Vec<Entry> {
    let mut source = Source {
        random: ChaCha8Rng::seed_from_u64(generator.seed),
        longest: generator.longest.max(1),
        next_id: BEGINNINGS * 4,
        open: Vec::new(),
    };
    let mut timestamp = 0.0;
    (0..requests)
        .map(|_| {
            timestamp += source.exponential(330.0);
            source.entry(whole(timestamp))
        })
        .collect()
}

struct Source {
    random: ChaCha8Rng,
    longest: u64,
    next_id: u64,
    open: Vec<Entry>,
}

impl Source {
    fn entry(&mut self, timestamp: u64) -> Entry {
        let earlier = self.continued();
        let median = self.typical();
        let (mut ids, known) = match &earlier {
            Some(earlier) => {
                let blocks = earlier.input_length / HASH_TOKENS;
                let mut ids = earlier.hash_ids.clone();
                ids.truncate(usize::try_from(blocks).unwrap_or(usize::MAX));
                (ids, earlier.input_length + earlier.output_length)
            }
            None => self.beginning(),
        };
        let fresh = self.log_normal(if earlier.is_some() { median / 4.0 } else { median });
        let input_length = (known + fresh).clamp(1, self.longest);
        let blocks = input_length.div_ceil(HASH_TOKENS);
        while (ids.len() as u64) < blocks {
            ids.push(self.next_id);
            self.next_id += 1;
        }
        ids.truncate(usize::try_from(blocks).unwrap_or(usize::MAX));
        let output_length = self.log_normal(300.0).clamp(1, 2000);
        let entry = Entry { timestamp, input_length, output_length, hash_ids: ids };
        if self.open.len() == OPEN {
            self.open.remove(0);
        }
        self.open.push(entry.clone());
        entry
    }

    /// The conversation that is gone on with, if it is one and there is room left in it.
    fn continued(&mut self) -> Option<Entry> {
        let goes_on = self.random.random_bool(0.35);
        if !goes_on || self.open.is_empty() {
            return None;
        }
        let index = self.random.random_range(0..self.open.len());
        let fits = |entry: &Entry| entry.input_length + entry.output_length < self.longest;
        fits(&self.open[index]).then(|| self.open.remove(index))
    }

    /// Blocks and tokens of a shared beginning.
    fn beginning(&mut self) -> (Vec<u64>, u64) {
        let number = self.random.random_range(0..BEGINNINGS);
        // The first of them is short and used most.
        let number = if self.random.random_bool(0.5) { 0 } else { number };
        let blocks = 1 + number % 3;
        ((number * 4..number * 4 + blocks).collect(), blocks * HASH_TOKENS)
    }

    /// Tokens of a typical new prompt, its beginning left out.
    fn typical(&self) -> f64 {
        float(self.longest / 4).clamp(1.0, 1200.0)
    }

    /// A number with a heavy tail: half of them are below `median`, one of a hundred is eleven times as large.
    fn log_normal(&mut self, median: f64) -> u64 {
        let (a, b): (f64, f64) = (self.unit(), self.unit());
        let normal = (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
        whole(median * normal.min(4.0).exp())
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Above 0, at most 1.
    fn unit(&mut self) -> f64 {
        1.0 - self.random.random::<f64>()
    }
}

#[expect(clippy::cast_precision_loss, reason = "a number of tokens, far below 2^53")]
const fn float(number: u64) -> f64 {
    number as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast of a float saturates, and none of these is negative"
)]
const fn whole(number: f64) -> u64 {
    number as u64
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn trace(seed: u64, longest: u64) -> Vec<Entry> {
        generate(Generator { seed, longest }, 500)
    }

    #[test]
    fn the_same_seed_gives_the_same_trace() {
        assert_eq!(trace(7, 32_768), trace(7, 32_768));
        assert_ne!(trace(7, 32_768), trace(8, 32_768));
    }

    #[test]
    fn every_entry_makes_sense() {
        for longest in [1, 2, 100, 511, 512, 513, 5000, 1 << 20] {
            for entry in trace(longest, longest) {
                assert_eq!(entry.fault(), None, "{entry:?}");
                assert!(entry.input_length <= longest && entry.output_length > 0);
            }
        }
    }

    #[test]
    fn lengths_have_a_heavy_tail() {
        let mut lengths: Vec<u64> = trace(1, 1 << 20).iter().map(|e| e.input_length).collect();
        lengths.sort_unstable();
        let (middle, last) = (lengths[250], lengths[499]);
        assert!((1000..4000).contains(&middle), "{middle}");
        assert!(last > 4 * middle, "{last}");
        assert!(lengths[0] < 1000);
    }

    #[test]
    fn prefixes_are_shared_and_an_id_has_one_place() {
        let trace = trace(2, 32_768);
        let mut before: BTreeMap<u64, Option<u64>> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        let mut shared = 0;
        for entry in &trace {
            let mut last = None;
            let mut prefix = true;
            for id in &entry.hash_ids {
                assert_eq!(*before.entry(*id).or_insert(last), last, "{entry:?}");
                last = Some(*id);
                prefix &= !seen.insert(*id);
                shared += u64::from(prefix);
            }
        }
        let all: usize = trace.iter().map(|entry| entry.hash_ids.len()).sum();
        let share = shared * 100 / all as u64;
        assert!((15..80).contains(&share), "{share} % of the blocks are a known prefix");
    }

    #[test]
    fn requests_arrive_one_after_the_other() {
        let trace = trace(3, 4096);
        assert!(trace.is_sorted_by_key(|entry| entry.timestamp));
        let mean = trace[499].timestamp / 500;
        assert!((200..500).contains(&mean), "{mean} ms");
    }
}
