//! The four-engine exchange, over many seeds; and that it finds what it is there to find.
//!
//! `KVX_SEED=N` runs one seed, `KVX_SEEDS=N` that many. Unless said: 400 where debug assertions are on, 10,000 otherwise.

#[cfg(test)]
mod digest;
#[cfg(test)]
mod many;
#[cfg(test)]
mod planted;
#[cfg(test)]
mod saboteur;
