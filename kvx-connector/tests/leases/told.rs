//! What whoever comes late, or does what a lease does not allow, is told.

use kvx_connector::protocol::message::{ToOwner, ToUser};
use kvx_connector::protocol::owner::{Config, Grant, Input, Output};
use kvx_connector::protocol::user::{self, Outcome, Why};
use kvx_connector::protocol::{Access, LeaseName, Reason};

use crate::bench::{
    ENGINE, Own, Use, confirm, confirm_of_nothing, confirms, ended, failed, freed, grant, hold,
    lease, peer, posts, reader, reasons, release, released_to, saying, verdicts,
};

const OTHERS: [(Access, Access); 2] =
    [(Access::Read, Access::Write), (Access::Write, Access::Read)];

/// Whoever says the wrong thing of itself is refused with that reason, and is not among the readers: it neither ends the lease
/// nor keeps it; whoever does what is allowed goes on as if nothing had been said.
#[test]
fn whoever_does_what_the_lease_does_not_allow_is_refused() {
    for (granted, other) in OTHERS {
        let mut own = Own::new();
        own.tell(Input::Grant(grant(1, granted)));
        let out = own.hear(1, saying(other, hold(1, reader(1, 0), &[0])));
        assert_eq!(ended(&out), [(peer(1), Reason::Access)]);
        assert_eq!(out.len(), 1, "nothing else is said: {out:?}");
        let out = own.hear(1, saying(other, confirm(1, reader(1, 0), &[0], 5)));
        assert_eq!((verdicts(&out), reasons(&out)), (vec![false], vec![Some(Reason::Access)]));
        assert_eq!((freed(&out), own.owner.live()), (vec![], 1));
        let out = own.hear(1, saying(other, release(1, reader(1, 0), &[0])));
        assert!(matches!(out[..], [Output::Send { message: ToUser::Released(_), .. }]));
        assert_eq!((own.owner.live(), own.owner.counts().contradictions), (1, 3));
        // Not held by that, either: it expires when it would have.
        own.pass(900);
        own.hear(1, saying(other, hold(1, reader(1, 0), &[0])));
        assert_eq!(freed(&own.pass(200)), [(1, Reason::Expired)], "{granted}");
    }
}

#[test]
fn whoever_does_what_is_allowed_is_not_disturbed() {
    for (granted, other) in OTHERS {
        let mut own = Own::new();
        own.tell(Input::Grant(grant(1, granted)));
        own.hear(2, saying(other, hold(1, reader(2, 0), &[0])));
        own.hear(1, saying(granted, hold(1, reader(1, 0), &[0])));
        own.hear(2, saying(other, confirm(1, reader(2, 0), &[0], 6)));
        let out = own.hear(1, saying(granted, confirm(1, reader(1, 0), &[0], 5)));
        assert_eq!((verdicts(&out), freed(&out)), (vec![true], vec![(1, Reason::Done)]));
        // The same question has the same answer after the end.
        let out = own.hear(2, saying(other, confirm(1, reader(2, 0), &[0], 6)));
        assert_eq!((verdicts(&out), reasons(&out)), (vec![false], vec![Some(Reason::Access)]));
    }
}

/// It waits for the grant, and is looked at then.
#[test]
fn what_came_before_the_grant_is_refused_with_it() {
    let mut own = Own::new();
    own.hear(1, saying(Access::Write, hold(1, reader(1, 0), &[0])));
    own.hear(2, saying(Access::Read, confirm(1, reader(2, 0), &[0], 5)));
    let out = own.tell(Input::Grant(grant(1, Access::Read)));
    assert_eq!(ended(&out), [(peer(1), Reason::Access)]);
    assert_eq!((verdicts(&out), freed(&out)), (vec![true], vec![(1, Reason::Done)]));
}

/// An earlier version does not say what it does: it is taken for what the lease allows.
#[test]
fn an_earlier_version_is_not_refused() {
    for granted in [Access::Read, Access::Write] {
        let mut own = Own::new();
        own.tell(Input::Grant(grant(1, granted)));
        assert_eq!(ended(&own.hear(1, hold(1, reader(1, 0), &[0]))), []);
        assert_eq!(verdicts(&own.hear(1, confirm(1, reader(1, 0), &[0], 5))), [true]);
    }
}

/// Users say what they do in every message that is about it.
#[test]
fn a_user_says_what_it_does() {
    for access in [Access::Read, Access::Write] {
        let mut user = Use::new();
        let mut out = user.ask(1, &[1], 1, access);
        if access == Access::Write {
            out.extend(user.told_parts(1, 1, vec![], Some(0)));
        }
        out.extend(user.settle(posts(&out)[0], Outcome::Done));
        let said: Vec<_> = out
            .iter()
            .filter_map(|it| match it {
                user::Output::Send { message, .. } => Some(message.access()),
                _ => None,
            })
            .collect();
        assert!(!said.is_empty() && said.iter().all(|it| *it == Some(access)), "{said:?}");
    }
}

