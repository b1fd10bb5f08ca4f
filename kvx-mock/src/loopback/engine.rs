//! One engine: its registrations, keys and peers, and how it moves bytes.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use kvx_core::Result;
use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId};
use kvx_core::memory::Region;
use kvx_core::slots::Slots;
use kvx_core::transfer::{Mode, PostedSegment};

use super::connection::{Connection, End};
use super::inbox::Inbox;
use crate::error::{closed, killed, malformed, stale};
use crate::step::copy_between;

/// One engine.
pub(super) struct Engine {
    pub(super) incarnation: Incarnation,
    pub(super) inbox: Inbox,
    tables: RwLock<Tables>,
}

/// What handles stand for. Read while bytes move, so that whoever changes it waits for them.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) life: Life,
    /// Whether it made an offer, so that a reply can answer one.
    pub(super) offered: bool,
    pub(super) regions: Slots<RegionId, Arc<Registered>>,
    pub(super) keys: Slots<RemoteRegionId, Imported>,
    pub(super) peers: Slots<PeerId, Side>,
}

/// Whether an engine lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Life {
    #[default]
    Up,
    Closed,
    Killed,
}

/// A registration.
pub(super) struct Registered {
    pub(super) region: Region,
    pub(super) secret: u64,
}

/// An imported key: the peer's registration, as long as that lasts.
pub(super) struct Imported {
    pub(super) peer: PeerId,
    pub(super) region: Weak<Registered>,
}

/// This engine's side of a connection.
pub(super) struct Side {
    pub(super) connection: Arc<Connection>,
    /// Which end it is.
    pub(super) end: usize,
    pub(super) keys: BTreeSet<RemoteRegionId>,
}

impl Side {
    pub(super) fn mine(&self) -> &End {
        &self.connection.ends[self.end]
    }

    pub(super) fn other(&self) -> &End {
        &self.connection.ends[1 - self.end]
    }
}

impl Engine {
    pub(super) fn new(incarnation: Incarnation) -> Self {
        Self { incarnation, inbox: Inbox::default(), tables: RwLock::default() }
    }

    pub(super) fn tables(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tables_mut(&self) -> RwLockWriteGuard<'_, Tables> {
        self.tables.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether that was its end.
    pub(super) fn end_life(&self, life: Life) -> bool {
        let mut tables = self.tables_mut();
        let ends = tables.life == Life::Up;
        if ends {
            tables.life = life;
        }
        ends
    }

    /// Takes its registrations from it.
    pub(super) fn take_memory(&self) -> Vec<Arc<Registered>> {
        self.tables_mut().regions.drain()
    }

    /// Forgets a peer that is down, and its keys.
    pub(super) fn forget(&self, peer: PeerId) {
        let mut tables = self.tables_mut();
        for key in tables.peers.remove(peer).into_iter().flat_map(|side| side.keys) {
            tables.keys.remove(key);
        }
    }
}

impl Tables {
    /// Fails when it is closed, or killed.
    pub(super) fn check_open(&self, operation: &'static str) -> Result<()> {
        match self.life {
            Life::Up => Ok(()),
            Life::Closed => Err(closed(operation)),
            Life::Killed => Err(killed(operation)),
        }
    }

    pub(super) fn peer(&self, operation: &'static str, peer: PeerId) -> Result<&Side> {
        self.peers.get(peer).ok_or_else(|| stale(operation, "peer", peer))
    }

    fn local(&self, handle: RegionId) -> Result<&Registered> {
        let registered = self.regions.get(handle);
        Ok(registered.ok_or_else(|| stale("submit", "local region", handle))?)
    }

    fn remote(&self, peer: PeerId, handle: RemoteRegionId) -> Result<&Imported> {
        let imported = self.keys.get(handle).filter(|imported| imported.peer == peer);
        imported.ok_or_else(|| stale("submit", "remote region", handle))
    }

    /// Fails when a handle of a batch is stale: nothing has been moved then.
    pub(super) fn check_handles(&self, peer: PeerId, segments: &[PostedSegment]) -> Result<()> {
        let mut last = None;
        for segment in segments {
            let handles = Some((segment.local, segment.remote));
            if last != handles {
                self.local(segment.local)?;
                self.remote(peer, segment.remote)?;
                last = handles;
            }
        }
        Ok(())
    }

    /// Moves the bytes of a batch. Regions are looked up again only where they change.
    pub(super) fn copy(&self, peer: PeerId, mode: Mode, segments: &[PostedSegment]) -> Result<()> {
        let mut rest = segments;
        while let Some(first) = rest.first() {
            let local = self.local(first.local)?;
            let remote = self.remote(peer, first.remote)?.region.upgrade().ok_or_else(|| {
                malformed("transfer", "the peer no longer has this region registered")
                    .with_context("region", first.remote)
            })?;
            let same = |s: &&PostedSegment| s.local == first.local && s.remote == first.remote;
            let count = rest.iter().take_while(same).count();
            let (run, after) = rest.split_at(count);
            for PostedSegment { local_offset, remote_offset, bytes, .. } in run {
                let (from, to) = ((&local.region, *local_offset), (&remote.region, *remote_offset));
                copy_between(mode, from, to, *bytes)?;
            }
            rest = after;
        }
        Ok(())
    }
}
