//! Messages on the wire.

use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::Incarnation;
use kvx_core::{Error, ErrorKind, Retry};

use crate::protocol::peers::message::{CardBytes, Message, Refusal};
use crate::select::Policy;

fn bytes(length: usize) -> HandshakeBytes {
    HandshakeBytes::new(vec![7; length]).unwrap()
}

fn all() -> Vec<Message> {
    let life = Incarnation::from_bytes([1; 16]);
    let refusal = Refusal::new(&Error::mismatch("facts", "kv_dtype", "bf16", "fp8"), false);
    vec![
        Message::GetCards {
            number: 1,
            engine: kvx_core::wire::Text::new("prefill-7").unwrap(),
            replica: 0,
            version: Some((life, 3)),
            offset: 1 << 40,
        },
        Message::Cards {
            number: u64::MAX,
            life,
            version: 3,
            lengths: vec![1 << 20; Message::MAX_RANKS],
            offset: 0,
            bytes: vec![9; Message::MAX_PART],
        },
        Message::Meet {
            number: 2,
            to: life,
            backend: kvx_core::wire::Text::new("shm").unwrap(),
            offer: bytes(HandshakeBytes::MAX_BYTES),
            card: CardBytes::new(&[1; Message::MAX_PART]),
        },
        Message::MeetReply { number: 2, reply: bytes(HandshakeBytes::MAX_BYTES) },
        Message::MeetCompletion { number: 2, completion: bytes(0) },
        Message::Finished { number: 2 },
        Message::Refused { number: 2, refusal },
        Message::Changed,
        Message::Parted,
        Message::Bye,
    ]
}

#[test]
fn the_longest_of_each_kind_goes_over_the_wire() {
    for message in all() {
        let bytes = message.encode().unwrap();
        assert_eq!(Message::decode(&bytes).unwrap(), message);
        assert!(Message::decode(&bytes[..bytes.len() - 1]).is_err());
        let more = [&*bytes, &[0]].concat();
        assert_eq!(Message::decode(&more).unwrap_err().kind(), ErrorKind::Peer);
    }
}

#[test]
fn what_is_over_a_limit_is_refused() {
    let life = Incarnation::from_bytes([1; 16]);
    let cards = |ranks: usize, part: usize| Message::Cards {
        number: 1,
        life,
        version: 1,
        lengths: vec![1; ranks],
        offset: 0,
        bytes: vec![0; part],
    };
    for message in [cards(Message::MAX_RANKS + 1, 0), cards(1, Message::MAX_PART + 1)] {
        assert!(Message::decode(&message.encode().unwrap()).is_err());
    }
    let error = cards(1, Message::MAX_BYTES).encode().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
    let error = Message::decode(&vec![0; Message::MAX_BYTES + 1]).unwrap_err();
    assert!(error.to_string().contains("too long"), "{error}");
    assert!(CardBytes::new(&[0; Message::MAX_PART + 1]).is_none());
}

#[test]
fn a_refusal_keeps_the_field_and_both_values() {
    let error = Error::mismatch("facts", "kv_dtype", "bf16", "fp8").with_kind(ErrorKind::Config);
    let refusal = Refusal::new(&error, false);
    let told = Message::Refused { number: 1, refusal }.encode().unwrap();
    let Message::Refused { refusal, .. } = Message::decode(&told).unwrap() else { panic!() };
    let error = refusal.to_error();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Config, Retry::Never));
    let mismatch = error.as_mismatch().unwrap();
    assert_eq!(mismatch.to_string(), "kv_dtype: producer has bf16, consumer has fp8");

    let long = Error::peer("test", "x\n".repeat(5000));
    let error = Refusal::new(&long, true).to_error();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Peer, Retry::Backoff));
    assert!(error.message().len() < 1100);
}

#[test]
fn a_policy_chooses() {
    let none = Policy { allow: Some(Vec::new()), ..Policy::default() };
    let error = crate::protocol::peers::Choosing::choose(&none, &["shm", "ucx"]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
