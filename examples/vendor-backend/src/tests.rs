//! What the conformance kit cannot reach: connections that no backend of this kind makes.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, Outcome, Submit, TransferBackend as _};
use kvx_core::config::BackendConfig;
use kvx_core::handshake::Handshake as _;
use kvx_core::id::{Incarnation, PeerId, TransferId};
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::registry::Probe;
use kvx_core::transfer::{Mode, PostedSegment};

use crate::connection::MAX_STRANGERS;
use crate::message::{Answer, Batch, Chunk, Hello, Note, Request, receive, send};
use crate::serve::MAX_UNTAKEN;
use crate::{Config, PlainTcp};

fn open() -> PlainTcp {
    PlainTcp::open(&Config::default()).unwrap()
}

fn wait<R>(mut look: impl FnMut() -> Option<R>) -> R {
    let begin = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begin.elapsed() < Duration::from_secs(10), "waited in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn next_event(of: &PlainTcp) -> Event {
    let mut events = Events::with_limit(1);
    wait(|| {
        of.poll(&mut events);
        events.drain().next()
    })
}

/// Two honest sides that have met: how each knows the other.
fn meet(one: &PlainTcp, other: &PlainTcp) -> (PeerId, PeerId) {
    let (at_other, reply) = other.accept(&one.offer().unwrap()).unwrap();
    let (at_one, completion) = one.complete(&reply).unwrap();
    other.finish(&completion).unwrap();
    (at_one, at_other)
}

/// A read of 8 bytes arrives.
fn works(one: &PlainTcp, other: &PlainTcp) {
    let (at_one, _) = meet(one, other);
    let [from, to] = [Region::host(8).unwrap(), Region::host(8).unwrap()];
    from.write_at(0, b"is there").unwrap();
    let blob = other.key_blob(other.register(&from).unwrap()).unwrap();
    let remote = one.import_key(at_one, &blob).unwrap();
    let local = one.register(&to).unwrap();
    let all = PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 8 };
    let posted = one.submit(TransferId(7), at_one, Mode::Read, &[all], None).unwrap();
    assert_eq!(posted, Submit::Submitted);
    let event = next_event(one);
    assert!(matches!(event, Event::Settled { outcome: Outcome::Done { .. }, .. }), "{event:?}");
    let mut read = [0; 8];
    to.read_at(0, &mut read).unwrap();
    assert_eq!(&read, b"is there");
}

/// A peer of the test's own making, which `side` takes for a real one: its handshake is right, and its connection not.
fn impostor(side: &PlainTcp) -> (TcpStream, PeerId, PlainTcp) {
    let real = open();
    let (_, reply) = side.accept(&real.offer().unwrap()).unwrap();
    drop(reply);
    let from = real.shared.incarnation;
    let (peer, word) = side.shared.with(|state| {
        let peer = state.known(from).unwrap();
        (peer, state.peer("test", peer).unwrap().word)
    });
    let stream = TcpStream::connect(side.shared.address).unwrap();
    Hello { from, to: side.shared.incarnation, word }.send(&stream).unwrap();
    (stream, peer, real)
}

/// The side ends the connection, and says so.
fn is_cut_off(side: &PlainTcp, peer: PeerId, mut stream: TcpStream) {
    match next_event(side) {
        Event::PeerDown { peer: down, error: Some(_) } => assert_eq!(down, peer),
        event => panic!("{event:?}"),
    }
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    // Either an end, or a reset, where bytes were left unread.
    assert!(matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_)));
}

