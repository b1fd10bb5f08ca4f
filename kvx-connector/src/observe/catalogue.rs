//! All metrics of this crate.

use metrics::Unit;

/// What kind of metric one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// It only grows, until the rank is started again.
    Counter,
    /// It is what it is now.
    Gauge,
    /// How values are distributed.
    Histogram,
}

impl Kind {
    /// Its name in documents.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// One metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// What kind it is.
    pub kind: Kind,
    /// Of what it counts.
    pub unit: Unit,
    /// Its labels, beside `engine`, `replica` and `rank`, which all have.
    pub labels: &'static [&'static str],
    /// What it counts, in one sentence.
    pub help: &'static str,
}

/// Labels that every metric has: this engine's name, the replica's number, and the rank's number in it.
pub(crate) const COMMON: [&str; 3] = ["engine", "replica", "rank"];

macro_rules! catalogue {
    ($($id:ident $kind:ident $name:literal $unit:ident [$($label:literal),*] $help:literal;)+) => {
        $(
            pub(crate) const $id: Metric = Metric {
                name: $name,
                kind: Kind::$kind,
                unit: Unit::$unit,
                labels: &[$($label),*],
                help: $help,
            };
        )+

        /// All metrics that this crate records.
        pub const METRICS: &[Metric] = &[$($id),+];
    };
}

