//! Offers that are repeated, cross, come late, or are not offers at all.

use std::sync::Arc;

use kvx_core::backend::{Event, TransferBackend as _};
use kvx_core::handshake::{Handshake as _, HandshakeBytes};
use kvx_core::id::{PeerId, TransferId};
use kvx_core::transfer::Mode;
use kvx_core::{ErrorKind, Retry};
use kvx_mock::{Fabric, MockBackend, Preset};

use crate::common::{ends_down, meet, pair, poll_until, presets};

fn two(fabric: &Fabric) -> (Arc<MockBackend>, Arc<MockBackend>) {
    (fabric.backend(Preset::rc(), "first"), fabric.backend(Preset::rc(), "second"))
}

/// A bare notification, as proof that posting works; how many arrive is the proof that there is one connection.
fn greet(from: &MockBackend, peer: PeerId, to: &MockBackend, expected: PeerId) {
    let _ = from.submit(TransferId(99), peer, Mode::Write, &[], Some(b"hello")).unwrap();
    let heard = |all: &[Event]| all.iter().any(|event| matches!(event, Event::Notified { .. }));
    let events = poll_until(to, heard);
    assert!(
        matches!(&events[..], [Event::Notified { peer, payload }]
            if *peer == expected && payload == b"hello"),
        "{events:?}"
    );
    poll_until(from, |all| !all.is_empty());
}

#[test]
fn who_may_post_when() {
    let fabric = Fabric::new(1);
    let (first, second) = two(&fabric);
    let offer = first.offer().unwrap();
    let (at_second, reply) = second.accept(&offer).unwrap();
    let early = second.submit(TransferId(1), at_second, Mode::Write, &[], Some(b"x")).unwrap_err();
    assert_eq!(early.kind(), ErrorKind::Misuse);
    let (at_first, completion) = first.complete(&reply).unwrap();
    greet(&first, at_first, &second, at_second);
    assert_eq!(second.finish(&completion).unwrap(), at_second);
    greet(&second, at_second, &first, at_first);
}

#[test]
fn repeated_messages_change_nothing() {
    for preset in presets() {
        let fabric = Fabric::new(1);
        let first = fabric.backend(preset.clone(), "first");
        let second = fabric.backend(preset, "second");
        let offer = first.offer().unwrap();
        let answer = second.accept(&offer).unwrap();
        assert_eq!(second.accept(&offer).unwrap(), answer);
        assert_eq!(second.accept(&first.offer().unwrap()).unwrap(), answer);
        let done = first.complete(&answer.1).unwrap();
        assert_eq!(first.complete(&answer.1).unwrap(), done);
        assert_eq!(second.accept(&offer).unwrap(), answer);
        assert_eq!(second.finish(&done.1).unwrap(), answer.0);
        assert_eq!(second.finish(&done.1).unwrap(), answer.0);
        greet(&first, done.0, &second, answer.0);
        greet(&second, answer.0, &first, done.0);
    }
}

#[test]
fn crossing_offers_give_one_connection_in_every_interleaving() {
    // Each side's three messages, in every order in which they can be delivered.
    for order in 0_u32..64 {
        let fabric = Fabric::new(1);
        let (first, second) = two(&fabric);
        let sides = [(&first, &second), (&second, &first)];
        let offers = [first.offer().unwrap(), second.offer().unwrap()];
        let mut next: [Option<HandshakeBytes>; 2] = [None, None];
        let mut handles: [Vec<PeerId>; 2] = [Vec::new(), Vec::new()];
        let (mut steps, mut bits) = ([0, 0], order);
        while steps != [3, 3] {
            let mut side = (bits & 1) as usize;
            bits >>= 1;
            if steps[side] == 3 {
                side = 1 - side;
            }
            // `side` is the initiator of this exchange.
            let (initiator, acceptor) = sides[side];
            match steps[side] {
                0 => {
                    let (peer, reply) = acceptor.accept(&offers[side]).unwrap();
                    handles[1 - side].push(peer);
                    next[side] = Some(reply);
                }
                1 => {
                    let (peer, completion) =
                        initiator.complete(next[side].as_ref().unwrap()).unwrap();
                    handles[side].push(peer);
                    next[side] = Some(completion);
                }
                _ => {
                    let peer = acceptor.finish(next[side].as_ref().unwrap()).unwrap();
                    handles[1 - side].push(peer);
                }
            }
            steps[side] += 1;
        }
        for list in &handles {
            assert_eq!(list.len(), 3);
            assert!(list.iter().all(|peer| *peer == list[0]), "order {order:b}: {handles:?}");
        }
        greet(&first, handles[0][0], &second, handles[1][0]);
        greet(&second, handles[1][0], &first, handles[0][0]);
    }
}

#[test]
fn another_incarnation_is_another_peer() {
    let fabric = Fabric::new(1);
    let (first, second) = two(&fabric);
    let old_offer = first.offer().unwrap();
    let (_, old_at_second) = meet(&first, &second);
    let old = first.incarnation();
    drop(first);
    let again = fabric.backend(Preset::rc(), "first");
    assert_ne!(again.incarnation(), old);
    let (at_again, at_second) = meet(&again, &second);
    assert_ne!(at_second, old_at_second);
    let events = poll_until(&second, ends_down);
    assert!(
        matches!(&events[..], [Event::PeerDown { peer, error: Some(error) }]
            if *peer == old_at_second && error.retry() == Retry::Reconnect),
        "{events:?}"
    );
    let late = second.accept(&old_offer).unwrap_err();
    assert_eq!((late.kind(), late.retry()), (ErrorKind::Peer, Retry::Reconnect));
    greet(&again, at_again, &second, at_second);
}

