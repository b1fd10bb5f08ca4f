//! How transfers end: failures, cancelling, and peers that go down under them.

use super::*;
use crate::backend::{Event, Outcome};
use crate::error::{ErrorKind, Retry};
use crate::id::TransferId;

/// Known failure 48 (vllm PR#56104, #55900): the failure of one part was reported while others were still in flight.
#[test]
fn a_failure_waits_for_its_siblings() {
    let setup = Setup::one_by_one(3);
    let mut transfer = setup.write(&segments(5), Some(b"n"));
    let held = setup.fake.held();
    assert_eq!(held.len(), 3);
    setup.fake.fail(held[0]);
    assert!(transfer.try_result().is_none(), "two batches are in flight");
    setup.port.deregister(setup.id).unwrap_err();
    setup.fake.done(held[1]);
    assert!(transfer.try_result().is_none(), "one batch is in flight");
    setup.fake.done(held[2]);
    let error = transfer.try_result().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.native()), (ErrorKind::Fabric, Some(-5)));
    assert_eq!(error.backend(), Some("fake"));
    assert_eq!(setup.fake.posts().len(), 3, "what was not posted never is");
    assert!(setup.fake.posts().iter().all(|post| post.notify.is_none()));
    setup.port.deregister(setup.id).unwrap();
}

/// Known failure 50 (vllm PR#50754): a failure to post is a failure of the transfer, not a hang.
#[test]
fn a_batch_that_cannot_be_posted_fails_the_transfer_once_the_others_settled() {
    let setup = Setup::one_by_one(8);
    setup.fake.script([Say::Hold, Say::Hold, Say::Refuse]);
    let mut transfer = setup.write(&segments(5), Some(b"n"));
    assert_eq!(setup.fake.posts().len(), 2);
    assert!(transfer.try_result().is_none());
    setup.settle_all();
    let error = transfer.try_result().unwrap().unwrap_err();
    assert_eq!(error.native(), Some(-5));
    assert_eq!(setup.fake.posts().len(), 2);
    let stats = setup.port.stats();
    assert_eq!((stats.failed, stats.done, stats.batches, stats.bytes), (1, 0, 2, 0));
}

#[test]
fn a_first_batch_that_cannot_be_posted_settles_at_once() {
    let setup = Setup::new();
    setup.fake.script([Say::Refuse]);
    let mut transfer = setup.write(&segments(1), None);
    assert!(transfer.is_settled());
    transfer.try_result().unwrap().unwrap_err();
}

/// Known failure 120 (vllm PR#40344 review): an error in the poll loop lost the other pending transfers.
#[test]
fn one_failed_transfer_does_not_lose_others() {
    let setup = Setup::new();
    let mut transfers: Vec<_> = (0..3).map(|_| setup.write(&segments(1), None)).collect();
    let held = setup.fake.held();
    // A settled event of nobody's, too.
    setup.fake.event(Event::Settled { id: TransferId(u64::MAX), outcome: Outcome::done() });
    setup.fake.fail(held[1]);
    setup.port.poll();
    assert!(transfers[1].try_result().unwrap().is_err());
    assert!(transfers[0].try_result().is_none() && transfers[2].try_result().is_none());
    setup.settle_all();
    assert!(transfers[0].try_result().unwrap().is_ok());
    assert!(transfers[2].try_result().unwrap().is_ok());
}

#[test]
fn an_outcome_said_twice_is_taken_once() {
    let setup = Setup::one_by_one(8);
    let mut transfer = setup.write(&segments(2), None);
    let held = setup.fake.held();
    for _ in 0..3 {
        setup.fake.event(Event::Settled { id: held[0], outcome: Outcome::done() });
    }
    assert!(transfer.try_result().is_none(), "the other is in flight");
    setup.fake.done(held[1]);
    assert!(transfer.try_result().unwrap().is_ok());
    let again = transfer.try_result().unwrap().unwrap_err();
    assert_eq!(again.kind(), ErrorKind::Misuse);
    assert_eq!(block_on(transfer).unwrap_err().kind(), ErrorKind::Misuse);
}

#[test]
fn cancelling_drops_the_rest_and_waits_for_what_is_posted() {
    let setup = Setup::one_by_one(2);
    let mut transfer = setup.write(&segments(4), Some(b"n"));
    transfer.cancel();
    transfer.cancel();
    let held = setup.fake.held();
    assert_eq!(setup.fake.lock().cancelled, [held.clone(), held.clone()].concat());
    assert!(transfer.try_result().is_none());
    setup.fake.settle(held[0], Outcome::Cancelled);
    setup.fake.done(held[1]);
    let error = transfer.try_result().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.to_string().contains("cancelled"), "{error}");
    assert_eq!(setup.fake.posts().len(), 2);
    transfer.cancel();
}

#[test]
fn cancelling_too_late_tells_the_truth() {
    let setup = Setup::new();
    let mut transfer = setup.write(&segments(4), Some(b"n"));
    transfer.cancel();
    setup.settle_all();
    assert!(transfer.try_result().unwrap().is_ok(), "all of it was moved and told");
}

