//! What a backend can do. The conformance suite is gated on it, and nothing claims what it does not do.

use serde::Serialize;

use crate::error::{Error, Result};
use crate::memory::MemoryKind;
use crate::transfer::Mode;

/// What a backend can do, as opened. Fields named `max_*` are inclusive limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Capabilities {
    /// One-sided reads.
    pub read: bool,
    /// One-sided writes.
    pub write: bool,
    /// Host memory can be registered.
    pub host_memory: bool,
    /// Memory of CUDA devices can be registered.
    pub cuda_memory: bool,
    /// Limits on what one call may carry.
    pub limits: Limits,
    /// What is known about the order in which data becomes visible.
    pub ordering: Ordering,
    /// How a peer's access to my memory can be ended.
    pub revoke: Revoke,
    /// A notification costs no message of its own (write with immediate, or the like).
    pub native_notification: bool,
    /// [`event_fd`](crate::backend::TransferBackend::event_fd) gives a descriptor to sleep on.
    pub event_fd: bool,
    /// The place outside of which it reaches nobody: two sides reach each other only where both say the same. `None` of a
    /// backend that reaches other hosts, or does not know.
    pub place: Option<String>,
}

impl Capabilities {
    /// A backend that can do nothing, within the largest limits: set what it can.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            read: false,
            write: false,
            host_memory: false,
            cuda_memory: false,
            limits: Limits::unlimited(),
            ordering: Ordering::Unordered,
            revoke: Revoke::None,
            native_notification: false,
            event_fd: false,
            place: None,
        }
    }

    /// Whether transfers of this mode can be posted.
    #[must_use]
    pub const fn mode(&self, mode: Mode) -> bool {
        match mode {
            Mode::Read => self.read,
            Mode::Write => self.write,
        }
    }

    /// Whether memory of this kind can be registered.
    #[must_use]
    pub const fn memory(&self, kind: MemoryKind) -> bool {
        match kind {
            MemoryKind::Host => self.host_memory,
            MemoryKind::Cuda(_) => self.cuda_memory,
        }
    }

    /// Whether the claims agree with each other.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Internal`](crate::ErrorKind::Internal), naming the contradiction: neither mode, no kind of memory,
    /// or a limit of zero.
    pub fn check(&self) -> Result<()> {
        let contradiction = if !self.read && !self.write {
            "neither reads nor writes"
        } else if !self.host_memory && !self.cuda_memory {
            "no kind of memory"
        } else if self.limits.max_segment_bytes == 0 {
            "max_segment_bytes is 0"
        } else if self.limits.max_batch_segments == 0 {
            "max_batch_segments is 0"
        } else if self.limits.max_in_flight == 0 {
            "max_in_flight is 0"
        } else {
            return Ok(());
        };
        Err(Error::new(crate::ErrorKind::Internal, "capabilities", contradiction))
    }
}

/// Limits on what one call may carry. The port splits by them, so callers need not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of one segment.
    pub max_segment_bytes: u64,
    /// Segments of one batch.
    pub max_batch_segments: u32,
    /// Bytes of one notification.
    pub max_notification_bytes: u32,
    /// Batches in flight to one peer.
    pub max_in_flight: u32,
}

impl Limits {
    /// The largest that can be stated.
    #[must_use]
    pub const fn unlimited() -> Self {
        Self {
            max_segment_bytes: u64::MAX,
            max_batch_segments: u32::MAX,
            max_notification_bytes: u32::MAX,
            max_in_flight: u32::MAX,
        }
    }
}

/// In which order a batch's data becomes visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Ordering {
    /// Batches to one peer become visible in the order they were posted (RC).
    PerPeer,
    /// In any order (SRD, adaptive routing).
    Unordered,
}

/// How a peer's access to my memory can be ended, other than by asking it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Revoke {
    /// It cannot: peers write only where the owner can quarantine.
    None,
    /// One peer's access to everything (RC: the queue pair is destroyed). It ends with the connection, too, whichever side
    /// ended that: by *peer down* at the latest.
    PerPeer,
    /// Everybody's access to one region, by deregistering it.
    PerRegion,
}
