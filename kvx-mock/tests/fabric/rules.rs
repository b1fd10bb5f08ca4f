//! Rules: every verdict, for every kind of operation.

use std::collections::BTreeSet;
use std::sync::mpsc;
use std::time::Duration;

use kvx_core::ErrorKind;
use kvx_core::backend::{Submit, TransferBackend as _};
use kvx_core::handshake::Handshake as _;
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::Mode;
use kvx_mock::{Fabric, Kind, Operation, Preset, Timing, Verdict, What, rules};

use crate::common::{Reach, Told, bytes, pair, presets, reach, seeds, told};

const LATE: Duration = Duration::from_millis(3);
const IN_FLIGHT: [Kind; 3] = [Kind::Data, Kind::Completion, Kind::Notification];

/// Two engines of a fabric that is moved by hand and takes no time.
fn quick(preset: Preset) -> Reach {
    let mut timing = *preset.timing();
    (timing.latency, timing.per_kib) = (Timing::ZERO.latency, Duration::ZERO);
    reach(Fabric::manual(1), &preset.with_timing(timing).unwrap())
}

fn count(fabric: &Fabric, wanted: impl Fn(&What) -> bool) -> usize {
    fabric.log().iter().filter(|entry| wanted(&entry.what)).count()
}

fn run(reach: &Reach) -> (Vec<Told>, Vec<Told>) {
    assert!(reach.fabric.run_until_idle(10_000));
    (told(&reach.first), told(&reach.second))
}

fn notified(id: u8) -> Told {
    Told::Notified(vec![id])
}

#[test]
fn verdicts_that_mean_nothing_are_ignored_and_logged() {
    let all = [
        Verdict::Drop,
        Verdict::Delay(LATE),
        Verdict::Double,
        Verdict::Reorder,
        Verdict::Hold,
        Verdict::Fail(ErrorKind::Fabric),
        Verdict::Full,
    ];
    for kind in Kind::ALL {
        assert!(Verdict::Pass.applies_to(kind));
        for verdict in all.into_iter().filter(|verdict| !verdict.applies_to(kind)) {
            let fabric = Fabric::manual(1);
            let guard = fabric.rule(
                move |operation: &Operation| {
                    if operation.kind == kind { verdict } else { Verdict::Pass }
                },
            );
            let reach = reach(fabric, &Preset::efa());
            reach.write(0);
            assert_eq!(
                run(&reach),
                (vec![Told::Done(0)], vec![notified(0)]),
                "{kind:?} {verdict:?}"
            );
            assert_eq!(guard.decided(), 0);
            let ignored = |what: &What| matches!(what, What::Ignored { kind: k, verdict: v, .. } if (*k, *v) == (kind, verdict));
            assert!(count(&reach.fabric, ignored) > 0, "{kind:?} {verdict:?}");
        }
    }
}

#[test]
fn a_rule_sees_what_is_about_to_happen() {
    let (tell, seen) = mpsc::channel();
    let fabric = Fabric::manual(1);
    let _guard = fabric.rule(move |operation: &Operation| {
        tell.send(operation.clone()).unwrap();
        Verdict::Pass
    });
    let reach = reach(fabric, &Preset::rc());
    reach.write(3);
    run(&reach);
    let all: Vec<Operation> = seen.try_iter().collect();
    let kinds: BTreeSet<Kind> = all.iter().map(|operation| operation.kind).collect();
    assert_eq!(kinds, Kind::ALL.into_iter().collect());
    for operation in &all {
        let (from, to) = (&*operation.from.name, &*operation.to.name);
        let (names, bytes, nth) = match operation.kind {
            Kind::Register => ((from, from), 64, 0),
            Kind::Handshake if from == "second" => (("second", "first"), operation.bytes, 0),
            Kind::Handshake => (("first", "second"), operation.bytes, operation.nth),
            Kind::Notification => (("first", "second"), 1, 0),
            _ => (("first", "second"), 16, 0),
        };
        assert_eq!(((from, to), operation.bytes, operation.nth), (names, bytes, nth));
        let of_transfer = !matches!(operation.kind, Kind::Register | Kind::Handshake);
        assert_eq!(operation.id.map(|id| id.0), of_transfer.then_some(3));
        if from == "first" {
            assert_eq!(operation.from.incarnation, reach.first.incarnation());
        }
    }
    let offers: Vec<u64> = all
        .iter()
        .filter(|o| o.kind == Kind::Handshake && &*o.from.name == "first")
        .map(|o| o.nth)
        .collect();
    assert_eq!(offers, [0, 1], "the offer and the completion");
}

