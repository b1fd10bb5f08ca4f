//! What is asked for: tokens, layers and block tables of one request.

use std::ops::Range;

use super::blocks::BlockTable;
use crate::{Error, Result};

/// One request, or a part of one: what to move, and in which blocks it lies on both sides.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// Tokens that the request has in its cache.
    pub tokens: u64,
    /// Which of them to move.
    pub range: Range<u64>,
    /// Which global layers to move.
    pub layers: Range<u32>,
    /// Cache groups of the consumer of which nothing is moved. Their block tables are not looked at.
    pub without: &'a [u16],
    /// The producer's block tables, one per cache group of its layout.
    pub producer: &'a [BlockTable<'a>],
    /// The consumer's block tables, one per cache group of its layout.
    pub consumer: &'a [BlockTable<'a>],
}

impl<'a> Request<'a> {
    /// All layers of all `tokens` tokens.
    #[must_use]
    pub const fn whole(
        tokens: u64,
        producer: &'a [BlockTable<'a>],
        consumer: &'a [BlockTable<'a>],
    ) -> Self {
        Self { tokens, range: 0..tokens, layers: 0..u32::MAX, without: &[], producer, consumer }
    }

    /// Only these tokens.
    #[must_use]
    pub const fn with_range(mut self, range: Range<u64>) -> Self {
        self.range = range;
        self
    }

    /// Only these layers.
    #[must_use]
    pub const fn with_layers(mut self, layers: Range<u32>) -> Self {
        self.layers = layers;
        self
    }

    /// Nothing of these cache groups of the consumer.
    #[must_use]
    pub const fn without_groups(mut self, groups: &'a [u16]) -> Self {
        self.without = groups;
        self
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.range.start <= self.range.end && self.range.end <= self.tokens {
            return Ok(());
        }
        Err(Error::misuse("plan.segments", "the token range is not inside the request")
            .with_context("range", format!("{}..{}", self.range.start, self.range.end))
            .with_context("tokens", self.tokens)
            .with_remedy("ask for tokens that the request has, the first before the last"))
    }
}

/// One step of a chunked transfer: see [`chunks`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Tokens to move in this step. May be empty: the consumer held them all.
    pub range: Range<u64>,
    /// Whether this is the last step. True for exactly one chunk of every request.
    pub last: bool,
}

/// The steps in which a request of `tokens` tokens is moved as it is prefilled, `chunk` tokens at a time, when the consumer
/// holds the first `held` of them already.
///
/// There is a step for every prefilled chunk, also for one of which nothing is to be moved, so that the last is always told
/// from the others; and one (empty, last) for a request without tokens.
///
/// # Errors
///
/// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) when `chunk` is 0 or more is held than there is.
pub fn chunks(tokens: u64, chunk: u64, held: u64) -> Result<impl Iterator<Item = Chunk>> {
    if chunk == 0 {
        return Err(Error::misuse("plan.chunks", "a chunk of 0 tokens"));
    }
    if held > tokens {
        return Err(Error::misuse("plan.chunks", "more tokens are held than the request has")
            .with_context("held", held)
            .with_context("tokens", tokens));
    }
    let count = tokens.div_ceil(chunk).max(1);
    Ok((0..count).map(move |i| {
        let end = (i + 1).saturating_mul(chunk).min(tokens);
        Chunk { range: (i * chunk).max(held).min(end)..end, last: i + 1 == count }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known failure 35 (sglang#19746): a chunk that the consumer holds already is empty and must not be taken for the
    /// last one. 8 pages of one token, 5 held, chunks of 4.
    #[test]
    fn a_held_chunk_is_empty_and_not_the_last() {
        let steps: Vec<_> = chunks(8, 4, 5).unwrap().collect();
        assert_eq!(steps, [Chunk { range: 4..4, last: false }, Chunk { range: 5..8, last: true }]);
    }

    #[test]
    fn every_token_that_is_not_held_is_in_one_chunk_and_one_chunk_is_last() {
        for tokens in 0..20 {
            for chunk in 1..8 {
                for held in 0..=tokens {
                    let steps: Vec<_> = chunks(tokens, chunk, held).unwrap().collect();
                    let moved: Vec<u64> =
                        steps.iter().flat_map(|step| step.range.clone()).collect();
                    assert_eq!(moved, (held..tokens).collect::<Vec<_>>());
                    assert_eq!(steps.iter().filter(|step| step.last).count(), 1);
                    assert!(steps.last().unwrap().last);
                }
            }
        }
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(chunks(8, 0, 0).is_err());
        assert!(chunks(8, 4, 9).is_err());
    }
}
