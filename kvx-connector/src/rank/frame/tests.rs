//! What the first schema says, byte for byte: later versions must go on reading it, and this one must read what they add.

use std::collections::BTreeMap;

use kvx_core::ErrorKind;
use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::Incarnation;
use kvx_core::layout::{Role, TensorKey};

use super::*;
use crate::integrity::{Digest, Rows};
use crate::protocol::message::{Confirm, Ended, Hold, PartList, Release, Released, Verdict};
use crate::protocol::peers::{Message, Refusal};
use crate::protocol::{Access, Attempt, Fingerprint, Nonce, Part, Ranks, Reason};

/// Name and bytes of each, in hexadecimal.
const SCHEMA_1: &str = include_str!("schema-1.txt");

/// The same with what has been added to messages since, where they say it.
const ADDED: &str = include_str!("schema-1-added.txt");

fn life(byte: u8) -> Incarnation {
    Incarnation::from_bytes([byte; 16])
}

fn lease() -> LeaseName {
    LeaseName { owner: life(1), number: 70_000, epoch: 2 }
}

fn reader() -> Reader {
    Reader { attempt: Attempt { user: life(2), number: 9 }, rank: 3 }
}

fn set() -> Ranks {
    Ranks::new([1, 3]).unwrap()
}

fn part(number: u32, group: Option<u16>) -> Part {
    Part { number, group, layers: 0..32, tokens: 16..4000 }
}

fn hold() -> Hold {
    Hold {
        lease: lease(),
        reader: reader(),
        set: set(),
        have: 4,
        total: true,
        asks: true,
        access: None,
        fingerprint: None,
    }
}

fn to_owners() -> Vec<(&'static str, ToOwner)> {
    let (lease, reader, set) = (lease(), reader(), set());
    let confirm = Confirm {
        lease,
        reader,
        set: set.clone(),
        nonce: Nonce(u64::MAX - 1),
        parts: 2,
        last: false,
        left_ms: 29_000,
        access: None,
        fingerprint: None,
    };
    vec![
        ("hold", ToOwner::Hold(hold())),
        ("confirm", ToOwner::Confirm(confirm)),
        (
            "release",
            ToOwner::Release(Release { lease, reader, set, access: None, fingerprint: None }),
        ),
    ]
}

fn to_users() -> Vec<(&'static str, ToUser)> {
    let (lease, reader) = (lease(), reader());
    let parts = vec![part(0, None), part(1, Some(2))];
    vec![
        ("parts", ToUser::Parts(PartList { lease, reader, parts, total: Some(2) })),
        ("parts_open", ToUser::Parts(PartList { lease, reader, parts: Vec::new(), total: None })),
        (
            "verdict",
            ToUser::Verdict(Verdict { lease, reader, nonce: Nonce(5), held: true, why: None }),
        ),
        ("ended", ToUser::Ended(Ended { lease, reader, reason: Reason::Preempted })),
        ("released", ToUser::Released(Released { lease, reader })),
    ]
}

fn all_digests() -> Vec<(&'static str, Digests)> {
    let (lease, reader, transfer) = (lease(), reader(), 77);
    let key = TensorKey { layer: 31, role: Role::Value };
    let rows = vec![Rows { key, heads: 2..4, tokens: 0..100 }];
    let buckets = BTreeMap::from([(0, Digest::default()), (16, Digest::default())]);
    let tell = |answer| Digests::Tell { lease, reader, transfer, answer };
    vec![
        (
            "digests_ask",
            Digests::Ask { lease, reader, transfer, question: Question { rows, grain: 16 } },
        ),
        ("digests_tell", tell(Ok(Answer { buckets }))),
        ("digests_none", tell(Err(Text::new("no such lease").unwrap()))),
    ]
}

