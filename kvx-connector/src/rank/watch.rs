//! What a rank counts and says of what it does, for people: see [`observe`](crate::observe). Nothing depends on it.
//!
//! The spans `kvx.request`, `kvx.transfer` (inside of it) and `kvx.lease` have what happened as events. What goes on is said at the
//! level DEBUG, failures at WARN: once each, and not more often than [quotas](Quota) allow where a peer may be the cause. Warnings
//! name the trace themselves, since spans may be filtered out.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvx_core::id::Incarnation;
use kvx_core::port::TransferReport;
use kvx_core::{Error, ErrorKind};
use tracing::{Span, debug, debug_span, warn};

use super::fetch::Fetch;
use super::orders::FetchOrder;
use super::{Flying, RankCounts};
use crate::control::ControlStats;
use crate::observe::{Gauges, Meters, Moved, Outcome, Quota, Tally, TraceId};
use crate::protocol::message::ToOwner;
use crate::protocol::peers::{self, Connection, PeersStats, Place, Remote};
use crate::protocol::{Part, owner, user};
use crate::ticket::Table;

mod leases;

pub(super) use leases::Granted;

/// How often the control channel's numbers are looked at.
const LOOK: Duration = Duration::from_millis(200);

/// Counts and says.
#[derive(Debug)]
pub(super) struct Watch {
    engine: String,
    place: Place,
    meters: Meters,
    tally: Tally,
    gauges: Gauges,
    look_at: Duration,
    /// Warnings of requests and leases.
    failures: Quota,
    /// Warnings of what peers say.
    frames: Quota,
}

/// What there is to be counted that others know.
#[derive(Debug)]
pub(super) struct Known<'a> {
    pub(super) owner: &'a owner::Owner,
    pub(super) user: &'a user::User,
    pub(super) peers: &'a peers::Peers,
    pub(super) counts: &'a RankCounts,
    pub(super) requests: usize,
    pub(super) routing: usize,
    pub(super) flying: usize,
    pub(super) connections: usize,
}

impl Watch {
    pub(super) fn new(engine: &str, place: Place) -> Self {
        Self {
            engine: engine.to_owned(),
            place,
            meters: Meters::new(engine, place),
            tally: Tally::default(),
            gauges: Gauges::default(),
            look_at: Duration::ZERO,
            failures: Quota::new(100, Duration::from_millis(100)),
            frames: Quota::new(10, Duration::from_secs(1)),
        }
    }

    pub(super) const fn gauges(&self) -> &Gauges {
        &self.gauges
    }

    pub(super) const fn meters(&self) -> &Meters {
        &self.meters
    }

    /// Hands on what has been counted.
    pub(super) fn publish(
        &mut self,
        now: Duration,
        known: &Known<'_>,
        control: impl FnOnce() -> Option<ControlStats>,
    ) {
        let count = |count: usize| count as u64;
        let gauges = &mut self.gauges;
        gauges.requests_routing = count(known.routing);
        gauges.requests_active = count(known.requests)
            .saturating_sub(count(known.routing) + gauges.requests_quarantined);
        gauges.transfers_in_flight = count(known.flying);
        gauges.leases_held = count(known.owner.live())
            .saturating_sub(gauges.leases_draining + gauges.leases_quarantined);
        gauges.peers_known = count(known.peers.known());
        gauges.peers_connected = count(known.connections);
        self.meters.now(gauges);
        self.meters.tally(&self.tally);
        self.meters.leases(known.owner.counts(), known.user.counts());
        let peers: PeersStats = known.peers.stats();
        self.meters.rank(&peers, known.counts);
        if now >= self.look_at {
            self.look_at = now + LOOK;
            if let Some(stats) = control() {
                self.meters.control(&stats);
            }
        }
    }

    // Requests.

    /// A request is asked for. Gives its span.
    pub(super) fn asked(&mut self, order: &FetchOrder) -> Span {
        self.tally.asked(order.access);
        let span = debug_span!(
            "kvx.request",
            trace = %TraceId::from(&order.key),
            key = %order.key,
            lease = %order.lease,
            request = order.request.0,
            engine = %self.engine,
            replica = self.place.replica,
            rank = self.place.rank,
        );
        debug!(
            parent: &span,
            from = %order.engine,
            at = %order.address,
            mode = ?order.access,
            tokens = ?order.range,
            deadline = ?order.deadline,
            "asked"
        );
        span
    }

    /// The other engine's ranks are connected.
    pub(super) fn routed(&self, fetch: &Fetch, sources: usize) {
        let took = fetch.asked.elapsed();
        self.meters.routed(took);
        debug!(parent: &fetch.span, sources, ?took, "routed");
    }

    /// A transfer is posted. Gives its span.
    pub(super) fn posted(
        fetch: &Fetch,
        connection: Connection,
        source: u16,
        part: &Part,
        segments: usize,
    ) -> Span {
        let span = debug_span!(
            parent: &fetch.span,
            "kvx.transfer",
            trace = %TraceId::from(&fetch.order.key),
            source,
            part = part.number,
            backend = connection.backend,
        );
        debug!(parent: &span, segments, "posted");
        span
    }

