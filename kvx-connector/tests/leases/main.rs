//! The simulation of leases, over many seeds; and that it finds what it is there to find.
//!
//! `KVX_SEED=N` runs one seed, `KVX_SEEDS=N` that many. Unless said: 2,000 where debug assertions are on, 50,000 otherwise.

#[cfg(test)]
mod many;
#[cfg(test)]
mod planted;
