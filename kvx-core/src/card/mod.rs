//! What a rank publishes about itself, so that others can read its cache or write into it.
//!
//! A [`Card`] says who the rank is ([`Identity`], with its incarnation), what its model is ([`Facts`]), how its cache is
//! laid out ([`RankLayout`]), over which fabrics it can be reached ([`Offer`]s, each with a key to every region), and the
//! address of its control channel ([`Address`]).
//!
//! A card comes from a peer, so it is checked before anything in it is used, and in an order in which each refusal can name
//! its cause:
//!
//! 1. its size, and that the bytes are a card, whole;
//! 2. that both sides speak a common schema ([`SchemaRange`]);
//! 3. that this side knows every feature that the card requires ([`Features`]);
//! 4. who sent it and what model it serves: [`Card::peek`] stops here, for [`Facts::check`] and
//!    [`Identity::expect_engine`];
//! 5. the rest, by the same rules as a card that is made here.
//!
//! ```
//! use kvx_core::card::{Card, EngineName, Offer};
//! use kvx_core::facts::Facts;
//! use kvx_core::handshake::HandshakeBytes;
//! use kvx_core::id::Incarnation;
//! use kvx_core::layout::{Grid, LayoutBuilder, ModelGeometry, NamedLayout};
//! use kvx_core::memory::KeyBlob;
//!
//! // The producer publishes what it is.
//! let model = ModelGeometry::preset("llama-3.1-8b")?;
//! let builder = LayoutBuilder::new(&model, NamedLayout::FlashAttentionHnd);
//! let layout = builder.build_replica(Grid::new(2, 1, 1)?, 0)?.remove(0);
//! let keys = vec![KeyBlob::new(vec![1, 2, 3])?; layout.regions().len()]; // from `MemoryRegistry::key_blob`
//! let offer = Offer::new("ucx", HandshakeBytes::new(vec![4, 5])?, keys)?; // from `Handshake::offer`
//! let card = Card::new(
//!     EngineName::new("prefill-7")?,
//!     Incarnation::random()?,
//!     "[2001:db8::7]:5600".parse()?,
//!     model.facts()?.with(Facts::MODEL, "llama-3.1-8b")?,
//!     layout,
//! )?
//! .with_offer(offer)?;
//! let bytes = card.encode()?;
//!
//! // The consumer looks whether it may be used, and then uses it.
//! let head = Card::peek(&bytes)?;
//! head.identity().expect_engine("prefill-7", head.control())?;
//! let own = model.facts()?.with(Facts::MODEL, "llama-3.1-8b")?;
//! Facts::check(head.facts(), &own)?;
//! assert_eq!(Card::decode(&bytes)?, card);
//! # Ok::<(), kvx_core::Error>(())
//! ```
//!
//! # Bytes
//!
//! An envelope of fixed size, then two MessagePack maps with named fields, the *head* and the *body*. Numbers of the
//! envelope are little endian.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 8 | `KVX card` |
//! | 8 | 2 | version of the envelope: 1 |
//! | 10 | 2 | oldest schema whose reader understands the card |
//! | 12 | 2 | schema in which it is written |
//! | 14 | 2 | zero |
//! | 16 | 8 | features that a reader must know, a bit each |
//! | 24 | 8 | features that a reader may use, a bit each |
//! | 32 | 4 | bytes of the head |
//! | 36 | 4 | bytes of the body |
//!
//! A later schema may add fields, which an earlier reader passes over. What a reader must not pass over is a required
//! feature.

mod address;
mod envelope;
mod form;
mod identity;
mod offer;
mod reader;

pub use address::{Address, Host};
pub use envelope::{FeatureSet, Features, SchemaRange};
pub use identity::{EngineName, Identity};
pub use offer::Offer;
pub use reader::{CardHead, CardReader};

use crate::facts::Facts;
use crate::id::Incarnation;
use crate::layout::RankLayout;
use crate::{Error, Result};

/// What a rank publishes about itself. See the [module documentation](self).
///
/// Checked when it is made, whether here or from a peer's bytes: every offer has a key to every region of the layout, no
/// two offers are of the same backend, and the control address is one that can be dialled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    head: CardHead,
    layout: RankLayout,
    offers: Vec<Offer>,
}

impl Card {
    /// Most bytes of a card, unless a reader allows more or less.
    pub const MAX_BYTES: usize = 1 << 20;
    /// Most offers of a card.
    pub const MAX_OFFERS: usize = 16;

