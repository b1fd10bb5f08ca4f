//! One request whose cache comes from another engine: where it stands, and what its load is.

use std::collections::BTreeSet;

use kvx_core::layout::GroupKind;
use kvx_core::plan::BlockTable;
use kvx_core::{Error, Result};

use super::blocks;
use super::config::SchedulerConfig;
use super::ranks::RankSet;
use super::request::RequestId;
use super::step::{Load, Source};
use crate::ticket::{Parts, Ticket, TicketGroup};

/// A request whose cache comes from another engine.
#[derive(Debug)]
pub(super) struct Pull {
    pub(super) prompt_tokens: u64,
    pub(super) attempt: u64,
    /// Its lease; none where its ticket was of no use.
    pub(super) source: Option<Source>,
    pub(super) state: State,
    /// Blocks of the pool that count as taken by it.
    pub(super) need: u64,
}

#[derive(Debug)]
pub(super) enum State {
    /// It has a ticket. `asked` is what the engine was told when it last asked: tokens it had, tokens to come.
    Waiting { ticket: Box<Ticket>, asked: Option<(u64, u64)> },
    /// Another request has the same lease.
    Second,
    /// It has blocks; the workers have not been told.
    Queued(Box<Load>),
    /// The workers load it.
    Loading(Box<Loading>),
    /// A load has failed; another is to begin later.
    Backoff { load: Box<Load>, tries: u32 },
    /// There is nothing more to load.
    Over,
}

/// A load that the workers have been told of.
#[derive(Debug)]
pub(super) struct Loading {
    pub(super) load: Load,
    /// Loads of the request that failed before.
    pub(super) tries: u32,
    pub(super) ends: Ends,
}

/// How a load ended at those ranks that have reported.
#[derive(Debug, Default)]
pub(super) struct Ends {
    pub(super) ranks: RankSet,
    pub(super) blocks: BTreeSet<(u16, u32)>,
    pub(super) quarantined: BTreeSet<(u16, u32)>,
    /// Ranks with blocks in quarantine.
    pub(super) unquiet: BTreeSet<u16>,
    pub(super) failed: bool,
    pub(super) for_good: bool,
    pub(super) reason: Option<String>,
}

/// A load that was aborted, and has not ended at all ranks.
#[derive(Debug)]
pub(super) struct Draining {
    pub(super) request: RequestId,
    pub(super) load: Load,
    pub(super) ends: Ends,
}

impl Pull {
    pub(super) const fn waits(&self) -> bool {
        matches!(self.state, State::Waiting { .. })
    }

    pub(super) const fn begins(&self) -> bool {
        matches!(self.state, State::Queued(_) | State::Backoff { .. })
    }

    /// Its load, from when it has blocks until it is over.
    pub(super) fn load(&self) -> Option<&Load> {
        match &self.state {
            State::Queued(load) | State::Backoff { load, .. } => Some(load),
            State::Loading(loading) => Some(&loading.load),
            State::Waiting { .. } | State::Second | State::Over => None,
        }
    }

    /// A queued load, or one to be tried again, begins.
    pub(super) fn begin(&mut self) -> Option<Load> {
        let (load, tries) = match std::mem::replace(&mut self.state, State::Over) {
            State::Queued(load) => (load, 0),
            State::Backoff { load, tries, .. } => (load, tries),
            other => {
                self.state = other;
                return None;
            }
        };
        let ends = Ends::default();
        self.state = State::Loading(Box::new(Loading { load: (*load).clone(), tries, ends }));
        Some(*load)
    }

    pub(super) fn stop_loading(&mut self) -> Option<Box<Loading>> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Loading(loading) => Some(loading),
            other => {
                self.state = other;
                None
            }
        }
    }
}

impl Load {
    /// The consumer's blocks, as (cache group, block).
    pub(super) fn local_blocks(&self) -> impl Iterator<Item = (u16, u32)> + '_ {
        let groups = (0_u16..).zip(&self.local);
        groups.flat_map(|(group, table)| table.ids.iter().map(move |id| (group, *id)))
    }

    pub(super) fn blocks(&self) -> usize {
        let local: usize = self.local.iter().map(|table| table.ids.len()).sum();
        local + self.remote.iter().map(|group| group.table.ids.len()).sum::<usize>()
    }
}

pub(super) fn load(
    config: &SchedulerConfig,
    request: &RequestId,
    pull: &Pull,
    ticket: &Ticket,
    asked: Option<(u64, u64)>,
    tables: &[BlockTable<'_>],
    external: u64,
) -> Result<Load> {
    let (computed, promised) =
        asked.ok_or_else(|| misuse("nothing was promised for this request", request))?;
    if external > promised || (ends_exactly(ticket) && external != promised) {
        return Err(misuse("not the number of tokens that were promised", request)
            .with_context("promised", promised)
            .with_context("external", external));
    }
    let tokens = computed..computed + external;
    Ok(Load {
        attempt: pull.attempt,
        replaces: None,
        request: request.clone(),
        source: pull.source.clone().unwrap_or_else(|| source(ticket)),
        deadline: config.deadline,
        announced: ticket.parts == Parts::Announced,
        local: blocks::own(&config.groups, tables, &tokens)?,
        remote: blocks::remote(&ticket.groups, &tokens)?,
        tokens,
    })
}

/// Whether a ticket's cache is of use only with all of its tokens: a state is that after the last of them, and of a window
/// only what follows them needs is there.
pub(super) fn ends_exactly(ticket: &Ticket) -> bool {
    let exact = |group: &TicketGroup| group.kind == GroupKind::State || group.table.first > 0;
    ticket.groups.iter().any(exact)
}

pub(super) fn source(ticket: &Ticket) -> Source {
    Source {
        engine: ticket.engine.clone(),
        cards: ticket.cards.clone(),
        replica: ticket.replica,
        lease: ticket.lease,
        key: ticket.key.clone(),
        ttl: ticket.ttl,
        fingerprint: ticket.fingerprint(),
    }
}

pub(super) fn misuse(what: &'static str, request: &RequestId) -> Error {
    Error::misuse("scheduler", what).with_context("request", request)
}
