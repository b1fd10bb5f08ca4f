//! Peers: their regions, their ends, and handshakes that race with them.

use super::*;
use crate::backend::PeerInfo;
use crate::error::{ErrorKind, Retry};

#[test]
fn regions_are_added_all_or_none() {
    let setup = Setup::new();
    let malformed = crate::memory::KeyBlob::new(vec![1]).unwrap();
    let error = setup.port.add_regions(setup.peer, &[(key(64), 64), (malformed, 64)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Peer);
    assert!(error.to_string().contains("index=1"), "{error}");
    assert_eq!(setup.fake.lock().released, 1, "the first key is released again");
    let error = setup.port.add_regions(setup.peer, &[(key(0), 0)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Peer);
    assert_eq!(setup.port.region_count(setup.peer).unwrap(), 1);
    assert_eq!(setup.port.add_regions(setup.peer, &[(key(64), 64), (key(32), 32)]).unwrap(), 1);
    assert_eq!(setup.port.region_count(setup.peer).unwrap(), 3);
    let reach = |remote_region, bytes| {
        let segment = Segment { remote_region, bytes, ..segment(0) };
        setup.port.transfer(setup.peer, Mode::Read, &setup.set, &[segment], None)
    };
    reach(1, 64).unwrap().cancel();
    reach(2, 32).unwrap().cancel();
    reach(2, 33).unwrap_err();
    reach(3, 1).unwrap_err();
}

#[test]
fn a_repeated_handshake_changes_nothing() {
    let setup = Setup::new();
    assert_eq!(meet(&setup.port, 1), setup.peer);
    assert_eq!(setup.port.region_count(setup.peer).unwrap(), 1);
    assert_eq!(setup.port.peers(), [setup.peer]);
}

#[test]
fn a_peer_that_went_down_is_forgotten_with_its_keys() {
    let setup = Setup::new();
    let mut transfer = setup.write(&segments(1), None);
    setup.fake.kill(setup.peer);
    setup.port.poll();
    let error = transfer.try_result().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fabric, "what the backend said: {error}");
    let (peer, error) = setup.port.next_peer_down().unwrap();
    assert_eq!(peer, setup.peer);
    assert!(error.unwrap().to_string().contains("died"));
    assert!(setup.port.next_peer_down().is_none());
    assert!(setup.port.peers().is_empty());
    let stale = [
        setup.port.peer_info(peer).unwrap_err(),
        setup.port.add_regions(peer, &[(key(1), 1)]).unwrap_err(),
        setup.port.region_count(peer).unwrap_err(),
        setup.port.sever(peer).unwrap_err(),
        setup.port.revoke(peer).unwrap_err(),
        setup.port.peer_stats(peer).unwrap_err(),
        block_on(setup.port.connect(peer)).unwrap_err(),
        block_on(setup.port.disconnect(peer)).unwrap_err(),
        setup.port.transfer(peer, Mode::Read, &setup.set, &segments(1), None).unwrap_err(),
    ];
    for error in stale {
        assert_eq!((error.kind(), error.retry()), (ErrorKind::Misuse, Retry::Reconnect));
    }
}

/// Known failure 68 (vllm#49238) and its like: what belonged to the old incarnation is never used for the new one.
#[test]
fn a_peer_that_comes_back_has_nothing_of_its_former_life() {
    let setup = Setup::new();
    setup.fake.kill(setup.peer);
    setup.port.poll();
    let again = setup.port.finish(&HandshakeBytes::new(vec![1, 1]).unwrap()).unwrap();
    assert_eq!(again.slot(), setup.peer.slot());
    assert_eq!(setup.port.region_count(again).unwrap(), 0);
    let error = setup.port.transfer(again, Mode::Read, &setup.set, &segments(1), None).unwrap_err();
    assert!(error.to_string().contains("side=remote"), "{error}");
    setup.port.peer_info(setup.peer).unwrap_err();
}

#[test]
fn a_peer_that_goes_down_within_its_handshake_is_not_entered() {
    let setup = Setup::new();
    let (fake, port) = (Arc::clone(&setup.fake), setup.port.clone());
    setup.fake.lock().in_handshake = Some(Box::new(move || {
        // Another thread is told of the end before this one knows of the beginning.
        fake.kill(PeerId::new(9, 0));
        port.poll();
    }));
    let error = setup.port.accept(&HandshakeBytes::new(vec![9, 0]).unwrap()).unwrap_err();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Peer, Retry::Reconnect));
    assert_eq!(setup.port.peers(), [setup.peer]);
    // The next one is another matter.
    assert!(setup.port.accept(&HandshakeBytes::new(vec![9, 1]).unwrap()).is_ok());
    assert!(setup.port.inner.lock().early_downs.is_empty());
}