#[test]
fn a_late_reply_or_completion_does_not_bring_a_connection_back() {
    let fabric = Fabric::new(1);
    let (first, second) = two(&fabric);
    let (at_second, reply) = second.accept(&first.offer().unwrap()).unwrap();
    let (_, completion) = first.complete(&reply).unwrap();
    second.sever(at_second).unwrap();
    for late in [first.complete(&reply).map(|_| ()), second.finish(&completion).map(|_| ())] {
        let error = late.unwrap_err();
        assert_eq!((error.kind(), error.retry()), (ErrorKind::Peer, Retry::Reconnect), "{error}");
    }
    poll_until(&first, ends_down);
    poll_until(&second, ends_down);
    let (at_first, at_second) = meet(&first, &second);
    greet(&first, at_first, &second, at_second);
}

#[test]
fn sides_that_cannot_talk_are_refused_by_name() {
    let fabric = Fabric::new(7);
    let rc = fabric.backend(Preset::rc(), "rc");
    let efa = fabric.backend(Preset::efa(), "efa");
    let elsewhere = Fabric::new(8).backend(Preset::rc(), "elsewhere");

    let error = efa.accept(&rc.offer().unwrap()).unwrap_err();
    let mismatch = error.as_mismatch().expect("a mismatch");
    assert_eq!((&*mismatch.field, &*mismatch.left.1, &*mismatch.right.1), ("preset", "efa", "rc"));
    assert_eq!(error.kind(), ErrorKind::Unsupported);

    let error = rc.accept(&elsewhere.offer().unwrap()).unwrap_err();
    let mismatch = error.as_mismatch().expect("a mismatch");
    assert_eq!(
        (&*mismatch.field, &*mismatch.left.1, &*mismatch.right.1),
        ("fabric", "seed 7", "seed 8")
    );

    let mut newer = rc.offer().unwrap().as_bytes().to_vec();
    newer[7] += 1;
    let error = efa.accept(&HandshakeBytes::new(newer).unwrap()).unwrap_err();
    assert_eq!(error.as_mismatch().expect("a mismatch").field, "handshake_version");
}

#[test]
fn messages_that_make_no_sense_are_the_peers_fault() {
    let fabric = Fabric::new(1);
    let (first, second, third) = {
        let (first, second) = two(&fabric);
        (first, second, fabric.backend(Preset::rc(), "third"))
    };
    let offer = first.offer().unwrap();
    let (_, reply) = second.accept(&offer).unwrap();
    let (_, completion) = first.complete(&reply).unwrap();
    third.offer().unwrap();
    let misled = third.complete(&reply).unwrap_err();
    assert_eq!(misled.message(), "the message answers another incarnation");
    let refused = [
        ("own offer", first.accept(&offer).map(|_| ())),
        ("reply for an offer", second.accept(&reply).map(|_| ())),
        ("offer for a reply", second.complete(&offer).map(|_| ())),
        ("another's reply", third.complete(&reply).map(|_| ())),
        ("another's completion", third.finish(&completion).map(|_| ())),
        ("reply for a completion", first.finish(&reply).map(|_| ())),
    ];
    for (what, result) in refused {
        assert_eq!(result.expect_err(what).kind(), ErrorKind::Peer, "{what}");
    }
    // Every message, cut short at every byte and with every byte changed.
    for message in [&offer, &reply, &completion] {
        let good = message.as_bytes();
        let cut = (0..good.len()).map(|len| good[..len].to_vec());
        let changed = (0..good.len()).map(|at| {
            let mut bytes = good.to_vec();
            bytes[at] ^= 0xff;
            bytes
        });
        for bytes in cut.chain(changed) {
            let bytes = HandshakeBytes::new(bytes).unwrap();
            for result in [
                third.accept(&bytes).map(|_| ()),
                third.complete(&bytes).map(|_| ()),
                third.finish(&bytes).map(|_| ()),
            ] {
                if let Err(error) = result {
                    assert_ne!(error.kind(), ErrorKind::Misuse, "{error}");
                    assert_ne!(error.kind(), ErrorKind::Internal, "{error}");
                }
            }
        }
    }
}

#[test]
fn connect_returns_once_the_handshake_is_complete() {
    let fabric = Fabric::new(1);
    let (first, second, at_first, at_second) = pair(&fabric, &Preset::rc());
    now(first.connect(at_first)).unwrap();
    now(second.connect(at_second)).unwrap();
    assert_eq!(first.peer_info(at_first).unwrap().transport, "mock-rc");
    second.sever(at_second).unwrap();
    assert_eq!(now(second.connect(at_second)).unwrap_err().kind(), ErrorKind::Peer);
    // The news takes its time.
    while now(first.connect(at_first)).is_ok() {
        assert_eq!(fabric.advance(1), 1);
    }
    assert_eq!(now(first.connect(at_first)).unwrap_err().kind(), ErrorKind::Peer);
    poll_until(&first, ends_down);
    assert_eq!(now(first.connect(at_first)).unwrap_err().kind(), ErrorKind::Misuse);
    assert_eq!(first.peer_info(at_first).unwrap_err().kind(), ErrorKind::Misuse);
}

/// The result of a future that never waits.
pub(crate) fn now<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("the mock waited"),
    }
}
