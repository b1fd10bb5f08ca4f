//! A checksum over what a ticket says is to be read or written.
//!
//! A ticket goes through programs that know nothing of kvx. What they change of the blocks, the lease or the tokens would have other
//! bytes moved than the producer meant, and nobody would see it: so the reader compares. A router may still say where the engine is.
//! It is no seal: whoever means to forge a ticket makes a new checksum. One of an earlier version has none.
//!
//! The same is what users tell the owner, [`Fingerprint`]: it knows what it granted, whatever became of the ticket.

use std::fmt;
use std::str::FromStr;

use kvx_core::layout::GroupKind;
use kvx_core::{Error, Result};
use twox_hash::XxHash3_64;

use super::{Parts, Ticket};
use crate::protocol::{Access, Fingerprint};

/// XXH3-64; `None` where it is not said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum(Option<Fingerprint>);

impl Sum {
    /// Characters of it.
    pub(super) const CHARS: usize = 16;

    pub(super) fn of(ticket: &Ticket) -> Self {
        Self(Some(ticket.fingerprint()))
    }

    /// Refuses a ticket of another checksum.
    pub(super) fn check(self, operation: &'static str, ticket: &Ticket) -> Result<()> {
        if self.0.is_none() || self == Self::of(ticket) {
            return Ok(());
        }
        Err(Error::peer(operation, "the ticket is not as its engine gave it: its checksum is another")
            .with_context("lease", ticket.lease)
            .with_context("said", self)
            .with_context("found", Self::of(ticket))
            .with_remedy(
                "find what changes tickets on their way: a router may change addresses, and nothing else of them",
            ))
    }
}

impl Ticket {
    /// What it says is to be read or written, in few bytes: for whoever grants the lease, and for whoever uses it, who tell each other.
    ///
    /// XXH3-64 of the lease (owner, number, epoch), whether it is to be written, how many tokens, whether in parts, and of each group its
    /// kind, tokens per block, first entry and ids: numbers as 8 bytes, little-endian, lists behind their lengths.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let mut bytes = Vec::with_capacity(64 + 32 * self.groups.len() + 8 * self.blocks());
        bytes.extend_from_slice(self.lease.owner.as_bytes());
        let mut number = |number: u64| bytes.extend_from_slice(&number.to_le_bytes());
        number(self.lease.number);
        number(self.lease.epoch.into());
        number((self.access == Access::Write).into());
        number(self.tokens);
        number((self.parts == Parts::Announced).into());
        number(self.groups.len() as u64);
        for group in &self.groups {
            number(match group.kind {
                GroupKind::State => 1,
                _ => 0,
            });
            number(group.block_tokens.into());
            number(group.table.first);
            number(group.table.ids.len() as u64);
            group.table.ids.iter().for_each(|id| number((*id).into()));
        }
        Fingerprint(XxHash3_64::oneshot(&bytes))
    }
}

impl fmt::Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(sum) => sum.fmt(f),
            None => f.write_str("none"),
        }
    }
}

/// Reads 16 hexadecimal digits.
impl FromStr for Sum {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_hex = text.len() == Self::CHARS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let sum = u64::from_str_radix(text, 16).ok().filter(|_| is_hex);
        sum.map(|sum| Self(Some(Fingerprint(sum))))
            .ok_or_else(|| "not a checksum of 16 hexadecimal digits".into())
    }
}
