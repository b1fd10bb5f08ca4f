//! How two layouts map onto each other: which ranks talk to which, and the segments of one request.
//!
//! 1. [`Pairing::new`] takes the layouts of all ranks of two engines and says which producer rank gives which heads of
//!    which layers to which consumer rank, and from whom each producer rank must hear.
//! 2. [`PeerPlan::compile`] prepares one pair of ranks, once. Its size depends on the number of tensors, never on the
//!    number of blocks.
//! 3. [`PeerPlan::segments`] lists the segments of one request, for given block tables, token and layer range: sorted by
//!    where they are written, merged across blocks, tensors and layers of a region, cut by the backend's limits. Nothing
//!    is allocated per segment; the caller's [`SegmentList`] is reused.
//!
//! Everything here is pure: no memory is touched, no clock is read.
//!
//! # What is moved
//!
//! A request has `tokens` tokens in its cache, and `range` of them are asked for. Of each tensor that the consumer rank
//! has, the heads that it holds are moved, for these tokens:
//!
//! - of a layer with a sliding or chunked window, only tokens that the layer still needs
//!   ([`Window::first_needed`](crate::layout::Window::first_needed)). A side that declares no window keeps all of the layer's
//!   tokens; the other side's window counts then. Two windows that differ are refused;
//! - where both sides have kernel blocks of the same size, blocks are moved whole: the last block with the unused rest of it (when
//!   the range ends with the request), a window's first block with the tokens before the window. Never a token before
//!   `range.start`: the consumer may hold those already, in blocks that other requests share;
//! - elsewhere exactly these tokens.
//!
//! Of a state group the last block of each side's table is moved, when a range that is not empty ends with the request.
//!
//! # Invariants
//!
//! For every list that [`PeerPlan::segments`] returns (each is a property test, against an oracle that shares no code with
//! this module):
//!
//! - every byte that must be written is written by exactly one segment, from the right source byte;
//! - no other byte is written, and no byte outside the producer's tensors is read;
//! - before limits are applied, no list with fewer segments does the same: segments are the maximal runs that are contiguous
//!   on both sides;
//! - the null block is neither read nor written.

mod blocks;
mod compile;
mod enumerate;
mod fold;
mod foretell;
mod list;
mod pairing;
mod pieces;
mod request;
mod roster;
#[cfg(test)]
mod tests;

pub use blocks::{BlockTable, kernel_blocks};
pub use compile::PeerPlan;
pub use list::{Cost, SegmentList, count_lengths};
pub use pairing::{Pair, Pairing, Share};
pub use request::{Chunk, Request, chunks};
pub use roster::{Confirmed, Roster};
