//! What must be refused, and how it is named.

use kvx_core::ErrorKind;
use kvx_core::card::{Card, CardReader, FeatureSet, Features};
use serde_json::{Value, json};

use crate::sample::{self, Parts, packed};

fn refused(bytes: &[u8], kind: ErrorKind, why: &str) {
    let error = Card::decode(bytes).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(why), "{error} does not say {why:?}");
}

fn changed(change: impl FnOnce(&mut Parts)) -> Vec<u8> {
    let mut parts = Parts::of(&sample::small());
    change(&mut parts);
    parts.bytes()
}

#[test]
fn every_truncation_is_refused() {
    let bytes = sample::small().encode().unwrap();
    for length in 0..bytes.len() {
        refused(&bytes[..length], ErrorKind::Peer, "the card is cut short");
        assert!(Card::peek(&bytes[..length]).is_err());
    }
}

#[test]
fn what_follows_a_card_is_refused() {
    let mut bytes = sample::small().encode().unwrap();
    bytes.push(0);
    refused(&bytes, ErrorKind::Peer, "other bytes follow the card");
    let parts = Parts::of(&sample::small());
    let (head, body) = (packed(&parts.head), packed(&parts.body));
    let longer = |section: &[u8]| [section, &[0xc0]].concat();
    let bytes = parts.bytes_with(&longer(&head), &body);
    refused(&bytes, ErrorKind::Peer, "the head is followed by other bytes");
    let bytes = parts.bytes_with(&head, &longer(&body));
    refused(&bytes, ErrorKind::Peer, "the body is followed by other bytes");
}

#[test]
fn what_is_no_card_is_refused() {
    let bytes = changed(|parts| parts.magic = *b"GET /car");
    refused(&bytes, ErrorKind::Peer, "not a card: it begins with \"GET /car\"");
    refused(b"PK", ErrorKind::Peer, "not a card");
    refused(b"", ErrorKind::Peer, "cut short");
    refused(&changed(|parts| parts.reserved = 7), ErrorKind::Peer, "7 where it must have 0");
}

#[test]
fn a_card_over_the_limit_is_refused_before_it_is_looked_at() {
    refused(
        &vec![0; Card::MAX_BYTES + 1],
        ErrorKind::Peer,
        "too long (bytes=1048577, limit=1048576)",
    );
    let bytes = sample::small().encode().unwrap();
    let reader = CardReader::default();
    reader.with_max_bytes(bytes.len()).decode(&bytes).unwrap();
    let error = reader.with_max_bytes(bytes.len() - 1).peek(&bytes).unwrap_err();
    assert!(error.to_string().contains("too long"), "{error}");
}

#[test]
fn another_envelope_is_refused_with_both_versions() {
    let bytes = changed(|parts| parts.version = 2);
    refused(&bytes, ErrorKind::Unsupported, "this side has version 1, the card has version 2");
}

#[test]
fn schemas_that_are_no_range_are_refused() {
    for schemas in [(0, 1), (0, 0), (2, 1)] {
        refused(&changed(|parts| parts.schemas = schemas), ErrorKind::Peer, "are no range");
    }
}

#[test]
fn unknown_required_features_are_named() {
    let bits = 1 << 3 | 1 << 17 | 1 << 63;
    let bytes = changed(|parts| parts.features = (bits, u64::MAX));
    refused(&bytes, ErrorKind::Unsupported, "does not know: 3, 17, 63 (known=none)");
    let reader = CardReader::default().with_features(FeatureSet::from_bits(1 << 3 | 1 << 5));
    let error = reader.peek(&bytes).unwrap_err().to_string();
    assert!(error.contains("does not know: 17, 63 (known=3, 5)"), "{error}");
    let reader = reader.with_features(FeatureSet::from_bits(bits));
    let features = reader.decode(&bytes).unwrap().head().features();
    assert_eq!(features.required.bits(), bits);
    let card = sample::small().with_features(features);
    assert_eq!(reader.decode(&card.encode().unwrap()).unwrap(), card);
    assert!(Features::NONE.required.is_empty() && features.optional.contains(features.required));
}

/// The order of checks: what is named first is what must be known first.
#[test]
fn each_refusal_comes_before_those_that_need_more() {
    let mut parts = Parts::of(&sample::small());
    parts.body = json!(null);
    refused(&parts.bytes(), ErrorKind::Peer, "the body is malformed");
    parts.head["engine"] = json!("None");
    refused(&parts.bytes(), ErrorKind::Peer, "no engine's name");
    parts.head = json!(null);
    refused(&parts.bytes(), ErrorKind::Peer, "the head is malformed");
    parts.features.0 = 1;
    refused(&parts.bytes(), ErrorKind::Unsupported, "requires features");
    parts.schemas = (9, 9);
    refused(&parts.bytes(), ErrorKind::Unsupported, "schema 9");
    parts.version = 9;
    refused(&parts.bytes(), ErrorKind::Unsupported, "version 9");
    parts.magic[0] = 0;
    refused(&parts.bytes(), ErrorKind::Peer, "not a card");
}

