//! A large job in chunks, of which several threads take one after the other.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::state::Place;
use crate::sys::vm::MOST;
use crate::sys::runs::Run;
use crate::strides::{CALL, STRIDE};

/// What a byte of mapped memory takes of a chunk, where one that goes through the kernel takes 1: a chunk is one stride, or
/// one call, or a mixture.
const MAPPED: usize = CALL / STRIDE;

/// Where a chunk begins: in a run, so many bytes after its first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cut {
    run: usize,
    at: usize,
}

/// Where the chunks of a job's runs begin, and which of them was taken last.
#[derive(Debug)]
pub(crate) struct Chunks {
    /// One more than there are chunks: the last is the end of the last run.
    cuts: Vec<Cut>,
    next: AtomicUsize,
}

impl Chunks {
    pub(crate) fn new(places: &[Place], runs: &[Run]) -> Self {
        let mut cuts = vec![Cut::default()];
        let mut room = Room::default();
        for (index, run) in runs.iter().enumerate() {
            let mut at = 0;
            while at < run.bytes() {
                at += room.take(&places[run.place() as usize], run, at);
                if room.is_used_up() {
                    room = Room::default();
                    let whole = at == run.bytes();
                    cuts.push(if whole { Cut { run: index + 1, at: 0 } } else { Cut { run: index, at } });
                }
            }
        }
        let end = Cut { run: runs.len(), at: 0 };
        if cuts.last() != Some(&end) {
            cuts.push(end);
        }
        Self { cuts, next: AtomicUsize::new(0) }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.cuts.len() - 1
    }

    /// Takes a chunk: the parts of the runs that are in it, by the runs' indices. `None` when all are taken. The runs are those of which it was made.
    pub(crate) fn take<'a>(
        &self,
        runs: &'a [Run],
    ) -> Option<impl Iterator<Item = (usize, Range<usize>)> + Clone + use<'a>> {
        let index = self.next.fetch_add(1, Relaxed);
        let (from, to) = (*self.cuts.get(index)?, *self.cuts.get(index + 1)?);
        let of = (from.run..).zip(runs.get(from.run..)?).take_while(move |(at, _)| *at <= to.run);
        let parts = of.map(move |(at, run)| {
            let begin = if at == from.run { from.at } else { 0 };
            let end = if at == to.run { to.at } else { run.bytes() };
            (at, begin..end)
        });
        Some(parts.filter(|(_, part)| !part.is_empty()))
    }
}

/// What is left of a chunk.
struct Room {
    bytes: usize,
    /// Ranges of the call to the kernel on either side, and where the last of them end.
    ranges: [usize; 2],
    ends: Option<[u64; 2]>,
}

impl Default for Room {
    fn default() -> Self {
        Self { bytes: CALL, ranges: [0; 2], ends: None }
    }
}

impl Room {
    /// Takes the part of a run after its first `at` bytes for which there is room: at least a byte.
    fn take(&mut self, place: &Place, run: &Run, at: usize) -> usize {
        let left = run.bytes() - at;
        match place {
            Place::Shared(..) => {
                let part = left.min(self.bytes / MAPPED);
                self.bytes -= part * MAPPED;
                part
            }
            Place::Process(base) => {
                let part = left.min(self.bytes);
                self.bytes -= part;
                let begins = [base + run.offset(), run.address()].map(|a| a + at as u64);
                // Neighbours become one range.
                for side in 0..2 {
                    let goes_on = self.ends.is_some_and(|ends| ends[side] == begins[side]);
                    self.ranges[side] += usize::from(!goes_on);
                }
                self.ends = Some(begins.map(|begin| begin + part as u64));
                part
            }
        }
    }

