//! The form of head and body on the wire. A field that is added here has a default, so that older cards can be read.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::envelope::{self, Opened};
use super::offer::{BackendName, OptionName, OptionValue};
use super::{Address, Card, CardHead, EngineName, Identity, Offer, SchemaRange};
use crate::config::BackendConfig;
use crate::facts::Facts;
use crate::handshake::HandshakeBytes;
use crate::id::Incarnation;
use crate::layout::{RankCoords, RankLayout};
use crate::memory::KeyBlob;
use crate::wire::{self, Text};
use crate::{Error, Result};

#[derive(Serialize)]
struct HeadOut<'a> {
    engine: &'a str,
    incarnation: Incarnation,
    coords: RankCoords,
    control: String,
    facts: &'a Facts,
}

#[derive(Deserialize)]
struct HeadIn {
    engine: Text<{ EngineName::MAX_BYTES }>,
    incarnation: Incarnation,
    coords: RankCoords,
    control: Text<{ Address::MAX_BYTES }>,
    facts: Facts,
}

#[derive(Serialize)]
struct BodyOut<'a> {
    layout: &'a RankLayout,
    offers: Vec<OfferOut<'a>>,
}

#[derive(Deserialize)]
struct BodyIn {
    layout: RankLayout,
    #[serde(deserialize_with = "wire::list::<_, _, { Card::MAX_OFFERS }>")]
    offers: Vec<OfferIn>,
}

#[derive(Serialize)]
struct OfferOut<'a> {
    backend: &'a str,
    handshake: &'a HandshakeBytes,
    keys: &'a [KeyBlob],
    options: &'a BackendConfig,
}

#[derive(Deserialize)]
struct OfferIn {
    backend: BackendName,
    handshake: HandshakeBytes,
    #[serde(deserialize_with = "wire::list::<_, _, { Offer::MAX_KEYS }>")]
    keys: Vec<KeyBlob>,
    #[serde(deserialize_with = "wire::map::<_, _, _, { Offer::MAX_OPTIONS }>")]
    options: BTreeMap<OptionName, OptionValue>,
}

pub(super) fn encode(card: &Card) -> Result<Vec<u8>> {
    // The writer of a card that was decoded may speak other schemas; what is written here is in ours.
    let CardHead { identity, control, facts, schemas: _, features } = &card.head;
    let head = HeadOut {
        engine: identity.engine.as_str(),
        incarnation: identity.incarnation,
        coords: identity.coords,
        control: control.to_string(),
        facts,
    };
    let offers = card.offers.iter().map(|offer| OfferOut {
        backend: offer.backend(),
        handshake: offer.handshake(),
        keys: offer.keys(),
        options: offer.options(),
    });
    let body = BodyOut { layout: &card.layout, offers: offers.collect() };
    let head = wire::to_bytes("card", &head)?;
    let body = wire::to_bytes("card", &body)?;
    let bytes = envelope::seal(SchemaRange::CURRENT, *features, &head, &body);
    if bytes.len() > Card::MAX_BYTES {
        return Err(Error::config("card", "the card is too long")
            .with_context("bytes", bytes.len())
            .with_context("limit", Card::MAX_BYTES)
            .with_context("regions", card.layout.regions().len())
            .with_context("offers", card.offers.len())
            .with_remedy("register fewer, larger regions, or offer fewer backends"));
    }
    Ok(bytes)
}

pub(super) fn head(opened: &Opened<'_>) -> Result<CardHead> {
    let head: HeadIn = wire::from_bytes("card", "the head", opened.head)?;
    head.coords.check()?;
    let identity = Identity {
        engine: EngineName::new(head.engine.into_string())?,
        incarnation: head.incarnation,
        coords: head.coords,
    };
    Ok(CardHead {
        identity,
        control: head.control.as_str().parse()?,
        facts: head.facts,
        schemas: opened.schemas,
        features: opened.features,
    })
}

pub(super) fn body(bytes: &[u8], head: CardHead) -> Result<Card> {
    let body: BodyIn = wire::from_bytes("card", "the body", bytes)?;
    let offers = body.offers.into_iter().map(|offer| {
        let options = offer.options.into_iter();
        let options = options.map(|(name, value)| (name.into_string(), value.into_string()));
        Offer::from_parts(offer.backend, offer.handshake, offer.keys, options.collect())
    });
    let offers = offers.collect::<Result<Vec<_>>>()?;
    Card::from_parts(head, body.layout, offers)
}
