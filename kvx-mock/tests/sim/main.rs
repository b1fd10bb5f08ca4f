//! The four-engine exchange, over many seeds; and that it finds what it is there to find.
//!
//! `KVX_SEED=N` runs one seed, `KVX_SEEDS=N` or `FROM..TO` that many. Unless said: 400 where debug assertions are on, 10,000 otherwise.

#[cfg(test)]
mod digest;
#[cfg(test)]
mod many;
#[cfg(test)]
mod planted;
#[cfg(test)]
mod saboteur;

#[cfg(test)]
use kvx_mock::sim::{Exchange, Report};

/// Runs a seed. What fails or panics says which seed it is.
#[cfg(test)]
fn run(seed: u64) -> Report {
    let run = || Exchange::new(seed).run().unwrap_or_else(|failure| panic!("{failure}"));
    std::panic::catch_unwind(run).unwrap_or_else(|panic| {
        eprintln!("seed {seed} panicked; KVX_SEED={seed} runs it again");
        std::panic::resume_unwind(panic)
    })
}