fn messages() -> Vec<(&'static str, Message)> {
    let bytes = |byte: u8| HandshakeBytes::new(vec![byte; 5]).unwrap();
    let mismatch = Error::mismatch_between("card", "kv heads", ("here", 8), ("there", 4));
    vec![
        (
            "get_cards",
            Message::GetCards {
                number: 1,
                engine: Text::new("prefill-0").unwrap(),
                replica: 1,
                version: Some((life(3), 4)),
                offset: 40_000,
            },
        ),
        (
            "cards",
            Message::Cards {
                number: 1,
                life: life(3),
                version: 4,
                lengths: vec![3, 400],
                offset: 0,
                bytes: vec![1, 2, 3],
            },
        ),
        (
            "meet",
            Message::Meet {
                number: 2,
                to: life(4),
                backend: Text::new("shm").unwrap(),
                offer: bytes(1),
                card: None,
            },
        ),
        ("meet_reply", Message::MeetReply { number: 2, reply: bytes(2) }),
        ("meet_completion", Message::MeetCompletion { number: 2, completion: bytes(3) }),
        ("finished", Message::Finished { number: 2 }),
        ("refused", Message::Refused { number: 2, refusal: Refusal::new(&mismatch, true) }),
        ("changed", Message::Changed),
        ("parted", Message::Parted),
        ("bye", Message::Bye),
    ]
}

/// Every message that there is, as this version writes it.
fn written() -> Vec<(&'static str, Vec<u8>)> {
    let mut all = Vec::new();
    all.extend(to_owners().iter().map(|(name, it)| (*name, to_owner(it).unwrap())));
    all.extend(to_users().iter().map(|(name, it)| (*name, to_user(it).unwrap())));
    all.extend(all_digests().iter().map(|(name, it)| (*name, digests(it).unwrap())));
    all.extend(messages().iter().map(|(name, it)| (*name, peers(&it.encode().unwrap()))));
    all
}

