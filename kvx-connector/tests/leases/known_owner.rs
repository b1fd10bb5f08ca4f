//! Public failures of other systems, as far as they are of an owner.

use kvx_connector::protocol::message::ToOwner;
use kvx_connector::protocol::owner::{Config, Grant, Input, Output};
use kvx_connector::protocol::{Access, LeaseName, Reason};

use crate::bench::{
    ENGINE, Own, confirm, confirm_of_nothing, ended, freed, grant, hold, lease, ms, parts, peer,
    reader, release, verdicts,
};

fn granted(access: Access) -> Own {
    let mut own = Own::new();
    own.tell(Input::Grant(grant(1, access)));
    own
}

/// Known failures 5 and 78 (sglang PR#22145, vllm#41211): four readers are four, however often each says so.
#[test]
fn done_after_the_whole_set_and_not_before() {
    let mut own = granted(Access::Read);
    let set = [0, 1, 2, 3];
    for (rank, nonce) in [(0, 10), (0, 10), (0, 11), (1, 12), (2, 13), (2, 13)] {
        let out = own.hear(rank, confirm(1, reader(1, rank.into()), &set, nonce));
        assert_eq!((verdicts(&out), freed(&out)), (vec![true], vec![]), "rank {rank}");
    }
    let out = own.hear(3, confirm(1, reader(1, 3), &set, 14));
    assert_eq!((verdicts(&out), freed(&out)), (vec![true], vec![(1, Reason::Done)]));
    // Doubled after the end: the same answer, and nothing is freed again.
    let out = own.hear(3, confirm(1, reader(1, 3), &set, 14));
    assert_eq!((verdicts(&out), freed(&out)), (vec![true], vec![]));
}

/// Known failures 6 and 7 (vllm PR#45880, PR#36958): a rank that nobody reads from hears of one who confirms, and under the
/// owner's own name of the lease.
#[test]
fn a_replica_that_is_not_read_is_freed_by_one_confirm() {
    let mut own = granted(Access::Read);
    let mut foreign = confirm(1, reader(1, 2), &[2], 5);
    if let ToOwner::Confirm(confirm) = &mut foreign {
        confirm.lease.owner = peer(77);
    }
    assert_eq!(verdicts(&own.hear(1, foreign)), [false]);
    assert_eq!(own.owner.counts().other_life, 1);
    assert_eq!(freed(&own.hear(1, confirm(1, reader(1, 2), &[2], 5))), [(1, Reason::Done)]);
}

/// Known failure 28 (vllm PR#18632, PR#18590): nothing to transfer is freed at once, and who confirms it is not refused.
#[test]
fn a_lease_of_nothing_is_free_at_once() {
    let mut own = Own::new();
    let nothing = Grant { parts: vec![], total: Some(0), ..grant(1, Access::Read) };
    assert_eq!(freed(&own.tell(Input::Grant(nothing))), [(1, Reason::Empty)]);
    let out = own.hear(1, confirm_of_nothing(1, reader(1, 0), 5));
    assert_eq!((verdicts(&out), freed(&out)), (vec![true], vec![]));
}

/// Known failure 36 (vllm PR#43509): of three siblings one is read; what comes before the grant is remembered.
#[test]
fn siblings_are_released_and_early_messages_are_remembered() {
    let mut own = Own::new();
    assert!(own.hear(1, confirm(1, reader(1, 0), &[0], 5)).is_empty());
    assert!(own.hear(1, release(2, reader(2, 0), &[0])).is_empty());
    let out = own.tell(Input::Grant(grant(1, Access::Read)));
    assert_eq!((verdicts(&out), freed(&out)), (vec![true], vec![(1, Reason::Done)]));
    assert_eq!(freed(&own.tell(Input::Grant(grant(2, Access::Read)))), [(2, Reason::Released)]);
    own.tell(Input::Grant(grant(3, Access::Read)));
    assert_eq!(freed(&own.hear(1, release(3, reader(3, 0), &[0]))), [(3, Reason::Released)]);
    assert_eq!(own.owner.live(), 0);
}

/// Known failures 37 and 38 (vllm PR#25067, PR#29906): finished, aborted and confirmed in any order: freed once, at once.
#[test]
fn an_abort_after_the_end_frees_once() {
    let withdraw = || Input::Withdraw { lease: lease(1), why: Reason::Aborted };
    let mut own = granted(Access::Read);
    own.hear(1, hold(1, reader(1, 0), &[0]));
    let out = own.tell(withdraw());
    assert_eq!(
        (freed(&out), ended(&out)),
        (vec![(1, Reason::Aborted)], vec![(peer(1), Reason::Aborted)])
    );
    let out = own.hear(1, confirm(1, reader(1, 0), &[0], 5));
    assert_eq!((verdicts(&out), freed(&out)), (vec![false], vec![]));
    assert!(own.tell(withdraw()).is_empty());
    assert_eq!(own.owner.counts().freed, 1);
}

