//! One request that a rank moves: what was ordered, by which way it goes, and what became of it.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::id::Incarnation;
use kvx_core::layout::RankLayout;
use kvx_core::plan::{BlockTable, Request, SegmentList};
use kvx_core::port::TransferReport;
use kvx_core::transfer::Mode;
use kvx_core::{Error, Result};

use super::orders::{FetchOrder, FetchReport};
use crate::protocol::peers::{Link, Route, WantId};
use crate::protocol::user::Unproven;
use crate::protocol::{Access, Part};
use crate::ticket::Table;

/// A request that is not over, or whose blocks are quarantined.
#[derive(Debug)]
pub(super) struct Fetch {
    pub(super) order: FetchOrder,
    pub(super) stage: Stage,
    pub(super) begun: Duration,
    pub(super) report: FetchReport,
    /// The first error of a transfer: why it failed, if it does.
    pub(super) error: Option<Arc<Error>>,
    /// When the first transfer was posted.
    pub(super) posted: Option<Duration>,
    /// Sources that have proven each part, where parts are proven one by one.
    pub(super) proven: std::collections::BTreeMap<u32, BTreeSet<u16>>,
    /// When it was asked for, and when its last byte had settled, by the clock on the wall of [`watch`](super::watch): steps are told
    /// the time once each, and much may happen in one.
    pub(super) asked: Instant,
    pub(super) settled: Option<Instant>,
    /// Blocks in quarantine.
    pub(super) kept: u64,
    pub(super) span: tracing::Span,
}

/// How far it has come.
#[derive(Debug)]
pub(super) enum Stage {
    /// It waits until the other engine's ranks are connected.
    Routing {
        want: WantId,
        /// Whether it was admitted meanwhile.
        begin: bool,
    },
    /// The lease machine has it.
    Asked {
        route: Arc<Route>,
        /// For each of its sources, the link over which bytes are moved, if any are.
        links: Vec<Option<usize>>,
        /// The sources.
        peers: Vec<Incarnation>,
    },
    /// It is over, and its blocks are kept.
    Quarantined,
}

impl Fetch {
    pub(super) fn new(order: FetchOrder, want: WantId, now: Duration, span: tracing::Span) -> Self {
        let begin = order.begin;
        Self {
            order,
            stage: Stage::Routing { want, begin },
            begun: now,
            report: FetchReport::default(),
            error: None,
            posted: None,
            proven: std::collections::BTreeMap::new(),
            asked: Instant::now(),
            settled: None,
            kept: 0,
            span,
        }
    }

    /// The link to a source, and whether it has one: `Some(None)` where nothing is moved.
    pub(super) fn link(&self, source: u16) -> Option<Option<&Link>> {
        let Stage::Asked { route, links, .. } = &self.stage else { return None };
        let link = links.get(usize::from(source))?;
        Some(link.and_then(|index| route.links.get(index)))
    }

    pub(super) const fn mode(&self) -> Mode {
        match self.order.access {
            Access::Read => Mode::Read,
            Access::Write => Mode::Write,
        }
    }

    /// Lists what is to be moved of a part over a link. Empty where nothing of it is asked for.
    pub(super) fn segments(
        &self,
        link: &Link,
        part: &Part,
        limits: &kvx_core::capability::Limits,
        list: &mut SegmentList,
    ) -> Result<bool> {
        let order = &self.order;
        let range = part.tokens.start.max(order.range.start)..part.tokens.end.min(order.range.end);
        if range.is_empty() || part.layers.is_empty() {
            return Ok(false);
        }
        if part.group.is_some() {
            return Err(Error::unsupported(
                "fetch",
                "the owner has published a part of one cache group only, and groups are numbered by each engine for itself: which \
                 blocks here it belongs to cannot be told from the number",
            )
            .with_context("part", part.number)
            .with_context("group", part.group.unwrap_or_default())
            .with_remedy("publish parts of all groups (Part::group is None), by layers and tokens"));
        }
        let (ours, theirs) = (borrowed(&order.ours), borrowed(&order.theirs));
        let (producer, consumer) = match order.access {
            Access::Read => (&theirs, &ours),
            Access::Write => (&ours, &theirs),
        };
        let request = Request::whole(order.tokens, producer, consumer)
            .with_range(range)
            .with_layers(part.layers.clone())
            .without_groups(&order.options.without);
        link.plan.segments(&request, self.mode(), limits, list)?;
        Ok(!list.is_empty())
    }

