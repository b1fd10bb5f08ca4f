//! An engine that does not poll: its peers fill up, and nobody's memory grows.

use std::collections::BTreeSet;

use kvx_core::ErrorKind;
use kvx_core::backend::{Submit, TransferBackend as _};
use kvx_core::handshake::Handshake as _;
use kvx_core::id::TransferId;
use kvx_core::transfer::Mode;
use kvx_mock::{Fabric, Preset, Timing, What};

use crate::common::{Told, meet, presets, reach, seeds, told};

#[test]
fn what_does_not_fit_waits_at_the_peers_and_comes_when_there_is_room() {
    const MOST: usize = 5;
    for preset in presets() {
        let preset = preset.with_most_notifications(MOST);
        let in_flight = preset.capabilities().limits.max_in_flight as usize;
        for seed in seeds(20) {
            let reach = reach(Fabric::new(seed), &preset);
            let note = |id: u64| id.to_le_bytes()[..4].to_vec();
            let (mut posted, mut settled) = (0_u64, BTreeSet::new());
            // Until it has said full for so long that it will not change.
            let mut full = 0;
            while full < 200 {
                let submitted = reach
                    .first
                    .submit(TransferId(posted), reach.peer, Mode::Write, &[], Some(&note(posted)))
                    .unwrap();
                match submitted {
                    Submit::Submitted => (posted, full) = (posted + 1, 0),
                    Submit::Done { .. } => panic!("this fabric takes its time"),
                    Submit::Full => full += 1,
                }
                settled.extend(told(&reach.first));
            }
            assert_eq!(settled.len(), MOST, "seed {seed}: those that there is room for");
            assert_eq!(posted, (MOST + in_flight) as u64, "seed {seed}");
            let log = reach.fabric.log();
            assert!(log.iter().any(|entry| matches!(entry.what, What::NoRoom(_))));

            // Others are not hindered.
            let third = reach.fabric.backend(preset.clone(), "third");
            let (at_first, _) = meet(&reach.first, &third);
            let _ = reach
                .first
                .submit(TransferId(1 << 40), at_first, Mode::Write, &[], Some(b"x"))
                .unwrap();
            while told(&third).is_empty() {}

            let mut heard = Vec::new();
            for _ in 0..10_000 {
                heard.extend(told(&reach.second));
                settled.extend(told(&reach.first));
            }
            settled.remove(&Told::Done(1 << 40));
            assert_eq!(settled, (0..posted).map(Told::Done).collect());
            assert_eq!(heard.len() as u64, posted);
            let heard: BTreeSet<_> = heard.into_iter().collect();
            assert_eq!(heard, (0..posted).map(|id| Told::Notified(note(id))).collect());
        }
    }
}

#[test]
fn waiting_for_room_ends_with_the_connection() {
    for preset in [Preset::rc(), Preset::efa(), Preset::ucx_tcp()] {
        let preset = preset.with_most_notifications(1).with_timing(Timing::ZERO).unwrap();
        let reach = reach(Fabric::new(1), &preset);
        reach.write(0);
        reach.write(1);
        while reach.fabric.advance(1) == 1 {}
        assert_eq!(told(&reach.first), [Told::Done(0)]);
        reach.first.sever(reach.peer).unwrap();
        let list = told(&reach.first);
        assert_eq!(list, [Told::Cancelled(1), Told::Down(true)]);
        assert_eq!(reach.arrived(), [0, 1], "its data had arrived");
        // The one that waited is not delivered later.
        while reach.fabric.advance(1) == 1 {}
        assert_eq!(told(&reach.second), [Told::Notified(vec![0]), Told::Down(false)]);
    }
}

/// One that meets new peers all the time and never hears that the old ones are gone.
#[test]
fn ended_connections_that_nobody_polls_are_bounded() {
    let fabric = Fabric::manual(1);
    let first = fabric.backend(Preset::rc().with_timing(Timing::ZERO).unwrap(), "first");
    let preset = Preset::rc().with_timing(Timing::ZERO).unwrap();
    let mut met = 0;
    let error = loop {
        let second = fabric.backend(preset.clone(), "second");
        match second.accept(&first.offer().unwrap()).and_then(|(_, reply)| first.complete(&reply)) {
            Ok(_) => met += 1,
            Err(error) => break error,
        }
        drop(second);
        assert!(fabric.run_until_idle(100));
    };
    assert_eq!(met, Preset::MOST_NOTIFICATIONS);
    assert_eq!(error.kind(), ErrorKind::Resources);
    assert!(error.to_string().contains("poll this backend"), "{error}");
    assert_eq!(told(&first).len(), met);
    let second = fabric.backend(preset, "second");
    meet(&first, &second);
}

/// What waited for room and was given up is forgotten with its connection, though nobody polls.
#[test]
fn whoever_fills_severs_and_comes_again_leaves_nothing() {
    let preset = Preset::rc().with_most_notifications(1).with_timing(Timing::ZERO).unwrap();
    let fabric = Fabric::manual(1);
    let (first, second) = (fabric.backend(preset.clone(), "1"), fabric.backend(preset, "2"));
    for round in 0..20 {
        let (peer, _) = meet(&first, &second);
        for id in 0..10 {
            let id = TransferId(round * 10 + id);
            let submitted = first.submit(id, peer, Mode::Write, &[], Some(b"x")).unwrap();
            assert_eq!(submitted, Submit::Submitted);
        }
        first.sever(peer).unwrap();
        assert!(fabric.run_until_idle(1000));
        let list = told(&first);
        let done = list.iter().filter(|told| matches!(told, Told::Done(_))).count();
        assert_eq!((list.len(), done), (11, usize::from(round == 0)), "round {round}: {list:?}");
    }
    // The one that arrived, and that twenty connections are over.
    assert_eq!(told(&second).len(), 21);
}
