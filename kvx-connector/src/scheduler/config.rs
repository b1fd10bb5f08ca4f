//! What an engine's scheduler is, and the policies that it wants.

use std::time::Duration;

use kvx_core::card::{Address, EngineName};
use kvx_core::layout::{CacheGroup, Grid, GroupKind};
use kvx_core::{Error, Result};

use super::pull::ends_exactly;
use super::request::OnFailure;
use crate::ticket::Ticket;

/// What an engine's scheduler is, and the policies that it wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Name of the engine.
    pub engine: EngineName,
    /// Where its cards are served.
    pub cards: Address,
    /// Its ranks.
    pub grid: Grid,
    /// The data parallel replica whose requests this scheduler has.
    pub replica: u32,
    /// Its cache groups.
    pub groups: Vec<SchedulerGroup>,
    /// Whether requests' caches may be given to other engines.
    pub produces: bool,
    /// Whether requests' caches may be had from other engines.
    pub consumes: bool,
    /// How long a lease runs unless it is extended: [`MIN_LEASE`](Self::MIN_LEASE) at least. Who holds it extends it thrice in that time.
    pub lease: Duration,
    /// How long a lease runs at most, however often it is extended, and how long one is extended before a load begins.
    pub hard: Duration,
    /// Within which time a load must end.
    pub deadline: Duration,
    /// What becomes of a prompt's last token.
    pub last_token: LastToken,
    /// What becomes of a request whose cache cannot be had.
    pub on_failure: OnFailure,
    /// How often a load that failed, and may be tried again, is.
    pub retries: u32,
    /// How long to wait before the first retry; each further one waits twice as long as the one before.
    pub backoff: Duration,
    /// Whether loads run while the request waits, between steps.
    pub asynchronous: bool,
    /// Whether caches go through a buffer of the host, into which each chunk of a prompt is copied.
    pub host_buffer: bool,
    /// Blocks of the pool that all groups' tables are filled from, where the connector is to see to it that loads do not fill
    /// the pool and then wait for each other: a load begins only if all that are under way, and it, find room for their
    /// prompts and one block more in each group; or if none is under way.
    pub pool_blocks: Option<u64>,
    /// Most requests with transfers at a time, of each role. Consumers' further ones are asked again later, producers' are not
    /// published.
    pub max_requests: usize,
}

/// A cache group, as the scheduler sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerGroup {
    /// The group.
    pub group: CacheGroup,
    /// Whether it is this side's alone (a draft model's): its blocks are neither given nor had.
    pub local_only: bool,
}

/// Who sees to it that a request with all of its prompt in the cache still has a token to compute, so that there are logits to
/// sample from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LastToken {
    /// The engine: it is given the whole prompt, and computes the last token again (vLLM, with asynchronous loads).
    #[default]
    EngineRecomputes,
    /// The connector: it gives all but the last token.
    Withheld,
    /// Nobody need: the engine has the first token that follows the prompt from elsewhere.
    NotNeeded,
}

impl SchedulerConfig {
    /// Shortest lease: in less, heartbeats that are sent thrice in it would not come in time on a busy machine.
    pub const MIN_LEASE: Duration = Duration::from_millis(100);

    /// Both roles, with vLLM's rules.
    #[must_use]
    pub fn new(
        engine: EngineName,
        cards: Address,
        grid: Grid,
        groups: impl IntoIterator<Item = CacheGroup>,
    ) -> Self {
        let groups = groups.into_iter();
        Self {
            engine,
            cards,
            grid,
            replica: 0,
            groups: groups.map(|group| SchedulerGroup { group, local_only: false }).collect(),
            produces: true,
            consumes: true,
            lease: Duration::from_secs(30),
            hard: Duration::from_secs(15 * 60),
            deadline: Duration::from_secs(120),
            last_token: LastToken::default(),
            on_failure: OnFailure::default(),
            retries: 1,
            backoff: Duration::from_millis(100),
            asynchronous: true,
            host_buffer: false,
            pool_blocks: None,
            max_requests: 65_536,
        }
    }