catalogue! {
    REQUESTS_ASKED Counter "kvx_requests_asked_total" Count ["mode"]
        "Requests that this rank was ordered to move.";
    REQUESTS_READY Counter "kvx_requests_ready_total" Count []
        "Requests of which every byte was there, and the lease confirmed.";
    REQUESTS_FAILED Counter "kvx_requests_failed_total" Count ["reason"]
        "Requests that failed, by what came first.";
    REQUESTS_ABORTED Counter "kvx_requests_aborted_total" Count []
        "Requests that this rank's engine gave up.";
    REQUESTS Gauge "kvx_requests" Count ["state"]
        "Requests that are not over, or whose blocks are kept.";
    REQUEST_ELAPSED Histogram "kvx_request_elapsed_seconds" Seconds ["outcome"]
        "From the order to move a request until it was over at this rank.";
    REQUEST_ROUTING Histogram "kvx_request_routing_seconds" Seconds []
        "From the order to move a request until the other engine's ranks were connected.";
    REQUEST_CONFIRM Histogram "kvx_request_confirm_seconds" Seconds []
        "From a request's last byte at this rank until it was ready: what the confirmation took.";
    REQUEST_BYTES Histogram "kvx_request_bytes" Bytes []
        "Bytes that this rank moved for a request that was ready.";

    TRANSFERS Counter "kvx_transfers_total" Count ["backend", "transport", "mode"]
        "Transfers that are done.";
    TRANSFER_BYTES Counter "kvx_transfer_bytes_total" Bytes ["backend", "transport", "mode"]
        "Bytes of transfers that are done.";
    TRANSFER_SEGMENTS Counter "kvx_transfer_segments_total" Count ["backend", "transport", "mode"]
        "Segments of transfers that are done, as they were posted.";
    TRANSFER_SECONDS Histogram "kvx_transfer_seconds" Seconds ["backend", "transport", "mode"]
        "From a transfer's first batch posted until all had settled.";
    TRANSFERS_FAILED Counter "kvx_transfers_failed_total" Count ["kind"]
        "Transfers that failed, also where they were tried again.";
    TRANSFERS_RETRIED Counter "kvx_transfers_retried_total" Count []
        "Transfers that are tried again after they failed.";
    TRANSFERS_IN_FLIGHT Gauge "kvx_transfers_in_flight" Count []
        "Transfers that are posted and have not settled.";
    DIGESTS Counter "kvx_digests_compared_total" Count ["result"]
        "Transfers whose digests were compared with the other side's.";

    CONFIRMS Counter "kvx_confirms_total" Count ["sent"]
        "Confirms that this rank sent to owners of leases.";
    STALE_READS Counter "kvx_stale_reads_total" Count []
        "Verdicts that this rank got: the lease had not held, what was read may be anything.";
    RELEASES_LOST Counter "kvx_releases_lost_total" Count []
        "Releases that were not answered, or for which there was no room.";
    STRAYS Counter "kvx_lease_messages_stray_total" Count []
        "Answers of owners that mean nothing here: too late, or from somebody else.";
    PEERS_SEVERED Counter "kvx_peers_severed_total" Count []
        "Connections cut because cancelled transfers did not settle.";

    LEASES_GRANTED Counter "kvx_leases_granted_total" Count []
        "Leases that this rank granted.";
    LEASES_ENDED Counter "kvx_leases_ended_total" Count ["reason"]
        "Leases whose epoch has ended, by why.";
    LEASES_FREED Counter "kvx_leases_freed_total" Count []
        "Leases whose blocks may be used again.";
    LEASES Gauge "kvx_leases" Count ["state"]
        "Leases that are not freed.";
    LEASE_HELD Histogram "kvx_lease_held_seconds" Seconds []
        "From a lease's grant until its epoch ended.";
    LEASE_MESSAGES Counter "kvx_lease_messages_total" Count ["message"]
        "Messages that came from users of leases.";
    HEARTBEATS_LATE Counter "kvx_heartbeats_late_total" Count []
        "Heartbeats that came after their lease had ended.";
    LEASE_MESSAGES_LATE Counter "kvx_lease_messages_late_total" Count []
        "Messages, heartbeats included, that came after their lease had ended.";
    LEASE_MESSAGES_EARLY Counter "kvx_lease_messages_early_total" Count ["outcome"]
        "Messages for leases that were not granted yet.";
    LEASE_MESSAGES_REFUSED Counter "kvx_lease_messages_refused_total" Count ["reason"]
        "Messages that were refused because of what they say.";
    STALE_VERDICTS Counter "kvx_stale_verdicts_total" Count []
        "Confirms that this rank answered with: it did not hold.";
    LEASE_TABLES_FULL Counter "kvx_lease_tables_full_total" Count []
        "Grants, parts and attempts for which there was no room.";
    LEASES_FORGOTTEN Counter "kvx_leases_forgotten_total" Count []
        "Ended leases forgotten before they were due, for want of room.";
    LEASE_ORDERS_IGNORED Counter "kvx_lease_orders_ignored_total" Count []
        "Orders of this rank's own engine that mean nothing: an unknown lease, a part twice.";

    QUARANTINES Counter "kvx_quarantines_total" Count ["of"]
        "Requests and leases that ended while something might still move in their blocks.";
    QUARANTINED_BLOCKS Gauge "kvx_quarantined_blocks" Count ["of"]
        "Blocks that are kept because something might still move in them.";

    PEERS Gauge "kvx_peers" Count ["state"]
        "Ranks of other engines.";
    PEERS_GONE Counter "kvx_peers_gone_total" Count ["cause"]
        "Peers that were met and are gone.";
    ROUTES Counter "kvx_routes_total" Count ["outcome"]
        "Ways to another engine that requests asked for.";
    HANDSHAKES Counter "kvx_handshakes_total" Count ["step"]
        "Attempts to fetch an engine's cards, and to meet a rank.";
    HANDSHAKES_FAILED Counter "kvx_handshakes_failed_total" Count ["kind"]
        "Attempts, of both kinds, that failed.";
    HANDSHAKES_ANSWERED Counter "kvx_handshakes_answered_total" Count ["outcome"]
        "Handshakes that others began.";
    CONNECTIONS_UNDEAD Counter "kvx_connections_undead_total" Count []
        "Connections that did not end in time.";

    MESSAGES_SENT Counter "kvx_messages_sent_total" Count ["way"]
        "Messages about leases and digests that this rank sent.";
    MESSAGES_UNSENT Counter "kvx_messages_unsent_total" Count []
        "Messages for which there was no session, or no room.";
    BAD_FRAMES Counter "kvx_bad_frames_total" Count ["layer"]
        "What peers sent and could not be read.";
    UNKNOWN_FRAMES Counter "kvx_unknown_frames_total" Count []
        "Frames of a kind that this version does not know, passed over.";

    CONTROL_CONNECTIONS Gauge "kvx_control_connections" Count ["state"]
        "Connections of the control channel.";
    CONTROL_OPENED Counter "kvx_control_opened_total" Count ["by"]
        "Connections of the control channel that were begun.";
    CONTROL_ESTABLISHED Counter "kvx_control_established_total" Count ["key"]
        "Sessions that came up.";
    CONTROL_REFUSED Counter "kvx_control_refused_total" Count ["cause"]
        "Connections that never became sessions.";
    CONTROL_DEFERRED Counter "kvx_control_deferred_total" Count []
        "Handshakes that had to wait because of the limit per second.";
    CONTROL_ENDED Counter "kvx_control_ended_total" Count ["cause"]
        "Sessions that were up and are over.";
    CONTROL_PINGS_MISSED Counter "kvx_control_pings_missed_total" Count []
        "Pings that were not answered in time.";
    CONTROL_ACCEPT_FAILED Counter "kvx_control_accept_failed_total" Count []
        "Times that no connection could be accepted, for want of descriptors as a rule.";
    CONTROL_MESSAGES Counter "kvx_control_messages_total" Count ["direction"]
        "Messages of the control channel, whole.";
    CONTROL_BYTES Counter "kvx_control_bytes_total" Bytes ["direction"]
        "Bytes of the control channel's connections.";
    CONTROL_FULL Counter "kvx_control_full_total" Count []
        "Messages for which a session's queue had no room.";
    CONTROL_PAUSED Counter "kvx_control_paused_total" Count []
        "Times that reading stopped because what had come was not taken.";
    CONTROL_QUEUED Gauge "kvx_control_queued_bytes" Bytes []
        "Bytes of messages that wait to be sent.";
}

/// Tells the program's recorder of every metric: its unit and what it counts. Each rank that starts does so.
pub fn describe() {
    metrics::with_recorder(|recorder| {
        for metric in METRICS {
            let (name, unit, help) = (metric.name.into(), Some(metric.unit), metric.help.into());
            match metric.kind {
                Kind::Counter => recorder.describe_counter(name, unit, help),
                Kind::Gauge => recorder.describe_gauge(name, unit, help),
                Kind::Histogram => recorder.describe_histogram(name, unit, help),
            }
        }
    });
}
