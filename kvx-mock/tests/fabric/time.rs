//! Virtual time: what moves it, how far, and what is bounded by it.

use std::time::Duration;

use kvx_core::backend::{SEVER_BOUND, TransferBackend as _};
use kvx_core::id::TransferId;
use kvx_core::transfer::Mode;
use kvx_mock::{Fabric, Kind, Preset, Span, Timing, rules};

use crate::common::{Told, import, memory, pair, presets, reach, seeds, segment, told, write};

#[test]
fn a_manual_fabric_is_moved_by_its_own_calls_only() {
    let reach = reach(Fabric::manual(1), &Preset::rc());
    let fabric = &reach.fabric;
    assert_eq!((fabric.now(), fabric.next_at()), (Duration::ZERO, None));
    fabric.advance_by(Duration::from_secs(3));
    assert_eq!(fabric.now(), Duration::from_secs(3));
    reach.write(0);
    for _ in 0..100 {
        assert!(told(&reach.first).is_empty() && told(&reach.second).is_empty());
    }
    let next = fabric.next_at().unwrap();
    let longest = Preset::rc().timing().latency.longest;
    assert!(next >= fabric.now() && next <= fabric.now() + longest, "{next:?}");
    let short = next - fabric.now() - Duration::from_nanos(1);
    assert_eq!(fabric.advance_by(short), 0, "something happened before its time");
    assert!(reach.arrived().is_empty());
    assert!(fabric.advance_by(Duration::from_nanos(1)) >= 1);
    assert_eq!(fabric.now(), next);
    assert_eq!(reach.arrived(), [0]);
    assert!(fabric.run_until_idle(100));
    assert_eq!(fabric.next_at(), None);
    assert!(fabric.now() <= next + longest, "one way there and one back");
    assert_eq!(told(&reach.first), [Told::Done(0)]);
    assert_eq!(told(&reach.second), [Told::Notified(vec![0])]);
}

#[test]
fn advancing_by_steps_counts_what_there_was() {
    let reach = reach(Fabric::manual(1), &Preset::efa());
    assert_eq!(reach.fabric.advance(7), 0);
    reach.write(0);
    assert!(!reach.fabric.run_until_idle(1));
    // The data has arrived; the report and the notification are under way.
    assert_eq!(reach.fabric.advance(7), 2);
    assert!(reach.fabric.run_until_idle(0));
}

#[test]
fn data_takes_the_time_that_its_bytes_need() {
    const MIB: usize = 1 << 20;
    let per_kib = Duration::from_micros(2);
    let mut timing = Timing::ZERO;
    timing.per_kib = per_kib;
    let preset = Preset::efa().with_timing(timing).unwrap();
    let fabric = Fabric::manual(1);
    let (first, second, peer, _) = pair(&fabric, &preset);
    let (_, local) = memory(&first, MIB, 2);
    let (_, remote) = memory(&second, MIB, 1);
    let remote = import(&second, remote, &first, peer);
    // Two of them share the way.
    for id in 0..2 {
        write(&first, id, peer, &[segment(local, remote, 0, MIB as u64)]);
    }
    let all = per_kib * 1024;
    fabric.advance_by(all - Duration::from_nanos(1));
    assert_eq!(told(&first), []);
    fabric.advance_by(Duration::from_nanos(1));
    assert_eq!(told(&first), [Told::Done(0)]);
    fabric.advance_by(all);
    assert_eq!(told(&first), [Told::Done(1)]);
}

#[test]
fn without_delays_everything_happens_in_the_order_of_the_calls() {
    for preset in presets() {
        let preset = preset.with_timing(Timing::ZERO).unwrap();
        let reach = reach(Fabric::manual(1), &preset);
        let most = u8::try_from(preset.capabilities().limits.max_in_flight.min(4)).unwrap();
        for id in 0..most {
            reach.write(id);
        }
        assert!(reach.fabric.run_until_idle(100));
        assert_eq!(reach.fabric.now(), Duration::ZERO);
        let ids = || 0..u64::from(most);
        assert_eq!(told(&reach.first), ids().map(Told::Done).collect::<Vec<_>>());
        let notes: Vec<_> = (0..most).map(|id| Told::Notified(vec![id])).collect();
        assert_eq!(told(&reach.second), notes);
    }
}