#[test]
fn strangers_harm_nobody() {
    let [one, other] = [open(), open()];
    let to = other.shared.address;
    // More than are let in: some say nothing, some say nonsense, some claim to be a peer.
    let crowd: Vec<TcpStream> = (0..3 * MAX_STRANGERS)
        .map(|number| {
            let mut stream = TcpStream::connect(to).unwrap();
            let said = match number % 3 {
                0 => Ok(()),
                1 => stream.write_all(&[0x5a; 200]),
                _ => Hello { from: one.incarnation(), to: other.incarnation(), word: 1 }
                    .send(&stream),
            };
            // It may have been shown the door by then.
            let _ = said;
            stream
        })
        .collect();
    works(&one, &other);
    assert!(other.shared.with(|state| state.strangers.len()) <= MAX_STRANGERS);
    // Who says nothing is not waited for for ever.
    wait(|| other.shared.with(|state| state.strangers.is_empty().then_some(())));
    drop(crowd);
}

#[test]
fn nonsense_ends_the_connection_it_came_by_and_no_other() {
    let side = open();
    let body = b"\xc1\xc1\xc1".as_slice();
    let nonsense: [&[u8]; 4] = [
        // A frame of 4 GiB; one that is no MessagePack; one that is, and no request; half a frame.
        &u32::MAX.to_le_bytes(),
        &[&3_u32.to_le_bytes(), body].concat(),
        &[&1_u32.to_le_bytes(), b"\xc0".as_slice()].concat(),
        &[&9_u32.to_le_bytes(), body].concat(),
    ];
    for bytes in nonsense {
        let (mut stream, peer, _real) = impostor(&side);
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        is_cut_off(&side, peer, stream);
    }
    for request in [Request::End, Request::Data(Chunk(vec![1])), Request::Abort] {
        let (stream, peer, _real) = impostor(&side);
        send(&stream, &request).unwrap();
        is_cut_off(&side, peer, stream);
    }
    works(&side, &open());
}

#[test]
fn a_second_connection_in_a_peers_name_is_turned_away() {
    let side = open();
    let (first, peer, real) = impostor(&side);
    wait(|| side.shared.with(|s| s.peer("test", peer).unwrap().incoming.is_some().then_some(())));
    let word = side.shared.with(|state| state.peer("test", peer).unwrap().word);
    let mut second = TcpStream::connect(side.shared.address).unwrap();
    Hello { from: real.incarnation(), to: side.incarnation(), word }.send(&second).unwrap();
    assert!(matches!(second.read(&mut [0; 8]), Ok(0) | Err(_)));
    // The first is as it was.
    let batch = Batch { ticket: 5, pieces: Vec::new(), note: Some(Note(b"hello".to_vec())) };
    send(&first, &Request::Write(batch)).unwrap();
    send(&first, &Request::End).unwrap();
    assert!(matches!(receive::<Answer>(&first).unwrap(), Answer::Done(5)));
    assert!(matches!(next_event(&side), Event::Notified { payload, .. } if payload == b"hello"));
}

#[test]
fn a_peer_that_floods_is_cut_off_and_takes_a_bounded_room() {
    let side = open();
    let (stream, peer, _real) = impostor(&side);
    let answers = stream.try_clone().unwrap();
    let reader = std::thread::spawn(move || while receive::<Answer>(&answers).is_ok() {});
    for ticket in 0..=MAX_UNTAKEN as u64 {
        let batch = Batch { ticket, pieces: Vec::new(), note: Some(Note(Vec::new())) };
        let sent =
            send(&stream, &Request::Write(batch)).and_then(|()| send(&stream, &Request::End));
        if sent.is_err() {
            break;
        }
    }
    reader.join().unwrap();
    for _ in 0..MAX_UNTAKEN {
        assert!(matches!(next_event(&side), Event::Notified { .. }));
    }
    is_cut_off(&side, peer, stream);
    works(&side, &open());
}

