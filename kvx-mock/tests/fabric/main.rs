//! What the fabric promises, over many seeds. `KVX_SEED=N` runs one seed only.

#[cfg(test)]
mod common;
#[cfg(test)]
mod ending;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod handshake;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod loopback;
#[cfg(test)]
mod memory;
#[cfg(test)]
mod opening;
#[cfg(test)]
mod order;
#[cfg(test)]
mod port;
#[cfg(test)]
mod room;
#[cfg(test)]
mod rules;
#[cfg(test)]
mod time;
#[cfg(test)]
mod traffic;
