//! A card of the next version, which has fields that this version does not know.

use kvx_core::ErrorKind;
use kvx_core::card::Card;
use serde_json::{Value, json};

use crate::bytes::from_hex;
use crate::sample::{self, Parts};

/// Adds fields at every level of the card, the layout included.
pub(crate) fn next_version() -> Parts {
    let mut parts = Parts::of(&sample::small());
    parts.schemas = (1, 2);
    parts.features = (0, 0b101);
    let later = json!({"kind": "later", "list": [1, [2, 3]], "none": null});
    let add = |value: &mut Value| value["a_later_field"] = later.clone();
    add(&mut parts.head);
    add(&mut parts.head["coords"]);
    add(&mut parts.head["facts"]["model"]);
    add(&mut parts.body);
    add(&mut parts.body["offers"][0]);
    add(&mut parts.body["layout"]);
    add(&mut parts.body["layout"]["regions"][0]);
    add(&mut parts.body["layout"]["groups"][0]);
    add(&mut parts.body["layout"]["tensors"][0]);
    add(&mut parts.body["layout"]["tensors"][0]["block"]);
    parts
}

#[test]
fn fields_of_a_later_schema_are_passed_over() {
    let bytes = from_hex(include_str!("../data/card_schema_2.hex"));
    assert_eq!(bytes, next_version().bytes(), "the held bytes are those of `next_version`");
    let card = Card::decode(&bytes).unwrap();
    let this = sample::small();
    assert_eq!(card.identity(), this.identity());
    assert_eq!(card.facts(), this.facts());
    assert_eq!(card.layout(), this.layout());
    assert_eq!(card.offers(), this.offers());
    assert_eq!(card.head().schemas().newest(), 2);
    assert_eq!(card.head().features().optional.bits(), 0b101);
}

#[test]
fn a_card_is_passed_on_in_the_schema_of_who_passes_it_on() {
    let card = Card::decode(&next_version().bytes()).unwrap();
    let again = Card::decode(&card.encode().unwrap()).unwrap();
    assert_eq!(again.head().schemas().newest(), 1);
}

#[test]
fn a_later_schema_alone_is_refused_with_both_ranges() {
    let mut parts = next_version();
    parts.schemas = (2, 3);
    let error = Card::decode(&parts.bytes()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let mismatch = error.as_mismatch().unwrap();
    assert_eq!(mismatch.field, "schema");
    assert_eq!(mismatch.left.1, "schema 1");
    assert_eq!(mismatch.right.1, "schemas 2 to 3");
}

/// A value of an enumeration that this version does not know cannot be passed over: the card is refused by its name.
#[test]
fn an_unknown_role_is_named() {
    let mut parts = next_version();
    parts.body["layout"]["tensors"][0]["role"] = json!("dream");
    let error = Card::decode(&parts.bytes()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Peer);
    assert!(error.message().contains("dream"), "{error}");
}