    /// The card of a rank that can be reached over nothing yet: see [`with_offer`](Self::with_offer).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) when `control` is not an address that can be dialled.
    pub fn new(
        engine: EngineName,
        incarnation: Incarnation,
        control: Address,
        facts: Facts,
        layout: RankLayout,
    ) -> Result<Self> {
        let identity = Identity { engine, incarnation, coords: *layout.coords() };
        let head = CardHead {
            identity,
            control,
            facts,
            schemas: SchemaRange::CURRENT,
            features: Features::NONE,
        };
        Self::from_parts(head, layout, Vec::new())
    }

    /// Adds a fabric over which the rank can be reached, after those that it has: most wanted first.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config): the offer has not as many keys as the layout has regions, the
    /// backend has an offer already, or there are [`MAX_OFFERS`](Self::MAX_OFFERS).
    pub fn with_offer(mut self, offer: Offer) -> Result<Self> {
        self.offers.push(offer);
        Self::from_parts(self.head, self.layout, self.offers)
    }

    /// Sets the features that a reader must know or may use.
    #[must_use]
    pub const fn with_features(mut self, features: Features) -> Self {
        self.head.features = features;
        self
    }

    /// The one place where a card is checked, whoever made it.
    fn from_parts(head: CardHead, layout: RankLayout, offers: Vec<Offer>) -> Result<Self> {
        head.control.check_dialable()?;
        if head.identity.coords != *layout.coords() {
            return Err(Error::mismatch_between(
                "card",
                "coords",
                ("the head", describe(&head.identity.coords)),
                ("the layout", describe(layout.coords())),
            )
            .with_kind(crate::ErrorKind::Config));
        }
        if offers.len() > Self::MAX_OFFERS {
            return Err(Error::config("card", "too many offers")
                .with_context("offers", offers.len())
                .with_context("limit", Self::MAX_OFFERS));
        }
        for (index, offer) in offers.iter().enumerate() {
            if offers[..index].iter().any(|other| other.backend() == offer.backend()) {
                return Err(Error::config("card", "two offers of the same backend")
                    .with_context("backend", offer.backend()));
            }
            if offer.keys().len() != layout.regions().len() {
                return Err(Error::config("card", "an offer must have one key per region")
                    .with_context("backend", offer.backend())
                    .with_context("keys", offer.keys().len())
                    .with_context("regions", layout.regions().len()));
            }
        }
        Ok(Self { head, layout, offers })
    }

    /// What can be known of it before the rest is decoded.
    #[must_use]
    pub const fn head(&self) -> &CardHead {
        &self.head
    }

    /// Whose it is.
    #[must_use]
    pub const fn identity(&self) -> &Identity {
        &self.head.identity
    }

    /// Where the rank's control channel listens.
    #[must_use]
    pub const fn control(&self) -> &Address {
        &self.head.control
    }

    /// What must be equal on both sides.
    #[must_use]
    pub const fn facts(&self) -> &Facts {
        &self.head.facts
    }

    /// How the rank's cache is laid out.
    #[must_use]
    pub const fn layout(&self) -> &RankLayout {
        &self.layout
    }

    /// Over what it can be reached, most wanted first.
    #[must_use]
    pub fn offers(&self) -> &[Offer] {
        &self.offers
    }

    /// The offer of this backend, if there is one.
    #[must_use]
    pub fn offer(&self, backend: &str) -> Option<&Offer> {
        self.offers.iter().find(|offer| offer.backend() == backend)
    }

    /// The card as bytes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) when there are more than [`MAX_BYTES`](Self::MAX_BYTES).
    pub fn encode(&self) -> Result<Vec<u8>> {
        form::encode(self)
    }

    /// What can be known of a card before the rest is decoded, by a reader of this version.
    ///
    /// # Errors
    ///
    /// As for [`CardReader::peek`].
    pub fn peek(bytes: &[u8]) -> Result<CardHead> {
        CardReader::default().peek(bytes)
    }

    /// The card that these bytes are, by a reader of this version.
    ///
    /// # Errors
    ///
    /// As for [`CardReader::decode`].
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        CardReader::default().decode(bytes)
    }
}

fn describe(coords: &crate::layout::RankCoords) -> String {
    format!("{coords} of {}", coords.grid)
}
