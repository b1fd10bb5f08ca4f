//! What two [`Peers`](super::Peers) say to each other.
//!
//! The same MessagePack with named fields as everything that goes between two engines, every length bounded. Whoever asks
//! numbers its questions; an answer says which one it is for, and one to a question that is no longer asked is passed over.
//!
//! ```text
//! any rank                          whoever serves an engine's cards
//! GetCards ───────────────────────▶
//!          ◀─────────────── Cards   once more from where it ended, until all is there
//!
//! initiator                         acceptor (another rank)
//! Meet (offer) ───────────────────▶ accepts
//!              ◀──────── MeetReply
//! MeetCompletion ─────────────────▶ finishes
//!              ◀───────── Finished
//! ```

use kvx_core::card::{Card, EngineName};
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::Incarnation;
use kvx_core::wire::{self, Text};
use kvx_core::{Error, ErrorKind, Result, Retry};
use serde::{Deserialize, Serialize};

const OPERATION: &str = "peers.message";

/// A backend's name.
pub type BackendName = Text<64>;
/// What went wrong, in words.
pub type Words = Text<1024>;

/// A message between two sides that want to know each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Message {
    /// Asks for the cards of an engine's replica, from one byte on.
    GetCards {
        /// Number of the question.
        number: u64,
        /// The engine that is expected here.
        engine: Text<{ EngineName::MAX_BYTES }>,
        /// Its replica.
        replica: u32,
        /// The life and the version of the cards that the asker has, or is in the middle of.
        version: Option<(Incarnation, u64)>,
        /// First byte asked for, in all the cards one after the other.
        offset: u64,
    },
    /// Cards, or a part of them.
    Cards {
        /// Number of the question.
        number: u64,
        /// The life of the engine.
        life: Incarnation,
        /// Changes when any card does. Never twice the same in one life.
        version: u64,
        /// Bytes of each rank's card, in the order of the replica.
        #[serde(deserialize_with = "wire::list::<_, _, { Message::MAX_RANKS }>")]
        lengths: Vec<u32>,
        /// First byte of this part, in all the cards one after the other.
        offset: u64,
        /// The part. Empty where the asker has this version already.
        #[serde(with = "part")]
        bytes: Vec<u8>,
    },
    /// Begins a handshake.
    Meet {
        /// Number of the attempt: a higher one of the same rank replaces it.
        number: u64,
        /// The life of the rank that is meant.
        to: Incarnation,
        /// The backend.
        backend: BackendName,
        /// Its offer.
        offer: HandshakeBytes,
        /// The card of who asks, for those who write into its memory. Left out where it is too long: it can be asked for.
        #[serde(default)]
        card: Option<CardBytes>,
    },
    /// Answers it.
    MeetReply {
        /// Number of the attempt.
        number: u64,
        /// What the backend answers.
        reply: HandshakeBytes,
    },
    /// Completes it.
    MeetCompletion {
        /// Number of the attempt.
        number: u64,
        /// What the backend tells.
        completion: HandshakeBytes,
    },
    /// Both sides may post.
    Finished {
        /// Number of the attempt.
        number: u64,
    },
    /// A question or an attempt is refused.
    Refused {
        /// Its number.
        number: u64,
        /// Why.
        refusal: Refusal,
    },
    /// The cards that were fetched by this session are not those that are served now.
    Changed,
    /// The connection to the other side is over: it may be met again.
    Parted,
    /// The sender goes.
    Bye,
}

impl Message {
    /// Most bytes of a message.
    pub const MAX_BYTES: usize = 64 * 1024;
    /// Most ranks of a replica.
    pub const MAX_RANKS: usize = 4096;
    /// Most bytes of cards in one message.
    pub const MAX_PART: usize = 32 * 1024;

    /// The message as bytes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Internal`]: it cannot be expressed within [`MAX_BYTES`](Self::MAX_BYTES).
    pub fn encode(&self) -> Result<Vec<u8>> {
        let bytes = wire::to_bytes(OPERATION, self)?;
        if bytes.len() > Self::MAX_BYTES {
            return Err(Error::new(ErrorKind::Internal, OPERATION, "the message is too long")
                .with_context("bytes", bytes.len())
                .with_context("limit", Self::MAX_BYTES));
        }
        Ok(bytes)
    }

    /// The message that these bytes are.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Peer`]: too long or malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() > Self::MAX_BYTES {
            return Err(Error::peer(OPERATION, "the message is too long")
                .with_context("bytes", bytes.len())
                .with_context("limit", Self::MAX_BYTES));
        }
        wire::from_bytes(OPERATION, "the message", bytes)
    }
}

mod part {
    use super::{Message, wire};
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        wire::serialize_bytes(bytes, serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<u8>, D::Error> {
        wire::bytes::<_, { Message::MAX_PART }>(input)
    }
}

/// A card's bytes that are short enough to go along with a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CardBytes(#[serde(with = "part")] Vec<u8>);

impl CardBytes {
    /// These bytes, if they are few enough.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (bytes.len() <= Message::MAX_PART.min(Card::MAX_BYTES)).then(|| Self(bytes.to_vec()))
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Why something is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Who is to blame.
    pub kind: ErrorKind,
    /// The same may be asked later.
    pub later: bool,
    /// What went wrong.
    pub text: Words,
    /// The field on which the two sides disagree, and both values, each with whose it is.
    #[serde(default)]
    pub mismatch: Option<Disagreement>,
    /// What can be done about it. `None` also from an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<Words>,
}

/// A field on which two sides disagree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disagreement {
    /// The field.
    pub field: Words,
    /// Whose value the left one is, and the value.
    pub left: (Words, Words),
    /// Whose value the right one is, and the value.
    pub right: (Words, Words),
}

impl Refusal {
    /// What to tell the other side of `error`.
    #[must_use]
    pub fn new(error: &Error, later: bool) -> Self {
        Self {
            kind: error.kind(),
            later,
            text: words(&error.to_string()),
            mismatch: error.as_mismatch().map(|mismatch| Disagreement {
                field: words(&mismatch.field),
                left: (words(&mismatch.left.0), words(&mismatch.left.1)),
                right: (words(&mismatch.right.0), words(&mismatch.right.1)),
            }),
            remedy: error.remedy().map(words),
        }
    }

    /// The error that it is on this side.
    #[must_use]
    pub fn to_error(&self) -> Error {
        let error = match &self.mismatch {
            None => Error::peer("peers", format!("the peer refuses: {}", self.text)),
            Some(Disagreement { field, left, right }) => {
                let side = |words: &Words| match words.as_str() {
                    "producer" => "producer",
                    "consumer" => "consumer",
                    _ => "one side",
                };
                let (mut whose, mut other) = (side(&left.0), side(&right.0));
                if whose == other {
                    (whose, other) = ("one side", "the other side");
                }
                let field = field.as_str().to_owned();
                Error::mismatch_between("peers", field, (whose, &left.1), (other, &right.1))
                    .with_context("refused_by_peer", &self.text)
            }
        };
        let retry = if self.later { Retry::Backoff } else { Retry::Never };
        let error = error.with_kind(self.kind).with_retry(retry);
        match &self.remedy {
            Some(remedy) => error.with_remedy(remedy.as_str().to_owned()),
            None => error,
        }
    }
}

/// As much of a text as may be sent.
fn words(text: &str) -> Words {
    let mut shown = wire::printable(text);
    while shown.len() > 1024 {
        shown.pop();
    }
    Words::new(shown).expect("printable text has no control characters, and is short now")
}
