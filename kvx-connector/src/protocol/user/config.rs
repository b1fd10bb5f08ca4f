//! What bounds a user, and what it counts.

use std::time::Duration;

/// Bounds and times of a user. A later version may have more.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Config {
    /// Most requests that are not over. 65,536.
    pub max_requests: usize,
    /// Most sources of one request. 1,024.
    pub max_sources: usize,
    /// Most parts of one source. 65,536.
    pub max_parts: u32,
    /// Most releases that wait for their answer. 16,384.
    pub max_releases: usize,
    /// Most transfers of one source that are posted at one time. 64.
    pub window: usize,
    /// From one heartbeat to the next. A third of the owner's time to live, or less. 5 s.
    pub hold_every: Duration,
    /// From the beginning of a read of which everything is known until its first heartbeat: most are over before. 20 ms.
    pub hold_first: Duration,
    /// How long the first answer is waited for, before a message is sent again; doubled each time. 50 ms.
    pub again_first: Duration,
    /// Its upper limit. 1 s.
    pub again_most: Duration,
    /// How often a transfer is tried again. 3.
    pub retries: u8,
    /// After how long it is tried again; doubled each time. 10 ms.
    pub retry_first: Duration,
    /// After how long a transfer for which there was no room is posted again. 1 ms.
    pub busy_for: Duration,
    /// How often a release is sent. 8.
    pub release_tries: u8,
    /// For how long a release may wait until its peer can be reached, and answers. 60 s.
    pub release_for: Duration,
    /// How long cancelled transfers may take to settle before their peer is severed. 1 s.
    pub grace: Duration,
    /// How long they may take then, before the blocks are quarantined. 3 s.
    pub sever_for: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_requests: 65_536,
            max_sources: 1_024,
            max_parts: 65_536,
            max_releases: 16_384,
            window: 64,
            hold_every: Duration::from_secs(5),
            hold_first: Duration::from_millis(20),
            again_first: Duration::from_millis(50),
            again_most: Duration::from_secs(1),
            retries: 3,
            retry_first: Duration::from_millis(10),
            busy_for: Duration::from_millis(1),
            release_tries: 8,
            release_for: Duration::from_secs(60),
            grace: Duration::from_secs(1),
            sever_for: Duration::from_secs(3),
        }
    }
}

/// What a user has counted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Counts {
    /// Requests asked for and taken.
    pub asked: u64,
    /// Requests that were ready.
    pub ready: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests that were aborted.
    pub aborted: u64,
    /// Requests that were not taken.
    pub refused: u64,
    /// Requests that ended quarantined.
    pub quarantined: u64,
    /// Of these, those of which it is known since that nothing moves any more.
    pub unquarantined: u64,
    /// Transfers posted.
    pub posted: u64,
    /// Transfers tried again.
    pub retried: u64,
    /// Transfers for which there was no room.
    pub busy: u64,
    /// Confirms sent for the first time.
    pub confirms: u64,
    /// Confirms sent again.
    pub repeated: u64,
    /// Verdicts that the lease had not held: reads of memory that may have been reused.
    pub stale: u64,
    /// Peers severed.
    pub severed: u64,
    /// Releases that were never answered, or for which there was no room.
    pub releases_lost: u64,
    /// Messages that mean nothing here: for a request that is over, or from the wrong peer.
    pub strays: u64,
}
