//! A transfer's report says by which way its bytes went: for every pair of memories, in both modes.

#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

#[cfg(test)]
mod pair;

use kvx_core::transfer::Mode;

use pair::{KINDS, Pair, segment};

/// Within `submit` and on a thread of the backend's, with a notification and without.
#[test]
fn a_report_names_the_kind_of_memory_that_was_copied_from() {
    for options in ["", "inline_bytes=0", "copy_threads=2", "copy_threads=2,together_bytes=0"] {
        let pair = Pair::new(options);
        for mode in [Mode::Read, Mode::Write] {
            for note in [None, Some(&b"note"[..])] {
                for (mine, theirs) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let from = if mode == Mode::Read { theirs } else { mine };
                    for bytes in [512, 200_000] {
                        let report = pair.transfer(mode, &[segment(mine, theirs, 1, bytes)], note);
                        assert_eq!(
                            report.route.as_deref(),
                            Some(KINDS[from].1),
                            "{mode} {mine} {theirs} {options}"
                        );
                    }
                }
                // One batch that takes both ways.
                let both = [segment(0, 0, 0, 64), segment(1, 1, 1, 64)];
                let report = pair.transfer(mode, &both, note);
                assert_eq!(report.route.as_deref(), Some("mapped+process_vm"), "{mode}");
                // From one kind into both.
                let (a, b) = if mode == Mode::Read { ((0, 1), (1, 1)) } else { ((1, 0), (1, 1)) };
                let into_both = [segment(a.0, a.1, 0, 64), segment(b.0, b.1, 1, 64)];
                let report = pair.transfer(mode, &into_both, note);
                assert_eq!(report.route.as_deref(), Some("process_vm"), "{mode}");
            }
        }
        let device = pair.one.peer_info(pair.peer).unwrap().device;
        assert_eq!(device.as_deref(), Some("mapped+process_vm"));
    }
}

#[test]
fn several_batches_are_joined_and_what_moves_nothing_names_no_way() {
    let pair = Pair::new("");
    let most = u64::from(pair.one.capabilities().limits.max_batch_segments);
    for mode in [Mode::Read, Mode::Write] {
        // The first batch is full of one kind, the second has the other.
        let first = (0..most).map(|at| segment(1, 1, at, 8));
        let all: Vec<_> = first.chain([segment(0, 0, 0, 8)]).collect();
        let report = pair.transfer(mode, &all, None);
        assert_eq!((report.batches, report.route.as_deref()), (2, Some("mapped+process_vm")));
        let report = pair.transfer(mode, &[], Some(b"bare"));
        assert_eq!(report.route, None);
    }
}
