//! What belongs to one engine: its registrations, its peers, and what it posted to each of them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use kvx_core::backend::Event;
use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::Region;
use kvx_core::transfer::Mode;
use kvx_core::{Error, Result};

use crate::error::{closed, stale};
use crate::net::{ConnectionId, EngineId};
use crate::preset::Preset;
use crate::slots::Slots;

/// One engine.
pub(crate) struct Engine {
    pub(crate) name: Arc<str>,
    pub(crate) incarnation: Incarnation,
    pub(crate) preset: Preset,
    pub(crate) regions: Slots<RegionId, Registered>,
    pub(crate) keys: Slots<RemoteRegionId, Imported>,
    pub(crate) peers: Slots<PeerId, Peer>,
    pub(crate) closing: BTreeSet<PeerId>,
    pub(crate) in_flight: BTreeMap<TransferId, PeerId>,
    pub(crate) events: VecDeque<Event>,
    /// Whether it made an offer, so that a reply can answer one.
    pub(crate) offered: bool,
    pub(crate) closed: bool,
}

/// A registration.
pub(crate) struct Registered {
    pub(crate) region: Region,
    pub(crate) secret: u64,
}

/// What a key blob says about a peer's region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteKey {
    pub(crate) incarnation: Incarnation,
    pub(crate) region: RegionId,
    pub(crate) bytes: u64,
    pub(crate) secret: u64,
}

/// An imported key blob.
pub(crate) struct Imported {
    pub(crate) peer: PeerId,
    pub(crate) key: RemoteKey,
}

/// One side of a connection, and the lane of what this side posted to the other.
pub(crate) struct Peer {
    pub(crate) engine: EngineId,
    pub(crate) incarnation: Incarnation,
    pub(crate) connection: ConnectionId,
    /// The other side's handle of this one.
    pub(crate) reverse: Option<PeerId>,
    /// Whether the handshake allows posting.
    pub(crate) ready: bool,
    pub(crate) state: PeerState,
    pub(crate) keys: BTreeSet<RemoteRegionId>,
    pub(crate) transfers: VecDeque<Transfer>,
    /// Notifications whose data has arrived.
    pub(crate) notes: VecDeque<Vec<u8>>,
    pub(crate) in_flight: u32,
    pub(crate) active_at: Option<usize>,
}

/// The life of one side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerState {
    /// In use.
    Open,
    /// Over: what is in flight is settling.
    Closing(Closing),
    /// Over, all settled, *peer down* waits to be polled.
    Down,
}

/// How a connection ended, seen from one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closing {
    /// Why, when it was not this side that ended it.
    pub(crate) reason: Option<&'static str>,
    /// Whether this side's access to the other's memory has ended.
    pub(crate) revoked: bool,
}

/// A posted batch.
pub(crate) struct Transfer {
    pub(crate) id: TransferId,
    pub(crate) mode: Mode,
    pub(crate) work: Work,
    pub(crate) notify: Option<Vec<u8>>,
    pub(crate) cancelled: bool,
    /// Why it must fail without moving one more byte.
    pub(crate) doomed: Option<Error>,
}

/// What is left to copy, and the regions that this needs.
#[derive(Default)]
pub(crate) struct Work {
    pub(crate) locals: Vec<(RegionId, Region)>,
    pub(crate) remotes: Vec<(RemoteRegionId, RemoteKey)>,
    /// In the reverse of the order in which they will be copied.
    pub(crate) jobs: Vec<Job>,
}

/// A segment, with indices in place of handles.
#[derive(Clone, Copy)]
pub(crate) struct Job {
    pub(crate) local: usize,
    pub(crate) remote: usize,
    pub(crate) local_offset: u64,
    pub(crate) remote_offset: u64,
    pub(crate) bytes: u64,
}

impl Engine {
    /// Fails when it is closed.
    pub(crate) fn check_open(&self, operation: &'static str) -> Result<()> {
        if self.closed { Err(closed(operation)) } else { Ok(()) }
    }

    pub(crate) fn peer(&self, operation: &'static str, peer: PeerId) -> Result<&Peer> {
        self.peers.get(peer).ok_or_else(|| stale(operation, "peer", peer))
    }

    /// The registration that a peer's key names, if it still does.
    pub(crate) fn reached_by(&self, key: &RemoteKey) -> Option<&Region> {
        let registered = self.regions.get(key.region)?;
        (registered.secret == key.secret && self.incarnation == key.incarnation)
            .then_some(&registered.region)
    }
}

impl Peer {
    pub(crate) fn is_idle(&self) -> bool {
        self.transfers.is_empty() && self.notes.is_empty()
    }
}