#[test]
fn a_failed_handshake_leaves_nothing() {
    let setup = Setup::new();
    let garbage = HandshakeBytes::new(vec![1, 2, 3]).unwrap();
    assert_eq!(setup.port.accept(&garbage).unwrap_err().kind(), ErrorKind::Peer);
    assert_eq!(setup.port.complete(&garbage).unwrap_err().kind(), ErrorKind::Peer);
    assert_eq!(setup.port.finish(&garbage).unwrap_err().kind(), ErrorKind::Peer);
    assert_eq!(setup.port.inner.lock().meetings, 0);
    assert_eq!(setup.port.peers(), [setup.peer]);
}

#[test]
fn severing_gives_up_what_is_queued_and_waits_for_what_is_posted() {
    let setup = Setup::one_by_one(1);
    setup.fake.lock().manual_sever = true;
    let mut first = setup.write(&segments(2), Some(b"n"));
    let mut second = setup.write(&segments(1), None);
    setup.port.sever(setup.peer).unwrap();
    let error = second.try_result().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "nothing of it was posted");
    assert!(first.try_result().is_none(), "one batch is in flight");
    let refused =
        setup.port.transfer(setup.peer, Mode::Read, &setup.set, &segments(1), None).unwrap_err();
    assert_eq!((refused.kind(), refused.retry()), (ErrorKind::Peer, Retry::Reconnect));
    setup.fake.end(setup.peer, None);
    assert_eq!(first.try_result().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    let (peer, error) = setup.port.next_peer_down().unwrap();
    assert_eq!(peer, setup.peer);
    assert!(error.is_none());
    assert_eq!(setup.fake.posts().len(), 1);
}

#[test]
fn severing_what_is_going_down_already_is_no_error() {
    let setup = Setup::new();
    setup.fake.kill(setup.peer);
    setup.port.sever(setup.peer).unwrap();
}

#[test]
fn disconnecting_lets_what_has_begun_be_done() {
    let setup = Setup::one_by_one(1);
    let mut transfer = setup.write(&segments(3), Some(b"n"));
    let (fake, port, peer) = (Arc::clone(&setup.fake), setup.port.clone(), setup.peer);
    let other = std::thread::spawn(move || block_on(port.disconnect(peer)));
    while !setup.port.inner.lock().peers.get(&peer).is_some_and(|peer| peer.leaving) {
        std::thread::yield_now();
    }
    let refused =
        setup.port.transfer(peer, Mode::Read, &setup.set, &segments(1), None).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Peer);
    assert!(fake.lock().severed.is_empty());
    while fake.posts().len() < 3 || !fake.held().is_empty() {
        fake.held().into_iter().for_each(|id| fake.done(id));
        std::thread::yield_now();
    }
    other.join().unwrap().unwrap();
    assert_eq!(transfer.try_result().unwrap().unwrap().batches, 3);
    assert_eq!(fake.lock().severed, [peer]);
    assert!(setup.port.peers().is_empty());
}

#[test]
fn revoking_where_it_cannot_changes_nothing() {
    let setup = Setup::new();
    assert_eq!(setup.port.revoke(setup.peer).unwrap_err().kind(), ErrorKind::Unsupported);
    setup.fake.always(Say::Inline);
    block_on(setup.write(&segments(1), None)).unwrap();
}

#[test]
fn the_rest_is_passed_through() {
    let setup = Setup::new();
    assert_eq!(setup.port.incarnation().as_bytes(), &[7; 16]);
    assert_eq!(setup.port.offer().unwrap().as_bytes(), [0, 0]);
    assert_eq!(setup.port.peer_info(setup.peer).unwrap(), PeerInfo::new("wire"));
    assert_eq!(setup.port.backend_name(), "fake");
    block_on(setup.port.connect(setup.peer)).unwrap();
}
