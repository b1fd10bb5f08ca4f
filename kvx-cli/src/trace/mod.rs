//! Traces: the requests that an inference service was sent, without their text.
//!
//! A trace is a file of JSON lines, one request each:
//!
//! ```json
//! {"timestamp": 120, "input_length": 1300, "output_length": 52, "hash_ids": [0, 17, 18]}
//! ```
//!
//! `timestamp` is in milliseconds; `hash_ids` names the blocks of [`HASH_TOKENS`] tokens that the prompt consists of, the last
//! of which may be cut short. Two requests that begin with the same ids begin with the same tokens. Other fields are passed
//! over.

use serde::{Deserialize, Serialize};

mod generate;
mod read;

pub use generate::{Generator, generate};
pub use read::{parse, read};

/// Tokens that one of a request's `hash_ids` stands for.
pub const HASH_TOKENS: u64 = 512;

/// Most tokens of a prompt.
pub const MAX_TOKENS: u64 = 1 << 24;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// When it arrived, in milliseconds.
    pub timestamp: u64,
    /// Tokens of its prompt.
    pub input_length: u64,
    /// Tokens of the answer.
    pub output_length: u64,
    /// Names of the blocks of [`HASH_TOKENS`] tokens that the prompt consists of.
    pub hash_ids: Vec<u64>,
}

impl Entry {
    /// Cuts the prompt to at most `tokens` tokens.
    pub fn cut(&mut self, tokens: u64) {
        self.input_length = self.input_length.min(tokens);
        let blocks = self.input_length.div_ceil(HASH_TOKENS);
        self.hash_ids.truncate(usize::try_from(blocks).unwrap_or(usize::MAX));
    }

    /// Why it makes no sense, if it does not.
    fn fault(&self) -> Option<String> {
        let Self { input_length, hash_ids, .. } = self;
        let blocks = input_length.div_ceil(HASH_TOKENS);
        if *input_length == 0 || *input_length > MAX_TOKENS {
            Some(format!("input_length is {input_length}; it must be 1 to {MAX_TOKENS}"))
        } else if hash_ids.len() as u64 != blocks {
            Some(format!(
                "{} hash_ids; {input_length} tokens need {blocks}, one for each {HASH_TOKENS}",
                hash_ids.len()
            ))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_prompt_has_as_many_ids_as_it_needs() {
        let mut entry =
            Entry { timestamp: 0, input_length: 1300, output_length: 1, hash_ids: vec![4, 5, 6] };
        entry.cut(2000);
        assert_eq!(entry.hash_ids, [4, 5, 6]);
        entry.cut(1024);
        assert_eq!((entry.input_length, &*entry.hash_ids), (1024, &[4, 5][..]));
        entry.cut(1);
        assert_eq!(entry.hash_ids, [4]);
        assert_eq!(entry.fault(), None);
    }
}