/// Known failures 39 and 84 (vllm PR#41269, PR#58108): whoever is rejected, or needs nothing, says so, and all is free.
#[test]
fn a_rejection_frees() {
    let mut own = granted(Access::Read);
    assert_eq!(freed(&own.hear(1, release(1, reader(1, 0), &[0, 1]))), []);
    assert_eq!(freed(&own.hear(2, release(1, reader(1, 1), &[0, 1]))), [(1, Reason::Released)]);
}

/// Known failure 40 (vllm#46283): a consumer that is written to, and whose producer dies, ends in time.
#[test]
fn a_dead_writer_ends_in_quarantine_and_then_free() {
    let mut own = granted(Access::Write);
    own.hear(1, hold(1, reader(1, 0), &[0]));
    own.tell(Input::PeerGone { peer: peer(1) });
    let out = own.pass(1_000);
    assert!(out.contains(&Output::Over { lease: lease(1), why: Reason::Expired }));
    assert_eq!(freed(&out), []);
    let out = own.pass(5_000);
    assert!(out.contains(&Output::Revoke { peer: peer(1) }));
    assert!(out.contains(&Output::Quarantined { lease: lease(1), why: Reason::Expired }));
    assert_eq!(freed(&out), []);
    let out = own.tell(Input::Quiescent { peer: peer(1) });
    assert_eq!(freed(&out), [(1, Reason::Expired)]);
}

/// Known failure 42 (vllm#50425): nobody ever comes: expired and counted.
#[test]
fn what_nobody_reads_expires() {
    let mut own = granted(Access::Read);
    assert_eq!(freed(&own.pass(999)), []);
    assert_eq!(freed(&own.pass(1)), [(1, Reason::Expired)]);
    assert_eq!(own.owner.counts().expired, 1);
    assert_eq!(freed(&own.pass(100_000)), []);
    assert_eq!((own.owner.remembered(), own.owner.wake()), (0, None));
}

/// Known failures 44 and 45 (vllm PR#20139, aws-do-eks PR#84): read after the lease had ended: never told that it held.
#[test]
fn a_late_reader_is_told_so_and_counted() {
    let mut own = granted(Access::Read);
    own.hear(1, hold(1, reader(1, 0), &[0]));
    own.pass(1_000);
    assert_eq!(verdicts(&own.hear(1, confirm(1, reader(1, 0), &[0], 5))), [false]);
    assert_eq!(own.owner.counts().stale, 1);
    // Nor does a late heartbeat revive it.
    assert_eq!(ended(&own.hear(1, hold(1, reader(1, 0), &[0]))), [(peer(1), Reason::Expired)]);
    assert_eq!(verdicts(&own.hear(1, confirm(1, reader(1, 0), &[0], 6))), [false]);
}

/// Known failure 46 (aibrix#1772): two hundred that wait longer than their leases are held by heartbeats, up to the hard deadline.
#[test]
fn heartbeats_hold_a_long_queue() {
    let mut own = Own::new();
    for number in 1..=200 {
        own.tell(Input::Grant(grant(number, Access::Read)));
    }
    for _ in 0..20 {
        assert_eq!(freed(&own.pass(400)), []);
        for number in 1..=200 {
            own.hear(1, hold(number, reader(number, 0), &[0]));
        }
    }
    for _ in 0..150 {
        own.pass(400);
        for number in 1..=200 {
            own.hear(1, hold(number, reader(number, 0), &[0]));
        }
    }
    assert_eq!((own.owner.live(), own.owner.counts().expired), (0, 200));
}

/// Known failure 47 (vllm#52234): an unknown lease, an ended one, another epoch, another life: none is confirmed.
#[test]
fn only_the_lease_itself_is_confirmed() {
    let mut own = granted(Access::Read);
    let with = |name: LeaseName| {
        let mut message = confirm(1, reader(1, 0), &[0], 5);
        if let ToOwner::Confirm(confirm) = &mut message {
            confirm.lease = name;
        }
        message
    };
    assert_eq!(verdicts(&own.hear(1, with(LeaseName { owner: peer(3), ..lease(1) }))), [false]);
    for name in [LeaseName { epoch: 1, ..lease(1) }, lease(2)] {
        assert!(verdicts(&own.hear(1, with(name))).is_empty());
    }
    // Two are refused once it is clear that they are not granted; the first was in time, all the while.
    own.tell(Input::Withdraw { lease: lease(1), why: Reason::Preempted });
    assert_eq!(verdicts(&own.pass(10_000)), [false, false]);
    assert_eq!(own.owner.counts().early_lapsed, 2);
}

/// Known failures 55 and 61 (sglang PR#28651, sglang#30233): users hear of an abort in the same step, and what they have read
/// does not count.
#[test]
fn an_abort_is_told_at_once_to_all() {
    let mut own = granted(Access::Read);
    for rank in 0..4 {
        own.hear(rank, hold(1, reader(1, rank.into()), &[0, 1, 2, 3]));
    }
    let out = own.tell(Input::Withdraw { lease: lease(1), why: Reason::Failed });
    let told: Vec<_> = (0..4).map(|rank| (peer(rank), Reason::Failed)).collect();
    assert_eq!(ended(&out), told);
    assert_eq!(verdicts(&own.hear(0, confirm(1, reader(1, 0), &[0, 1, 2, 3], 1))), [false]);
}

