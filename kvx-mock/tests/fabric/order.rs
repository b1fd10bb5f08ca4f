//! What the seed decides: in which order things become visible.

use std::collections::BTreeSet;

use kvx_core::backend::{Event, TransferBackend as _};
use kvx_core::id::TransferId;
use kvx_core::transfer::Mode;
use kvx_mock::{Fabric, Preset, What};

use crate::common::{
    bytes, import, memory, outcome, pair, poll, poll_until, seeds, segment, write,
};

/// Writes eight batches over each other; the last byte that stays tells which was last.
fn last_of_eight(seed: u64, preset: &Preset) -> u8 {
    let fabric = Fabric::new(seed);
    let (first, second, peer, _) = pair(&fabric, preset);
    let (target, target_handle) = memory(&second, 64, 0xee);
    let remote = import(&second, target_handle, &first, peer);
    for id in 0..8 {
        let (_, local) = memory(&first, 64, id);
        write(&first, id.into(), peer, &[segment(local, remote, 0, 64)]);
    }
    let settled = |event: &Event| matches!(event, Event::Settled { .. });
    poll_until(&first, |all| all.iter().filter(|event| settled(event)).count() == 8);
    let found = bytes(&target);
    assert!(found.iter().all(|byte| *byte == found[0]), "torn: {found:?}");
    found[0]
}

#[test]
fn batches_to_a_peer_are_ordered_where_the_capability_says_so() {
    for seed in seeds(50) {
        assert_eq!(last_of_eight(seed, &Preset::rc()), 7, "seed {seed}");
    }
}

#[test]
fn batches_to_a_peer_come_in_every_order_where_nothing_is_promised() {
    let last: BTreeSet<u8> = (0..100).map(|seed| last_of_eight(seed, &Preset::efa())).collect();
    assert_eq!(last, (0..8).collect());
}

#[test]
fn segments_of_a_batch_are_seen_half_done_in_any_order() {
    for preset in [Preset::rc(), Preset::efa()] {
        let mut first_seen = BTreeSet::new();
        for seed in 0..200 {
            let fabric = Fabric::new(seed);
            let (first, second, peer, _) = pair(&fabric, &preset);
            let (target, target_handle) = memory(&second, 4, 0);
            let remote = import(&second, target_handle, &first, peer);
            let (_, local) = memory(&first, 4, 1);
            let segments: Vec<_> = (0..4).map(|at| segment(local, remote, at, 1)).collect();
            write(&first, 0, peer, &segments);
            assert_eq!(fabric.advance(1), 1);
            let seen = bytes(&target);
            if seen.iter().sum::<u8>() == 1 {
                first_seen.insert(seen.iter().position(|byte| *byte == 1).unwrap());
            }
        }
        assert_eq!(first_seen, (0..4).collect(), "preset {}", preset.name());
    }
}

#[test]
fn nobody_depends_on_the_other_sides_polling() {
    for seed in seeds(50) {
        for mode in [Mode::Read, Mode::Write] {
            let fabric = Fabric::new(seed);
            let (first, second, peer, _) = pair(&fabric, &Preset::ucx_tcp());
            let (_, remote) = memory(&second, 64, 1);
            let remote = import(&second, remote, &first, peer);
            let (_, local) = memory(&first, 64, 2);
            let segments = [segment(local, remote, 0, 64)];
            let _ = first.submit(TransferId(1), peer, mode, &segments, Some(b"note")).unwrap();
            assert!(outcome(&first, 1).is_done());
            while fabric.advance(1) == 1 {}
            // One poll, of an engine that had not polled before, has what came meanwhile.
            let events = poll(&second);
            assert!(matches!(&events[..], [Event::Notified { payload, .. }] if payload == b"note"));
        }
    }
}

#[test]
fn settled_and_notified_come_in_either_order() {
    let mut notified_first = BTreeSet::new();
    for seed in 0..100 {
        let fabric = Fabric::new(seed);
        let (first, second, peer, _) = pair(&fabric, &Preset::rc());
        let (_, remote) = memory(&second, 64, 1);
        let remote = import(&second, remote, &first, peer);
        let (_, local) = memory(&first, 64, 2);
        let segments = [segment(local, remote, 0, 64)];
        let _ = first.submit(TransferId(1), peer, Mode::Write, &segments, Some(b"x")).unwrap();
        while fabric.advance(1) == 1 {}
        let log = fabric.log();
        let at = |wanted: fn(&What) -> bool| log.iter().position(|e| wanted(&e.what)).unwrap();
        let settled = at(|what| matches!(what, What::Settled { .. }));
        let notified = at(|what| matches!(what, What::Notified { .. }));
        notified_first.insert(notified < settled);
    }
    assert_eq!(notified_first.len(), 2);
}
