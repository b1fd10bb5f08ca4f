//! The form of a card's bytes, held in place.

use kvx_core::card::Card;

use crate::sample::{self, Parts};

pub(crate) fn from_hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .chars()
        .filter_map(|char| char.to_digit(16))
        .map(|d| u8::try_from(d).unwrap())
        .collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    let lines =
        bytes.chunks(32).map(|line| line.iter().map(|byte| format!("{byte:02x}")).collect());
    lines.collect::<Vec<String>>().join("\n") + "\n"
}

/// What is written today must be what was written when the schema was made: somebody out there reads it.
#[test]
fn schema_1_stays_as_it_is() {
    let held = include_str!("../data/card_schema_1.hex");
    let now = to_hex(&sample::small().encode().unwrap());
    assert_eq!(now, held, "the form of cards changed: that takes a new schema");
    assert_eq!(Card::decode(&from_hex(held)).unwrap(), sample::small());
}

#[test]
fn a_card_is_what_its_documentation_says() {
    let card = sample::llama();
    assert_eq!(Card::decode(&Parts::of(&card).bytes()).unwrap(), card);
}

#[test]
fn a_card_of_a_real_model_is_small() {
    let bytes = sample::llama().encode().unwrap().len();
    assert!(bytes < 32 * 1024, "{bytes} bytes for 64 tensors");
}