#[test]
fn data_that_is_lost_fails_its_transfer_or_takes_the_connection_with_it() {
    for preset in [Preset::rc(), Preset::efa(), Preset::ucx_tcp()] {
        let reach = quick(preset.clone());
        let guard = reach.fabric.rule(rules::drop().kind(Kind::Data).nth(1));
        for id in 0..3 {
            reach.write(id);
        }
        let (mine, theirs) = run(&reach);
        assert_eq!(guard.decided(), 1);
        let fails = |id| Told::Failed(id, ErrorKind::Peer);
        match preset.name() {
            // Those behind it, too: nothing may overtake it.
            "rc" => {
                assert_eq!(mine, [Told::Done(0), fails(1), fails(2), Told::Down(false)]);
                assert_eq!(theirs, [notified(0), Told::Down(false)]);
                assert_eq!(reach.arrived(), [0]);
            }
            "efa" => {
                let fails = Told::Failed(1, ErrorKind::Fabric);
                assert_eq!(mine, [Told::Done(0), Told::Done(2), fails]);
                assert_eq!(theirs, [notified(0), notified(2)]);
                assert_eq!(reach.arrived(), [0, 2]);
            }
            _ => {
                assert_eq!(mine.last(), Some(&Told::Down(false)));
                assert!(mine.contains(&fails(1)), "{mine:?}");
                assert_eq!(theirs.last(), Some(&Told::Down(false)));
                assert!(!reach.arrived().contains(&1) && !theirs.contains(&notified(1)));
            }
        }
        let death = preset.timing().death;
        assert!(reach.fabric.now() >= death.shortest);
    }
}

#[test]
fn a_report_or_a_notification_that_is_lost_takes_the_connection_with_it() {
    for preset in [Preset::rc(), Preset::efa(), Preset::ucx_tcp()] {
        for kind in [Kind::Completion, Kind::Notification] {
            let reach = quick(preset.clone());
            let _guard = reach.fabric.rule(rules::drop().kind(kind));
            reach.write(0);
            let (mine, theirs) = run(&reach);
            assert_eq!(reach.arrived(), [0], "the data had arrived");
            assert_eq!((mine.len(), mine[1].clone()), (2, Told::Down(false)), "{mine:?}");
            assert_eq!(theirs.last(), Some(&Told::Down(false)));
            if kind == Kind::Notification {
                assert_eq!(theirs.len(), 1, "not notified: {theirs:?}");
            } else {
                assert_eq!(
                    mine[0],
                    Told::Failed(0, ErrorKind::Peer),
                    "nobody said that it is done"
                );
            }
        }
    }
}

#[test]
fn what_is_delayed_comes_later_by_as_much_and_is_asked_about_once() {
    for preset in [Preset::rc(), Preset::efa()] {
        for kind in IN_FLIGHT {
            let reach = quick(preset.clone());
            let guard = reach.fabric.rule(rules::delay(LATE).kind(kind));
            reach.write(0);
            reach.fabric.advance_by(LATE - Duration::from_nanos(1));
            let (mine, theirs) = (told(&reach.first), told(&reach.second));
            assert_eq!(mine.is_empty(), kind != Kind::Notification);
            assert_eq!(theirs.is_empty(), kind != Kind::Completion);
            assert_eq!(reach.arrived().is_empty(), kind == Kind::Data);
            reach.fabric.advance_by(Duration::from_nanos(1));
            let all = ([mine, told(&reach.first)].concat(), [theirs, told(&reach.second)].concat());
            assert_eq!(all, (vec![Told::Done(0)], vec![notified(0)]));
            assert_eq!(guard.decided(), 1);
        }
    }
}

#[test]
fn what_comes_twice_is_passed_on_once() {
    for preset in presets() {
        let reach = quick(preset);
        let _guard = reach.fabric.rule(rules::double());
        reach.write(0);
        assert_eq!(run(&reach), (vec![Told::Done(0)], vec![notified(0)]));
        for kind in IN_FLIGHT {
            let suppressed =
                |what: &What| matches!(what, What::Suppressed { kind: k, .. } if *k == kind);
            assert_eq!(count(&reach.fabric, suppressed), 1, "{kind:?}");
        }
    }
}

