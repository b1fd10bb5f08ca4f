//! What every element should be: a tag made of where it stands in the model and in the request.

use kvx_core::layout::Role;
use serde::{Deserialize, Serialize};

use crate::trace::HASH_TOKENS;

/// Scrambles 64 bits: close inputs give outputs that have nothing in common.
pub(crate) const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let value = (value ^ (value >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    value ^ (value >> 32)
}

/// What a request's tokens are, without the tokens: equal for two requests as far as these begin with the same blocks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Prompt {
    tokens: u64,
    /// One for each block of [`HASH_TOKENS`] tokens: names it and all before it.
    chain: Vec<u64>,
}

impl Prompt {
    /// A prompt of `tokens` tokens in the blocks that `hash_ids` names.
    pub(crate) fn new(seed: u64, tokens: u64, hash_ids: &[u64]) -> Self {
        let mut last = mix(seed ^ 0x6b76_782d_7461_6773);
        let chain = hash_ids
            .iter()
            .map(|id| {
                last = mix(last.wrapping_add(mix(*id)));
                last
            })
            .collect();
        Self { tokens, chain }
    }

    /// How many tokens it has.
    pub(crate) const fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Names of its blocks of [`HASH_TOKENS`] tokens; the last may be cut short.
    pub(crate) fn chain(&self) -> &[u64] {
        &self.chain
    }

    /// What token number `token` is, given all before it.
    pub(crate) fn token(&self, token: u64) -> u64 {
        let block = usize::try_from(token / HASH_TOKENS).unwrap_or(usize::MAX);
        let chain = self.chain.get(block).copied().unwrap_or_default();
        mix(chain ^ (token % HASH_TOKENS))
    }

    /// What the state after all of its tokens is.
    pub(crate) fn state(&self) -> u64 {
        mix(self.token(self.tokens.saturating_sub(1)) ^ self.tokens)
    }
}

/// Names a tensor's head; with a token it makes a [`Row`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadTag(u64);

impl HeadTag {
    pub(crate) fn new(layer: u32, role: Role, head: u32) -> Self {
        let role = match role {
            Role::Key => 0,
            Role::Value => 1,
            Role::Latent => 2,
            Role::IndexKey => 3,
            Role::IndexScale => 4,
            Role::KeyScale => 5,
            Role::ValueScale => 6,
            Role::LatentScale => 7,
            Role::ConvState(part) => 0x100 + u64::from(part),
            Role::SsmState => 8,
            Role::Aux(item) => 0x1_0000 + u64::from(item),
            _ => 9,
        };
        Self(mix((u64::from(layer) << 40) ^ (role << 20) ^ u64::from(head)))
    }

    /// The row of this head at a token (as [`Prompt::token`] names it).
    #[inline]
    pub(crate) const fn row(self, token: u64) -> Row {
        Row(mix(self.0 ^ token))
    }
}

/// The elements of one head at one token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row(u64);

#[expect(clippy::cast_possible_truncation, reason = "bits are taken apart; indexes may come round")]
impl Row {
    /// Sixteen bits of the row: all that an element of two bytes has.
    #[inline]
    const fn word(self, index: u16) -> u16 {
        let [a, b, c] = [self.0 as u16, (self.0 >> 16) as u16, (self.0 >> 32) as u16];
        let mixed = a.wrapping_add(index.wrapping_mul(0x9e37));
        let mixed = (mixed ^ (mixed >> 7)).wrapping_mul(b | 1);
        mixed ^ (mixed >> 9) ^ c
    }

    /// Writes the row's elements, of `size` bytes each, one after the other.
    pub(crate) fn fill(self, size: usize, out: &mut [u8]) {
        if size == 1 {
            for (index, byte) in out.iter_mut().enumerate() {
                *byte = self.word(index as u16).to_le_bytes()[1];
            }
            return;
        }
        let (words, _) = out.as_chunks_mut::<2>();
        for (index, word) in words.iter_mut().enumerate() {
            *word = self.word(index as u16).to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn row(layer: u32, role: Role, head: u32, token: u64) -> Vec<u8> {
        let prompt = Prompt::new(1, 2000, &[7, 8, 9, 10]);
        let mut out = vec![0; 64];
        HeadTag::new(layer, role, head).row(prompt.token(token)).fill(2, &mut out);
        out
    }

    #[test]
    fn rows_differ_in_every_coordinate() {
        let mut all = BTreeSet::new();
        for layer in 0..4 {
            for role in [Role::Key, Role::Value, Role::ConvState(0), Role::ConvState(1)] {
                for head in 0..4 {
                    for token in (0..2000).step_by(37) {
                        assert!(all.insert(row(layer, role, head, token)));
                    }
                }
            }
        }
    }

    #[test]
    fn neighbouring_elements_differ() {
        let words: Vec<u16> = (0..2000).map(|i| Row(mix(3)).word(i)).collect();
        let equal = words.windows(2).filter(|pair| pair[0] == pair[1]).count();
        assert!(equal < 4, "{equal}");
        let distinct: BTreeSet<u16> = words.iter().copied().collect();
        assert!(distinct.len() > 1800, "{}", distinct.len());
    }

    #[test]
    fn a_row_begins_alike_for_every_length() {
        for size in [1, 2, 4, 8] {
            let (mut long, mut short) = (vec![0; 64 * size], vec![0; 3 * size]);
            Row(mix(5)).fill(size, &mut long);
            Row(mix(5)).fill(size, &mut short);
            assert_eq!(long[..short.len()], short);
        }
    }

    #[test]
    fn prompts_are_alike_as_far_as_their_blocks_are() {
        let (a, b) = (Prompt::new(1, 1500, &[1, 2, 3]), Prompt::new(1, 1400, &[1, 2, 4]));
        for token in 0..1024 {
            assert_eq!(a.token(token), b.token(token));
        }
        assert_ne!(a.token(1024), b.token(1024));
        // The same block elsewhere is something else, and so is it with another seed.
        assert_ne!(a.token(0), Prompt::new(1, 512, &[2]).token(0));
        assert_ne!(Prompt::new(1, 1024, &[1, 2]).token(512), Prompt::new(1, 512, &[2]).token(0));
        assert_ne!(a.token(0), Prompt::new(2, 1500, &[1, 2, 3]).token(0));
        assert_ne!(a.state(), Prompt::new(1, 1499, &[1, 2, 3]).state());
    }
}
