use kvx_core::card::{FeatureSet, SchemaRange};
use kvx_core::id::Incarnation;

use super::super::Key;

use kvx_core::{ErrorKind, Retry};

use super::*;
use crate::control::record::MAX_PAYLOAD_BYTES;

mod mutated;

const LIMIT: usize = 1 << 20;

fn key(byte: u8) -> Security {
    Security::with_key(Key::from_bytes([byte; 32]))
}

fn local(engine: &str, security: Security) -> Local {
    Local {
        identity: RemoteIdentity {
            engine: EngineName::new(engine).unwrap(),
            incarnation: Incarnation::from_bytes([engine.len().try_into().unwrap(); 16]),
            rank: None,
        },
        versions: Versions::CURRENT,
        security,
        max_message_bytes: LIMIT,
    }
}

/// Two sides, and what they have heard.
struct Pair {
    dials: Session,
    dialled: Session,
    heard: [Vec<SessionEvent>; 2],
}

impl Pair {
    fn new(dials: Local, dialled: Local) -> Self {
        let heard = [Vec::new(), Vec::new()];
        let dials = Session::dial(&Arc::new(dials), None).unwrap();
        Self { dials, dialled: Session::accept(&Arc::new(dialled)), heard }
    }

    fn up(security: fn() -> Security) -> Self {
        let mut pair = Self::new(local("decode", security()), local("prefill", security()));
        pair.carry().unwrap();
        assert!(pair.dials.is_up() && pair.dialled.is_up());
        pair.heard.iter_mut().for_each(Vec::clear);
        pair
    }

    /// Carries bytes until nobody says anything more. Each side's fault, if there was one.
    fn carry(&mut self) -> Result<(), [Option<Fault>; 2]> {
        let mut faults = [None, None];
        loop {
            let said = take(&mut self.dials);
            if let Err(fault) = self.dialled.receive(&said, &mut self.heard[1]) {
                faults[1].get_or_insert(fault);
            }
            if matches!(self.dialled.state, State::Knocked(_)) {
                self.dialled.answer().unwrap();
            }
            let answer = take(&mut self.dialled);
            if let Err(fault) = self.dials.receive(&answer, &mut self.heard[0]) {
                faults[0].get_or_insert(fault);
            }
            if said.is_empty() && answer.is_empty() {
                return if faults.iter().all(Option::is_none) { Ok(()) } else { Err(faults) };
            }
        }
    }
}

/// All that a session has to say.
fn take(session: &mut Session) -> Vec<u8> {
    let said = session.output().to_vec();
    session.sent(said.len());
    said
}

fn plain() -> Security {
    Security::plaintext_on_loopback()
}

fn keyed() -> Security {
    key(7)
}

