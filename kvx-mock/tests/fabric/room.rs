//! An engine that does not poll: its peers fill up, and nobody's memory grows.

use std::collections::BTreeSet;

use kvx_core::backend::{Submit, TransferBackend as _};
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
