//! What the supervisor and an engine in a process of its own say to each other: a line each, as JSON.

use serde::{Deserialize, Serialize};

/// How an engine's process is set up, in its environment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) name: String,
    pub(crate) key: [u8; 32],
    pub(crate) tp: u32,
    /// Heads before tokens in its memory, or after.
    pub(crate) heads_first: bool,
    pub(crate) blocks: u32,
    pub(crate) backend: String,
    pub(crate) options: Vec<(String, String)>,
    pub(crate) listen: String,
    /// Where others reach its ranks, if not where they listen.
    pub(crate) advertised: Vec<String>,
    /// Every so many milliseconds what has stopped half-way goes on; 0: nothing stops.
    pub(crate) slow: u32,
    /// A fault of the protocol, by its name.
    pub(crate) plant: Option<String>,
}

/// What an engine is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    Publish { request: u64, tokens: u64, ttl_ms: u64, hard_ms: u64 },
    Withdraw { request: u64 },
    Fetch { attempt: u64, request: u64, ticket: String, from: u64, deadline_ms: u64 },
    Abort { attempt: u64 },
    Count,
    Stop,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum How {
    Ready,
    Failed,
    Aborted,
}

/// What an engine says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Said {
    Up {
        listens: Vec<String>,
    },
    Ticket {
        request: u64,
        ticket: String,
    },
    /// There are no blocks left.
    Full {
        number: u64,
    },
    Freed {
        request: u64,
        whys: Vec<String>,
    },
    Ended(Ended),
    /// Nothing moves any more in the blocks of an attempt that ended quarantined.
    Quiet {
        attempt: u64,
    },
    /// Somebody has written into blocks that nobody was using.
    Spoilt {
        blocks: Vec<u32>,
        runs: u64,
    },
    Counted(Count),
    /// The engine is gone: what there was before it, and what there is after it.
    Stopped {
        before: Count,
        after: Count,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ended {
    pub(crate) attempt: u64,
    pub(crate) how: How,
    /// Runs of bytes that are not those of the request, where it is ready.
    pub(crate) wrong: u64,
    /// Runs of bytes that were changed though they were not asked for.
    pub(crate) outside: u64,
    /// Whether exactly the blocks that were asked for are named as not good, where it failed.
    pub(crate) all_named: bool,
    pub(crate) quarantined: bool,
    pub(crate) elapsed_ms: u64,
    pub(crate) error: String,
}

/// What a process holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Count {
    /// Descriptors, but for those of sessions with peers.
    pub(crate) descriptors: usize,
    /// Sessions with peers.
    pub(crate) sessions: usize,
    pub(crate) threads: usize,
    /// Mappings of shared memory.
    pub(crate) shared: usize,
    /// Memory of its own.
    pub(crate) kib: u64,
    pub(crate) leases: usize,
    pub(crate) fetches: usize,
    pub(crate) peers: usize,
}

impl Count {
    /// Whether a process holds no more than it did. With each peer it may have four sessions: either side may have dialled, and
    /// again where it was told of another life (`PER_PEER` of `protocol::peers`).
    pub(crate) const fn is_no_more_than(&self, before: &Self) -> bool {
        self.descriptors <= before.descriptors
            && self.threads <= before.threads
            && self.shared <= before.shared
            && self.peers <= before.peers
            && self.sessions <= 4 * self.peers
    }
}