    /// Ranks that take part in each request.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.grid.tp * self.grid.pp
    }

    /// How many tokens of a prompt a producer should compute before it finishes the request, for consumers with the same policy.
    /// Where a consumer computes the last token itself, it can go on from a state, and from a window, only as they were before
    /// that token.
    #[must_use]
    pub fn tokens_to_produce(&self, prompt_tokens: u64) -> u64 {
        let state = self.transferred().any(|group| group.kind == GroupKind::State);
        match self.last_token {
            LastToken::NotNeeded => prompt_tokens,
            LastToken::EngineRecomputes if !state => prompt_tokens,
            _ => prompt_tokens.saturating_sub(1),
        }
    }

    /// How many of a ticket's tokens are of use for a prompt.
    pub(super) fn usable(&self, ticket: &Ticket, prompt_tokens: u64) -> u64 {
        let is_state = |kind| kind == GroupKind::State;
        let state = self.transferred().any(|group| is_state(group.kind))
            || ticket.groups.iter().any(|group| is_state(group.kind));
        let limit = match self.last_token {
            LastToken::NotNeeded => prompt_tokens,
            // There is no way back from a state to the one before.
            LastToken::EngineRecomputes if !state => prompt_tokens,
            _ => prompt_tokens.saturating_sub(1),
        };
        match state || ends_exactly(ticket) {
            true if ticket.tokens > limit => 0,
            _ => ticket.tokens.min(limit),
        }
    }

    /// How many tokens an engine may count as computed once `loaded` of a prompt are there.
    pub(super) fn computed(&self, loaded: u64, prompt_tokens: u64) -> u64 {
        match self.last_token {
            LastToken::NotNeeded => loaded,
            _ => loaded.min(prompt_tokens.saturating_sub(1)),
        }
    }

    /// Blocks that a prompt takes of the pool, with one more in each group for what is computed next.
    pub(super) fn pool_need(&self, prompt_tokens: u64) -> u64 {
        let blocks = |group: &SchedulerGroup| match group.group.kind {
            GroupKind::State => 1,
            _ => prompt_tokens.div_ceil(group.group.block_tokens.into()),
        };
        self.groups.iter().map(|group| blocks(group) + 1).sum()
    }

    pub(super) fn transferred(&self) -> impl Iterator<Item = &CacheGroup> {
        self.groups.iter().filter(|group| !group.local_only).map(|group| &group.group)
    }

    pub(super) fn check(&self) -> Result<()> {
        let refuse = |why: String| Err(Error::config("scheduler", why));
        Grid::new(self.grid.tp, self.grid.pp, self.grid.dp)?;
        if self.replica >= self.grid.dp {
            return refuse(format!("replica {} of {}", self.replica, self.grid));
        }
        if self.transferred().next().is_none() {
            return refuse("there is no cache group to be transferred".into());
        }
        if self.groups.len() > Ticket::MAX_GROUPS {
            let (count, limit) = (self.groups.len(), Ticket::MAX_GROUPS);
            return refuse(format!("{count} cache groups; the limit is {limit}"));
        }
        if let Some(index) = self.groups.iter().position(|group| group.group.block_tokens == 0) {
            return refuse(format!("block_tokens of group {index} is 0"));
        }
        if self.lease < Self::MIN_LEASE || self.lease > Ticket::MAX_TTL {
            let (least, most) = (Self::MIN_LEASE, Ticket::MAX_TTL);
            return refuse(format!("a lease of {:?}; it is {least:?} to {most:?}", self.lease));
        }
        if self.hard < self.lease || self.hard > Ticket::MAX_TTL {
            return refuse(format!(
                "a lease of {:?} at first and {:?} at most",
                self.lease, self.hard
            ));
        }
        if self.deadline.is_zero() || self.deadline > Ticket::MAX_TTL {
            return refuse(format!("a deadline of {:?}", self.deadline));
        }
        if self.max_requests == 0 {
            return refuse("max_requests is 0".into());
        }
        Ok(())
    }
}
