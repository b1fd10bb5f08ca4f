use std::collections::BTreeMap;

use serde::Deserialize;

use super::*;

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct Everything {
    name: Option<Text<8>>,
    #[serde(deserialize_with = "list::<_, _, 3>")]
    numbers: Vec<u32>,
    #[serde(deserialize_with = "map::<_, _, _, 2>")]
    options: BTreeMap<Text<4>, Text<4>>,
    #[serde(deserialize_with = "bytes::<_, 4>")]
    blob: Vec<u8>,
}

fn read(encoded: &[u8]) -> Result<Everything> {
    from_bytes("test", "the value", encoded)
}

/// A map of one field, whose value is `value`.
fn field(name: &str, value: &[u8]) -> Vec<u8> {
    let length = u8::try_from(name.len()).unwrap();
    [&[0x81, 0xa0 | length], name.as_bytes(), value].concat()
}

fn refused(encoded: &[u8], why: &str) {
    let error = read(encoded).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Peer);
    assert!(error.message().contains(why), "{error} does not say {why:?}");
}

#[test]
fn what_is_within_its_limits_is_read() {
    assert_eq!(read(&field("numbers", &[0x93, 1, 2, 3])).unwrap().numbers, [1, 2, 3]);
    assert_eq!(read(&field("blob", &[0xc4, 4, 9, 8, 7, 6])).unwrap().blob, [9, 8, 7, 6]);
    assert_eq!(read(&field("blob", &[0x92, 9, 8])).unwrap().blob, [9, 8]);
    let name = read(&field("name", b"\xa8\xc3\xa4bcdefg")).unwrap().name.unwrap();
    assert_eq!(name.as_str(), "äbcdefg");
    let options = read(&field("options", b"\x82\xa1b\xa1y\xa1a\xa1x")).unwrap().options;
    let options: Vec<_> = options.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(options, [("a", "x"), ("b", "y")]);
}

#[test]
fn a_count_over_its_limit_is_refused_as_announced() {
    // Four billion are announced, none is there: the refusal is about the count, not about the missing bytes.
    refused(&field("numbers", &[0xdd, 0xff, 0xff, 0xff, 0xff]), "4294967295 items; the limit is 3");
    refused(&field("options", &[0xdf, 0xff, 0xff, 0xff, 0xff]), "4294967295 items; the limit is 2");
    refused(&field("numbers", &[0x94, 1, 2, 3, 4]), "4 items; the limit is 3");
    refused(&field("blob", &[0xc4, 5, 1, 2, 3, 4, 5]), "5 items; the limit is 4");
    refused(&field("blob", &[0x95, 1, 2, 3, 4, 5]), "5 items; the limit is 4");
    refused(&field("name", b"\xa9abcdefghi"), "text of 9 bytes; the limit is 8");
}

#[test]
fn a_count_that_is_not_announced_is_bounded_as_well() {
    // JSON announces no counts.
    let read = |text| serde_json::from_str::<Everything>(text).map_err(|error| error.to_string());
    assert_eq!(read(r#"{"numbers": [1, 2, 3]}"#).unwrap().numbers, [1, 2, 3]);
    assert!(read(r#"{"numbers": [1, 2, 3, 4]}"#).unwrap_err().contains("the limit is 3"));
    assert!(read(r#"{"blob": [1, 2, 3, 4, 5]}"#).unwrap_err().contains("the limit is 4"));
    let three = r#"{"options": {"a": "", "b": "", "c": ""}}"#;
    assert!(read(three).unwrap_err().contains("the limit is 2"));
}

#[test]
fn what_is_announced_must_be_there() {
    refused(&field("numbers", &[0x93, 1, 2]), "malformed");
    refused(&field("blob", &[0xc6, 0xff, 0xff, 0xff, 0xff, 0]), "malformed");
    refused(&field("name", &[0xdb, 0xff, 0xff, 0xff, 0xff, b'a']), "malformed");
    refused(&[], "malformed");
}

#[test]
fn a_key_is_there_once() {
    refused(&field("options", b"\x82\xa1b\xa1y\xa1b\xa1x"), "b is there twice");
}

#[test]
fn text_has_no_control_characters() {
    refused(&field("name", b"\xa3a\nb"), r"the control character '\n'");
    assert!(Text::<8>::new("a\u{7f}").is_err());
    assert!(Text::<8>::new("123456789").is_err());
    assert!(Text::<8>::new("12345678").is_ok());
}

#[test]
fn nothing_follows_the_value() {
    refused(&[0x80, 0x80], "followed by other bytes");
}

#[test]
fn unknown_fields_are_passed_over_unless_too_deep() {
    let deep = |depth: usize| field("later", &[vec![0x91; depth], vec![0xc0]].concat());
    assert_eq!(read(&deep(MAX_DEPTH - 2)).unwrap(), Everything::default());
    refused(&deep(MAX_DEPTH - 1), "depth limit exceeded");
    refused(&deep(100_000), "depth limit exceeded");
}

#[test]
fn what_a_peer_wrote_is_printable() {
    assert_eq!(printable("a\u{1b}[31m\nb"), r"a\u{1b}[31m\nb");
    let long = printable(&"x".repeat(10_000));
    assert_eq!(long.len(), 256 + 3);
}