/// An owner and how its lease ended.
fn ended_by(why: Reason) -> Own {
    let mut own = Own::new();
    own.tell(Input::Grant(grant(1, Access::Read)));
    match why {
        Reason::Done => drop(own.hear(1, confirm(1, reader(1, 0), &[0], 5))),
        Reason::Released => drop(own.hear(1, release(1, reader(1, 0), &[0]))),
        Reason::Expired => drop(own.pass(1_000)),
        why => drop(own.tell(Input::Withdraw { lease: lease(1), why })),
    }
    own
}

const ENDS: [Reason; 6] = [
    Reason::Done,
    Reason::Released,
    Reason::Expired,
    Reason::Aborted,
    Reason::Preempted,
    Reason::Failed,
];

/// Each end has its own reason for whoever comes late: at once, and after all else of the lease is forgotten.
#[test]
fn late_users_hear_why() {
    for why in ENDS {
        let mut own = ended_by(why);
        for later in [0, 120_000] {
            own.pass(later);
            let out = own.hear(2, confirm(1, reader(2, 0), &[0], 7));
            assert_eq!((verdicts(&out), reasons(&out)), (vec![false], vec![Some(why)]));
            assert_eq!(ended(&own.hear(2, hold(1, reader(2, 0), &[0]))), [(peer(2), why)]);
            let out = own.hear(2, release(1, reader(2, 0), &[0]));
            assert!(matches!(out[..], [Output::Send { message: ToUser::Released(_), .. }]));
        }
        assert_eq!(own.owner.remembered(), 0, "only the reason is left");
        assert_eq!(own.owner.ended(lease(1)), Some(why));
    }
}

/// The reasons are bounded, the newest are kept; what was never granted is not among them.
#[test]
fn reasons_are_bounded() {
    let mut config = Config::new(ENGINE);
    config.max_past = 2;
    let mut own = Own::with(config);
    for number in 1..=4 {
        own.tell(Input::Grant(grant(number, Access::Read)));
        own.hear(1, release(number, reader(number, 0), &[0]));
    }
    own.pass(60_000);
    let known: Vec<u64> =
        (1..=5).filter(|number| own.owner.ended(lease(*number)).is_some()).collect();
    assert_eq!(known, [3, 4]);
    // What is not known may still be granted: it waits.
    assert!(own.hear(2, confirm(5, reader(2, 0), &[0], 7)).is_empty());
    assert_eq!(reasons(&own.pass(60_000)), [Some(Reason::Unknown)]);
}

/// Nothing to transfer stays nothing to transfer.
#[test]
fn a_lease_of_nothing_is_confirmed_also_long_after() {
    let mut own = Own::new();
    own.tell(Input::Grant(Grant { parts: vec![], total: Some(0), ..grant(1, Access::Read) }));
    own.pass(3_600_000);
    assert_eq!(own.owner.remembered(), 0);
    assert_eq!(verdicts(&own.hear(1, confirm_of_nothing(1, reader(1, 0), 5))), [true]);
    assert_eq!(ended(&own.hear(1, hold(1, reader(1, 0), &[0]))), []);
}

/// An epoch has its own end: the next one is not held to it.
#[test]
fn a_later_epoch_is_not_the_one_that_ended() {
    let mut own = ended_by(Reason::Preempted);
    own.pass(60_000);
    let name = LeaseName { epoch: 1, ..lease(1) };
    own.tell(Input::Grant(Grant { lease: name, ..grant(1, Access::Read) }));
    let mut again = confirm(1, reader(2, 0), &[0], 7);
    assert_eq!(reasons(&own.hear(2, again.clone())), [Some(Reason::Preempted)]);
    if let ToOwner::Confirm(confirm) = &mut again {
        confirm.lease = name;
    }
    assert_eq!(verdicts(&own.hear(2, again)), [true]);
}

/// What the owner says is why the request fails, and an earlier owner says nothing.
#[test]
fn a_request_fails_with_the_reason() {
    for why in ENDS.into_iter().map(Some).chain([Some(Reason::Access), Some(Reason::Other), None]) {
        let mut user = Use::new();
        let out = user.ask(1, &[1], 1, Access::Read);
        let out = user.settle(posts(&out)[0], Outcome::Done);
        let (_, asked) = confirms(&out).remove(0);
        assert_eq!(failed(&user.told_verdict(1, &asked, why)), Some(Why::Stale(why)));
    }
}

/// Whoever is refused for what it does was never let in, and has nothing to give back: also a writer.
#[test]
fn whoever_was_never_let_in_releases_nothing() {
    for access in [Access::Read, Access::Write] {
        let mut user = Use::new();
        user.ask(1, &[1], 1, access);
        let mut out = user.told_ended(1, 1, Reason::Access);
        for transfer in posts(&user.tell(user::Input::Tick)) {
            out.extend(user.settle(transfer, Outcome::Cancelled));
        }
        out.extend(user.pass(10_000));
        assert_eq!(released_to(&out), []);
        assert_eq!(user.user.releasing(), 0);
    }
}
