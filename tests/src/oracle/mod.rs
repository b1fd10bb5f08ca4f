//! What a transfer must do, byte by byte: written from the documentation of [`kvx_core::plan`], sharing no code and no
//! arithmetic with it.
//!
//! A [`Scene`] is one request between two engines: the layouts of all their ranks, a block table per cache group on each
//! side, the tokens and layers that are asked for. An [`Oracle`] knows, for every byte of every consumer rank, from which byte
//! of which producer rank it must come, or that it must not change. It goes over every logical element (layer, role, head,
//! token, dim, byte) in plain nested loops and puts each into a map; it never merges, sorts or skips anything.
//!
//! [`Memory`] is the memory of all these ranks: real bytes, each producer's element filled with a tag of its logical name,
//! everything else with noise. Segments are applied to it one byte at a time, while it keeps for every byte where it came from
//! and how often it was written. Then [`Oracle::check`] finds
//!
//! - a byte that was not written, or written twice;
//! - a byte that came from elsewhere, also where the value happens to be the same;
//! - a byte that was written and must not be: other blocks, the null block, the space between elements;
//! - a value that is not the tag of its logical element.
//!
//! [`Oracle::fewest`] lists the fewest segments that do the work of one pair of ranks, from the same map.
//!
//! # How the oracle reads *What is moved*
//!
//! Token `t` of a request with `n` tokens is *needed* by a layer if the window of its next token, `n`, takes it: always
//! with full attention; with a sliding window of `w` if `t + w > n`; with chunks of `c` if `t` and `n` are in the same
//! chunk. Where the sides disagree (one has a window, the other does not), both must need it.
//!
//! A *slot* is a token's place in the request; the unused places of the last kernel block are slots too, from `n` on. Of a
//! token range `a..b`:
//!
//! - no slot before `a` is moved, and none at all if no token is needed or the range is empty;
//! - where kernel blocks differ in size, slot `t` is moved if `t < b` and token `t` is needed;
//! - where they are equal, slot `t < b` is moved if its block, or an earlier one, holds a needed token; and if `b = n`, the
//!   unused slots of the block that holds token `n - 1` are moved too;
//! - what is kept once per kernel block is moved if any slot of the block is. The range must not begin within a block then.
//!
//! Of a state group, the last block of each side's table is moved if the range is not empty and ends with the request.

mod address;
mod expect;
mod fault;
mod memory;
mod rules;
mod runs;
mod scene;
mod tag;

pub use expect::{Oracle, Origin};
pub use fault::Fault;
pub use memory::Memory;
pub use runs::Run;
pub use scene::{Scene, Side, Table};

pub(crate) use rules::touched_entries;
pub(crate) use runs::check_cut;

#[cfg(test)]
mod tests;
