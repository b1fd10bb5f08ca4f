//! Which number feeds which metric.

use super::catalogue as all;
use super::catalogue::Metric;
use super::tally::{CAUSES, ERROR_KINDS, FAILURES, Gauges, REASONS, Tally};
use crate::control::ControlStats;
use crate::protocol::peers::PeersStats;
use crate::protocol::{owner, user};
use crate::rank::RankCounts;

/// A metric, the value of its label where it has one, and where its number is found.
pub(super) type Row<T> = (Metric, &'static str, fn(&T) -> u64);

/// A family of a metric: its label's values, and where its numbers are found, in the same order.
pub(super) type Family<T> = (Metric, &'static [&'static str], fn(&T) -> &[u64]);

pub(super) const TALLY: &[Row<Tally>] = &[
    (all::REQUESTS_ASKED, "read", |t| t.asked_read),
    (all::REQUESTS_ASKED, "write", |t| t.asked_write),
    (all::REQUESTS_READY, "", |t| t.ready),
    (all::REQUESTS_ABORTED, "", |t| t.aborted),
    (all::QUARANTINES, "request", |t| t.quarantined_requests),
    (all::QUARANTINES, "lease", |t| t.quarantined_leases),
    (all::LEASE_MESSAGES, "hold", |t| t.holds),
    (all::LEASE_MESSAGES, "confirm", |t| t.confirms),
    (all::LEASE_MESSAGES, "release", |t| t.releases),
];

pub(super) const TALLIES: &[Family<Tally>] = &[
    (all::REQUESTS_FAILED, &FAILURES, |t| &t.failed),
    (all::TRANSFERS_FAILED, &ERROR_KINDS, |t| &t.transfers_failed),
    (all::LEASES_ENDED, &REASONS, |t| &t.ended),
    (all::PEERS_GONE, &CAUSES, |t| &t.gone),
];

pub(super) const OWNER: &[Row<owner::Counts>] = &[
    (all::LEASES_GRANTED, "", |c| c.granted),
    (all::LEASES_FREED, "", |c| c.freed),
    (all::HEARTBEATS_LATE, "", |c| c.late_holds),
    (all::LEASE_MESSAGES_LATE, "", |c| c.late),
    (all::LEASE_MESSAGES_EARLY, "kept", |c| c.early),
    (all::LEASE_MESSAGES_EARLY, "refused", |c| c.early_refused),
    (all::LEASE_MESSAGES_EARLY, "lapsed", |c| c.early_lapsed),
    (all::LEASE_MESSAGES_REFUSED, "other_life", |c| c.other_life),
    (all::LEASE_MESSAGES_REFUSED, "contradiction", |c| c.contradictions),
    (all::STALE_VERDICTS, "", |c| c.stale),
    (all::LEASE_TABLES_FULL, "", |c| c.full),
    (all::LEASES_FORGOTTEN, "", |c| c.forgotten),
    (all::LEASE_ORDERS_IGNORED, "", |c| c.ignored),
];

pub(super) const USER: &[Row<user::Counts>] = &[
    (all::TRANSFERS_RETRIED, "", |c| c.retried),
    (all::CONFIRMS, "first", |c| c.confirms),
    (all::CONFIRMS, "again", |c| c.repeated),
    (all::STALE_READS, "", |c| c.stale),
    (all::RELEASES_LOST, "", |c| c.releases_lost),
    (all::STRAYS, "", |c| c.strays),
    (all::PEERS_SEVERED, "", |c| c.severed),
];

pub(super) const PEERS: &[Row<PeersStats>] = &[
    (all::ROUTES, "ready", |s| s.ready),
    (all::ROUTES, "failed", |s| s.failed),
    (all::HANDSHAKES, "cards", |s| s.fetches),
    (all::HANDSHAKES, "meeting", |s| s.meetings),
    (all::HANDSHAKES_ANSWERED, "met", |s| s.answered),
    (all::HANDSHAKES_ANSWERED, "refused", |s| s.refused),
    (all::CONNECTIONS_UNDEAD, "", |s| s.undead),
    (all::BAD_FRAMES, "peers", |s| s.malformed),
];