/// Messages that say what has been added.
fn added() -> Vec<(&'static str, Vec<u8>)> {
    let (lease, reader) = (lease(), reader());
    let hold = ToOwner::Hold(Hold { access: Some(Access::Read), ..hold() });
    let confirm = match to_owners().remove(1).1 {
        ToOwner::Confirm(it) => ToOwner::Confirm(Confirm { access: Some(Access::Write), ..it }),
        other => other,
    };
    let access = Some(Access::Read);
    let fingerprint = None;
    let release = ToOwner::Release(Release { lease, reader, set: set(), access, fingerprint });
    let fingerprint = Some(Fingerprint(0xba80_8f27_3643_ddb7));
    let touching = |message: &ToOwner| match message.clone() {
        ToOwner::Hold(it) => ToOwner::Hold(Hold { fingerprint, ..it }),
        ToOwner::Confirm(it) => ToOwner::Confirm(Confirm { fingerprint, ..it }),
        ToOwner::Release(it) => ToOwner::Release(Release { fingerprint, ..it }),
    };
    let why = Some(Reason::Expired);
    let verdict = ToUser::Verdict(Verdict { lease, reader, nonce: Nonce(5), held: false, why });
    let ended = ToUser::Ended(Ended { lease, reader, reason: Reason::Access });
    let unlike = ToUser::Ended(Ended { lease, reader, reason: Reason::Ticket });
    vec![
        ("hold_access", to_owner(&hold).unwrap()),
        ("confirm_access", to_owner(&confirm).unwrap()),
        ("release_access", to_owner(&release).unwrap()),
        ("verdict_why", to_user(&verdict).unwrap()),
        ("ended_access", to_user(&ended).unwrap()),
        ("hold_fingerprint", to_owner(&touching(&hold)).unwrap()),
        ("confirm_fingerprint", to_owner(&touching(&confirm)).unwrap()),
        ("release_fingerprint", to_owner(&touching(&release)).unwrap()),
        ("ended_ticket", to_user(&unlike).unwrap()),
    ]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

#[test]
fn what_is_written_is_the_first_schema() {
    let now: String =
        written().iter().map(|(name, bytes)| format!("{name} {}\n", hex(bytes))).collect();
    assert_eq!(now, SCHEMA_1, "what goes between two engines has changed: see docs/protocol.md");
}

#[test]
fn what_has_been_added_since_is_said_by_name() {
    let now: String =
        added().iter().map(|(name, bytes)| format!("{name} {}\n", hex(bytes))).collect();
    assert_eq!(now, ADDED, "what goes between two engines has changed: see docs/protocol.md");
    for (name, bytes) in added() {
        let again = match read(&bytes).unwrap().unwrap() {
            Frame::ToOwner(it) => to_owner(&it).unwrap(),
            Frame::ToUser(it) => to_user(&it).unwrap(),
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(again, bytes, "{name}");
    }
}

/// A reason of a later version is one that this one does not know, and no fault of the message.
#[test]
fn a_later_reason_is_read() {
    #[derive(Serialize)]
    enum LaterToUser {
        Verdict { lease: LeaseName, reader: Reader, nonce: Nonce, held: bool, why: &'static str },
        Ended { lease: LeaseName, reader: Reader, reason: &'static str },
    }
    let (lease, reader, nonce) = (lease(), reader(), Nonce(5));
    let verdict = LaterToUser::Verdict { lease, reader, nonce, held: false, why: "Eclipsed" };
    let read_back = framed(TO_USER, &verdict).unwrap();
    let why = Some(Reason::Other);
    let expected = ToUser::Verdict(Verdict { lease, reader, nonce, held: false, why });
    assert_eq!(read(&read_back).unwrap(), Some(Frame::ToUser(expected)));
    let ended = framed(TO_USER, &LaterToUser::Ended { lease, reader, reason: "Eclipsed" }).unwrap();
    let expected = ToUser::Ended(Ended { lease, reader, reason: Reason::Other });
    assert_eq!(read(&ended).unwrap(), Some(Frame::ToUser(expected)));
}

#[test]
fn the_first_schema_is_read() {
    let mut read_so_far = 0;
    for (line, (name, _)) in SCHEMA_1.lines().zip(written()) {
        let (said, bytes) = line.split_once(' ').unwrap();
        assert_eq!(said, name);
        let bytes = unhex(bytes);
        match read(&bytes).unwrap().unwrap() {
            Frame::ToOwner(it) => assert!(to_owners().contains(&(name, it))),
            Frame::ToUser(it) => assert!(to_users().contains(&(name, it))),
            Frame::Digests(it) => assert!(all_digests().contains(&(name, it))),
            Frame::Peers(it) => assert!(messages().contains(&(name, Message::decode(it).unwrap()))),
        }
        read_so_far += 1;
    }
    assert_eq!(read_so_far, written().len());
}

/// A message of today, with something that a later version may add.
#[derive(Serialize)]
struct Later<T> {
    #[serde(flatten)]
    today: T,
    hue: (u64, &'static str),
}

#[derive(Serialize)]
enum LaterToOwner {
    Hold(Later<Hold>),
    Hum(u8),
}

#[test]
fn what_a_later_version_adds_is_passed_over() {
    let frame = |message: &LaterToOwner| framed(TO_OWNER, message).unwrap();
    let later = frame(&LaterToOwner::Hold(Later { today: hold(), hue: (7, "blue") }));
    assert_ne!(later, to_owner(&ToOwner::Hold(hold())).unwrap());
    assert_eq!(read(&later).unwrap(), Some(Frame::ToOwner(ToOwner::Hold(hold()))));
    // A field that came after the first message of this kind, and is not there yet.
    #[derive(Serialize)]
    struct Earlier {
        lease: LeaseName,
        reader: Reader,
        set: Ranks,
        have: u32,
        total: bool,
    }
    #[derive(Serialize)]
    enum EarlierToOwner {
        Hold(Earlier),
    }
    let Hold { lease, reader, set, have, total, .. } = hold();
    let earlier = EarlierToOwner::Hold(Earlier { lease, reader, set, have, total });
    let earlier = framed(TO_OWNER, &earlier).unwrap();
    let expected = ToOwner::Hold(Hold { asks: false, ..hold() });
    assert_eq!(read(&earlier).unwrap(), Some(Frame::ToOwner(expected)));
    // Another kind of frame is nobody's fault; another message of a known kind is, as nobody agreed to it.
    assert_eq!(read(&[200, 1, 2, 3]).unwrap(), None);
    let error = read(&frame(&LaterToOwner::Hum(1))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Peer, "{error}");
    assert!(read(&[]).is_err());
}