    /// Enters what a transfer was.
    pub(super) fn add(&mut self, backend: &str, moved: &TransferReport, now: Duration) {
        let since = self.posted.map_or(Duration::ZERO, |posted| now.saturating_sub(posted));
        // What settles within a step took longer than no time.
        self.report.moving = self.report.moving.max(since).max(moved.elapsed);
        self.report.bytes += moved.bytes;
        self.report.segments += moved.segments;
        self.report.transfers += 1;
        let transport = match &moved.route {
            Some(route) => format!("{backend}/{}/{route}", moved.transport),
            None => format!("{backend}/{}", moved.transport),
        };
        self.report.transports.insert(transport);
    }

    /// Ranks of the other engine from which everything is there, where these sources are not proven.
    pub(super) fn proven_but(&self, unproven: &[Unproven]) -> BTreeSet<Incarnation> {
        let mut proven = self.order.options.proven.clone();
        if let Stage::Asked { peers, .. } = &self.stage
            && !unproven.is_empty()
        {
            let good =
                |(at, _): &(u16, &Incarnation)| unproven.iter().all(|source| source.source != *at);
            proven.extend((0..).zip(peers).filter(good).map(|(_, peer)| *peer));
        }
        proven
    }

    /// This engine's blocks of which something is not proven good, as (group, id): all that hold a token of a part that some
    /// source has not proven, whoever told of its parts.
    pub(super) fn spoilt(
        &self,
        unproven: &[Unproven],
        layout: &RankLayout,
    ) -> BTreeSet<(u16, u32)> {
        let order = &self.order;
        let good =
            |tokens: Range<u64>| !unproven.is_empty() && unproven.iter().all(|it| has(it, &tokens));
        let mut spoilt = BTreeSet::new();
        for (group, (spec, table)) in (0_u16..).zip(layout.groups().iter().zip(&order.ours)) {
            let tokens = u64::from(spec.block_tokens);
            for (entry, id) in (table.first..).zip(&table.ids) {
                if spec.null_block == Some(*id) {
                    continue;
                }
                let is_state = spec.kind == kvx_core::layout::GroupKind::State;
                let (start, end) = match is_state {
                    true => (order.range.start, order.range.end),
                    false => (entry * tokens, (entry + 1) * tokens),
                };
                let (start, end) = (start.max(order.range.start), end.min(order.range.end));
                if start < end && !good(start..end) {
                    spoilt.insert((group, *id));
                }
            }
        }
        spoilt
    }
}

/// Whether a source has proven everything of these tokens: all parts that have to do with them, in whatever layers, and nothing is
/// between those. Unless all parts are known, there may be others.
fn has(source: &Unproven, tokens: &Range<u64>) -> bool {
    let touches = |part: &&Part| part.tokens.start < tokens.end && tokens.start < part.tokens.end;
    let mut touching: Vec<&Part> = source.parts.iter().filter(touches).collect();
    touching.sort_by_key(|part| part.tokens.start);
    let proven = |part: &&Part| source.proven.binary_search(&part.number).is_ok();
    let mut here = tokens.start;
    for part in &touching {
        if part.tokens.start > here {
            return false;
        }
        here = here.max(part.tokens.end);
    }
    source.complete && here >= tokens.end && touching.iter().all(proven)
}

pub(super) fn borrowed(tables: &[Table]) -> Vec<BlockTable<'_>> {
    tables.iter().map(Table::as_plan).collect()
}

#[cfg(test)]
mod tests;