pub(super) const PEERS_FAMILIES: &[Family<PeersStats>] =
    &[(all::HANDSHAKES_FAILED, &ERROR_KINDS, |s| &s.failures_by_kind)];

pub(super) const RANK: &[Row<RankCounts>] = &[
    (all::DIGESTS, "equal", |c| c.digests_equal),
    (all::DIGESTS, "differing", |c| c.digests_differing),
    (all::MESSAGES_SENT, "data", |c| c.by_fabric),
    (all::MESSAGES_SENT, "control", |c| c.by_channel),
    (all::MESSAGES_UNSENT, "", |c| c.unsent),
    (all::BAD_FRAMES, "rank", |c| c.bad_frames),
    (all::UNKNOWN_FRAMES, "", |c| c.unknown_frames),
];

pub(super) const CONTROL: &[Row<ControlStats>] = &[
    (all::CONTROL_OPENED, "accepted", |s| s.accepted),
    (all::CONTROL_OPENED, "dialled", |s| s.dialled),
    // Those with the old key are among the established ones.
    (all::CONTROL_ESTABLISHED, "own", |s| s.established.saturating_sub(s.old_key)),
    (all::CONTROL_ESTABLISHED, "old", |s| s.old_key),
    (all::CONTROL_REFUSED, "evicted", |s| s.evicted),
    (all::CONTROL_REFUSED, "timed_out", |s| s.timed_out),
    (all::CONTROL_REFUSED, "not_ours", |s| s.not_ours),
    (all::CONTROL_REFUSED, "wrong_key", |s| s.wrong_key),
    (all::CONTROL_REFUSED, "unproven", |s| s.unproven),
    (all::CONTROL_REFUSED, "unfit", |s| s.refused),
    (all::CONTROL_REFUSED, "too_many", |s| s.too_many),
    (all::CONTROL_REFUSED, "unreachable", |s| s.unreachable),
    (all::CONTROL_DEFERRED, "", |s| s.deferred),
    (all::CONTROL_ENDED, "left", |s| s.left),
    (all::CONTROL_ENDED, "lost", |s| s.lost),
    (all::CONTROL_ENDED, "silent", |s| s.silent),
    (all::BAD_FRAMES, "control", |s| s.bad_frames),
    (all::CONTROL_PINGS_MISSED, "", |s| s.missed_pings),
    (all::CONTROL_ACCEPT_FAILED, "", |s| s.accept_failed),
    (all::CONTROL_MESSAGES, "sent", |s| s.messages_sent),
    (all::CONTROL_MESSAGES, "received", |s| s.messages_received),
    (all::CONTROL_BYTES, "sent", |s| s.bytes_sent),
    (all::CONTROL_BYTES, "received", |s| s.bytes_received),
    (all::CONTROL_FULL, "", |s| s.full),
    (all::CONTROL_PAUSED, "", |s| s.paused),
];

pub(super) const NOW: &[Row<Gauges>] = &[
    (all::REQUESTS, "routing", |g| g.requests_routing),
    (all::REQUESTS, "active", |g| g.requests_active),
    (all::REQUESTS, "quarantined", |g| g.requests_quarantined),
    (all::TRANSFERS_IN_FLIGHT, "", |g| g.transfers_in_flight),
    (all::LEASES, "held", |g| g.leases_held),
    (all::LEASES, "draining", |g| g.leases_draining),
    (all::LEASES, "quarantined", |g| g.leases_quarantined),
    (all::QUARANTINED_BLOCKS, "request", |g| g.blocks_of_requests),
    (all::QUARANTINED_BLOCKS, "lease", |g| g.blocks_of_leases),
    (all::PEERS, "known", |g| g.peers_known),
    (all::PEERS, "connected", |g| g.peers_connected),
];

pub(super) const CONTROL_NOW: &[Row<ControlStats>] = &[
    (all::CONTROL_CONNECTIONS, "up", |s| s.up),
    (all::CONTROL_CONNECTIONS, "half_open", |s| s.half_open),
    (all::CONTROL_CONNECTIONS, "dialling", |s| s.dialling),
    (all::CONTROL_QUEUED, "", |s| s.queued_bytes),
];
