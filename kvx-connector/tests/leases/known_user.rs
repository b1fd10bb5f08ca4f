//! Public failures of other systems, as far as they are of a user.

use kvx_connector::protocol::user::{Input, Outcome, Output, Why};
use kvx_connector::protocol::{Access, Reason, RequestNumber, TransferNumber};

use crate::bench::{
    Use, ask, confirms, failed, is_aborted, is_ready, ms, parts, peer, posts, released_to,
};

const REQUEST: RequestNumber = RequestNumber(1);

/// Everything settles, and the confirms that follow.
fn settle_all(
    user: &mut Use,
    out: &[Output],
) -> Vec<(kvx_core::id::Incarnation, kvx_connector::protocol::message::Confirm)> {
    let mut all = Vec::new();
    for transfer in posts(out) {
        all.extend(confirms(&user.settle(transfer, Outcome::Done)));
    }
    all
}

/// Known failure 88 (TRT-LLM#17665): a verdict that is lost is asked for again, and the deadline ends the waiting.
#[test]
fn a_lost_verdict_is_asked_for_again() {
    let mut user = Use::new();
    let out = user.ask(1, &[1], 1, Access::Read);
    let asked = settle_all(&mut user, &out);
    assert_eq!(asked.len(), 1);
    let again = confirms(&user.pass(1_000));
    assert!(again.len() >= 3, "{}", again.len());
    assert!(again.iter().all(|(_, confirm)| confirm.nonce == asked[0].1.nonce));
    assert!(is_ready(&user.judge(1, &asked[0].1, true)));
    // And none ever comes.
    let out = user.ask(2, &[1], 1, Access::Read);
    settle_all(&mut user, &out);
    assert_eq!(failed(&user.pass(30_000)), Some(Why::Deadline));
}

/// Known failures 43 and 114 (vllm#35943, dynamo PR#7489): a transfer that fails, or a cancel in any phase, ends the request.
#[test]
fn a_failed_transfer_is_tried_again_and_then_reported() {
    let mut user = Use::new();
    let mut out = user.ask(1, &[1], 1, Access::Read);
    for _ in 0..3 {
        let [transfer] = posts(&out)[..] else { panic!("one transfer") };
        assert_eq!(posts(&user.settle(transfer, Outcome::Failed { retry: true })), []);
        out = user.pass(1_000);
    }
    let [transfer] = posts(&out)[..] else { panic!("one transfer") };
    let out = user.settle(transfer, Outcome::Failed { retry: true });
    assert_eq!((failed(&out), user.user.live()), (Some(Why::Transfer), 0));
    assert_eq!(released_to(&out), [peer(1)]);
}

/// Known failure 48 (vllm PR#56104): of three sources one fails: reported only once the other two have settled.
#[test]
fn a_failure_waits_for_its_siblings() {
    let mut user = Use::new();
    let out = user.ask(1, &[1, 2, 3], 1, Access::Read);
    let [one, two, three] = posts(&out)[..] else { panic!("three transfers") };
    let out = user.settle(one, Outcome::Failed { retry: false });
    let cancelled: Vec<_> = out.iter().filter(|it| matches!(it, Output::Cancel { .. })).collect();
    assert_eq!((cancelled.len(), failed(&out)), (2, None));
    assert_eq!(failed(&user.settle(two, Outcome::Done)), None);
    assert_eq!(failed(&user.settle(three, Outcome::Cancelled)), Some(Why::Transfer));
}

/// Known failures 41, 54 and 94 (vllm-ascend#16662, sglang#32564, nixl#2067): an abort while transfers are under way pins the
/// blocks until they settle, and is reported once.
#[test]
fn an_abort_pins_until_quiescent() {
    let mut user = Use::new();
    let [transfer] = posts(&user.ask(1, &[1], 1, Access::Read))[..] else { panic!("one transfer") };
    let out = user.tell(Input::Abort { request: REQUEST });
    assert!(!is_aborted(&out) && out.contains(&Output::Cancel { transfer }));
    assert_eq!(released_to(&out), [peer(1)]);
    assert!(!is_aborted(&user.pass(900)));
    assert!(is_aborted(&user.settle(transfer, Outcome::Done)));
    assert_eq!(user.user.live(), 0);
    assert!(user.settle(transfer, Outcome::Done).is_empty());
}

/// Known failures 94 and 85: what never settles is severed, then quarantined; the request ends, its blocks do not.
#[test]
fn what_never_settles_is_quarantined() {
    let mut user = Use::new();
    let [transfer] = posts(&user.ask(1, &[1], 1, Access::Read))[..] else { panic!("one transfer") };
    user.tell(Input::Abort { request: REQUEST });
    let out = user.pass(1_000);
    assert!(out.contains(&Output::Sever { peer: peer(1) }) && !is_aborted(&out));
    let out = user.pass(3_000);
    assert!(out.contains(&Output::Aborted { request: REQUEST, quarantined: true }));
    let out = user.settle(transfer, Outcome::Failed { retry: true });
    assert_eq!(out, [Output::Unquarantined { request: REQUEST }]);
    assert_eq!((user.user.counts().quarantined, user.user.counts().unquarantined), (1, 1));
}

