//! Engines that die, stop and come back, and ways that are closed.

use std::time::Duration;

use kvx_core::backend::TransferBackend as _;
use kvx_core::capability::Revoke;
use kvx_core::handshake::Handshake as _;
use kvx_core::id::TransferId;
use kvx_core::memory::MemoryRegistry as _;
use kvx_core::transfer::Mode;
use kvx_core::{ErrorKind, Retry};
use kvx_mock::{Fabric, Preset};

use crate::common::{
    Reach, Told, bytes, import, meet, memory, presets, reach, seeds, segment, told,
};

/// Longer than anything takes.
const LONG: Duration = Duration::from_secs(100);

/// Posts as many of the four writes as fit, and returns how many that is.
fn post(reach: &Reach, preset: &Preset) -> u8 {
    let most = u8::try_from(preset.capabilities().limits.max_in_flight.min(4)).unwrap();
    (0..most).for_each(|id| reach.write(id));
    most
}

/// Whether an engine was told that the peer is down, last, after each of its transfers had settled once.
fn is_down_last(list: &[Told], transfers: u8) -> bool {
    let mut ids: Vec<u64> = list
        .iter()
        .filter_map(|told| match told {
            Told::Done(id) | Told::Cancelled(id) | Told::Failed(id, _) => Some(*id),
            Told::Notified(_) | Told::Down(_) => None,
        })
        .collect();
    ids.sort_unstable();
    ids == (0..u64::from(transfers)).collect::<Vec<_>>()
        && list.iter().filter(|told| matches!(told, Told::Down(_))).count() == 1
        && matches!(list.last(), Some(Told::Down(_)))
}

#[test]
fn the_peers_of_a_dead_process_find_out_in_time() {
    for preset in presets() {
        let death = preset.timing().death;
        let mut failed = 0;
        for seed in seeds(30) {
            println!("seed {seed}, preset {}", preset.name());
            let reach = reach(Fabric::manual(seed), &preset);
            let posted = post(&reach, &preset);
            reach.fabric.advance(u32::try_from(seed % 6).unwrap());
            reach.fabric.kill("second").unwrap();
            let (arrived, early) = (reach.arrived(), told(&reach.first));
            assert!(early.len() <= usize::from(posted));
            reach.fabric.advance_by(death.shortest - Duration::from_nanos(1));
            let soon = told(&reach.first);
            assert!(!soon.contains(&Told::Down(false)), "found out too early: {soon:?}");
            reach.fabric.advance_by(LONG);
            let all = [early, soon, told(&reach.first)].concat();
            assert!(is_down_last(&all, posted), "{all:?}");
            failed += all.iter().filter(|t| matches!(t, Told::Failed(_, ErrorKind::Peer))).count();
            assert_eq!(reach.arrived(), arrived, "the memory of a dead process was written");
            assert!(told(&reach.second).is_empty());
        }
        assert!(failed > 0);
    }
}

#[test]
fn a_dead_process_does_nothing_more() {
    for preset in presets() {
        for seed in seeds(30) {
            let reach = reach(Fabric::manual(seed), &preset);
            let posted = post(&reach, &preset);
            reach.fabric.advance(u32::try_from(seed % 6).unwrap());
            reach.fabric.kill("first").unwrap();
            let arrived = reach.arrived();
            let heard = told(&reach.second);
            reach.fabric.advance_by(LONG);
            assert_eq!(reach.arrived(), arrived, "seed {seed}");
            let after = told(&reach.second);
            assert_eq!(after.last(), Some(&Told::Down(false)));
            assert!(heard.len() + after.len() <= usize::from(posted) + 1);
            assert!(told(&reach.first).is_empty(), "its transfers settle for nobody");
            let closed = |error: kvx_core::Error| assert_eq!(error.kind(), ErrorKind::Closed);
            closed(reach.try_write(0).unwrap_err());
            closed(reach.first.offer().unwrap_err());
            closed(reach.first.register(&reach.source).unwrap_err());
        }
    }
}

