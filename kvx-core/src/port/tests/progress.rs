//! Credits, full queues, and who polls.

use std::time::{Duration, Instant};

use super::super::{EVENTS_PER_POLL, KEPT_NOTIFICATIONS};
use super::*;
use crate::error::ErrorKind;

/// Known failure 83 (vllm PR#47495): a full queue was taken for a failed read.
#[test]
fn a_full_queue_is_not_a_failure() {
    let setup = Setup::new();
    setup.fake.script([Say::Full; 5]);
    setup.fake.always(Say::Inline);
    let report = block_on(setup.write(&segments(1), Some(b"n"))).unwrap();
    assert_eq!(report.batches, 1);
    let stats = setup.port.stats();
    assert_eq!((stats.full, stats.failed, stats.done), (5, 0, 1));
    assert_eq!(setup.fake.lock().submits, 6);
    assert_eq!(setup.fake.posts().len(), 1);
}

/// Nobody polls: what is done within the call is known when it returns, and so is what waited for it.
#[test]
fn what_is_done_at_once_needs_no_event() {
    let setup = Setup::one_by_one(2);
    let mut first = setup.write(&segments(1), None);
    setup.fake.always(Say::Done);
    let mut second = setup.write(&segments(5), Some(b"n"));
    assert!(second.is_settled() && !first.is_settled());
    let report = second.try_result().unwrap().unwrap();
    assert_eq!((report.batches, report.segments, report.route), (5, 5, None));
    setup.fake.script([Say::Full]);
    let mut third = setup.write(&segments(1), None);
    assert!(!third.is_settled());
    setup.settle_all();
    assert!(first.try_result().unwrap().is_ok() && third.try_result().unwrap().is_ok());
    let stats = setup.port.stats();
    assert_eq!((stats.done, stats.failed, stats.full, stats.batches), (3, 0, 1, 7));
}

#[test]
fn what_was_full_is_tried_again_when_something_settled_and_not_before() {
    let setup = Setup::new();
    let first = setup.write(&segments(1), None);
    setup.fake.script([Say::Full]);
    let second = setup.write(&segments(1), None);
    let third = setup.write(&segments(1), None);
    let submits = setup.fake.lock().submits;
    for _ in 0..10 {
        setup.port.poll();
    }
    assert_eq!(setup.fake.lock().submits, submits, "nothing settled");
    setup.fake.done(setup.fake.held()[0]);
    setup.port.poll();
    assert_eq!(setup.fake.held().len(), 2);
    drop((first, second, third));
}

/// Something settles while the backend is being asked: its room is not waited for a second time.
#[test]
fn room_made_during_the_call_is_used() {
    let setup = Setup::new();
    let first = setup.write(&segments(1), None);
    let (fake, port) = (Arc::clone(&setup.fake), setup.port.clone());
    setup.fake.script([Say::Full]);
    setup.fake.lock().in_submit = Some(Box::new(move || {
        fake.done(fake.held()[0]);
        port.poll();
    }));
    let second = setup.write(&segments(1), None);
    assert_eq!(setup.fake.posts().len(), 2);
    drop((first, second));
}

#[test]
fn peers_that_wait_for_room_take_turns() {
    let setup = Setup::one_by_one(100);
    let peers: Vec<_> = (2..5).map(|number| meet(&setup.port, number)).collect();
    for peer in &peers {
        setup.port.add_regions(*peer, &[(key(BYTES), BYTES)]).unwrap();
    }
    let first = setup.write(&segments(1), None);
    setup.fake.always(Say::Full);
    let transfers: Vec<_> = peers
        .iter()
        .map(|peer| setup.port.transfer(*peer, Mode::Read, &setup.set, &segments(9), None))
        .collect();
    // From now on there is room for one batch whenever one has settled.
    for _ in 0..9 {
        setup.fake.script([Say::Hold]);
        setup.fake.done(setup.fake.held()[0]);
        setup.port.poll();
    }
    for peer in &peers {
        let posts = setup.fake.posts();
        assert_eq!(posts.iter().filter(|post| post.peer == *peer).count(), 3);
    }
    drop((first, transfers));
}

#[test]
fn credits_bound_what_is_in_flight_to_each_peer() {
    let setup = Setup::one_by_one(2);
    let other = meet(&setup.port, 2);
    setup.port.add_regions(other, &[(key(BYTES), BYTES)]).unwrap();
    let transfers = [
        setup.write(&segments(4), None),
        setup.port.transfer(other, Mode::Read, &setup.set, &segments(3), None).unwrap(),
    ];
    let stats = |peer| setup.port.peer_stats(peer).unwrap();
    assert_eq!((stats(setup.peer).in_flight, stats(other).in_flight), (2, 2));
    assert_eq!(setup.port.stats().in_flight, 4);
    assert_eq!(setup.port.stats().unsettled, 2);
    // The fake asserts that there are never more.
    setup.settle_all();
    for transfer in transfers {
        block_on(transfer).unwrap();
    }
    assert_eq!(setup.port.stats().in_flight, 0);
}