    /// A transfer is done: its bytes are there.
    pub(super) fn settled(
        &mut self,
        fetch: &mut Fetch,
        flying: &Flying,
        on: Connection,
        moved: &TransferReport,
    ) {
        fetch.settled = Some(Instant::now());
        let route = moved.route.as_deref();
        let (bytes, segments, elapsed) = (moved.bytes, moved.segments, moved.elapsed);
        self.meters.moved(Moved {
            backend: on.backend,
            transport: &moved.transport,
            route,
            mode: fetch.mode(),
            bytes,
            segments,
            elapsed,
        });
        debug!(
            parent: &flying.span,
            transport = %moved.transport,
            route,
            bytes,
            segments,
            queued = ?moved.queued,
            took = ?elapsed,
            "settled"
        );
    }

    /// A transfer came to nothing; it may be tried again.
    pub(super) fn unsettled(&mut self, span: Option<&Span>, error: &Error) {
        if error.kind() != ErrorKind::Closed {
            self.tally.transfer_failed(error.kind());
        }
        let span = span.cloned().unwrap_or_else(Span::none);
        debug!(parent: &span, kind = %error.kind(), %error, "not settled");
    }

    /// A message goes to the owner of a lease. Which request it is about is looked for only where somebody listens.
    pub(super) fn asking<'a>(
        peer: Incarnation,
        message: &ToOwner,
        mut fetches: impl Iterator<Item = &'a Fetch>,
    ) {
        let ToOwner::Confirm(confirm) = message else { return };
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        let (lease, attempt) = (confirm.lease, confirm.reader.attempt);
        let mine = |fetch: &&Fetch| fetch.order.lease == lease && fetch.order.attempt == attempt;
        if let Some(fetch) = fetches.find(mine) {
            debug!(parent: &fetch.span, %peer, last = confirm.last, "confirming");
        }
    }

    /// A request was ready.
    pub(super) fn ready(&mut self, fetch: &Fetch) {
        let report = &fetch.report;
        let elapsed = fetch.asked.elapsed();
        // Where nothing was to be moved, all of it is confirmation.
        let confirming = fetch.settled.unwrap_or(fetch.asked).elapsed();
        self.tally.ended(Outcome::Ready, false);
        self.meters.ended(Outcome::Ready, elapsed);
        self.meters.ready(report.bytes, confirming);
        debug!(
            parent: &fetch.span,
            bytes = report.bytes,
            segments = report.segments,
            transfers = report.transfers,
            transports = ?report.transports,
            routing = ?report.routing,
            ?confirming,
            ?elapsed,
            "ready"
        );
    }

    /// A request has failed.
    pub(super) fn failed(
        &mut self,
        now: Duration,
        fetch: &mut Fetch,
        outcome: Outcome,
        error: &Error,
        (blocks, quarantined): (&BTreeSet<(u16, u32)>, bool),
    ) {
        let elapsed = fetch.asked.elapsed();
        self.tally.ended(outcome, quarantined);
        self.meters.ended(outcome, elapsed);
        if quarantined {
            self.keep(fetch, blocks.len() as u64);
        }
        let fetch = &*fetch;
        let order = &fetch.order;
        match self.failures.pass(now) {
            Some(suppressed) => warn!(
                parent: &fetch.span,
                trace = %TraceId::from(&order.key),
                key = %order.key,
                lease = %order.lease,
                from = %order.engine,
                kind = %error.kind(),
                %error,
                blocks = blocks.len(),
                quarantined,
                bytes = fetch.report.bytes,
                ?elapsed,
                suppressed,
                "failed"
            ),
            None => debug!(
                parent: &fetch.span,
                kind = %error.kind(),
                %error,
                blocks = blocks.len(),
                quarantined,
                "failed"
            ),
        }
    }

    /// A request was given up, and is over.
    pub(super) fn aborted(&mut self, fetch: &mut Fetch, quarantined: bool) {
        let elapsed = fetch.asked.elapsed();
        self.tally.ended(Outcome::Aborted, quarantined);
        self.meters.ended(Outcome::Aborted, elapsed);
        if quarantined {
            let blocks = ids(&fetch.order.ours);
            self.keep(fetch, blocks);
        }
        debug!(parent: &fetch.span, quarantined, ?elapsed, "aborted");
    }

    fn keep(&mut self, fetch: &mut Fetch, blocks: u64) {
        fetch.kept = blocks;
        self.gauges.requests_quarantined += 1;
        self.gauges.blocks_of_requests += blocks;
    }

    /// Nothing moves any more in the blocks of a request that was quarantined.
    pub(super) fn unquarantined(&mut self, fetch: &Fetch) {
        self.gauges.requests_quarantined = self.gauges.requests_quarantined.saturating_sub(1);
        self.gauges.blocks_of_requests = self.gauges.blocks_of_requests.saturating_sub(fetch.kept);
        debug!(parent: &fetch.span, blocks = fetch.kept, "no longer quarantined");
    }

    // Peers.

    /// A peer is gone.
    pub(super) fn gone(&mut self, remote: &Remote, reason: peers::GoneReason) {
        self.tally.gone(reason);
        tracing::info!(%remote, %reason, "a peer is gone");
    }

    /// What a peer sent cannot be read.
    pub(super) fn bad_frame(&mut self, now: Duration, peer: &dyn std::fmt::Display, error: &Error) {
        if let Some(suppressed) = self.frames.pass(now) {
            warn!(%peer, %error, suppressed, "a bad frame: what it came by is ended");
        }
    }
}

/// How many blocks there are in tables.
fn ids(tables: &[Table]) -> u64 {
    tables.iter().map(|table| table.ids.len() as u64).sum()
}
