//! Whoever would read or write other blocks than were granted, because its ticket was edited, is found out by the owner.

use kvx_connector::protocol::message::ToUser;
use kvx_connector::protocol::owner::{Config, Grant, Input, Output};
use kvx_connector::protocol::user::{self, Ask, Outcome, Why};
use kvx_connector::protocol::{Access, Fingerprint, Reason};

use crate::bench::{
    ENGINE, Own, Use, ask, confirm, confirm_of_nothing, ended, failed, freed, grant, hold,
    is_ready, peer, posts, reader, reasons, release, released_to, touching, verdicts,
};

fn of_blocks(blocks: u64, access: Access) -> Grant {
    Grant { fingerprint: Some(Fingerprint(blocks)), ..grant(1, access) }
}

/// It is no reader: it is let in to nothing, ends nothing and holds nothing, and the next is served.
#[test]
fn whoever_touches_other_blocks_than_were_granted_is_refused() {
    for access in [Access::Read, Access::Write] {
        let mut own = Own::new();
        own.tell(Input::Grant(of_blocks(7, access)));
        let out = own.hear(1, touching(8, hold(1, reader(1, 0), &[0])));
        assert_eq!((ended(&out), out.len()), (vec![(peer(1), Reason::Ticket)], 1));
        let out = own.hear(1, touching(8, confirm(1, reader(1, 0), &[0], 5)));
        assert_eq!((verdicts(&out), reasons(&out)), (vec![false], vec![Some(Reason::Ticket)]));
        let out = own.hear(1, touching(8, release(1, reader(1, 0), &[0])));
        assert!(matches!(out[..], [Output::Send { message: ToUser::Released(_), .. }]), "{out:?}");
        assert_eq!((own.owner.live(), own.owner.counts().contradictions), (1, 3));
        own.hear(2, touching(7, hold(1, reader(2, 0), &[0])));
        let out = own.hear(2, touching(7, confirm(1, reader(2, 0), &[0], 6)));
        assert_eq!((verdicts(&out), freed(&out)), (vec![true], vec![(1, Reason::Done)]));
        // The same question has the same answer after the end.
        let out = own.hear(1, touching(8, confirm(1, reader(1, 0), &[0], 5)));
        assert_eq!((verdicts(&out), reasons(&out)), (vec![false], vec![Some(Reason::Ticket)]));
    }
}

#[test]
fn what_came_before_the_grant_is_compared_with_it() {
    let mut own = Own::new();
    own.hear(1, touching(8, hold(1, reader(1, 0), &[0])));
    own.hear(2, touching(7, confirm(1, reader(2, 0), &[0], 5)));
    let out = own.tell(Input::Grant(of_blocks(7, Access::Read)));
    assert_eq!(ended(&out), [(peer(1), Reason::Ticket)]);
    assert_eq!((verdicts(&out), freed(&out)), (vec![true], vec![(1, Reason::Done)]));
}

/// An earlier version does not say what it touches, and an engine may not say what it grants: then nothing is compared.
#[test]
fn what_is_not_said_is_not_compared() {
    let mut own = Own::new();
    own.tell(Input::Grant(of_blocks(7, Access::Read)));
    assert_eq!(verdicts(&own.hear(1, confirm(1, reader(1, 0), &[0], 5))), [true]);
    let mut own = Own::new();
    own.tell(Input::Grant(grant(1, Access::Read)));
    assert_eq!(verdicts(&own.hear(1, touching(8, confirm(1, reader(1, 0), &[0], 5)))), [true]);
}

/// A lease of nothing is confirmed to whoever has moved nothing, also long after; to whoever has, its ticket named something.
#[test]
fn of_nothing_nothing_can_have_been_moved() {
    let mut config = Config::new(ENGINE);
    config.max_ended = 0;
    for config in [Config::new(ENGINE), config] {
        let mut own = Own::with(config);
        own.tell(Input::Grant(Grant { parts: vec![], total: Some(0), ..grant(1, Access::Read) }));
        let moved = own.hear(1, confirm(1, reader(1, 0), &[0], 5));
        assert_eq!(verdicts(&moved), [false]);
        assert_eq!(verdicts(&own.hear(2, confirm_of_nothing(1, reader(2, 0), 6))), [true]);
    }
}

/// Users say what they touch in every message that is about it; one that is refused fails with the reason, and nothing is ready.
#[test]
fn a_user_says_what_it_touches() {
    for access in [Access::Read, Access::Write] {
        let mut user = Use::new();
        let asked = Ask { fingerprint: Some(Fingerprint(8)), ..ask(1, &[1], 1, access) };
        let mut out = user.tell(user::Input::Ask(asked));
        out.extend(user.tell(user::Input::PeerReady { peer: peer(1) }));
        if access == Access::Write {
            assert_eq!(posts(&out), [], "a writer writes nothing before it is let in");
            let out = user.told_ended(1, 1, Reason::Ticket);
            assert_eq!(failed(&out), Some(Why::Ended(Reason::Ticket)));
            assert_eq!(released_to(&out), [], "it was never let in");
            continue;
        }
        out.extend(user.settle(posts(&out)[0], Outcome::Done));
        let said: Vec<_> = out
            .iter()
            .filter_map(|it| match it {
                user::Output::Send { message, .. } => Some(message.fingerprint()),
                _ => None,
            })
            .collect();
        assert!(!said.is_empty() && said.iter().all(|it| *it == Some(Fingerprint(8))), "{said:?}");
        assert!(!is_ready(&out));
    }
    let mut user = Use::new();
    let asked = Ask { fingerprint: Some(Fingerprint(8)), ..ask(1, &[1], 1, Access::Read) };
    let mut out = user.tell(user::Input::Ask(asked));
    out.extend(user.tell(user::Input::PeerReady { peer: peer(1) }));
    out.extend(
        user.tell(user::Input::Abort { request: kvx_connector::protocol::RequestNumber(1) }),
    );
    out.extend(user.settle(posts(&out)[0], Outcome::Cancelled));
    let released = out.iter().find_map(|it| match it {
        user::Output::Send { message, .. } => Some(message.fingerprint()),
        _ => None,
    });
    assert_eq!(released, Some(Some(Fingerprint(8))), "{out:?}");
}