#[test]
fn impossible_timings_are_refused() {
    let mut timing = *Preset::rc().timing();
    timing.sever = Span::new(Duration::ZERO, SEVER_BOUND * 2);
    assert_eq!(Preset::rc().with_timing(timing).unwrap_err().kind(), kvx_core::ErrorKind::Misuse);
}

/// What keeps transfers from settling by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stuck {
    No,
    Stopped,
    Killed,
    Parted,
    DataHeld,
    ReportHeld,
    DataLost,
}

#[test]
fn whatever_is_wrong_sever_settles_everything_within_its_bound() {
    let stuck = [
        Stuck::No,
        Stuck::Stopped,
        Stuck::Killed,
        Stuck::Parted,
        Stuck::DataHeld,
        Stuck::ReportHeld,
        Stuck::DataLost,
    ];
    for preset in presets() {
        let most = preset.capabilities().limits.max_in_flight.min(4);
        for stuck in stuck {
            let mut undone = 0;
            for seed in seeds(20) {
                let reach = reach(Fabric::manual(seed), &preset);
                let fabric = &reach.fabric;
                let _rule = match stuck {
                    Stuck::DataHeld => Some(fabric.rule(rules::hold().kind(Kind::Data))),
                    Stuck::ReportHeld => Some(fabric.rule(rules::hold().kind(Kind::Completion))),
                    Stuck::DataLost => Some(fabric.rule(rules::drop().kind(Kind::Data).nth(0))),
                    _ => None,
                };
                for id in 0..most {
                    reach.write(u8::try_from(id).unwrap());
                }
                let _parted =
                    (stuck == Stuck::Parted).then(|| fabric.partition("first", "second").unwrap());
                match stuck {
                    Stuck::Stopped => fabric.stop("second").unwrap(),
                    Stuck::Killed => fabric.kill("second").unwrap(),
                    _ => {}
                }
                fabric.advance(u32::try_from(seed % 5).unwrap());
                reach.first.sever(reach.peer).unwrap();
                fabric.advance_by(SEVER_BOUND);
                let list = told(&reach.first);
                let what = format!("seed {seed}, {}, {stuck:?}: {list:?}", preset.name());
                assert_eq!(list.len(), most as usize + 1, "{what}");
                assert!(matches!(list.last(), Some(Told::Down(_))), "{what}");
                undone += list.iter().filter(|told| !matches!(told, Told::Done(_))).count() - 1;
                let before = reach.arrived();
                fabric.advance_by(Duration::from_secs(100));
                assert_eq!(told(&reach.first), [], "{what}");
                assert_eq!(reach.arrived(), before, "{what}: written after it settled");
            }
            assert!(undone > 0, "{}, {stuck:?}: nothing was in flight", preset.name());
        }
    }
}

#[test]
fn a_bare_notification_is_ordered_after_nothing() {
    let reach = reach(Fabric::manual(1), &Preset::rc());
    let held = reach.fabric.rule(rules::hold().kind(Kind::Data));
    reach.write(0);
    let _ = reach.first.submit(TransferId(9), reach.peer, Mode::Write, &[], Some(b"bare")).unwrap();
    assert!(reach.fabric.run_until_idle(100));
    assert_eq!(held.held(), 1);
    assert_eq!(told(&reach.second), [Told::Notified(b"bare".to_vec())]);
    assert_eq!(told(&reach.first), [], "reports of one connection come in order");
    drop(held);
    assert!(reach.fabric.run_until_idle(100));
    assert_eq!(told(&reach.first), [Told::Done(0), Told::Done(9)]);
}
