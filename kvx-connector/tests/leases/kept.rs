//! Leases that a scheduler speaks of before they are granted, and requests that a scheduler tries again.

use kvx_connector::protocol::message::ToOwner;
use kvx_connector::protocol::owner::Input;
use kvx_connector::protocol::user::{self, Ask, Keeping, Outcome, Output, Why};
use kvx_connector::protocol::{Access, Reason, TransferKey};

use crate::bench::{
    Own, Use, ask, confirm, confirms, ended, freed, grant, hold, lease, ms, peer, posts, reader,
    release, verdicts,
};

fn expect(number: u64) -> Input {
    Input::Expect { lease: lease(number), key: TransferKey::new("r").unwrap() }
}

/// Known failure 36 (vllm PR#43509): what comes before the grant waits for it, also for longer than a stranger's would.
#[test]
fn what_is_said_of_an_expected_lease_waits_for_its_grant() {
    let mut own = Own::new();
    own.tell(expect(1));
    for number in [1, 2] {
        assert!(own.hear(1, confirm(number, reader(1, 0), &[0], 9)).is_empty());
    }
    assert_eq!(verdicts(&own.pass(60_000)), [false], "nobody expected the second");
    let out = own.tell(Input::Grant(grant(1, Access::Read)));
    assert_eq!((verdicts(&out), freed(&out)), (vec![true], vec![(1, Reason::Done)]));
}

/// Known failures 38 and 55 (vllm PR#29906, sglang PR#28651): a request that is aborted before its lease was granted: who waits
/// is told at once, and whoever asks later; and there is nothing to free.
#[test]
fn an_expected_lease_that_is_withdrawn_is_told_and_never_freed() {
    let mut own = Own::new();
    own.tell(expect(1));
    own.hear(1, hold(1, reader(1, 0), &[0]));
    let out = own.tell(Input::Withdraw { lease: lease(1), why: Reason::Aborted });
    assert_eq!((ended(&out), freed(&out)), (vec![(peer(1), Reason::Aborted)], vec![]));
    let out = own.hear(2, hold(1, reader(2, 0), &[0]));
    assert_eq!(ended(&out), [(peer(2), Reason::Aborted)]);
    assert_eq!(own.owner.live(), 0);
    own.pass(60_000);
    assert_eq!(own.owner.remembered(), 0);
}

fn holds(out: &[Output]) -> usize {
    let hold = |it: &&Output| matches!(it, Output::Send { message: ToOwner::Hold(_), .. });
    out.iter().filter(hold).count()
}

fn releases(out: &[Output]) -> usize {
    let release = |it: &&Output| matches!(it, Output::Send { message: ToOwner::Release(_), .. });
    out.iter().filter(release).count()
}

/// Known failure 46 (aibrix#1772): heartbeats come as often as the lease needs them, not as often as is usual.
#[test]
fn heartbeats_follow_the_lease() {
    for (every, count) in [(None, 2), (Some(ms(100)), 100), (Some(ms(60_000)), 2)] {
        let mut user = Use::new();
        let keeping = Keeping { every, ..Keeping::default() };
        user.tell(user::Input::Ask(Ask { begin: false, keeping, ..ask(1, &[1], 1, Access::Read) }));
        user.tell(user::Input::PeerReady { peer: peer(1) });
        assert_eq!(holds(&user.pass(10_000)), count, "{every:?}");
    }
}

#[test]
fn a_request_that_fails_and_is_kept_releases_nothing_and_goes_on_as_the_same_reader() {
    let mut user = Use::new();
    let keeping = Keeping { after_failure: true, ..Keeping::default() };
    let first = Ask { keeping, ..ask(1, &[1], 1, Access::Read) };
    let mut out = user.tell(user::Input::Ask(first.clone()));
    out.extend(user.tell(user::Input::PeerReady { peer: peer(1) }));
    let out = user.settle(posts(&out)[0], Outcome::Failed { retry: false });
    assert!(matches!(out[..], [Output::Failed { why: Why::Transfer, .. }]), "{out:?}");
    assert_eq!((releases(&user.pass(10_000)), user.user.live()), (0, 0));
    // Held until it is known what becomes of it; then it begins, with a deadline of its own.
    let request = kvx_connector::protocol::RequestNumber(2);
    let mut out = user.tell(user::Input::Ask(Ask { request, begin: false, ..first.clone() }));
    assert_eq!(holds(&out), 1);
    out = user.pass(29_000);
    assert!(holds(&out) > 3 && posts(&out).is_empty());
    user.tell(user::Input::Until { request, deadline: ms(10_000) });
    let out = user.tell(user::Input::Begin { request });
    let out = user.settle(posts(&out)[0], Outcome::Done);
    let (_, asked) = confirms(&out).remove(0);
    assert_eq!(asked.reader, reader(1, 0));
    let out = user.judge(1, &asked, true);
    assert!(out.iter().any(|it| matches!(it, Output::Ready { .. })), "{out:?}");
}

/// The deadline that was there before does not end it, and the new one does.
#[test]
fn another_deadline_counts() {
    let mut user = Use::new();
    let out = user.ask(1, &[1], 1, Access::Read);
    let request = kvx_connector::protocol::RequestNumber(1);
    user.tell(user::Input::Until { request, deadline: ms(90_000) });
    assert!(!user.pass(80_000).iter().any(|it| matches!(it, Output::Failed { .. })));
    user.settle(posts(&out)[0], Outcome::Busy);
    let out = user.pass(11_000);
    let late = |it: &Output| matches!(it, Output::Failed { why: Why::Deadline, .. });
    let cancelled = out.iter().find_map(|it| match it {
        Output::Cancel { transfer } => Some(*transfer),
        _ => None,
    });
    let out = match cancelled {
        Some(transfer) => user.settle(transfer, Outcome::Cancelled),
        None => out,
    };
    assert!(out.iter().any(late), "{out:?}");
}

/// Known failure 48 (vllm PR#56104): of two ranks one has confirmed and one tries again. The lease is over after both, not before,
/// and in one attempt.
#[test]
fn a_lease_is_done_when_the_rank_that_tried_again_has_confirmed() {
    let mut own = Own::new();
    own.tell(Input::Grant(grant(1, Access::Read)));
    own.hear(1, hold(1, reader(1, 0), &[0, 1]));
    own.hear(2, hold(1, reader(1, 1), &[0, 1]));
    let out = own.hear(1, confirm(1, reader(1, 0), &[0, 1], 5));
    assert_eq!((verdicts(&out), freed(&out)), (vec![true], vec![]));
    own.pass(500);
    own.hear(2, hold(1, reader(1, 1), &[0, 1]));
    let out = own.hear(2, confirm(1, reader(1, 1), &[0, 1], 6));
    assert_eq!((verdicts(&out), freed(&out)), (vec![true], vec![(1, Reason::Done)]));
    assert!(ended(&own.hear(2, release(1, reader(1, 1), &[0, 1]))).is_empty());
}