#[test]
fn transfers_begin_in_the_order_of_the_calls() {
    let setup = Setup::one_by_one(1);
    let transfers: Vec<_> = (0..5).map(|i| setup.write(&[segment(i)], None)).collect();
    setup.settle_all();
    let offsets: Vec<_> =
        setup.fake.posts().iter().map(|post| post.segments[0].local_offset / 16).collect();
    assert_eq!(offsets, [0, 1, 2, 3, 4]);
    drop(transfers);
}

#[test]
fn waiting_blocks_until_it_settles_or_time_is_up() {
    let setup = Setup::new();
    let mut transfer = setup.write(&segments(1), None);
    let begun = Instant::now();
    assert!(transfer.wait(Duration::from_millis(20)).is_none());
    assert!(begun.elapsed() >= Duration::from_millis(20));
    let (fake, id) = (Arc::clone(&setup.fake), setup.fake.held()[0]);
    let other = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(5));
        fake.done(id);
    });
    assert!(transfer.wait(Duration::from_secs(60)).unwrap().is_ok());
    other.join().unwrap();
}

#[test]
fn notifications_are_given_in_order_to_one_taker_each() {
    let setup = Setup::new();
    assert!(setup.port.wait_notified(Duration::from_millis(1)).unwrap().is_none());
    for payload in [b"a", b"b", b"c"] {
        setup.fake.notify(setup.peer, payload);
    }
    let first = setup.port.wait_notified(Duration::from_secs(60)).unwrap();
    assert_eq!(first, Some((setup.peer, b"a".to_vec())));
    assert_eq!(block_on(setup.port.notified()).unwrap().1, b"b");
    assert_eq!(setup.port.next_notification().unwrap().1, b"c");
    assert!(setup.port.next_notification().is_none());
    assert_eq!(setup.port.peer_stats(setup.peer).unwrap().notifications, 3);
}

/// Notifications that nobody takes are neither dropped nor kept without bound: no more events are taken.
#[test]
fn notifications_that_are_not_taken_stop_the_polling() {
    let setup = Setup::new();
    let many = KEPT_NOTIFICATIONS + 1000;
    for i in 0..many {
        setup.fake.notify(setup.peer, &(i as u64).to_le_bytes());
    }
    let mut transfer = setup.write(&segments(1), None);
    setup.fake.done(setup.fake.held()[0]);
    while setup.port.poll() > 0 {}
    let kept = setup.port.inner.lock().notifications.len();
    assert!(kept <= KEPT_NOTIFICATIONS && kept + EVENTS_PER_POLL > KEPT_NOTIFICATIONS);
    let polls = setup.fake.lock().polls;
    assert_eq!(setup.port.poll(), 0);
    assert_eq!(setup.fake.lock().polls, polls, "the backend is not asked");
    assert!(transfer.try_result().is_none(), "its event is behind them");
    for i in 0..many {
        let (_, payload) = setup.port.wait_notified(Duration::from_secs(60)).unwrap().unwrap();
        assert_eq!(payload, (i as u64).to_le_bytes(), "none is lost");
    }
    assert!(transfer.try_result().unwrap().is_ok());
}

#[test]
fn peer_downs_are_given_in_order() {
    let setup = Setup::new();
    let other = meet(&setup.port, 2);
    setup.fake.notify(setup.peer, b"last words");
    setup.fake.kill(setup.peer);
    setup.fake.kill(other);
    assert_eq!(block_on(setup.port.peer_down()).unwrap().0, setup.peer);
    assert_eq!(setup.port.next_peer_down().unwrap().0, other);
    assert_eq!(setup.port.next_notification().unwrap().1, b"last words");
}

#[test]
fn a_backend_that_panics_does_not_stop_the_port() {
    let setup = Setup::new();
    setup.fake.lock().in_submit = Some(Box::new(|| panic!("a bug in a backend")));
    let port = setup.port.clone();
    let (peer, set) = (setup.peer, setup.set.clone());
    let died = std::thread::spawn(move || {
        drop(port.transfer(peer, Mode::Write, &set, &segments(1), None));
    });
    died.join().unwrap_err();
    setup.fake.always(Say::Inline);
    block_on(setup.write(&segments(1), None)).unwrap();
    // Whether the batch was posted is not known: its memory is held.
    assert_eq!(setup.port.deregister(setup.id).unwrap_err().kind(), ErrorKind::Misuse);
}