#[test]
fn reordering_lets_others_overtake_where_no_order_is_promised() {
    for kind in IN_FLIGHT {
        for preset in [Preset::efa(), Preset::rc()] {
            let ordered = preset.name() == "rc";
            let reach = quick(preset);
            let _guard = reach.fabric.rule(rules::reorder().kind(kind).nth(0));
            for id in 0..3 {
                reach.write(id);
            }
            let (mine, theirs) = run(&reach);
            let (last_done, last_note) = (mine.last().unwrap(), theirs.last().unwrap());
            let (done, note) = (Told::Done(0), notified(0));
            if ordered {
                assert_eq!(mine, [0, 1, 2].map(Told::Done));
                assert_eq!(theirs, [0, 1, 2].map(notified));
            } else {
                assert_eq!(*last_done == done, kind != Kind::Notification, "{kind:?}: {mine:?}");
                assert_eq!(*last_note == note, kind != Kind::Completion, "{kind:?}: {theirs:?}");
            }
        }
    }
}

#[test]
fn what_is_held_waits_for_its_guard() {
    for preset in [Preset::rc(), Preset::efa(), Preset::ucx_tcp()] {
        let ordered = preset.name() == "rc";
        for kind in IN_FLIGHT {
            let reach = quick(preset.clone());
            let guard = reach.fabric.rule(rules::hold().kind(kind).nth(0));
            reach.write(0);
            reach.write(1);
            let (mine, theirs) = run(&reach);
            assert_eq!((guard.held(), guard.decided()), (1, 1));
            assert!(!mine.contains(&Told::Done(0)) || kind == Kind::Notification);
            assert!(!theirs.contains(&notified(0)) || kind == Kind::Completion);
            // Those behind it are held up exactly where order is promised.
            if kind == Kind::Data {
                assert_eq!(reach.arrived(), if ordered { vec![] } else { vec![1] });
            }
            if kind != Kind::Notification {
                assert_eq!(mine.contains(&Told::Done(1)), !ordered, "{kind:?}: {mine:?}");
            }
            if kind != Kind::Completion {
                assert_eq!(theirs.contains(&notified(1)), !ordered, "{kind:?}: {theirs:?}");
            }
            assert_eq!(guard.release(), 1);
            assert_eq!((guard.held(), guard.release()), (0, 0));
            let rest = run(&reach);
            let mut all = ([mine, rest.0].concat(), [theirs, rest.1].concat());
            all.0.sort();
            all.1.sort();
            let both = (vec![Told::Done(0), Told::Done(1)], vec![notified(0), notified(1)]);
            assert_eq!(all, both);
        }
    }
}

#[test]
fn a_rule_lives_as_long_as_its_guard() {
    let reach = quick(Preset::efa());
    let guard = reach.fabric.rule(rules::hold());
    reach.write(0);
    assert_eq!(run(&reach), (vec![], vec![]));
    drop(guard);
    assert_eq!(run(&reach), (vec![Told::Done(0)], vec![notified(0)]));
    reach.fabric.rule(rules::hold()).forever();
    reach.write(0);
    assert_eq!(run(&reach), (vec![], vec![]));
    reach.first.sever(reach.peer).unwrap();
    assert_eq!(run(&reach).0, [Told::Cancelled(0), Told::Down(true)]);
}

#[test]
fn what_fails_at_the_call_has_no_effect() {
    let reach = quick(Preset::rc());
    let before = reach.fabric.log().len();
    let guard = reach.fabric.rule(rules::fail_post(ErrorKind::Resources).times(1));
    assert_eq!(reach.try_write(0).unwrap_err().kind(), ErrorKind::Resources);
    assert_eq!(run(&reach), (vec![], vec![]));
    let new: Vec<What> = reach.fabric.log()[before..].iter().map(|e| e.what.clone()).collect();
    assert!(matches!(new[..], [What::Ruled { kind: Kind::Post, .. }]), "{new:?}");
    reach.write(0);
    assert_eq!(run(&reach).0, [Told::Done(0)]);
    drop(guard);

    let guard = reach.fabric.rule(rules::full().times(2));
    assert_eq!(reach.try_write(1).unwrap(), Submit::Full);
    assert_eq!(reach.try_write(1).unwrap(), Submit::Full);
    reach.write(1);
    assert_eq!(run(&reach).0, [Told::Done(1)]);
    drop(guard);

    let _guard = reach.fabric.rule(rules::fail(ErrorKind::Resources).kind(Kind::Register));
    let region = Region::host(64).unwrap();
    let error = reach.first.register(&region).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Resources);
    assert!(error.to_string().contains("bytes=64"), "{error}");
}

