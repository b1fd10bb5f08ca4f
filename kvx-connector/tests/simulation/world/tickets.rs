//! What users are given, and what becomes of it on the way.

use kvx_connector::protocol::{LeaseName, TransferKey};
use kvx_connector::ticket::{Parts, Ticket, TicketGroup};
use rand::RngExt as _;

use super::{TTL, Verdict, World};

impl World<'_> {
    /// The ticket of a lease.
    pub(super) fn ticket(&self, lease: LeaseName, serial: u64) -> Verdict<Ticket> {
        let owner = self.owner();
        let groups = owner.layouts.first().map(|layout| layout.groups()).unwrap_or_default();
        let group = |(group, table): (&kvx_core::layout::CacheGroup, _)| TicketGroup {
            kind: group.kind,
            block_tokens: group.block_tokens,
            table,
        };
        Ok(Ticket {
            key: TransferKey::new(format!("r{serial}")).map_err(|error| error.to_string())?,
            engine: owner.name.parse().map_err(|error: kvx_core::Error| error.to_string())?,
            cards: owner.address(0),
            replica: 0,
            tp: 1,
            lease,
            access: self.access,
            ttl: TTL,
            tokens: self.scene.tokens,
            parts: Parts::Whole,
            groups: groups.iter().zip(self.owner_tables()).map(group).collect(),
        })
    }

    /// Now and then somebody puts another block into a ticket. Whether that was done.
    pub(super) fn edit(&mut self, ticket: &mut Ticket) -> bool {
        if !self.edits || !self.rng.random_ratio(1, 16) || ticket.groups.is_empty() {
            return false;
        }
        let number = self.rng.random_range(0..ticket.groups.len());
        let group = self.owner().layouts[0].groups()[number];
        let ids = ticket.groups[number].table.ids.clone();
        if ids.is_empty() {
            return false;
        }
        let (at, other) =
            (self.rng.random_range(0..ids.len()), self.rng.random_range(0..group.blocks));
        // One that is there already changes places with it.
        let ids = &mut ticket.groups[number].table.ids;
        let before = ids[at];
        if other == before || group.null_block.is_some_and(|null| [other, before].contains(&null)) {
            return false;
        }
        if let Some(twin) = ids.iter().position(|id| *id == other) {
            ids[twin] = before;
        }
        ids[at] = other;
        true
    }
}
