//! Reading cards.

use super::envelope::{self, FeatureSet, Features, Opened, SchemaRange};
use super::{Address, Card, Identity, form};
use crate::facts::Facts;
use crate::{Error, ErrorKind, Result};

/// What can be known of a card before the rest is decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardHead {
    pub(super) identity: Identity,
    pub(super) control: Address,
    pub(super) facts: Facts,
    pub(super) schemas: SchemaRange,
    pub(super) features: Features,
}

impl CardHead {
    /// Whose card it is.
    #[must_use]
    pub const fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Where the rank's control channel listens.
    #[must_use]
    pub const fn control(&self) -> &Address {
        &self.control
    }

    /// What must be equal on both sides.
    #[must_use]
    pub const fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The schemas that its writer speaks.
    #[must_use]
    pub const fn schemas(&self) -> SchemaRange {
        self.schemas
    }

    /// The features that its writer requires and offers.
    #[must_use]
    pub const fn features(&self) -> Features {
        self.features
    }
}

/// What somebody accepts as a card. The default is what this version of `kvx-core` knows.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CardReader {
    /// Most bytes of a card.
    pub max_bytes: usize,
    /// Schemas that this side speaks.
    pub schemas: SchemaRange,
    /// Features that this side knows.
    pub features: FeatureSet,
}

impl Default for CardReader {
    fn default() -> Self {
        Self {
            max_bytes: Card::MAX_BYTES,
            schemas: SchemaRange::CURRENT,
            features: FeatureSet::NONE,
        }
    }
}

impl CardReader {
    /// Sets the most bytes of a card.
    #[must_use]
    pub const fn with_max_bytes(mut self, bytes: usize) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// Sets the features that this side knows.
    #[must_use]
    pub const fn with_features(mut self, known: FeatureSet) -> Self {
        self.features = known;
        self
    }

    /// Who published a card and what model it serves, without decoding the rest.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Peer`]: too long, not a card, cut short, followed by other bytes, or a malformed head. The message
    ///   says which.
    /// - [`ErrorKind::Unsupported`]: no common schema (names both ranges), or a required feature that this side does not
    ///   know (names the bits).
    pub fn peek(&self, bytes: &[u8]) -> Result<CardHead> {
        let opened = envelope::open(self, bytes)?;
        head(&opened)
    }

    /// The card that these bytes are, all of it checked.
    ///
    /// # Errors
    ///
    /// As for [`peek`](Self::peek), and [`ErrorKind::Peer`] when the body is malformed, its layout is not valid, or it
    /// breaks a rule of [`Card`].
    pub fn decode(&self, bytes: &[u8]) -> Result<Card> {
        let opened = envelope::open(self, bytes)?;
        let head = head(&opened)?;
        form::body(opened.body, head).map_err(blame_peer)
    }
}

fn head(opened: &Opened<'_>) -> Result<CardHead> {
    form::head(opened).map_err(blame_peer)
}

/// Whatever is wrong in a card that came from a peer is the peer's doing.
fn blame_peer(error: Error) -> Error {
    error.with_kind(ErrorKind::Peer)
}