/// Known failures 44, 45 and 47 (vllm PR#20139, aws-do-eks PR#84, vllm#52234): what was read after the end is never ready.
#[test]
fn stale_reads_fail_and_are_counted() {
    let mut user = Use::new();
    let out = user.ask(1, &[1], 2, Access::Read);
    let asked = settle_all(&mut user, &out);
    let out = user.judge(1, &asked[0].1, false);
    assert_eq!((failed(&out), is_ready(&out)), (Some(Why::Stale(Some(Reason::Expired))), false));
    assert_eq!(user.user.counts().stale, 1);
}

/// Known failures 55, 56 and 61 (sglang PR#28651, #36033, #30233): the owner's failure ends the request in the same step.
#[test]
fn the_end_of_a_lease_ends_the_request() {
    let mut user = Use::new();
    let [transfer] = posts(&user.ask(1, &[1], 1, Access::Read))[..] else { panic!("one transfer") };
    let out = user.told_ended(1, 1, Reason::Failed);
    assert!(out.contains(&Output::Cancel { transfer }));
    let out = user.settle(transfer, Outcome::Done);
    assert_eq!(failed(&out), Some(Why::Ended(Reason::Failed)));
    // From another peer, or when it is over: nothing.
    assert!(user.told_ended(1, 1, Reason::Failed).is_empty());
    user.ask(2, &[1, 2], 1, Access::Read);
    assert!(user.told_ended(3, 2, Reason::Failed).is_empty());
    assert_eq!(user.user.counts().strays, 2);
}

/// Known failure 83 (vllm PR#47495): five times no room, then done: ready, and no failure was counted.
#[test]
fn no_room_is_no_failure() {
    let mut user = Use::new();
    let mut out = user.ask(1, &[1], 1, Access::Read);
    for _ in 0..5 {
        let [transfer] = posts(&out)[..] else { panic!("one transfer") };
        user.settle(transfer, Outcome::Busy);
        out = user.pass(1);
    }
    let asked = settle_all(&mut user, &out);
    assert!(is_ready(&user.judge(1, &asked[0].1, true)));
    assert_eq!((user.user.counts().busy, user.user.counts().retried), (5, 0));
}

/// Nor for ever: where there is never any room, the deadline ends it, and its time is the request's own.
#[test]
fn without_room_for_ever_the_deadline_ends_it() {
    let mut user = Use::new();
    let mut out = user.ask(1, &[1], 1, Access::Read);
    let mut tries = 0;
    while failed(&out).is_none() {
        assert!(user.now < ms(31_000), "it goes on after its deadline");
        let mut next = Vec::new();
        for transfer in posts(&out) {
            tries += 1;
            next.extend(user.settle(transfer, Outcome::Busy));
        }
        next.extend(user.pass(10));
        out = next;
    }
    assert_eq!((failed(&out), user.user.live()), (Some(Why::Deadline), 0));
    assert!(tries > 100 && user.now >= ms(29_000), "{tries} tries in {:?}", user.now);
    assert_eq!(user.user.counts().retried, 0);
}

/// Known failures 28 and 84 (vllm PR#18632, PR#58108): a full prefix hit transfers nothing, and its owner is told all the same.
#[test]
fn nothing_to_transfer_is_confirmed() {
    let mut user = Use::new();
    let mut nothing = ask(1, &[1], 0, Access::Read);
    nothing.sources[0].data = false;
    user.tell(Input::Ask(nothing));
    let out = user.tell(Input::PeerReady { peer: peer(1) });
    assert_eq!((posts(&out).len(), confirms(&out).len()), (0, 1));
    assert!(is_ready(&user.judge(1, &confirms(&out)[0].1, true)));
}

/// Known failure 39 (vllm PR#41269): rejected before it was admitted, before the peer was even met: the owner is told, again
/// and again until it answers.
#[test]
fn a_rejection_reaches_the_owner() {
    let mut user = Use::new();
    let out = user.tell(Input::Ask(ask(1, &[1], 1, Access::Read)));
    assert_eq!(out, [Output::NeedPeer { peer: peer(1) }]);
    assert!(is_aborted(&user.tell(Input::Abort { request: REQUEST })));
    assert_eq!(released_to(&user.tell(Input::PeerReady { peer: peer(1) })), [peer(1)]);
    assert_eq!(released_to(&user.pass(100)).len(), 1);
    user.told_released(1, 1);
    assert_eq!((user.user.releasing(), user.user.wake()), (0, None));
}

