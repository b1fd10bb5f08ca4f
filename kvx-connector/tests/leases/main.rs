//! Leases: the machines of owners and users by hand, in every order, and in a simulation of many seeds; and that the
//! simulation finds what it is there to find.
//!
//! `KVX_SEED=N` runs one seed, `KVX_SEEDS=N` or `FROM..TO` that many. Unless said: 2,000 where debug assertions are on, 50,000 otherwise.

#[cfg(test)]
mod bench;
#[cfg(test)]
mod kept;
#[cfg(test)]
mod known_owner;
#[cfg(test)]
mod known_user;
#[cfg(test)]
mod many;
#[cfg(test)]
mod model;
#[cfg(test)]
mod planted;
#[cfg(test)]
mod tickets;
#[cfg(test)]
mod told;