#[test]
fn a_process_that_starts_again_is_another() {
    for preset in presets() {
        let reach = reach(Fabric::manual(1), &preset);
        let old_offer = reach.second.offer().unwrap();
        let old_key = {
            let (_, handle) = memory(&reach.second, 32, 1);
            reach.second.key_blob(handle).unwrap()
        };
        let again = reach.fabric.restart("second").unwrap();
        assert_ne!(again.incarnation(), reach.second.incarnation());
        let refused = reach.first.accept(&old_offer).unwrap_err();
        assert_eq!((refused.kind(), refused.retry()), (ErrorKind::Peer, Retry::Reconnect));
        let (peer, _) = meet(&reach.first, &again);
        let refused = reach.first.import_key(peer, &old_key).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Peer);
        // The old one is found dead, and the new one is not affected.
        reach.fabric.advance_by(LONG);
        assert_eq!(told(&reach.first), [Told::Down(false)]);
        let (target, handle) = memory(&again, 64, 1);
        let remote = import(&again, handle, &reach.first, peer);
        let segments = [segment(reach.local, remote, 0, 32)];
        let _ =
            reach.first.submit(TransferId(9), peer, Mode::Write, &segments, Some(b"new")).unwrap();
        reach.fabric.advance_by(LONG);
        assert_eq!(told(&reach.first), [Told::Done(9)]);
        assert_eq!(told(&again), [Told::Notified(b"new".to_vec())]);
        assert_eq!(bytes(&target)[..32], [2; 32]);
        // It can be started again when it is dead already, too.
        reach.fabric.kill("second").unwrap();
        reach.fabric.kill("second").unwrap();
        let third = reach.fabric.restart("second").unwrap();
        assert!(third.offer().is_ok());
    }
}

#[test]
fn a_stopped_process_is_served_by_its_network_card_or_not_at_all() {
    for preset in presets() {
        for seed in seeds(10) {
            let reach = reach(Fabric::manual(seed), &preset);
            let posted = post(&reach, &preset);
            reach.fabric.stop("second").unwrap();
            reach.fabric.advance_by(LONG);
            let all: Vec<u8> = (0..posted).collect();
            let mine = told(&reach.first);
            assert_eq!(told(&reach.second), [], "its polls give nothing");
            if preset.is_software() {
                assert_eq!((mine.len(), reach.arrived().len()), (0, 0));
            } else {
                assert_eq!((mine.len(), reach.arrived()), (usize::from(posted), all.clone()));
            }
            reach.fabric.resume("second").unwrap();
            reach.fabric.advance_by(LONG);
            let mine = [mine, told(&reach.first)].concat();
            assert_eq!(mine.len(), usize::from(posted));
            assert!(mine.iter().all(|told| matches!(told, Told::Done(_))), "{mine:?}");
            assert_eq!((reach.arrived(), told(&reach.second).len()), (all, usize::from(posted)));
        }
    }
}

#[test]
fn what_a_stopped_process_posted_goes_on_where_that_is_hardwares_work() {
    for preset in presets() {
        let reach = reach(Fabric::manual(1), &preset);
        let posted = post(&reach, &preset);
        reach.fabric.stop("first").unwrap();
        reach.fabric.advance_by(LONG);
        let arrived = if preset.is_software() { 0 } else { usize::from(posted) };
        assert_eq!(reach.arrived().len(), arrived);
        assert_eq!((told(&reach.first), told(&reach.second).len()), (vec![], arrived));
        reach.fabric.resume("first").unwrap();
        reach.fabric.advance_by(LONG);
        assert_eq!(told(&reach.first).len(), usize::from(posted));
    }
}

#[test]
fn a_stopped_engine_moves_nothing_by_polling() {
    let reach = reach(Fabric::new(1), &Preset::rc());
    reach.fabric.stop("second").unwrap();
    reach.write(0);
    for _ in 0..100 {
        assert_eq!(told(&reach.second), []);
    }
    assert!(reach.arrived().is_empty());
    while told(&reach.first).is_empty() {}
    assert_eq!(reach.arrived(), [0]);
}

#[test]
fn a_partition_that_heals_in_time_loses_nothing() {
    for preset in presets() {
        for seed in seeds(20) {
            let reach = reach(Fabric::manual(seed), &preset);
            let posted = post(&reach, &preset);
            reach.fabric.advance(u32::try_from(seed % 6).unwrap());
            let outer = reach.fabric.partition("second", "first").unwrap();
            let inner = reach.fabric.partition("first", "second").unwrap();
            let before = reach.arrived();
            let early = (told(&reach.first), told(&reach.second));
            reach.fabric.advance_by(preset.timing().silence.shortest / 2);
            inner.heal();
            reach.fabric.advance_by(preset.timing().silence.shortest / 4);
            assert_eq!(reach.arrived(), before, "something got through");
            assert_eq!((told(&reach.first), told(&reach.second)), (vec![], vec![]));
            drop(outer);
            reach.fabric.advance_by(LONG);
            let mine = [early.0, told(&reach.first)].concat();
            let theirs = [early.1, told(&reach.second)].concat();
            assert_eq!((mine.len(), theirs.len()), (usize::from(posted), usize::from(posted)));
            assert!(mine.iter().all(|told| matches!(told, Told::Done(_))), "{mine:?}");
        }
    }
}

