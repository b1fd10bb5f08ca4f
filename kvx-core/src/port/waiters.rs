//! Tasks that wait for something to happen on a port.

use std::collections::BTreeMap;
use std::task::Waker;

/// What a task can wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Topic {
    /// A notification arrived.
    Notified,
    /// A peer went down.
    PeerDown,
    /// A transfer settled or a peer went down.
    Settled,
    /// There is something to do for whoever drives the port.
    Driver,
}

impl Topic {
    const COUNT: usize = 4;
}

/// The waiting tasks of each topic. Each task has a seat, so that one that waits again replaces its own waker.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    next: u64,
    seats: [BTreeMap<u64, Waker>; Topic::COUNT],
}

impl Waiters {
    /// A seat number that was never given out.
    pub(super) fn seat(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Takes the seat. What is returned was there before, to be dropped once no lock is held: a waker may be the last thing
    /// that keeps a task, and whatever that owns, alive.
    #[must_use]
    pub(super) fn sit(&mut self, topic: Topic, seat: u64, waker: Waker) -> Option<Waker> {
        self.seats[topic as usize].insert(seat, waker)
    }

    /// Gives the seat up. As for [`sit`](Self::sit).
    #[must_use]
    pub(super) fn leave(&mut self, topic: Topic, seat: u64) -> Option<Waker> {
        self.seats[topic as usize].remove(&seat)
    }

    /// Moves the tasks that wait for `topic` to `out`, to be woken once no lock is held.
    pub(super) fn take(&mut self, topic: Topic, out: &mut Vec<Waker>) {
        let seats = &mut self.seats[topic as usize];
        if !seats.is_empty() {
            out.extend(std::mem::take(seats).into_values());
        }
    }

    /// As [`take`](Self::take), for every topic.
    pub(super) fn take_all(&mut self, out: &mut Vec<Waker>) {
        for seats in &mut self.seats {
            out.extend(std::mem::take(seats).into_values());
        }
    }
}
