//! What all ranks of a process come to.

use std::collections::BTreeMap;

use kvx_connector::observe::RankStatus;
use serde::Serialize;

use crate::metrics::Page;

/// Sums over all ranks. Those of counters only grow, until a rank is started again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Sums {
    pub(super) ranks: u64,
    /// The longest time that a rank has been running, in milliseconds.
    pub(super) up_ms: u64,
    pub(super) peers_connected: u64,
    pub(super) bytes: u64,
    pub(super) transfers: u64,
    pub(super) asked: u64,
    pub(super) ready: u64,
    pub(super) failed: u64,
    pub(super) aborted: u64,
    pub(super) stale_reads: u64,
    pub(super) granted: u64,
    pub(super) freed: u64,
    pub(super) leases: u64,
    pub(super) requests: u64,
    pub(super) quarantined_blocks: u64,
    /// Failed requests by reason, ended leases by reason, refused connections by cause: those that there were.
    pub(super) failures: BTreeMap<String, u64>,
    pub(super) ends: BTreeMap<String, u64>,
    pub(super) refused: BTreeMap<String, u64>,
    /// Bytes by backend and transport.
    pub(super) transports: BTreeMap<String, u64>,
}

impl Sums {
    pub(super) fn of(page: &Page) -> Self {
        let mut sums = Self::default();
        for rank in page.engines.iter().flat_map(|engine| &engine.ranks) {
            sums.add(rank);
        }
        sums
    }

    fn add(&mut self, rank: &RankStatus) {
        self.ranks += 1;
        self.up_ms = self.up_ms.max(rank.up_ms);
        self.peers_connected += rank.peers_connected;
        self.bytes += rank.counter("kvx_transfer_bytes_total");
        self.transfers += rank.counter("kvx_transfers_total");
        self.asked += rank.counter("kvx_requests_asked_total");
        self.ready += rank.counter("kvx_requests_ready_total");
        self.failed += rank.counter("kvx_requests_failed_total");
        self.aborted += rank.counter("kvx_requests_aborted_total");
        self.stale_reads += rank.counter("kvx_stale_reads_total");
        self.granted += rank.counter("kvx_leases_granted_total");
        self.freed += rank.counter("kvx_leases_freed_total");
        self.leases += rank.leases.held + rank.leases.draining + rank.leases.quarantined;
        self.requests += rank.requests.routing + rank.requests.active + rank.requests.quarantined;
        self.quarantined_blocks += rank.quarantine.request_blocks + rank.quarantine.lease_blocks;
        for (name, into) in [
            ("kvx_requests_failed_total", &mut self.failures),
            ("kvx_leases_ended_total", &mut self.ends),
            ("kvx_control_refused_total", &mut self.refused),
            ("kvx_transfer_bytes_total", &mut self.transports),
        ] {
            for (series, count) in rank.counters.range(format!("{name}{{")..) {
                let Some(labels) = series.strip_prefix(name) else { break };
                let value = values(labels);
                if *count > 0 && !value.is_empty() {
                    *into.entry(value).or_default() += count;
                }
            }
        }
    }
}

/// The values of labels: `a/b` of `{x="a",y="b"}`.
fn values(labels: &str) -> String {
    let labels = labels.trim_start_matches('{').trim_end_matches('}');
    let values = labels.split("\",").filter_map(|label| label.split_once("=\""));
    let values: Vec<&str> = values.map(|(_, value)| value.trim_end_matches('"')).collect();
    values.join("/")
}
