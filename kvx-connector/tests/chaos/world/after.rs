//! What is left when a replay is over.

use std::time::{Duration, Instant};

use super::{PATIENCE, World};
use crate::words::{Count, Order};

/// How much more memory of its own a process may have than when it was warm.
const MEMORY_KIB: u64 = 32 << 10;

impl World {
    /// What each holds is what it held when it was warm: nothing of those that died.
    pub(super) fn compare(&mut self) {
        let warm: Vec<Option<Count>> = self.slots.iter().map(|slot| slot.warm).collect();
        let fits = |count: &Count, warm: &Count| {
            count.is_no_more_than(warm) && count.kib <= warm.kib + MEMORY_KIB
        };
        let same = |counts: &[Count]| {
            let mut both = counts.iter().zip(&warm);
            both.all(|(count, warm)| warm.as_ref().is_none_or(|warm| fits(count, warm)))
        };
        let settled = self.settle(same);
        if !same(&settled) || settled.iter().any(|count| count.leases + count.fetches > 0) {
            self.ledger.wrong.push(format!("what is held: {settled:?}, when warm: {warm:?}"));
        }
        self.ledger.compare();
    }

    /// Stops all: each ends by itself, and leaves nothing.
    pub(super) fn end(&mut self) {
        (0..self.slots.len()).for_each(|index| self.tell(index, &Order::Stop));
        let all = |world: &Self| world.slots.iter().all(|slot| slot.stopped.is_some());
        self.wait(Instant::now() + PATIENCE, all);
        for slot in &mut self.slots {
            let name = &slot.setup.name;
            let process = slot.process.as_mut();
            if !process.is_some_and(|process| process.ends_within(PATIENCE)) {
                self.ledger.wrong.push(format!("{name} does not end"));
            }
            match slot.stopped {
                // UCX keeps what it has made for the process until that ends.
                Some((before, after))
                    if slot.setup.backend == "shm" && !after.is_no_more_than(&before) =>
                {
                    self.ledger
                        .wrong
                        .push(format!("{name} leaves {after:?}, and had {before:?} before"));
                }
                Some(_) => {}
                None => self.ledger.wrong.push(format!("{name} did not say that it stopped")),
            }
        }
    }

    /// Asks what all hold until that is quiet and as wanted, or patience ends.
    pub(super) fn settle(&mut self, wanted: impl Fn(&[Count]) -> bool) -> Vec<Count> {
        let until = Instant::now() + PATIENCE;
        let mut counts = Vec::new();
        while Instant::now() < until {
            self.slots.iter_mut().for_each(|slot| slot.counted = None);
            (0..self.slots.len()).for_each(|index| self.tell(index, &Order::Count));
            self.wait(until, |world| world.slots.iter().all(|slot| slot.counted.is_some()));
            let last = std::mem::replace(
                &mut counts,
                self.slots.iter().map(|slot| slot.counted.unwrap_or_default()).collect(),
            );
            let quiet = counts.iter().all(|count| count.leases + count.fetches == 0);
            let held = |it: &Count| (it.descriptors, it.threads, it.shared, it.peers);
            if quiet && wanted(&counts) && last.iter().map(held).eq(counts.iter().map(held)) {
                break;
            }
            self.wait(Instant::now() + Duration::from_millis(20), |_| false);
        }
        counts
    }
}
