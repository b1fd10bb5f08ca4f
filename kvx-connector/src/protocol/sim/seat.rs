//! Processes: their clocks, their machines, their memory, and what the checker knows of them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvx_core::id::Incarnation;

use super::fabric::Memory;
use super::spec::Spec;
use crate::protocol::id::{LeaseName, Reader};
use crate::protocol::message::ToOwner;
use crate::protocol::owner::Owner;
use crate::protocol::terms::{Access, RequestNumber, StageNumber, TransferNumber};
use crate::protocol::user::User;

/// A clock that runs at its own rate, from its own beginning.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    pub(super) base: u64,
    /// Of a thousand.
    pub(super) rate: u64,
}

impl Clock {
    /// What it says at a time of the world.
    pub(super) const fn at(self, now: u64) -> Duration {
        Duration::from_micros(self.base + now * self.rate / 1000)
    }

    /// The first time of the world at which it says so much.
    pub(super) fn when(self, local: Duration) -> u64 {
        let micros = u64::try_from(local.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX / 2000);
        let mut at = micros.saturating_sub(self.base) * 1000 / self.rate;
        while self.at(at) < local {
            at += 1;
        }
        at
    }

    /// How long something takes on the world's clock.
    pub(super) fn span(self, local: Duration) -> u64 {
        u64::try_from(local.as_micros()).unwrap_or(0) * 1000 / self.rate + 1
    }
}

/// What processes of both kinds have.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) life: Incarnation,
    pub(super) alive: bool,
    pub(super) clock: Clock,
    pub(super) stopped_until: u64,
    /// For how long it was stopped in all.
    pub(super) stopped: u64,
    /// When it is next told that time has passed.
    pub(super) wake: Option<u64>,
    pub(super) memory: Memory,
}

/// A rank of the owner.
#[derive(Debug)]
pub(super) struct OwnerSeat {
    pub(super) process: Process,
    pub(super) machine: Owner,
    pub(super) specs: BTreeMap<LeaseName, Spec>,
    pub(super) early: BTreeMap<LeaseName, (Duration, Vec<(Incarnation, ToOwner)>)>,
    /// Leases that will be granted: what is said of them before waits for as long as that takes.
    pub(super) expected: BTreeSet<LeaseName>,
    /// Of which lease, part, and which stage.
    pub(super) stages: BTreeMap<StageNumber, (LeaseName, u32, u8)>,
}

/// A rank of the user.
#[derive(Debug)]
pub(super) struct UserSeat {
    pub(super) process: Process,
    pub(super) machine: User,
    pub(super) requests: BTreeMap<RequestNumber, Req>,
    pub(super) connections: BTreeMap<Incarnation, Connection>,
    pub(super) stages: BTreeMap<StageNumber, (RequestNumber, u16, u32, u8)>,
    pub(super) transfers: BTreeMap<TransferNumber, RequestNumber>,
}

/// A user's connection to a rank of the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Connection {
    Up,
    /// It ends once everything has settled.
    Ending {
        gone: bool,
    },
}

/// A request, as the checker sees it.
#[derive(Clone, Debug)]
pub(super) struct Req {
    pub(super) job: usize,
    pub(super) reader: Reader,
    /// What it does: that of the lease, but where the engine is mistaken.
    pub(super) access: Access,
    /// Whether its ticket was edited: it would read or write what was never leased.
    pub(super) edited: bool,
    /// The ranks of the owner and their lives at that time.
    pub(super) sources: Vec<(usize, Incarnation)>,
    /// Its blocks, by source and part, and what each holds after the stages.
    pub(super) blocks: BTreeMap<(u16, u32), (usize, u32)>,
    pub(super) deadline: Duration,
    pub(super) flying: usize,
    pub(super) staging: usize,
    pub(super) over: bool,
    pub(super) quarantined: bool,
    pub(super) aborted: bool,
    pub(super) severed: bool,
    /// What happened that may be the cause of a failure.
    pub(super) lost: BTreeSet<Incarnation>,
    pub(super) transfer_failed: bool,
    pub(super) stage_failed: bool,
}