#[test]
fn both_come_up_and_know_each_other() {
    for security in [plain, keyed] {
        let mut pair = Pair::new(local("decode", security()), local("prefill", security()));
        pair.carry().unwrap();
        for (heard, engine) in pair.heard.iter().zip(["prefill", "decode"]) {
            match heard.last() {
                Some(SessionEvent::Up { remote, agreed }) => {
                    assert_eq!(remote.engine.as_str(), engine);
                    assert_eq!(agreed.schema, 1);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn messages_of_every_length_arrive_whole_however_the_stream_is_cut() {
    let lengths = [0, 1, 1000, MAX_PAYLOAD_BYTES - 1, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES + 1];
    let lengths =
        lengths.into_iter().chain([2 * MAX_PAYLOAD_BYTES, 3 * MAX_PAYLOAD_BYTES + 5, LIMIT]);
    let messages: Vec<Vec<u8>> =
        lengths.map(|length| (0_u8..251).cycle().take(length).collect()).collect();
    for security in [plain, keyed] {
        for cut in [1, 2, 3, 61, 1024, 65_536, usize::MAX] {
            let mut pair = Pair::up(security);
            for message in &messages {
                pair.dials.send(message).unwrap();
            }
            // A cut of one byte is slow; the first megabyte says all.
            let said = take(&mut pair.dials);
            for piece in said.chunks(cut) {
                pair.dialled.receive(piece, &mut pair.heard[1]).unwrap();
            }
            assert_eq!(pair.heard[1].len(), messages.len());
            for (heard, message) in pair.heard[1].iter().zip(&messages) {
                assert!(matches!(heard, SessionEvent::Message(bytes) if bytes == message));
            }
        }
    }
}

#[test]
fn a_message_over_the_limit_is_neither_sent_nor_taken() {
    let mut pair = Pair::up(keyed);
    assert_eq!(pair.dials.send(&vec![0; LIMIT + 1]).unwrap_err().kind(), ErrorKind::Misuse);
    let mut larger = local("decode", keyed());
    larger.max_message_bytes = 2 * LIMIT;
    let mut pair = Pair::new(larger, local("prefill", keyed()));
    pair.carry().unwrap();
    pair.dials.send(&vec![0; LIMIT + 1]).unwrap();
    let [told, fault] = pair.carry().unwrap_err();
    let fault = fault.unwrap();
    assert_eq!(fault.kind, FaultKind::BadFrame);
    assert!(fault.error.to_string().contains("the limit is 1048576"), "{}", fault.error);
    assert!(told.unwrap().error.to_string().contains("the limit is 1048576"));
    assert!(pair.dialled.kept() < 4096);
}

#[test]
fn a_ping_is_answered_with_its_number() {
    let mut pair = Pair::up(keyed);
    pair.dialled.ping(0x0102_0304_0506_0708).unwrap();
    pair.carry().unwrap();
    assert_eq!(pair.heard[1], [SessionEvent::Pong(0x0102_0304_0506_0708)]);
}

#[test]
fn keys_change_on_the_way_and_on_both_sides_at_once() {
    let rekeys = |dials: u64, dialled: u64| {
        let mut pair = Pair::new(local("decode", keyed()), local("prefill", keyed()));
        (pair.dials.rekey_every, pair.dialled.rekey_every) = (dials, dialled);
        pair.carry().unwrap();
        for round in 0..20_u8 {
            pair.dials.send(&[round]).unwrap();
            pair.dialled.send(&[round; 9]).unwrap();
        }
        pair.carry().map(|()| pair.heard)
    };
    let [at_dials, at_dialled] = rekeys(4, 4).unwrap();
    // `Knocked` and `Up`, and the messages.
    assert_eq!((at_dials.len(), at_dialled.len()), (21, 22));
    // It does make a difference.
    let [_, fault] = rekeys(4, 5).unwrap_err();
    assert_eq!(fault.unwrap().kind, FaultKind::BadFrame);
    // And with as many records as there really are between two keys.
    let mut pair = Pair::up(keyed);
    for round in 0..REKEY_EVERY + 10 {
        pair.dials.send(&round.to_le_bytes()).unwrap();
        let said = take(&mut pair.dials);
        pair.dialled.receive(&said, &mut pair.heard[1]).unwrap();
        assert_eq!(pair.heard[1].pop(), Some(SessionEvent::Message(round.to_le_bytes().to_vec())));
    }
}

#[test]
fn a_session_ends_before_its_numbers_do() {
    let mut pair = Pair::new(local("decode", keyed()), local("prefill", keyed()));
    pair.dials.max_records = 3;
    pair.carry().unwrap();
    pair.dials.send(b"1").unwrap();
    pair.dials.send(b"2").unwrap();
    let error = pair.dials.send(b"3").unwrap_err();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Closed, Retry::Reconnect));
    // The other side does not rely on it.
    let mut pair = Pair::new(local("decode", keyed()), local("prefill", keyed()));
    pair.dialled.max_records = 3;
    pair.carry().unwrap();
    for _ in 0..3 {
        pair.dials.send(b"x").unwrap();
    }
    assert_eq!(pair.carry().unwrap_err()[1].as_ref().unwrap().error.kind(), ErrorKind::Closed);
}

/// The records of three messages that one side sends.
fn three_records(pair: &mut Pair) -> [Vec<u8>; 3] {
    [b"one", b"two", b"six"].map(|message| {
        pair.dials.send(message).unwrap();
        take(&mut pair.dials)
    })
}

#[test]
fn a_record_opens_in_its_place_only() {
    type Change = fn(&mut Vec<Vec<u8>>);
    let changes: [(&str, Change, usize); 7] = [
        ("replayed", |it| it.insert(1, it[0].clone()), 1),
        ("replayed later", |it| it.push(it[0].clone()), 3),
        ("reordered", |it| it.swap(1, 2), 1),
        ("left out", |it| drop(it.remove(1)), 1),
        ("of another session", |it| it[1] = three_records(&mut Pair::up(keyed))[1].clone(), 1),
        (
            "truncated, with the length that it has",
            |it| {
                it[1].pop();
                it[1][0] -= 1;
            },
            1,
        ),
        ("empty", |it| it[1] = vec![0, 0], 1),
    ];
    for (what, change, before) in changes {
        let mut pair = Pair::up(keyed);
        let mut records = three_records(&mut pair).to_vec();
        change(&mut records);
        let fault = pair.dialled.receive(&records.concat(), &mut pair.heard[1]).unwrap_err();
        assert_eq!(fault.kind, FaultKind::BadFrame, "{what}");
        assert_eq!(pair.heard[1].len(), before, "{what}");
        assert!(pair.dialled.is_over());
        // Nothing brings it back.
        pair.dialled.receive(&records[1], &mut pair.heard[1]).unwrap();
        assert_eq!(pair.heard[1].len(), before, "{what}");
        // The other side is told.
        let told = take(&mut pair.dialled);
        let told = pair.dials.receive(&told, &mut pair.heard[0]).unwrap_err();
        assert!(told.error.to_string().contains("bad frame"), "{}", told.error);
    }
}

#[test]
fn a_record_with_any_bit_changed_does_not_open() {
    let mut pair = Pair::up(keyed);
    let [record, ..] = three_records(&mut pair);
    for bit in 16..record.len() * 8 {
        let mut pair = Pair::up(keyed);
        let [mut record, ..] = three_records(&mut pair);
        record[bit / 8] ^= 1 << (bit % 8);
        pair.dialled.receive(&record, &mut pair.heard[1]).unwrap_err();
        assert!(pair.heard[1].is_empty(), "bit {bit}");
    }
}

#[test]
fn who_has_another_key_is_told_nothing() {
    let mut pair = Pair::new(local("decode", key(1)), local("prefill", key(2)));
    let [unheard, fault] = pair.carry().unwrap_err();
    assert!(unheard.is_none() && pair.heard[0].is_empty() && pair.heard[1].is_empty());
    let fault = fault.unwrap();
    assert_eq!(fault.kind, FaultKind::WrongKey);
    assert!(fault.error.remedy().unwrap().contains("same key"), "{}", fault.error);
    assert!(pair.dialled.is_over() && pair.dialled.kept() == 0);
}

#[test]
fn an_old_key_is_accepted_while_keys_are_changed_and_is_seen() {
    let changing = key(2).accepting(Key::from_bytes([1; 32]));
    let mut pair = Pair::new(local("decode", key(1)), local("prefill", changing.clone()));
    pair.carry().unwrap();
    assert!(pair.dialled.is_up() && pair.dialled.used_old_key());
    let mut pair = Pair::new(local("decode", key(2)), local("prefill", changing.clone()));
    pair.carry().unwrap();
    assert!(pair.dialled.is_up() && !pair.dialled.used_old_key());
    // To dial, the first is used.
    let mut pair = Pair::new(local("decode", changing), local("prefill", key(1)));
    pair.carry().unwrap_err();
}

#[test]
fn a_recording_of_a_whole_session_gets_no_further_than_the_first_message() {
    let mut pair = Pair::new(local("decode", keyed()), local("prefill", keyed()));
    let first = take(&mut pair.dials);
    pair.dialled.receive(&first, &mut pair.heard[1]).unwrap();
    pair.dialled.answer().unwrap();
    let answer = take(&mut pair.dialled);
    pair.dials.receive(&answer, &mut pair.heard[0]).unwrap();
    let hello = take(&mut pair.dials);
    pair.dialled.receive(&hello, &mut pair.heard[1]).unwrap();
    assert!(pair.dialled.is_up());

    let mut again = Session::accept(&Arc::new(local("prefill", keyed())));
    let mut heard = Vec::new();
    again.receive(&first, &mut heard).unwrap();
    again.answer().unwrap();
    assert_ne!(take(&mut again), answer, "another session has other keys");
    let fault = again.receive(&hello, &mut heard).unwrap_err();
    assert_eq!(fault.kind, FaultKind::WrongKey);
    assert_eq!(heard, [SessionEvent::Knocked]);
    assert!(again.output().is_empty(), "it is told nothing");
    // Nor does all of it at once.
    let mut again = Session::accept(&Arc::new(local("prefill", keyed())));
    let fault = again.receive(&[first, hello].concat(), &mut heard).unwrap_err();
    assert_eq!(fault.kind, FaultKind::WrongKey);
    assert!(again.answer().is_err());
}

#[test]
fn one_without_a_key_and_one_with_do_not_talk() {
    for (dials, dialled) in [(plain(), keyed()), (keyed(), plain())] {
        let mut pair = Pair::new(local("decode", dials), local("prefill", dialled));
        let [_, fault] = pair.carry().unwrap_err();
        let fault = fault.unwrap();
        assert_eq!(fault.kind, FaultKind::NotOurs);
        assert_eq!(fault.error.as_mismatch().unwrap().field, "security");
        assert!(!pair.dials.is_up() && pair.heard[0].is_empty());
    }
}

/// Known failure 115 (vllm PR#17192, sglang PR#21435): whatever strangers send is refused by the first byte that is wrong, and
/// nothing of it is kept.
#[test]
fn strangers_are_hung_up_on_at_the_first_wrong_byte() {
    let mut knock = take(&mut Session::dial(&Arc::new(local("x", key(9))), None).unwrap());
    knock[8] = 2;
    let long = [preamble::write(&keyed()).as_slice(), &[0xff, 0xff], &[0; 70_000]].concat();
    let none = [preamble::write(&keyed()).as_slice(), &[0, 0]].concat();
    for (stranger, bytes) in [
        (b"GET / HTTP/1.1\r\n".as_slice(), 1),
        (b"\x16\x03\x01\x02\x00", 1),
        // ZeroMQ's greeting; a pickle.
        (b"\xff\0\0\0\0\0\0\0\x01\x7f", 1),
        (b"\x80\x04\x95", 1),
        (b"KVX card", 6),
        (&knock, 9),
        (&long, 14),
        (&none, 14),
    ] {
        let mut session = Session::accept(&Arc::new(local("prefill", keyed())));
        let mut events = Vec::new();
        let mut taken = 0;
        for byte in stranger {
            taken += 1;
            if session.receive(&[*byte], &mut events).is_err() {
                break;
            }
            assert!(session.kept() <= 64, "{}", session.kept());
        }
        assert_eq!(taken, bytes, "{:?}", stranger.escape_ascii().to_string());
        assert!(session.output().is_empty() && events.is_empty() && session.kept() == 0);
    }
}

/// Known failure 76 (vllm#27083): whoever answers is not whom one wanted. Both names and the address are in the error.
#[test]
fn another_engine_than_the_one_that_was_wanted_is_refused_with_both_names() {
    let address: Address = "10.0.0.1:5600".parse().unwrap();
    let expected = (EngineName::new("prefill-1").unwrap(), address);
    let mut pair = Pair::new(local("decode", keyed()), local("prefill-2", keyed()));
    pair.dials = Session::dial(&Arc::new(local("decode", keyed())), Some(expected)).unwrap();
    let [fault, told] = pair.carry().unwrap_err();
    let fault = fault.unwrap();
    assert_eq!((fault.kind, fault.error.kind()), (FaultKind::Refused, ErrorKind::Peer));
    let text = fault.error.to_string();
    for part in ["prefill-1", "prefill-2", "10.0.0.1:5600"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!pair.heard[0].iter().any(|it| matches!(it, SessionEvent::Up { .. })));
    let told = told.unwrap();
    assert_eq!(told.kind, FaultKind::Left);
    assert!(told.error.to_string().contains("prefill-1"), "{}", told.error);
}

#[test]
fn versions_that_do_not_meet_are_told_to_both_with_both_values() {
    let newer = |versions: Versions| {
        let mut newer = local("decode", keyed());
        newer.versions = versions;
        Pair::new(newer, local("prefill", keyed())).carry().unwrap_err()
    };
    let schemas = SchemaRange::new(2, 3).unwrap();
    let required = FeatureSet::from_bits(1 << 35);
    for (versions, field, here, there) in [
        (Versions { schemas, ..Versions::CURRENT }, "schema", "schemas 2 to 3", "schema 1"),
        (Versions { required, known: required, ..Versions::CURRENT }, "features", "35", "none"),
    ] {
        for (fault, [mine, theirs]) in
            newer(versions).into_iter().zip([[here, there], [there, here]])
        {
            let error = fault.unwrap().error;
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            let mismatch = error.as_mismatch().unwrap();
            assert_eq!(mismatch.field, field);
            assert_eq!((mismatch.left.1.as_str(), mismatch.right.1.as_str()), (mine, theirs));
        }
    }
    // One that requires nothing, and a later one that speaks this schema as well.
    let mut later = local("decode", keyed());
    later.versions.schemas = SchemaRange::new(1, 2).unwrap();
    later.versions.known = FeatureSet::from_bits(1 << 35);
    Pair::new(later, local("prefill", keyed())).carry().unwrap();
}

/// A record without a key.
fn record(tag: u8, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len() + 1).unwrap();
    [&length.to_le_bytes(), payload, &[tag]].concat()
}

/// Known failure 57 (sglang PR#30352): a control message that nobody knows is an error of its session.
#[test]
fn a_record_that_nobody_expects_ends_the_session_with_a_reason() {
    let bye = |code: u8, reason: &str| {
        let mut bytes = b"\x82\xa4code".to_vec();
        bytes.extend([code, 0xa6]);
        bytes.extend(b"reason");
        bytes.push(0xa0 | u8::try_from(reason.len()).unwrap());
        bytes.extend(reason.as_bytes());
        record(Tag::Bye as u8, &bytes)
    };
    for (sent, kind, why) in [
        (record(0, b""), FaultKind::BadFrame, "unknown kind 0"),
        (record(77, b"ABORT"), FaultKind::BadFrame, "unknown kind 77"),
        (vec![0, 0], FaultKind::BadFrame, "a record is empty"),
        (record(Tag::Hello as u8, b""), FaultKind::BadFrame, "a second hello"),
        (record(Tag::Part as u8, b"short"), FaultKind::BadFrame, "a part of 5 bytes"),
        (record(Tag::Ping as u8, b"1234567"), FaultKind::BadFrame, "a ping of 7 bytes"),
        (record(Tag::Pong as u8, b"123456789"), FaultKind::BadFrame, "a pong of 9 bytes"),
        (record(Tag::Bye as u8, b"\xc1"), FaultKind::BadFrame, "the bye is malformed"),
        (bye(9, "a\nb"), FaultKind::BadFrame, "control character"),
        (bye(0, ""), FaultKind::Left, "closed the session"),
        (bye(1, "why"), FaultKind::Left, "refused the session: why"),
        (bye(3, "4096"), FaultKind::Left, "too many sessions: 4096"),
        (bye(4, ""), FaultKind::Left, "is stopping"),
        (bye(99, "later"), FaultKind::Left, "ended the session: later"),
    ] {
        let mut pair = Pair::up(plain);
        let fault = pair.dialled.receive(&sent, &mut pair.heard[1]).unwrap_err();
        assert_eq!(fault.kind, kind, "{}", fault.error);
        assert!(fault.error.to_string().contains(why), "{}", fault.error);
        assert_eq!(take(&mut pair.dialled).is_empty(), kind == FaultKind::Left);
    }
}

#[test]
fn whoever_is_first_says_hello_before_anything_else() {
    for (sent, why) in [
        (record(Tag::Message as u8, b"x"), "no hello"),
        (record(Tag::Hello as u8, b"x"), "cut short"),
        (vec![0xff, 0x7f], "a hello of 32767 bytes"),
    ] {
        let mut session = Session::accept(&Arc::new(local("prefill", plain())));
        let mut events = Vec::new();
        session.receive(&preamble::write(&plain()), &mut events).unwrap();
        let fault = session.receive(&sent, &mut events).unwrap_err();
        assert!(fault.error.to_string().contains(why), "{}", fault.error);
        assert!(events.is_empty());
    }
}

#[test]
fn nothing_is_sent_before_it_is_up_or_after_it_is_over() {
    let mut pair = Pair::new(local("decode", keyed()), local("prefill", keyed()));
    assert_eq!(pair.dials.send(b"x").unwrap_err().kind(), ErrorKind::Misuse);
    pair.carry().unwrap();
    pair.dials.leave(Leave::Closed, "done");
    pair.dials.send(b"x").unwrap_err();
    let [_, fault] = pair.carry().unwrap_err();
    let fault = fault.unwrap();
    assert_eq!((fault.kind, fault.error.kind()), (FaultKind::Left, ErrorKind::Closed));
    assert!(fault.error.to_string().contains("closed the session: done"));
}
