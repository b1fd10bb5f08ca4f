//! What the two engines of `kvx serve` say to each other besides the connector: which request is wanted, and its ticket. In a
//! real deployment a router carries the tickets.
//!
//! One JSON object a message, over a control channel of its own: so it is encrypted, bounded, and whoever has no key is never
//! heard.
//!
//! ```json
//! {"ask": {"request": 3, "tokens": 1024, "seed": 7}}
//! {"ticket": {"request": 3, "params": {"remote_host": "...", "...": "..."}}}
//! ```

use kvx_core::{Error, ErrorKind, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::engine::tags::Prompt;
use crate::trace::HASH_TOKENS;

/// What the consumer says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromConsumer {
    /// Fill a cache of so many tokens, with tags of this seed, and lease it.
    Ask(Ask),
    /// It has been fetched, or will not be.
    Over {
        /// Which.
        request: u64,
        /// How that came out.
        outcome: Outcome,
    },
}

/// What became of a request, as the consumer found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// It was fetched, and every element had its value.
    Good,
    /// It was fetched, and some element had not.
    Wrong,
    /// It was not fetched.
    Failed,
}

/// A request that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ask {
    /// The consumer's number for it.
    pub(crate) request: u64,
    pub(crate) tokens: u64,
    pub(crate) seed: u64,
}

impl Ask {
    /// What its tokens are.
    pub(crate) fn prompt(self) -> Prompt {
        let first = self.request << 24;
        let ids: Vec<u64> = (first..first + self.tokens.div_ceil(HASH_TOKENS)).collect();
        Prompt::new(self.seed, self.tokens, &ids)
    }
}

/// What the producer says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromProducer {
    /// First of all: who it is.
    Hello {
        /// Its engine's name.
        engine: String,
        /// Its model.
        model: String,
        /// Its shape, as on its command line.
        shape: String,
    },
    /// A request is leased.
    Ticket {
        /// Which.
        request: u64,
        /// Its ticket, as `kv_transfer_params`.
        params: Value,
    },
    /// There is no room now. It may be asked for again.
    Busy {
        /// Which.
        request: u64,
    },
    /// It will not be leased.
    Refused {
        /// Which.
        request: u64,
        /// Why.
        why: String,
    },
}

/// A message as bytes.
pub(crate) fn to_bytes(message: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(message).map_err(|source| {
        Error::new(ErrorKind::Internal, "serve", "a message cannot be expressed")
            .with_source(source)
    })
}

/// A message of bytes.
///
/// # Errors
///
/// [`ErrorKind::Peer`]: it is none.
pub(crate) fn from_bytes<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|source| {
        Error::peer("serve", "the other side said something that is not understood")
            .with_remedy("run the same version of kvx on both sides")
            .with_source(source)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_as_they_are_documented() {
        let ask = FromConsumer::Ask(Ask { request: 3, tokens: 1024, seed: 7 });
        let text = r#"{"ask":{"request":3,"tokens":1024,"seed":7}}"#;
        assert_eq!(to_bytes(&ask).unwrap(), text.as_bytes());
        assert_eq!(from_bytes::<FromConsumer>(text.as_bytes()).unwrap(), ask);
        let ticket = FromProducer::Ticket { request: 3, params: serde_json::json!({"a": 1}) };
        assert_eq!(to_bytes(&ticket).unwrap(), br#"{"ticket":{"request":3,"params":{"a":1}}}"#);
        for bytes in [&b""[..], b"{", b"{\"ask\":{}}", b"[1]", b"\xff"] {
            assert!(from_bytes::<FromConsumer>(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn both_sides_know_the_same_tokens_and_every_request_has_others() {
        let ask = |request| Ask { request, tokens: 1100, seed: 7 };
        assert_eq!(ask(1).prompt().token(1099), ask(1).prompt().token(1099));
        assert_ne!(ask(1).prompt().token(0), ask(2).prompt().token(0));
    }
}
