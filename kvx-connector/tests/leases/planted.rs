//! Each fault that is planted in the machines is found.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kvx_connector::protocol::Plant;
use kvx_connector::protocol::sim::Leases;

/// Within so many seeds.
const WITHIN: u64 = 10_000;

/// The first seed that finds a fault, and what is found.
fn found(plant: Plant) -> Option<(u64, String)> {
    let seed = (0..WITHIN).find(|seed| !Leases::new(*seed).plant(plant).is_sound())?;
    let failure = Leases::new(seed).plant(plant).run().err()?;
    Some((seed, failure.violation.to_string()))
}

#[test]
fn every_planted_fault_is_found() {
    let next = AtomicUsize::new(0);
    let missed = AtomicU64::new(0);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(plant) = Plant::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match found(*plant) {
                        Some((seed, what)) => println!("{plant:?}: seed {seed}: {what}"),
                        None => {
                            missed.fetch_add(1, Ordering::Relaxed);
                            println!("{plant:?}: not found in {WITHIN} seeds");
                        }
                    }
                }
            });
        }
    });
    assert_eq!(missed.into_inner(), 0, "faults were not found");
}

#[test]
fn a_fault_is_named_with_its_seed_and_the_same_in_each_run() {
    let run = || Leases::new(7).plant(Plant::FreeBeforeConfirm).run();
    let (one, other) = (run(), run());
    let texts =
        [one, other].map(|it| it.map_or_else(|failure| failure.to_string(), |_| String::new()));
    assert_eq!(texts[0], texts[1]);
    let found =
        (0..200).find_map(|seed| Leases::new(seed).plant(Plant::FreeBeforeConfirm).run().err());
    let failure = found.expect("it is found within 200 seeds");
    let text = failure.to_string();
    assert!(text.contains(&format!("KVX_SEED={} runs it again", failure.seed)), "{text}");
    assert!(!failure.log.is_empty(), "the log is shown");
}
