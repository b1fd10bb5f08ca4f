//! Large batches, which several threads copy together, keep what a single thread keeps: whatever ends them, nothing is written
//! after it was said that they are over, and what is said to be done is there.

#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

#[cfg(test)]
mod dice;
#[cfg(test)]
mod happens;
#[cfg(test)]
mod memory;
#[cfg(test)]
mod pair;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use kvx_core::backend::{Outcome, TransferBackend as _};
use kvx_core::id::TransferId;
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::Mode;

use dice::Dice;
use happens::{Happens, happen};
use memory::{Watched, content, fill, memory, others};
use pair::{BYTES, Pair, wait};

const BEFORE: u8 = 0x11;
const SOURCE: u8 = 0x22;
const POISON: u8 = 0x33;
const AFTER: u8 = 0x44;

/// With `KVX_LONG=1` ten times as many.
fn rounds(short: u64) -> u64 {
    if std::env::var("KVX_LONG").is_ok_and(|value| value == "1") { short * 10 } else { short }
}

/// So many threads, either kind of source, both modes.
fn cases() -> impl Iterator<Item = (usize, bool, Mode)> {
    (1..=4).flat_map(|threads| {
        [true, false].into_iter().flat_map(move |shared| {
            [Mode::Read, Mode::Write].into_iter().map(move |mode| (threads, shared, mode))
        })
    })
}

/// A pair, of which the memory that a transfer reads is of this kind: the source, and the target.
fn open(threads: usize, shared: bool, mode: Mode) -> (Pair, Region, Region) {
    let (source, target) = (memory(shared), memory(true));
    fill(&target, BEFORE);
    let (mine, theirs) = if mode == Mode::Read { (&target, &source) } else { (&source, &target) };
    (Pair::new(threads, mine, theirs), source, target)
}

#[test]
fn every_byte_arrives() {
    for (threads, shared, mode) in cases() {
        let (mut pair, source, target) = open(threads, shared, mode);
        let dice = &mut Dice::new(threads as u64);
        let bytes: Vec<u8> =
            (0..BYTES / 8).flat_map(|_| dice.below(u64::MAX).to_le_bytes()).collect();
        source.write_at(0, &bytes).unwrap();
        for id in 0..3 {
            fill(&target, BEFORE);
            let segments = pair.segments(dice);
            pair.post(id, mode, &segments);
            pair.settle(1);
            let (of, outcome) = pair.one.settled.remove(0);
            let done = of == TransferId(id) && matches!(outcome, Outcome::Done { .. });
            assert!(done && content(&target) == bytes, "{threads} {shared} {mode}: {outcome:?}");
        }
    }
}

/// One case: three transfers of the same bytes, and something that happens after a while.
fn disturb(threads: usize, shared: bool, mode: Mode, what: Happens, dice: &mut Dice) -> usize {
    let (mut pair, source, target) = open(threads, shared, mode);
    fill(&source, SOURCE);
    let segments = pair.segments(dice);
    for id in 0..3 {
        pair.post(id, mode, &segments);
    }
    std::thread::sleep(Duration::from_micros(dice.below(1500)));
    happen(what, &pair, mode);
    let case = format!("{threads} threads, shared: {shared}, {mode}, {what:?}");
    // From here on nobody may read the source, or what was read does not count.
    let unread = mode == Mode::Read && matches!(what, Happens::Revoke | Happens::SourceGone);
    let done_before = unread.then(|| {
        pair.one.poll();
        pair.one.settled.len()
    });
    if unread {
        fill(&source, POISON);
    }
    // From here on nobody may write the target.
    if what == Happens::Revoke && mode == Mode::Write {
        assert_is_left_alone(&target, &case);
    }
    wait(&case, || {
        pair.one.poll();
        pair.other.poll();
        let down = pair.one.down && pair.other.down;
        pair.one.settled.len() == 3 && (down || !what.ends_connection())
    });
    let done = pair.one.settled.iter().filter(|(_, o)| matches!(o, Outcome::Done { .. })).count();
    if what == Happens::Revoke && mode == Mode::Read {
        let poisoned = content(&target).iter().filter(|byte| **byte == POISON).count();
        assert_eq!(poisoned, 0, "{case}: was read after its owner ended that");
    }
    if what == Happens::SourceGone && mode == Mode::Read {
        // One may have been checked just before: it is done, and was told later.
        let before = done_before.unwrap_or(0);
        assert!(done <= before + 1, "{case}: {done} done, {before} of them before");
    } else if done == 3 && !(what == Happens::Revoke && mode == Mode::Write) {
        assert_eq!(others(&target, SOURCE), 0, "{case}: is done, and is not there");
    }
    // All was told: nobody writes any more.
    assert_is_left_alone(&target, &case);
    done
}

fn assert_is_left_alone(target: &Region, case: &str) {
    fill(target, AFTER);
    std::thread::sleep(Duration::from_micros(300));
    assert_eq!(others(target, AFTER), 0, "{case}: was written after it was over");
}

#[test]
fn whatever_happens_it_is_over_when_that_is_said() {
    let (mut done, mut count) = (0, 0);
    for round in 0..rounds(2) {
        for (threads, shared, mode) in cases() {
            for what in Happens::ALL {
                let seed = round * 1000 + count as u64;
                done += disturb(threads, shared, mode, what, &mut Dice::new(seed + 1));
                count += 3;
            }
        }
    }
    // Things did happen in the midst of transfers, and not always before the first.
    assert!(done > 0 && done < count, "{done} of {count} done");
}

/// The regions are held until the last thread is out of the job, and let go of before its end is told.
#[test]
fn regions_are_held_as_long_as_anybody_copies_and_no_longer() {
    for (round, (threads, shared, mode)) in
        (0..rounds(3)).flat_map(|round| cases().map(move |case| (round, case)))
    {
        let dice = &mut Dice::new(round + 77);
        let (source, region) = (memory(shared), memory(true));
        fill(&source, SOURCE);
        let gone = Arc::new(AtomicBool::new(false));
        let watched = Watched { region: region.clone(), last: AFTER, gone: Arc::clone(&gone) };
        let watched = Region::new(watched).unwrap();
        let (mine, theirs) =
            if mode == Mode::Read { (&watched, &source) } else { (&source, &watched) };
        let mut pair = Pair::new(threads, mine, theirs);
        let segments = pair.segments(dice);
        pair.post(0, mode, &segments);
        std::thread::sleep(Duration::from_micros(dice.below(800)));
        let owner = if mode == Mode::Read { &pair.one } else { &pair.other };
        owner.backend.deregister(owner.region).unwrap();
        drop(watched);
        if dice.below(2) == 0 {
            // It may have settled.
            let _ = pair.one.backend.cancel(TransferId(0));
        }
        pair.settle(1);
        assert!(gone.load(SeqCst), "{threads} {shared} {mode}: still held");
        std::thread::sleep(Duration::from_micros(300));
        assert_eq!(others(&region, AFTER), 0, "{threads} {shared} {mode}: not held");
    }
}