#[test]
fn late_answers_to_a_cancelled_transfer_do_not_settle_the_next_of_its_id() {
    let [one, other] = [open(), open()];
    let (at_one, _) = meet(&one, &other);
    let big = Region::host(64 << 20).unwrap();
    let remote = one.import_key(at_one, &other.key_blob(other.register(&big).unwrap()).unwrap());
    let (remote, local) =
        (remote.unwrap(), one.register(&Region::host(64 << 20).unwrap()).unwrap());
    let segments: Vec<_> = (0..64_u64)
        .map(|index| {
            let at = index << 20;
            PostedSegment { local, remote, local_offset: at, remote_offset: at, bytes: 1 << 20 }
        })
        .collect();
    for _ in 0..8 {
        let id = TransferId(3);
        let submit = |segments| one.submit(id, at_one, Mode::Read, segments, None).unwrap();
        assert_eq!(submit(&segments), Submit::Submitted);
        one.cancel(id).unwrap();
        assert!(matches!(next_event(&one), Event::Settled { outcome: Outcome::Cancelled, .. }));
        assert_eq!(submit(&segments[..1]), Submit::Submitted);
        assert!(matches!(next_event(&one), Event::Settled { outcome: Outcome::Done { .. }, .. }));
    }
}

#[test]
fn a_peer_that_cannot_be_reached_is_down_within_a_bound() {
    let [one, other] = [open(), open()];
    let (_, reply) = other.accept(&one.offer().unwrap()).unwrap();
    drop(other);
    let (at_one, _) = one.complete(&reply).unwrap();
    let posted = one.submit(TransferId(1), at_one, Mode::Write, &[], Some(b"anyone?"));
    if let Ok(Submit::Submitted) = posted {
        let event = next_event(&one);
        assert!(matches!(event, Event::Settled { outcome: Outcome::Failed(_), .. }), "{event:?}");
    }
    assert!(matches!(next_event(&one), Event::PeerDown { error: Some(_), .. }));
}

#[test]
fn options_are_checked_before_anything_is_opened() {
    let read = |text: &str| Config::read(&text.parse::<BackendConfig>().unwrap());
    assert_eq!(read("address=::1").unwrap().address, "::1".parse::<IpAddr>().unwrap());
    for bad in ["port=7", "address=here", "address=0.0.0.0", "address=ff02::1"] {
        assert_eq!(read(bad).unwrap_err().kind(), kvx_core::ErrorKind::Config, "{bad}");
    }
    let probe = crate::probe::probe(&"port=7".parse().unwrap());
    assert!(matches!(probe, Probe::BadOptions { .. }), "{probe:?}");
    let probe = crate::probe::probe(&"address=192.0.2.1".parse().unwrap());
    assert!(matches!(probe, Probe::Unavailable { remedy: Some(_), .. }), "{probe:?}");
    let error = PlainTcp::open(&Config { address: "192.0.2.1".parse().unwrap() }).unwrap_err();
    assert_eq!(error.kind(), kvx_core::ErrorKind::Unsupported);
}

#[test]
fn an_address_of_the_wrong_life_is_refused() {
    let side = open();
    let stranger = Hello { from: Incarnation::random().unwrap(), to: side.incarnation(), word: 0 };
    let stream = TcpStream::connect(side.shared.address).unwrap();
    stranger.send(&stream).unwrap();
    assert!(matches!((&stream).read(&mut [0; 8]), Ok(0) | Err(_)));
    let side = Arc::new(side);
    works(&side, &open());
}

#[test]
fn a_peer_that_closes_once_it_is_notified_has_answered() {
    for round in 0..40 {
        let [one, other] = [open(), open()];
        let (at_one, _) = meet(&one, &other);
        let note = Some(b"the last".as_slice());
        let posted = one.submit(TransferId(round), at_one, Mode::Write, &[], note).unwrap();
        assert_eq!(posted, Submit::Submitted);
        assert!(matches!(next_event(&other), Event::Notified { .. }));
        drop(other);
        let event = next_event(&one);
        assert!(matches!(event, Event::Settled { outcome: Outcome::Done { .. }, .. }), "{event:?}");
        assert!(matches!(next_event(&one), Event::PeerDown { error: Some(_), .. }));
    }
}
