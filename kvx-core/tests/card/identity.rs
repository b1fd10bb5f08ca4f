//! Who published a card.

use kvx_core::ErrorKind;
use kvx_core::card::{Address, Card, CardReader, EngineName};
use kvx_core::facts::Facts;
use kvx_core::id::Incarnation;
use serde_json::json;

use crate::sample::{self, Parts};

/// Known failure 110 (ROCm/ATOM#2249): what is printed where no name was set is no name.
#[test]
fn an_engine_has_a_name() {
    for text in ["", "  ", "None", "none", "NULL", "undefined", "nil", "a\nb"] {
        assert_eq!(EngineName::new(text).unwrap_err().kind(), ErrorKind::Config, "{text:?}");
        let mut parts = Parts::of(&sample::small());
        parts.head["engine"] = json!(text);
        let error = Card::decode(&parts.bytes()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Peer, "{text:?}: {error}");
    }
    assert!(EngineName::new("x".repeat(257)).is_err());
    for text in ["0", "None-1", "nonesuch", "vllm-7_dp0", "2f1c…"] {
        assert_eq!(EngineName::new(text).unwrap().as_str(), text);
    }
}

/// Known failure 76 (vllm#27083): another engine answers at the address.
#[test]
fn another_engine_is_named_with_its_address() {
    let card = sample::small();
    let address: Address = "localhost:5600".parse().unwrap();
    card.identity().expect_engine("prefill-7", &address).unwrap();
    let error = card.identity().expect_engine("prefill-8", &address).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Peer);
    let text = error.to_string();
    for part in ["prefill-7", "prefill-8", "localhost:5600"] {
        assert!(text.contains(part), "{text} does not name {part}");
    }
}

/// A rank that was restarted has another incarnation, and nothing else tells its card from the old one.
#[test]
fn a_restart_shows() {
    let card = sample::small();
    let again = Card::new(
        card.identity().engine.clone(),
        Incarnation::random().unwrap(),
        card.control().clone(),
        card.facts().clone(),
        card.layout().clone(),
    )
    .unwrap();
    let read = |card: &Card| Card::peek(&card.encode().unwrap()).unwrap();
    assert_ne!(read(&card).identity(), read(&again).identity());
    assert_eq!(read(&card).identity().engine, read(&again).identity().engine);
}

#[test]
fn a_card_has_an_address_at_which_its_rank_can_be_reached() {
    for text in ["0.0.0.0:5600", "[::]:5600", "host:0", "host", "::1", ""] {
        let mut parts = Parts::of(&sample::small());
        parts.head["control"] = json!(text);
        let error = Card::decode(&parts.bytes()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Peer, "{text:?}: {error}");
    }
}

/// Known failures 16 and 17 (sglang#19398, vllm#29503; llm-d#499): each field that differs has an error of its own, before
/// the rest is decoded. Here the rest cannot be.
#[test]
fn a_different_model_is_refused_before_the_body_is_read() {
    let own = sample::facts();
    for (field, value) in [
        (Facts::MODEL, "Llama-3.1-70B"),
        (Facts::KV_DTYPE, "fp8_e4m3"),
        (Facts::ENGINE_VERSION, "0.31.0"),
        (Facts::BLOCK_TOKENS, "32"),
        (Facts::LAYOUT, "flash-attention-nhd"),
        (Facts::REVISION, "1"),
    ] {
        let mut parts = Parts::of(&sample::small());
        parts.head["facts"][field]["value"] = json!(value);
        parts.body = json!("rubbish");
        let bytes = parts.bytes();
        Card::decode(&bytes).unwrap_err();
        let head = Card::peek(&bytes).unwrap();
        let error = Facts::check(head.facts(), &own).unwrap_err();
        let mismatch = error.as_mismatch().unwrap();
        assert_eq!(mismatch.field, field);
        assert_eq!(mismatch.left.1, value);
        assert_eq!(Some(mismatch.right.1.as_str()), own.get(field));
        assert!(error.context().is_empty(), "{error} names more than {field}");
    }
}

#[test]
fn a_peek_tells_what_the_whole_card_tells() {
    let card = sample::llama();
    let bytes = card.encode().unwrap();
    assert_eq!(&CardReader::default().peek(&bytes).unwrap(), card.head());
}