/// Known failure 56 (sglang#36033): who comes after the failure is told at once.
#[test]
fn who_comes_late_is_told_at_once() {
    let mut own = granted(Access::Read);
    own.tell(Input::Withdraw { lease: lease(1), why: Reason::Failed });
    assert_eq!(ended(&own.hear(1, hold(1, reader(1, 0), &[0]))), [(peer(1), Reason::Failed)]);
}

/// Known failures 54 and 85 (sglang#32564, vllm PR#56465): a bound that passes is no permission to free what may be written.
#[test]
fn a_writer_that_is_not_quiescent_keeps_the_blocks() {
    let mut own = granted(Access::Write);
    own.hear(1, hold(1, reader(1, 0), &[0]));
    let out = own.tell(Input::Withdraw { lease: lease(1), why: Reason::Aborted });
    assert_eq!((freed(&out), ended(&out).len()), (vec![], 1));
    assert_eq!(freed(&own.pass(3_600_000)), []);
    assert_eq!(freed(&own.hear(1, release(1, reader(1, 0), &[0]))), [(1, Reason::Aborted)]);
}

/// Known failure 89 (TRT-LLM PR#12313): time alone is enough to clear a full table.
#[test]
fn a_full_table_is_cleared_by_time() {
    let mut config = Config::new(ENGINE);
    config.max_leases = 3;
    let mut own = Own::with(config);
    for number in 1..=3 {
        own.tell(Input::Grant(grant(number, Access::Read)));
    }
    assert_eq!(freed(&own.tell(Input::Grant(grant(4, Access::Read)))), [(4, Reason::Full)]);
    assert_eq!(own.owner.wake(), Some(ms(1000)));
    assert_eq!(freed(&own.pass(1_000)).len(), 3);
    assert_eq!(freed(&own.tell(Input::Grant(grant(5, Access::Read)))), []);
}

/// Known failure 95 (vllm PR#24268): confirmed and expired in the same moment: freed once, and the reader is told the truth.
#[test]
fn confirm_and_expiry_in_one_moment_free_once() {
    let mut own = granted(Access::Read);
    own.now = ms(1000);
    let out = own.hear(1, confirm(1, reader(1, 0), &[0], 5));
    assert_eq!((freed(&out), verdicts(&out)), (vec![(1, Reason::Expired)], vec![false]));
    let mut own = granted(Access::Read);
    own.now = ms(1000) - std::time::Duration::from_nanos(1);
    let mut out = own.hear(1, confirm(1, reader(1, 0), &[0], 5));
    out.extend(own.pass(1));
    assert_eq!((freed(&out), verdicts(&out)), (vec![(1, Reason::Done)], vec![true]));
}

/// Strangers cannot make the owner grow: early messages and ended leases are bounded, per peer and in all.
#[test]
fn tables_are_bounded() {
    let mut config = Config::new(ENGINE);
    (config.max_early, config.max_early_per_peer, config.max_ended) = (10, 4, 5);
    let mut own = Own::with(config);
    for number in 100..200 {
        own.hear(u8::try_from(number % 4).unwrap(), hold(number, reader(number, 0), &[0]));
    }
    assert_eq!((own.owner.remembered(), own.owner.counts().early_refused), (10, 90));
    for number in 1..=20 {
        own.tell(Input::Grant(grant(number, Access::Read)));
        own.hear(1, release(number, reader(number, 0), &[0]));
    }
    assert_eq!(own.owner.counts().forgotten, 15);
    own.pass(100_000);
    assert_eq!((own.owner.remembered(), own.owner.wake()), (0, None));
}

/// Parts are pushed when they are published, and a reader that comes late, or lost some, gets what it lacks.
#[test]
fn parts_reach_early_and_late_readers() {
    use kvx_connector::protocol::message::ToUser;
    let lists = |out: &[Output]| -> Vec<(u32, Option<u32>)> {
        let list = |output: &Output| match output {
            Output::Send { message: ToUser::Parts(list), .. } => {
                Some((u32::try_from(list.parts.len()).unwrap(), list.total))
            }
            _ => None,
        };
        out.iter().filter_map(list).collect()
    };
    let mut own = Own::new();
    own.tell(Input::Grant(Grant { parts: vec![], total: None, ..grant(1, Access::Read) }));
    assert_eq!(lists(&own.hear(1, hold(1, reader(1, 0), &[0, 1]))), [(0, None)]);
    let publish = |from: usize, to: u32, total| {
        let parts = parts(to).split_off(from);
        Input::Publish { lease: lease(1), parts, total }
    };
    assert_eq!(lists(&own.tell(publish(0, 2, None))), [(2, None)]);
    assert_eq!(lists(&own.tell(publish(2, 3, Some(3)))), [(1, Some(3))]);
    assert_eq!(lists(&own.hear(2, hold(1, reader(1, 1), &[0, 1]))), [(3, Some(3))]);
    // Twice, or beyond the last: counted.
    assert_eq!(lists(&own.tell(publish(0, 5, None))), []);
    assert_eq!(own.owner.counts().ignored, 5);
}