#[test]
fn a_held_last_batch_can_be_cancelled() {
    let setup = Setup::one_by_one(8);
    let mut transfer = setup.write(&segments(2), Some(b"n"));
    assert_eq!(setup.fake.posts().len(), 1);
    transfer.cancel();
    setup.settle_all();
    assert_eq!(transfer.try_result().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(setup.fake.posts().len(), 1);
}

#[test]
fn a_queued_transfer_is_cancelled_at_once_and_leaves_the_queue_in_order() {
    let setup = Setup::one_by_one(1);
    let mut first = setup.write(&[segment(0)], None);
    let mut second = setup.write(&[segment(1)], None);
    let mut third = setup.write(&[segment(2)], None);
    second.cancel();
    assert_eq!(second.try_result().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    setup.settle_all();
    assert!(first.try_result().unwrap().is_ok() && third.try_result().unwrap().is_ok());
    let offsets: Vec<_> =
        setup.fake.posts().iter().map(|post| post.segments[0].local_offset).collect();
    assert_eq!(offsets, [0, 32]);
}

#[test]
fn cancelling_while_the_last_batch_is_refused_as_full_is_not_forgotten() {
    let setup = Setup::new();
    let mut first = setup.write(&segments(1), None);
    setup.fake.script([Say::Full]);
    // Both the cancelling and the refusal come while the backend is being asked.
    let port = setup.port.clone();
    setup.fake.lock().in_submit = Some(Box::new(move || {
        let mut effects = Default::default();
        let newest = *port.inner.lock().transfers.keys().next_back().unwrap();
        let _in_flight = port.inner.lock().cancel(newest, &mut effects);
        port.inner.run(effects);
    }));
    let mut second = setup.write(&segments(1), None);
    assert_eq!(second.try_result().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    setup.settle_all();
    assert!(first.try_result().unwrap().is_ok());
    assert_eq!(setup.fake.posts().len(), 1);
}

#[test]
fn a_peer_that_goes_down_while_its_last_batch_is_refused_as_full_fails_it() {
    let setup = Setup::new();
    let (fake, port, peer) = (Arc::clone(&setup.fake), setup.port.clone(), setup.peer);
    setup.fake.script([Say::Full]);
    setup.fake.lock().in_submit = Some(Box::new(move || {
        fake.kill(peer);
        port.poll();
        // Known again to the fake, so that it says full and not stale.
        fake.meet_again(peer);
    }));
    let mut transfer = setup.write(&segments(1), None);
    let error = transfer.try_result().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Peer, Retry::Reconnect));
    assert!(error.to_string().contains("the peer died"), "the cause is kept: {error}");
}

#[test]
fn a_peer_that_goes_down_takes_its_queue_with_it() {
    let setup = Setup::one_by_one(1);
    let mut posted = setup.write(&segments(2), None);
    let mut queued = setup.write(&segments(1), None);
    setup.fake.kill(setup.peer);
    setup.port.poll();
    posted.try_result().unwrap().unwrap_err();
    let error = queued.try_result().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Peer, Retry::Reconnect));
    assert_eq!(setup.fake.posts().len(), 1);
    setup.port.deregister(setup.id).unwrap();
}

/// Known failure 54 (sglang#32564): memory was handed on while a write to it was in flight. Here the backend breaks its
/// contract, and says that a peer is down before its last batch settled.
#[test]
fn a_peer_that_is_down_too_early_frees_nothing() {
    let setup = Setup::new();
    let mut transfer = setup.write(&segments(1), None);
    setup.fake.down_too_early(setup.peer);
    assert!(transfer.try_result().is_none());
    setup.port.deregister(setup.id).unwrap_err();
    let held = setup.fake.held();
    setup.fake.done(held[0]);
    assert!(transfer.try_result().unwrap().is_ok());
    setup.port.deregister(setup.id).unwrap();
}

#[test]
fn one_peers_end_is_not_anothers() {
    let setup = Setup::new();
    let other = meet(&setup.port, 2);
    setup.port.add_regions(other, &[(key(BYTES), BYTES)]).unwrap();
    let mut here = setup.write(&segments(1), None);
    let mut there =
        setup.port.transfer(other, Mode::Write, &setup.set, &segments(1), None).unwrap();
    setup.fake.kill(other);
    setup.port.poll();
    there.try_result().unwrap().unwrap_err();
    assert!(here.try_result().is_none());
    setup.settle_all();
    assert!(here.try_result().unwrap().is_ok());
    let (all, one) = (setup.port.stats(), setup.port.peer_stats(setup.peer).unwrap());
    assert_eq!((all.done, all.failed, one.done, one.failed), (1, 1, 1, 0));
}

/// What the batches say of their ways is in the report, each way once.
#[test]
fn a_report_names_the_ways_of_all_batches() {
    for (said, route) in [
        ([None; 3], None),
        ([Some("mapped"); 3], Some("mapped")),
        ([None, Some("mapped"), None], Some("mapped")),
        ([Some("process_vm"), Some("mapped"), Some("process_vm")], Some("mapped+process_vm")),
        ([Some("a+c"), Some("a"), Some("b+c")], Some("a+b+c")),
    ] {
        let setup = Setup::one_by_one(3);
        let mut transfer = setup.write(&segments(3), None);
        for (id, route) in setup.fake.held().into_iter().zip(said) {
            setup.fake.settle(id, Outcome::Done { route });
        }
        let report = transfer.try_result().unwrap().unwrap();
        assert_eq!(report.route.as_deref(), route);
        let document = serde_json::to_value(&report).unwrap();
        assert_eq!(document["route"].as_str(), route, "{document}");
    }
}