#[test]
fn a_layout_that_is_not_valid_is_refused_by_its_own_rules() {
    let bytes = changed(|parts| parts.body["layout"]["tensors"][0]["base"] = json!(u64::MAX));
    refused(&bytes, ErrorKind::Peer, "outside region");
    let bytes = changed(|parts| parts.body["layout"]["regions"][1]["bytes"] = json!(0));
    refused(&bytes, ErrorKind::Peer, "region 1 is empty");
    let bytes = changed(|parts| {
        let coords = json!({"grid": {"tp": 2, "pp": 1, "dp": 1}, "tp": 2, "pp": 0, "dp": 0});
        parts.head["coords"] = coords.clone();
        parts.body["layout"]["coords"] = coords;
    });
    refused(&bytes, ErrorKind::Peer, "outside its grid");
}

#[test]
fn a_peek_gives_no_rank_outside_its_grid() {
    for (name, value) in [("tp", 2), ("pp", 1), ("dp", 1)] {
        let bytes = changed(|parts| parts.head["coords"][name] = json!(value));
        let error = Card::peek(&bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Peer);
        assert!(error.to_string().contains("outside its grid"), "{error}");
    }
}

#[test]
fn head_and_layout_name_the_same_rank() {
    let bytes = changed(|parts| parts.head["coords"]["tp"] = json!(0));
    refused(&bytes, ErrorKind::Peer, "coords");
}

#[test]
fn an_offer_has_a_key_for_every_region() {
    let regions = sample::small().layout().regions().len();
    for keys in [0, regions - 1, regions + 1] {
        let made = sample::small().with_offer(sample::offer("verbs", keys));
        assert_eq!(made.unwrap_err().kind(), ErrorKind::Config);
        let bytes = changed(|parts| parts.body["offers"][0]["keys"] = json!(vec![[1]; keys]));
        refused(&bytes, ErrorKind::Peer, &format!("keys={keys}, regions={regions}"));
    }
}

#[test]
fn a_backend_has_one_offer() {
    let card = sample::small();
    let regions = card.layout().regions().len();
    let error = card.with_offer(sample::offer("ucx", regions)).unwrap_err();
    assert!(error.to_string().contains("two offers of the same backend (backend=ucx)"), "{error}");
    let bytes = changed(|parts| parts.body["offers"][1]["backend"] = json!("ucx"));
    refused(&bytes, ErrorKind::Peer, "two offers of the same backend");
    let bytes = changed(|parts| parts.body["offers"][1]["backend"] = json!(""));
    refused(&bytes, ErrorKind::Peer, "without a backend's name");
}

/// What is done to a card's head and body.
type Change = fn(&mut Value, &mut Value);

#[test]
fn lists_and_texts_have_limits() {
    let cases: [(&str, Change); 8] = [
        ("the limit is 16", |_, body| {
            let offer = body["offers"][0].clone();
            body["offers"] = Value::Array(vec![offer; 17]);
        }),
        ("the limit is 4096", |_, body| {
            body["offers"][0]["keys"] = json!(vec![[0; 0]; 4097]);
        }),
        ("the limit is 4096", |_, body| {
            let region = body["layout"]["regions"][0].clone();
            body["layout"]["regions"] = Value::Array(vec![region; 4097]);
        }),
        ("the limit is 4096", |_, body| {
            body["offers"][0]["keys"][0] = json!(vec![0; 4097]);
        }),
        ("the limit is 16384", |_, body| {
            body["offers"][0]["handshake"] = json!(vec![0; 16385]);
        }),
        ("the limit is 64", |_, body| {
            body["offers"][0]["options"] =
                (0..65).map(|n| (n.to_string(), json!(""))).collect::<Value>();
        }),
        ("the limit is 64", |head, _| {
            head["facts"] = (0..65)
                .map(|n| (n.to_string(), json!({"value": "", "required": true})))
                .collect::<Value>();
        }),
        ("the limit is 512", |head, _| {
            head["facts"]["model"]["value"] = json!("x".repeat(513));
        }),
    ];
    for (why, change) in cases {
        let bytes = changed(|parts| change(&mut parts.head, &mut parts.body));
        refused(&bytes, ErrorKind::Peer, why);
    }
}

#[test]
fn what_a_peer_wrote_does_not_fill_the_log() {
    let role = "\u{1b}[2J".to_owned() + &"x".repeat(100_000);
    let bytes = changed(|parts| parts.body["layout"]["tensors"][0]["role"] = json!(role));
    let text = Card::decode(&bytes).unwrap_err().to_string();
    assert!(text.len() < 1000 && !text.contains('\u{1b}'), "{text}");
}

#[test]
fn a_card_that_grew_too_long_is_refused_where_it_is_made() {
    use kvx_core::handshake::HandshakeBytes;
    use kvx_core::memory::KeyBlob;
    let card = sample::llama();
    let keys =
        vec![KeyBlob::new(vec![7; KeyBlob::MAX_BYTES]).unwrap(); card.layout().regions().len()];
    let handshake = HandshakeBytes::new(Vec::new()).unwrap();
    let card = ["a", "b", "c", "d"].into_iter().fold(card, |card, backend| {
        let offer = kvx_core::card::Offer::new(backend, handshake.clone(), keys.clone()).unwrap();
        card.with_offer(offer).unwrap()
    });
    let error = card.encode().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("limit=1048576, regions=64, offers=6"), "{error}");
}