    fn is_used_up(&self) -> bool {
        self.bytes < MAPPED || self.ranges.contains(&MOST)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::sys::memfd::{Foreign, Own, Pages};

    /// One of each kind. Nothing is copied, so the mapping may be small.
    fn places() -> [Place; 2] {
        let own = Own::new("kvx-shm-test", 4096, Pages::Normal, |_, _| Ok(())).unwrap();
        let fd = own.fd().try_clone_to_owned().unwrap();
        [Place::Shared(Arc::new(Foreign::map(&fd).unwrap()), 0), Place::Process(1 << 40)]
    }

    fn run(place: u32, offset: u64, to: usize, bytes: usize) -> Run {
        Run::alone(place, offset, to, bytes)
    }

    /// Runs of all sizes, some of which go on where the one before ended, on either side.
    fn runs() -> impl Strategy<Value = Vec<Run>> {
        let bytes = prop_oneof![
            4 => 0..600_usize,
            2 => 0..100_000_usize,
            1 => 0..5_000_000_usize,
            1 => Just(STRIDE),
            1 => Just(CALL),
        ];
        let one = (0..2_u32, bytes, any::<bool>(), any::<bool>());
        let repeat = prop_oneof![4 => Just(1_usize), 1 => 1..3000_usize];
        proptest::collection::vec((one, repeat), 0..60).prop_map(|list| {
            let (mut offset, mut to, mut runs) = (0, 1 << 30, Vec::new());
            for ((place, bytes, there, here), count) in list {
                for _ in 0..if bytes < 600 { count } else { 1 } {
                    offset += if there { 0 } else { 64 };
                    to += if here { 0 } else { 64 };
                    runs.push(run(place, offset, to, bytes));
                    offset += bytes as u64;
                    to += bytes;
                }
            }
            runs
        })
    }

    proptest! {
        /// Every byte of every run once, in order, and no chunk larger than a stride or a call.
        #[test]
        fn every_byte_is_in_one_chunk(runs in runs()) {
            let places = places();
            let chunks = Chunks::new(&places, &runs);
            let mut seen = vec![0; runs.len()];
            let mut count = 0;
            while let Some(parts) = chunks.take(&runs) {
                count += 1;
                let mut bytes = [0; 2];
                for (index, part) in parts {
                    let run = &runs[index];
                    prop_assert_eq!(part.start, seen[index]);
                    prop_assert!(part.end >= part.start && part.end <= run.bytes());
                    seen[index] = part.end;
                    bytes[run.place() as usize] += part.len();
                }
                prop_assert!(bytes[0] <= STRIDE && bytes[1] <= CALL, "{:?}", bytes);
            }
            prop_assert_eq!(count, chunks.count());
            prop_assert!(runs.iter().zip(seen).all(|(run, seen)| seen == run.bytes()));
            prop_assert!(chunks.take(&runs).is_none());
        }
    }

    /// Chunks of what the kernel copies are as large as one call may be.
    #[test]
    fn calls_are_not_cut_needlessly() {
        let places = places();
        let ranges = |chunks: &Chunks, runs: &[Run]| chunks.take(runs).unwrap().count();
        // Small ranges apart: as many as a call takes.
        let apart: Vec<_> = (0..5000_usize).map(|at| run(1, at as u64 * 512, (1 << 30) + at * 256, 256)).collect();
        let chunks = Chunks::new(&places, &apart);
        assert_eq!((chunks.count(), ranges(&chunks, &apart)), (5, MOST));
        // Ranges that become one on both sides: as many bytes as a call takes.
        let count = 2 * CALL / 256;
        let joined: Vec<_> = (0..count).map(|at| run(1, at as u64 * 256, (1 << 30) + at * 256, 256)).collect();
        let chunks = Chunks::new(&places, &joined);
        assert_eq!((chunks.count(), ranges(&chunks, &joined)), (2, CALL / 256));
    }

    /// Threads that take chunks at the same time take different ones.
    #[test]
    fn threads_share_them_all() {
        let places = places();
        let runs: Vec<_> = (0..100).map(|at| run(0, 0, 1 << 30, 40_000 + at)).collect();
        let chunks = Chunks::new(&places, &runs);
        let all = |_| {
            let mut sum = 0;
            while let Some(parts) = chunks.take(&runs) {
                sum += parts.map(|(_, part)| part.len()).sum::<usize>();
            }
            sum
        };
        let sum: usize = std::thread::scope(|scope| {
            let threads = [0; 4].map(|n| scope.spawn(move || all(n)));
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(sum, runs.iter().map(|run| run.bytes()).sum::<usize>());
    }
}