/// Known failure 46 (aibrix#1772): what waits to be admitted is held, and nothing is posted.
#[test]
fn what_waits_is_held() {
    let mut user = Use::new();
    let waiting =
        kvx_connector::protocol::user::Ask { begin: false, ..ask(1, &[1], 1, Access::Read) };
    user.tell(Input::Ask(waiting));
    let mut out = user.tell(Input::PeerReady { peer: peer(1) });
    out.extend(user.pass(20_000));
    let holds = out.iter().filter(|it| matches!(it, Output::Send { .. })).count();
    assert_eq!((holds, posts(&out).len()), (5, 0));
    assert_eq!(posts(&user.tell(Input::Begin { request: REQUEST })).len(), 1);
}

/// Known failure 120 (vllm PR#40344): of three requests the second fails: the others go on. And a peer that is gone takes only
/// its own.
#[test]
fn one_failure_is_one_failure() {
    let mut user = Use::new();
    let all: Vec<_> = [(1, 1), (2, 2), (3, 3)]
        .map(|(number, one)| posts(&user.ask(number, &[one], 1, Access::Read))[0])
        .into();
    assert_eq!(failed(&user.settle(all[1], Outcome::Failed { retry: false })), Some(Why::Transfer));
    let out = user.settle(all[2], Outcome::Failed { retry: true });
    assert_eq!(failed(&out), None);
    assert_eq!(failed(&user.tell(Input::PeerGone { peer: peer(3) })), Some(Why::PeerGone));
    let asked = confirms(&user.settle(all[0], Outcome::Done));
    assert!(is_ready(&user.judge(1, &asked[0].1, true)));
}

/// A writer writes only once the owner has answered, and releases only once its writes have settled.
#[test]
fn a_writer_waits_for_leave_and_for_its_writes() {
    let mut user = Use::new();
    let mut write = ask(1, &[1], 0, Access::Write);
    write.sources[0].total = None;
    user.tell(Input::Ask(write));
    user.tell(Input::PeerReady { peer: peer(1) });
    let out = user.tell(Input::Publish { request: REQUEST, parts: parts(1), total: Some(1) });
    assert_eq!(posts(&out), [] as [TransferNumber; 0]);
    let out = user.told_parts(1, 1, vec![], None);
    let [transfer] = posts(&out)[..] else { panic!("one transfer") };
    assert_eq!(released_to(&user.tell(Input::Abort { request: REQUEST })), []);
    let out = user.settle(transfer, Outcome::Cancelled);
    assert!(is_aborted(&out));
    assert_eq!(released_to(&out), [peer(1)]);
    assert!(user.now < ms(1));
}

/// An answer that was given over a connection before may still come: it must not let a writer write over the next one, where
/// its owner takes it for gone. So whoever has asked fails, answered or not; a reader goes on.
#[test]
fn a_writer_that_has_asked_fails_with_its_connection() {
    for (access, fails) in [(Access::Write, true), (Access::Read, false)] {
        let mut user = Use::new();
        // Nothing is known of its parts: it has to ask for them.
        let mut unknown = ask(1, &[1], 0, access);
        unknown.sources[0].total = None;
        user.tell(Input::Ask(unknown));
        let out = user.tell(Input::PeerReady { peer: peer(1) });
        let asks = |output: &Output| matches!(output, Output::Send { .. });
        assert!(out.iter().any(asks) && posts(&out).is_empty(), "{access:?}: {out:?}");
        let mut out = user.tell(Input::PeerDown { peer: peer(1) });
        out.extend(user.tell(Input::PeerReady { peer: peer(1) }));
        out.extend(user.told_parts(1, 1, parts(1), Some(1)));
        assert_eq!(failed(&out).is_some(), fails, "{access:?}: {out:?}");
        assert_eq!(posts(&out).len(), usize::from(!fails), "{access:?}: {out:?}");
    }
}

/// A writer whose peer was lost owes it a word: until it is heard, the owner keeps the blocks. It is said as soon as the peer can be
/// reached again, or given up after a while. Found by the simulation of whole engines.
#[test]
fn a_writer_that_lost_its_owner_tells_it_later() {
    for comes_back in [true, false] {
        let mut user = Use::new();
        let out = user.ask(1, &[1], 1, Access::Write);
        let mut out = [out, user.told_parts(1, 1, parts(1), Some(1))].concat();
        let [transfer] = posts(&out)[..] else { panic!("one transfer: {out:?}") };
        out = user.tell(Input::PeerDown { peer: peer(1) });
        out.extend(user.settle(transfer, Outcome::Failed { retry: true }));
        assert!(failed(&out).is_some(), "{out:?}");
        out.extend(user.tell(Input::PeerGone { peer: peer(1) }));
        assert_eq!((released_to(&out), user.user.releasing()), (vec![], 1));
        assert!(user.user.owes(peer(1)));
        user.pass(5_000);
        if comes_back {
            let out = user.tell(Input::PeerReady { peer: peer(1) });
            assert_eq!(released_to(&out), [peer(1)]);
            user.told_released(1, 1);
        } else {
            assert_eq!(released_to(&user.pass(70_000)), []);
        }
        assert_eq!((user.user.releasing(), user.user.wake()), (0, None), "{comes_back}");
    }
}
