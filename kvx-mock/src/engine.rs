//! What belongs to one engine: its registrations, its peers, and what it posted to each of them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use kvx_core::backend::{Event, Outcome};
use kvx_core::id::{Incarnation, PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::Region;
use kvx_core::slots::Slots;
use kvx_core::transfer::Mode;
use kvx_core::{Error, Result};

use crate::error::{closed, killed, stale};
use crate::net::{ConnectionId, EngineId};
use crate::preset::Preset;
use crate::schedule::{Key, Lane};
use crate::timing::Nanos;

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
    pub(crate) inbox: Inbox,
    /// Whether it made an offer, so that a reply can answer one.
    pub(crate) offered: bool,
    pub(crate) life: Life,
    /// Whether its process is stopped.
    pub(crate) stopped: bool,
}

/// Whether an engine lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// It does.
    Up,
    /// It was closed in an orderly way.
    Closed,
    /// Its process was killed.
    Killed,
}

/// Events that wait to be polled, and the room for notifications.
#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) events: VecDeque<Event>,
    /// Ended connections among the events.
    pub(crate) downs: usize,
    /// Notifications among the events.
    pub(crate) notified: usize,
    /// Notifications under way, for each of which there is room.
    pub(crate) coming: usize,
    /// Transfers of others whose notification waits for room, the oldest first.
    pub(crate) waiting: VecDeque<(Lane, u64)>,
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
    pub(crate) name: Arc<str>,
    pub(crate) incarnation: Incarnation,
    pub(crate) connection: ConnectionId,
    /// The other side's handle of this one.
    pub(crate) reverse: Option<PeerId>,
    /// Whether the handshake allows posting.
    pub(crate) ready: bool,
    pub(crate) state: PeerState,
    /// Whether this side's access to the other's memory has ended.
    pub(crate) revoked: bool,
    /// Whether something in this lane was lost for good, so that nothing more of it moves.
    pub(crate) broken: bool,
    pub(crate) keys: BTreeSet<RemoteRegionId>,
    /// What was posted and has not settled, in the order of posting.
    pub(crate) transfers: BTreeMap<u64, Transfer>,
    /// Notifications that have set out, in that order.
    pub(crate) notes: BTreeMap<u64, Note>,
    pub(crate) in_flight: u32,
    /// Until when the link carries data that is already under way.
    pub(crate) busy_until: Nanos,
    /// The news that the other side has ended the connection, and what it says.
    pub(crate) notice: Option<(Wait, &'static str)>,
    pub(crate) silence: Option<Key>,
    pub(crate) loss: Option<Key>,
    pub(crate) finish: Option<Key>,
}

/// What something that is under way waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Its time.
    Time(Key),
    /// Those before it in its lane, or room at the other side.
    Turn,
    /// The way to the other side to be open again.
    Way,
    /// A rule to let go of it; the second number orders what is held.
    Rule(u64, u64),
}

/// The life of one side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerState {
    /// In use.
    Open,
    /// Over: what is in flight is settling. With the reason, when it was not this side that ended it.
    Closing(Option<&'static str>),
    /// Over, all settled, *peer down* waits to be polled.
    Down,
}

/// A posted batch.
pub(crate) struct Transfer {
    pub(crate) id: TransferId,
    pub(crate) mode: Mode,
    pub(crate) work: Work,
    /// Of all segments.
    pub(crate) bytes: u64,
    pub(crate) notify: Option<Vec<u8>>,
    pub(crate) posted_at: Nanos,
    pub(crate) cancelled: bool,
    /// Why it must fail without moving one more byte.
    pub(crate) doomed: Option<Error>,
    pub(crate) stage: Stage,
    pub(crate) wait: Wait,
    /// Whether rules have been asked about what it waits for.
    pub(crate) judged: bool,
}

/// How far a transfer has come.
pub(crate) enum Stage {
    /// Data is to be moved.
    Data,
    /// All data has arrived, and its notification waits for room at the other side.
    Room,
    /// It is over. What it waits for is to be reported.
    Over(Outcome),
}

/// A notification that has set out.
pub(crate) struct Note {
    pub(crate) id: TransferId,
    pub(crate) payload: Vec<u8>,
    pub(crate) wait: Wait,
    pub(crate) judged: bool,
    /// Whether there is room kept for it.
    pub(crate) room: bool,
}

/// What is left to copy, and the regions that this needs.
#[derive(Default)]
pub(crate) struct Work {
    pub(crate) locals: Vec<(RegionId, Region)>,
    pub(crate) remotes: Vec<(RemoteRegionId, RemoteKey)>,
    /// In the reverse of the order in which they will be copied.
    pub(crate) jobs: Vec<Job>,
    /// How many of them are copied next.
    pub(crate) part: usize,
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
    /// Fails when it is closed, or killed.
    pub(crate) fn check_open(&self, operation: &'static str) -> Result<()> {
        match self.life {
            Life::Up => Ok(()),
            Life::Closed => Err(closed(operation)),
            Life::Killed => Err(killed(operation)),
        }
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

    /// Whether there is room for one more notification. Those that wait for room come first.
    pub(crate) fn has_room(&self) -> bool {
        let Inbox { notified, coming, .. } = &self.inbox;
        notified + coming < self.preset.most_notifications()
    }
}

impl Work {
    /// How many bytes the next part has.
    pub(crate) fn part_bytes(&self) -> u64 {
        let rest = self.jobs.len().saturating_sub(self.part);
        self.jobs[rest..].iter().fold(0, |sum, job| sum.saturating_add(job.bytes))
    }
}