#[test]
fn a_partition_that_lasts_takes_both_sides_down() {
    for preset in presets() {
        for seed in seeds(20) {
            println!("seed {seed}, preset {}", preset.name());
            let reach = reach(Fabric::manual(seed), &preset);
            let posted = post(&reach, &preset);
            reach.fabric.advance(u32::try_from(seed % 6).unwrap());
            let guard = reach.fabric.partition("first", "second").unwrap();
            reach
                .fabric
                .advance_by(preset.timing().silence.longest + preset.timing().sever.longest);
            let (mine, theirs) = (told(&reach.first), told(&reach.second));
            assert!(is_down_last(&mine, posted), "{mine:?}");
            assert_eq!(theirs.last(), Some(&Told::Down(false)));
            // Those that meet again although nothing passes find out again.
            let (peer, _) = meet(&reach.first, &reach.second);
            let connect = crate::handshake::now(reach.first.connect(peer));
            assert_eq!(connect.unwrap_err().kind(), ErrorKind::Peer);
            reach.fabric.advance_by(LONG);
            assert_eq!(told(&reach.first), [Told::Down(false)]);
            assert_eq!(told(&reach.second), [Told::Down(false)]);
            drop(guard);
            meet(&reach.first, &reach.second);
            reach.fabric.advance_by(LONG);
            assert_eq!((told(&reach.first), told(&reach.second)), (vec![], vec![]));
        }
    }
}

/// What makes fabrics without revoking dangerous: the writer has not yet found out when the way opens again.
#[test]
fn after_a_partition_a_late_writer_has_access_unless_that_ended_with_the_connection() {
    for preset in presets() {
        let revokes = preset.capabilities().revoke == Revoke::PerPeer;
        let mut wrote = 0;
        for seed in seeds(40) {
            let reach = reach(Fabric::manual(seed), &preset);
            let guard = reach.fabric.partition("first", "second").unwrap();
            // Posted as soon as the target has given the writer up, if that did not give up first.
            let mut down = false;
            while !down && reach.fabric.advance(1) == 1 {
                down = told(&reach.second).contains(&Told::Down(false));
            }
            assert!(down);
            if reach.try_write(0).is_err() {
                continue;
            }
            guard.heal();
            reach.fabric.advance_by(LONG);
            wrote += reach.arrived().len();
            let mine = told(&reach.first);
            assert!(is_down_last(&mine, 1), "{mine:?}");
        }
        assert_eq!(wrote > 0, !revokes, "preset {}", preset.name());
    }
}

#[test]
fn a_link_that_flaps_is_open_and_closed_in_turns() {
    let (down, up) = (Duration::from_micros(700), Duration::from_micros(300));
    let reach = reach(Fabric::manual(1), &Preset::rc());
    reach.fabric.flap("first", "second", down, up, 3).unwrap();
    let next = |id: u8, by: Duration| {
        reach.write(id);
        reach.fabric.advance_by(by);
        told(&reach.first)
    };
    let short = Duration::from_micros(100);
    assert_eq!(next(0, short), [], "closed at once");
    reach.fabric.advance_by(down - short);
    assert_eq!(next(1, short), [Told::Done(0), Told::Done(1)], "open");
    reach.fabric.advance_by(up - short);
    assert_eq!(next(2, short), [], "closed again");
    reach.fabric.advance_by(LONG);
    assert_eq!(told(&reach.first), [Told::Done(2)]);
    assert_eq!(reach.fabric.next_at(), None);
    assert_eq!(next(3, short), [Told::Done(3)], "open for good");
    reach.fabric.flap("first", "second", down, up, 0).unwrap();
    assert_eq!(reach.fabric.next_at(), None);
}

#[test]
fn names_that_nobody_has_are_refused() {
    let fabric = Fabric::manual(1);
    let _first = fabric.backend(Preset::rc(), "first");
    let errors = [
        fabric.kill("frist").unwrap_err(),
        fabric.stop("frist").unwrap_err(),
        fabric.resume("frist").unwrap_err(),
        fabric.restart("frist").map(|_| ()).unwrap_err(),
        fabric.partition("first", "frist").map(|_| ()).unwrap_err(),
        fabric.flap("frist", "first", LONG, LONG, 1).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Misuse);
        let text = error.to_string();
        assert!(text.contains("\"frist\"") && text.contains("opened=first"), "{text}");
    }
    let error = fabric.partition("first", "first").map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
}

#[test]
fn a_half_finished_handshake_ends_with_the_other_side() {
    for kill in [false, true] {
        let fabric = Fabric::manual(1);
        let first = fabric.backend(Preset::rc(), "first");
        let second = fabric.backend(Preset::rc(), "second");
        let (peer, _) = second.accept(&first.offer().unwrap()).unwrap();
        if kill {
            fabric.kill("first").unwrap();
        } else {
            drop(first);
        }
        fabric.advance_by(LONG);
        assert_eq!(told(&second), [Told::Down(false)]);
        assert_eq!(second.sever(peer).unwrap_err().kind(), ErrorKind::Misuse);
    }
}
