//! Many seeds of a simulation, on all processors.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a long sweep says how far it is.
const SAYS_EVERY: Duration = Duration::from_secs(60);

/// Runs each seed once, the lowest first, on all processors, and adds up what the runs give. Every minute it says on
/// standard error below which seed all have held: a sweep that was interrupted goes on from there (`KVX_SEEDS=FROM..TO`).
///
/// # Panics
///
/// With the first failure's seed, and what it says; and where a run panics.
#[expect(clippy::panic, reason = "it is a test's, and this is how one fails")]
pub fn sweep<T: Default + Send, E: fmt::Display + Send>(
    seeds: Range<u64>,
    run: impl Fn(u64) -> Result<T, E> + Sync,
    add: impl Fn(&mut T, T) + Sync,
) -> T {
    assert!(!seeds.is_empty(), "no seed was run: KVX_SEEDS names none");
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let (next, failed) = (AtomicU64::new(seeds.start), AtomicBool::new(false));
    let at: Vec<AtomicU64> = (0..threads).map(|_| AtomicU64::new(seeds.start)).collect();
    let total = Mutex::new(T::default());
    let said = Mutex::new(Instant::now());
    std::thread::scope(|scope| {
        for mine in &at {
            scope.spawn(|| {
                let mut sum = T::default();
                while !failed.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    mine.store(seed.min(seeds.end), Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(seed))) {
                        Ok(Ok(one)) => add(&mut sum, one),
                        Ok(Err(broken)) => {
                            failed.store(true, Ordering::Relaxed);
                            panic!("KVX_SEED={seed}: {broken}");
                        }
                        Err(panic) => {
                            failed.store(true, Ordering::Relaxed);
                            eprintln!("seed {seed} panicked; KVX_SEED={seed} runs it again");
                            std::panic::resume_unwind(panic);
                        }
                    }
                    say_how_far(&said, &at, &seeds);
                }
                add(&mut total.lock().unwrap_or_else(PoisonError::into_inner), sum);
            });
        }
    });
    total.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn say_how_far(said: &Mutex<Instant>, at: &[AtomicU64], seeds: &Range<u64>) {
    let Ok(mut said) = said.try_lock() else { return };
    if said.elapsed() >= SAYS_EVERY {
        *said = Instant::now();
        let below = at.iter().map(|one| one.load(Ordering::Relaxed)).min().unwrap_or(seeds.start);
        eprintln!("all seeds from {} to below {below} hold, of {}", seeds.start, seeds.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_seed_is_run_once_and_a_failure_names_its_seed() {
        let sum = sweep(5..1005, Ok::<_, String>, |sum, one| *sum += one);
        assert_eq!(sum, (5..1005).sum::<u64>());
        let failing = |seed| if seed == 40 { Err("broken".to_owned()) } else { Ok(1_u64) };
        let caught = std::panic::catch_unwind(|| sweep(0..100, failing, |sum, one| *sum += one));
        assert!(caught.is_err());
        let caught = std::panic::catch_unwind(|| sweep(9..9, failing, |sum, one| *sum += one));
        assert!(caught.is_err(), "none is none");
    }
}
