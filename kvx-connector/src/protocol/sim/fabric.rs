//! Memory that holds a tag in each block, and transfers that copy them when they like.

use std::collections::{BTreeMap, BTreeSet};

use kvx_core::id::Incarnation;

use crate::protocol::terms::{Access, TransferNumber};

/// The memory of one process.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    pub(super) tags: Vec<u32>,
    /// The newest last, and used first.
    free: Vec<usize>,
    used: BTreeSet<usize>,
}

impl Memory {
    /// A block for something new.
    pub(super) fn allocate(&mut self) -> usize {
        let block = self.free.pop().unwrap_or_else(|| {
            self.tags.push(0);
            self.tags.len() - 1
        });
        self.used.insert(block);
        block
    }

    /// A block is used for something else at once.
    pub(super) fn release(&mut self, block: usize, junk: u32) {
        if self.used.remove(&block) {
            self.tags[block] = junk;
            self.free.push(block);
        }
    }

    pub(super) fn used(&self) -> usize {
        self.used.len()
    }
}

/// A transfer under way.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub(super) user: usize,
    pub(super) user_life: Incarnation,
    pub(super) owner: usize,
    pub(super) owner_life: Incarnation,
    pub(super) request: u64,
    pub(super) transfer: TransferNumber,
    pub(super) access: Access,
    /// Block at the owner, block at the user.
    pub(super) copies: Vec<(usize, usize)>,
    pub(super) copied: usize,
    /// Its connection has ended: nothing more is moved.
    pub(super) barred: bool,
    pub(super) cancelled: bool,
    /// It will fail, and may be tried again.
    pub(super) fails: bool,
    /// When it settles, and the number of the event: later ones are void.
    pub(super) settles: u64,
    /// It takes no notice of being cancelled, or of its connection's end.
    pub(super) stuck: bool,
}

/// What is under way.
#[derive(Debug, Default)]
pub(super) struct Flights {
    pub(super) all: BTreeMap<u64, Flight>,
    pub(super) next: u64,
}

impl Flights {
    pub(super) fn add(&mut self, flight: Flight) -> u64 {
        self.next += 1;
        self.all.insert(self.next, flight);
        self.next
    }

    pub(super) fn of_transfer(&self, life: Incarnation, transfer: TransferNumber) -> Option<u64> {
        let mut all = self.all.iter();
        let found = all.find(|(_, it)| it.user_life == life && it.transfer == transfer);
        found.map(|(id, _)| *id)
    }

    /// Those from one process to another.
    pub(super) fn between(&self, user: Incarnation, owner: Incarnation) -> Vec<u64> {
        let of = |it: &Flight| it.user_life == user && it.owner_life == owner;
        self.all.iter().filter(|(_, it)| of(it)).map(|(id, _)| *id).collect()
    }

    pub(super) fn from(&self, user: Incarnation) -> Vec<u64> {
        let of = |it: &Flight| it.user_life == user;
        self.all.iter().filter(|(_, it)| of(it)).map(|(id, _)| *id).collect()
    }
}