#[test]
fn a_message_of_the_handshake_can_fail() {
    for nth in 0..2 {
        let fabric = Fabric::manual(1);
        let rule = rules::fail(ErrorKind::Fabric).kind(Kind::Handshake).from("first").nth(nth);
        let _guard = fabric.rule(rule);
        let first = fabric.backend(Preset::rc(), "first");
        let second = fabric.backend(Preset::rc(), "second");
        let offer = first.offer().unwrap();
        if nth == 0 {
            assert_eq!(second.accept(&offer).unwrap_err().kind(), ErrorKind::Fabric);
        }
        let (at_second, reply) = second.accept(&offer).unwrap();
        let (_, completion) = first.complete(&reply).unwrap();
        if nth == 1 {
            assert_eq!(second.finish(&completion).unwrap_err().kind(), ErrorKind::Fabric);
        }
        assert_eq!(second.finish(&completion).unwrap(), at_second);
    }
}

#[test]
fn a_transfer_can_fail_before_or_after_its_data_arrived() {
    for preset in presets() {
        for kind in [Kind::Data, Kind::Completion] {
            let reach = quick(preset.clone());
            let _guard = reach.fabric.rule(rules::fail(ErrorKind::Fabric).kind(kind));
            reach.write(0);
            let (mine, theirs) = run(&reach);
            assert_eq!(mine, [Told::Failed(0, ErrorKind::Fabric)]);
            let arrived = kind == Kind::Completion;
            assert_eq!(theirs, if arrived { vec![notified(0)] } else { vec![] });
            assert_eq!(bytes(&reach.target)[0], if arrived { 2 } else { 1 });
        }
    }
}

#[test]
fn rules_match_what_they_say() {
    let hits = |rule: rules::Matched, preset: Preset| {
        let fabric = Fabric::manual(1);
        let (first, second, at_first, at_second) = pair(&fabric, &preset);
        let guard = fabric.rule(rule);
        for id in 0..10 {
            for (backend, peer) in [(&first, at_first), (&second, at_second)] {
                let mode = if id % 2 == 0 { Mode::Read } else { Mode::Write };
                let id = kvx_core::id::TransferId(id);
                let _ = backend.submit(id, peer, mode, &[], Some(b"x")).unwrap();
            }
        }
        guard.decided()
    };
    let posts = || rules::full().kind(Kind::Post);
    assert_eq!(hits(posts(), Preset::rc()), 20);
    assert_eq!(hits(posts().from("first"), Preset::rc()), 10);
    assert_eq!(hits(posts().to("first"), Preset::rc()), 10);
    assert_eq!(hits(posts().from("first").to("first"), Preset::rc()), 0);
    assert_eq!(hits(posts().from("third"), Preset::rc()), 0);
    assert_eq!(hits(posts().mode(Mode::Read), Preset::rc()), 10);
    assert_eq!(hits(posts().nth(7), Preset::rc()), 1);
    assert_eq!(hits(posts().nth(20), Preset::rc()), 0);
    assert_eq!(hits(posts().times(3), Preset::rc()), 3);
    assert_eq!(hits(posts().chance(1, 1), Preset::rc()), 20);
    assert_eq!(hits(posts().chance(0, 1), Preset::rc()), 0);
    assert_eq!(hits(posts().chance(1, 0), Preset::rc()), 0);
    let some = hits(posts().chance(1, 2), Preset::rc());
    assert!((3..=17).contains(&some), "{some}");
}

#[test]
fn the_first_rule_that_says_something_decides() {
    let reach = quick(Preset::efa());
    let first = reach.fabric.rule(rules::delay(LATE).kind(Kind::Data).nth(1));
    let second = reach.fabric.rule(rules::hold().kind(Kind::Data));
    reach.write(0);
    reach.write(1);
    assert_eq!(run(&reach), (vec![Told::Done(1)], vec![notified(1)]));
    assert_eq!((first.decided(), second.decided(), second.held()), (1, 1, 1));
}

#[test]
fn rules_draw_from_streams_of_their_own() {
    let run_with = |seed, rule: Option<rules::Matched>| {
        let fabric = Fabric::new(seed);
        let guard = rule.map(|rule| fabric.rule(rule));
        let reach = reach(fabric, &Preset::efa());
        for id in 0..4 {
            reach.write(id);
        }
        while reach.fabric.advance(1) == 1 {}
        (reach.fabric.digest(), guard.map(|guard| guard.decided()))
    };
    let mut decided = BTreeSet::new();
    for seed in seeds(30) {
        let (plain, _) = run_with(seed, None);
        let (inert, _) = run_with(seed, Some(rules::full().kind(Kind::Data).chance(1, 2)));
        assert_eq!(plain, inert, "a rule that decides nothing changes nothing");
        let rule = || rules::delay(LATE).chance(1, 2);
        let (one, other) = (run_with(seed, Some(rule())), run_with(seed, Some(rule())));
        assert_eq!(one, other, "seed {seed}");
        decided.insert(one.1);
    }
    assert!(decided.len() > 3, "{decided:?}");
}
