//! What a rank itself counts, beside its machines.

use std::time::Duration;

use kvx_core::ErrorKind;
use kvx_core::transfer::Mode;

use crate::protocol::user::Why;
use crate::protocol::{Access, Reason, peers};

/// Kinds of errors, as labels.
pub(crate) const ERROR_KINDS: [&str; 8] =
    ["misuse", "peer", "fabric", "resources", "unsupported", "config", "closed", "internal"];

/// Place of a kind in [`ERROR_KINDS`]; one that is not there counts as `internal`.
pub(crate) fn error_kind(kind: ErrorKind) -> usize {
    let name = kind.as_str();
    ERROR_KINDS.iter().position(|known| *known == name).unwrap_or(ERROR_KINDS.len() - 1)
}

/// Why requests fail, as labels: those of leases first, then those of whom no way was found to the other engine, by the kind of
/// error.
pub(super) const FAILURES: [&str; 17] = [
    "lease_ended",
    "stale",
    "peer_unreachable",
    "connection_lost",
    "peer_gone",
    "transfer",
    "stage",
    "contradiction",
    "deadline",
    "route_misuse",
    "route_peer",
    "route_fabric",
    "route_resources",
    "route_unsupported",
    "route_config",
    "route_closed",
    "route_internal",
];

const ROUTE: usize = FAILURES.len() - ERROR_KINDS.len();

/// Why leases end, as labels.
pub(super) const REASONS: [&str; 16] = [
    "done",
    "released",
    "expired",
    "aborted",
    "preempted",
    "failed",
    "stage",
    "empty",
    "full",
    "other_life",
    "unknown",
    "contradiction",
    "revoked",
    "other",
    "access",
    "ticket",
];

const fn reason(why: Reason) -> usize {
    match why {
        Reason::Done => 0,
        Reason::Released => 1,
        Reason::Expired => 2,
        Reason::Aborted => 3,
        Reason::Preempted => 4,
        Reason::Failed => 5,
        Reason::Stage => 6,
        Reason::Empty => 7,
        Reason::Full => 8,
        Reason::OtherLife => 9,
        Reason::Unknown => 10,
        Reason::Contradiction => 11,
        Reason::Revoked => 12,
        Reason::Other => 13,
        Reason::Access => 14,
        Reason::Ticket => 15,
    }
}

/// Why peers go, as labels.
pub(super) const CAUSES: [&str; 8] =
    ["lost", "down", "bye", "superseded", "changed", "refused", "forgotten", "unlisted"];

const fn cause(reason: peers::GoneReason) -> usize {
    match reason {
        peers::GoneReason::Lost => 0,
        peers::GoneReason::Down => 1,
        peers::GoneReason::Bye => 2,
        peers::GoneReason::Superseded => 3,
        peers::GoneReason::Changed => 4,
        peers::GoneReason::Refused => 5,
        peers::GoneReason::Forgotten => 6,
        peers::GoneReason::Unlisted => 7,
    }
}

/// What an engine is told of its requests and leases, and what its transfers come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(super) asked_read: u64,
    pub(super) asked_write: u64,
    pub(super) ready: u64,
    pub(super) failed: [u64; FAILURES.len()],
    pub(super) aborted: u64,
    pub(super) transfers_failed: [u64; ERROR_KINDS.len()],
    pub(super) ended: [u64; REASONS.len()],
    pub(super) quarantined_requests: u64,
    pub(super) quarantined_leases: u64,
    pub(super) gone: [u64; CAUSES.len()],
    /// Messages of users of leases.
    pub(crate) holds: u64,
    pub(crate) confirms: u64,
    pub(crate) releases: u64,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Ready,
    Failed(Why),
    /// No way to the other engine was found.
    Unrouted(ErrorKind),
    Aborted,
}

impl Tally {
    pub(crate) fn asked(&mut self, access: Access) {
        match access {
            Access::Read => self.asked_read += 1,
            Access::Write => self.asked_write += 1,
        }
    }

    pub(crate) fn ended(&mut self, outcome: Outcome, quarantined: bool) {
        match outcome {
            Outcome::Ready => self.ready += 1,
            Outcome::Aborted => self.aborted += 1,
            Outcome::Unrouted(kind) => self.failed[ROUTE + error_kind(kind)] += 1,
            Outcome::Failed(why) => {
                let place = match why {
                    Why::Ended(_) => 0,
                    Why::Stale(_) => 1,
                    Why::PeerFailed => 2,
                    Why::PeerDown => 3,
                    Why::PeerGone => 4,
                    Why::Transfer => 5,
                    Why::Stage => 6,
                    Why::Contradiction => 7,
                    Why::Deadline => 8,
                };
                self.failed[place] += 1;
            }
        }
        self.quarantined_requests += u64::from(quarantined);
    }

    pub(crate) fn transfer_failed(&mut self, kind: ErrorKind) {
        self.transfers_failed[error_kind(kind)] += 1;
    }

    pub(crate) fn lease_ended(&mut self, why: Reason) {
        self.ended[reason(why)] += 1;
    }

    pub(crate) fn lease_quarantined(&mut self) {
        self.quarantined_leases += 1;
    }

    pub(crate) fn gone(&mut self, reason: peers::GoneReason) {
        self.gone[cause(reason)] += 1;
    }
}

/// What there is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gauges {
    pub(crate) requests_routing: u64,
    pub(crate) requests_active: u64,
    pub(crate) requests_quarantined: u64,
    pub(crate) transfers_in_flight: u64,
    pub(crate) leases_held: u64,
    pub(crate) leases_draining: u64,
    pub(crate) leases_quarantined: u64,
    pub(crate) blocks_of_requests: u64,
    pub(crate) blocks_of_leases: u64,
    pub(crate) peers_known: u64,
    pub(crate) peers_connected: u64,
}

/// A transfer that is done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moved<'a> {
    pub(crate) backend: &'static str,
    pub(crate) transport: &'a str,
    pub(crate) route: Option<&'a str>,
    pub(crate) mode: Mode,
    pub(crate) bytes: u64,
    pub(crate) segments: u64,
    pub(crate) elapsed: Duration,
}
