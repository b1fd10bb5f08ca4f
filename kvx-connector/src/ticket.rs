//! What the producer's scheduler hands to the consumer's, by way of the router: where a request's cache lies, and under which
//! lease.
//!
//! ```text
//! producer's scheduler ── response: kv_transfer_params ──▶ router ── request: kv_transfer_params ──▶ consumer's scheduler
//! ```
//!
//! A [`Ticket`] has two forms. The one goes through routers and proxies that know nothing of kvx: [`TransferParams`], the names
//! that vLLM gave them, and one name more. The other is bytes: [`Ticket::to_bytes`]. Both are bounded and state the schemas
//! that they can be read by; both name the field that is wrong, and pass over fields that they do not know.
//!
//! Both have a checksum over what is to be read or written: a router may say where the engine is, and change nothing else.
//!
//! A ticket comes from a stranger. It is data: that it names an address does not mean that the address may be dialled, and
//! that it names blocks does not mean that they are there. Who dials and who reads checks that.

mod bytes;
mod params;
mod sum;
#[cfg(test)]
mod tests;

use std::time::Duration;

use kvx_core::card::{Address, EngineName};
use kvx_core::layout::GroupKind;
use kvx_core::plan::BlockTable;
use kvx_core::{Error, Result};
use serde::Serialize;

pub use params::TransferParams;
pub(crate) use params::required;

use crate::form::{self, Ids, named_fields};
use crate::protocol::{Access, LeaseName, TransferKey};

/// Where a request's cache lies on the producer, and under which lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The transfer's name on both sides.
    pub key: TransferKey,
    /// The producer's engine.
    pub engine: EngineName,
    /// Where it serves its cards.
    pub cards: Address,
    /// Which of its data parallel replicas has the request.
    pub replica: u32,
    /// Its tensor parallel ranks. For those who read vLLM's names only: a card says it better.
    pub tp: u32,
    /// The lease on the blocks. Of no meaning where there are no tokens.
    pub lease: LeaseName,
    /// What it allows. Nearly always to read: the engine that decodes asks for what another has computed.
    pub access: Access,
    /// How long the lease runs unless it is extended, from when it was granted. In whole milliseconds.
    pub ttl: Duration,
    /// How many tokens' cache is there, from the request's first on.
    pub tokens: u64,
    /// Whether all of it is there already.
    pub parts: Parts,
    /// One for each of the producer's cache groups.
    pub groups: Vec<TicketGroup>,
}

/// Whether all of a request's cache is there when its ticket is given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Parts {
    /// It is.
    Whole,
    /// It comes in parts, which the producer's ranks announce; the last says how many there are.
    Announced,
}

/// A request's blocks in one of the producer's cache groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TicketGroup {
    /// What the blocks hold.
    pub kind: GroupKind,
    /// Tokens per block of the table: the logical block, not the kernel's.
    pub block_tokens: u32,
    /// The blocks.
    pub table: Table,
}

/// A request's block table for one cache group, as it is sent: a [`BlockTable`] that owns its ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Table {
    /// The request's logical block number that the first id stands for.
    pub first: u64,
    /// Ids of logical blocks.
    #[serde(serialize_with = "form::ids")]
    pub ids: Vec<u32>,
}

named_fields!(Table { first: u64, ids: Ids<{ Ticket::MAX_BLOCKS }> });
named_fields!(TicketGroup { kind: GroupKind, block_tokens: u32, table: Table });

impl Table {
    /// As the plan reads it.
    #[must_use]
    pub fn as_plan(&self) -> BlockTable<'_> {
        BlockTable::starting_at(self.first, &self.ids)
    }

    /// The logical block number after the last one, as far as there is such a number.
    pub(crate) fn end(&self) -> u64 {
        self.first.saturating_add(self.ids.len() as u64)
    }
}

impl From<BlockTable<'_>> for Table {
    fn from(table: BlockTable<'_>) -> Self {
        Self { first: table.first(), ids: table.ids().to_vec() }
    }
}

impl Ticket {
    /// Most cache groups.
    pub const MAX_GROUPS: usize = 64;
    /// Most block ids, over all groups.
    pub const MAX_BLOCKS: usize = 1 << 20;
    /// Most bytes of a ticket as bytes.
    pub const MAX_BYTES: usize = 4 * Self::MAX_BLOCKS + (64 << 10);
    /// Most tokens.
    pub const MAX_TOKENS: u64 = 1 << 40;
    /// Longest time to live: a day.
    pub const MAX_TTL: Duration = Duration::from_secs(24 * 60 * 60);

    /// Whether it is a ticket for anything: one of a request without tokens holds no lease, and nothing need be released.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Block ids in all groups.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.groups.iter().map(|group| group.table.ids.len()).sum()
    }

    /// Whether its parts fit together: what is promised is there, within the limits. `operation` and the names of fields go
    /// into the error.
    fn check(&self, operation: &'static str) -> Result<()> {
        let refuse =
            |field: &str, why: String| Err(Error::peer(operation, format!("{field}: {why}")));
        if self.tokens > Self::MAX_TOKENS {
            return refuse("tokens", format!("{}; the limit is {}", self.tokens, Self::MAX_TOKENS));
        }
        if self.ttl > Self::MAX_TTL {
            return refuse("ttl", format!("{:?}; the limit is {:?}", self.ttl, Self::MAX_TTL));
        }
        if self.groups.len() > Self::MAX_GROUPS {
            let (count, limit) = (self.groups.len(), Self::MAX_GROUPS);
            return refuse("groups", format!("{count} items; the limit is {limit}"));
        }
        if self.blocks() > Self::MAX_BLOCKS {
            let (count, limit) = (self.blocks(), Self::MAX_BLOCKS);
            return refuse("groups", format!("{count} block ids in all; the limit is {limit}"));
        }
        if self.is_empty() {
            return Ok(());
        }
        if self.lease.number == 0 {
            return refuse("lease", "leases are numbered from 1 on".into());
        }
        if self.groups.iter().all(|group| group.table.ids.is_empty()) {
            return refuse("groups", format!("there are {} tokens and no block", self.tokens));
        }
        for (index, group) in self.groups.iter().enumerate() {
            if group.block_tokens == 0 {
                return refuse("groups", format!("group {index}: block_tokens is 0"));
            }
            // Of a state only the last block counts, and where that stands in the table does not matter.
            let needed = self.tokens.div_ceil(group.block_tokens.into());
            if group.kind != GroupKind::State
                && !group.table.ids.is_empty()
                && group.table.end() != needed
            {
                return refuse(
                    "groups",
                    format!(
                        "group {index}: the table ends with block {}, {} tokens with block {needed}",
                        group.table.end(),
                        self.tokens
                    ),
                );
            }
        }
        Ok(())
    }
}
