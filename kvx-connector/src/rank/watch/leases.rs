//! What is counted and said of leases that this rank grants.

use std::time::Duration;

use kvx_core::id::Incarnation;
use tracing::{Span, debug, debug_span, warn};

use super::{Watch, ids};
use crate::observe::TraceId;
use crate::protocol::message::{ToOwner, ToUser};
use crate::protocol::{LeaseName, Reason};
use crate::rank::orders::GrantOrder;

/// A lease that this rank has granted and not freed.
#[derive(Debug)]
pub(in crate::rank) struct Granted {
    pub(in crate::rank) order: GrantOrder,
    pub(in crate::rank) at: Duration,
    state: Stand,
    span: Span,
}

/// How far a lease has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stand {
    Held,
    Draining,
    Quarantined,
}

impl Watch {
    /// A lease is granted.
    pub(in crate::rank) fn granted(&self, order: GrantOrder, now: Duration) -> Granted {
        let span = debug_span!(
            "kvx.lease",
            trace = %TraceId::from(&order.key),
            key = %order.key,
            lease = %order.lease,
            engine = %self.engine,
            replica = self.place.replica,
            rank = self.place.rank,
        );
        debug!(
            parent: &span,
            mode = ?order.access,
            parts = order.parts.len(),
            total = order.total,
            ttl = ?order.ttl,
            hard = ?order.hard,
            "granted"
        );
        Granted { order, at: now, state: Stand::Held, span }
    }

    /// A user of a lease says something.
    pub(in crate::rank) fn heard(
        &mut self,
        peer: Incarnation,
        message: &ToOwner,
        granted: Option<&Granted>,
    ) {
        let what = match message {
            ToOwner::Hold(_) => {
                self.tally.holds += 1;
                "held"
            }
            ToOwner::Confirm(_) => {
                self.tally.confirms += 1;
                "asked whether it holds"
            }
            ToOwner::Release(_) => {
                self.tally.releases += 1;
                "given up by a reader"
            }
        };
        if let Some(granted) = granted {
            debug!(parent: &granted.span, %peer, reader = %message.reader(), "{what}");
        }
    }

    /// A user of a lease is answered.
    pub(in crate::rank) fn answered(
        &mut self,
        now: Duration,
        peer: Incarnation,
        message: &ToUser,
        granted: Option<&Granted>,
    ) {
        if let Some(why @ (Reason::Access | Reason::Ticket)) = message.why()
            && let Some(suppressed) = self.frames.pass(now)
        {
            let (lease, reader) = (message.lease(), message.reader());
            let leased = granted.map(|granted| granted.order.access.to_string());
            warn!(%peer, %lease, %reader, leased, suppressed, "refused: {why}");
        }
        if let (ToUser::Verdict(verdict), Some(granted)) = (message, granted) {
            let what = if verdict.held { "confirmed" } else { "stale" };
            debug!(parent: &granted.span, %peer, reader = %verdict.reader, "{what}");
        }
    }

    /// The epoch of a lease has ended.
    pub(in crate::rank) fn over(
        &mut self,
        now: Duration,
        lease: LeaseName,
        why: Reason,
        granted: Option<&mut Granted>,
    ) {
        self.tally.lease_ended(why);
        let Some(granted) = granted else { return };
        if std::mem::replace(&mut granted.state, Stand::Draining) == Stand::Held {
            self.gauges.leases_draining += 1;
        }
        let held = now.saturating_sub(granted.at);
        self.meters.held(held);
        let order = &granted.order;
        let warns =
            matches!(why, Reason::Expired | Reason::Stage | Reason::Full | Reason::OtherLife);
        match warns.then(|| self.failures.pass(now)).flatten() {
            Some(suppressed) => warn!(
                parent: &granted.span,
                trace = %TraceId::from(&order.key),
                key = %order.key,
                %lease,
                reason = %why,
                ?held,
                suppressed,
                "ended"
            ),
            None => debug!(parent: &granted.span, reason = %why, ?held, "ended"),
        }
    }

    /// The blocks of a lease are kept: something may still be written into them.
    pub(in crate::rank) fn lease_quarantined(
        &mut self,
        now: Duration,
        lease: LeaseName,
        why: Reason,
        granted: Option<&mut Granted>,
    ) {
        self.tally.lease_quarantined();
        let Some(granted) = granted else { return };
        if granted.state == Stand::Draining {
            self.gauges.leases_draining = self.gauges.leases_draining.saturating_sub(1);
        }
        granted.state = Stand::Quarantined;
        let blocks = ids(&granted.order.tables);
        self.gauges.leases_quarantined += 1;
        self.gauges.blocks_of_leases += blocks;
        if let Some(suppressed) = self.failures.pass(now) {
            let order = &granted.order;
            warn!(
                parent: &granted.span,
                trace = %TraceId::from(&order.key),
                key = %order.key,
                %lease,
                reason = %why,
                blocks,
                suppressed,
                "quarantined: a writer may still write"
            );
        }
    }

    /// The blocks of a lease may be used again.
    pub(in crate::rank) fn freed(&mut self, granted: &Granted, why: Reason) {
        match granted.state {
            Stand::Held => {}
            Stand::Draining => {
                self.gauges.leases_draining = self.gauges.leases_draining.saturating_sub(1);
            }
            Stand::Quarantined => {
                let blocks = ids(&granted.order.tables);
                self.gauges.leases_quarantined = self.gauges.leases_quarantined.saturating_sub(1);
                self.gauges.blocks_of_leases = self.gauges.blocks_of_leases.saturating_sub(blocks);
            }
        }
        debug!(parent: &granted.span, reason = %why, "freed");
    }

    /// More parts are published.
    pub(in crate::rank) fn published(granted: &Granted, parts: usize, total: Option<u32>) {
        debug!(parent: &granted.span, parts, total, "published");
    }
}
