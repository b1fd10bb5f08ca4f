//! A ticket as bytes: magic, the schemas that it can be read by, and a map of named fields.

use std::time::Duration;

use kvx_core::card::{Address, EngineName, SchemaRange};
use kvx_core::wire;
use kvx_core::{Error, Result};
use serde::Serialize;

use super::sum::Sum;
use super::{Parts, Ticket, TicketGroup};
use crate::form::{self, LeaseForm, List, Millis, Parsed, named_fields};
use crate::protocol::{Access, LeaseName, TransferKey};

const MAGIC: [u8; 4] = *b"kvxT";
const HEADER: usize = MAGIC.len() + 4;

/// The schemas of tickets that this version of kvx reads and writes.
pub(super) const SCHEMAS: SchemaRange = match SchemaRange::new(1, 1) {
    Some(range) => range,
    None => SchemaRange::CURRENT,
};

/// Refuses what was written by somebody who shares no schema with this version.
pub(super) fn check_schemas(oldest: u16, newest: u16) -> Result<()> {
    let theirs = SchemaRange::new(oldest, newest).ok_or_else(|| {
        Error::peer("ticket", format!("schema: {oldest} to {newest} is no range"))
    })?;
    match SCHEMAS.common(theirs) {
        Some(_) => Ok(()),
        None => Err(Error::mismatch_between(
            "ticket",
            "schema",
            ("this side", SCHEMAS),
            ("the ticket", theirs),
        )
        .with_remedy("run versions of kvx that can talk to each other")),
    }
}

struct Body {
    key: TransferKey,
    engine: EngineName,
    cards: Address,
    replica: u32,
    tp: u32,
    lease: LeaseName,
    ttl: Duration,
    tokens: u64,
    announced: bool,
    writes: bool,
    sum: Sum,
    groups: Vec<TicketGroup>,
}

named_fields!(Body {
    key: TransferKey,
    engine: Parsed<EngineName, { EngineName::MAX_BYTES }>,
    cards: Parsed<Address, { Address::MAX_BYTES }>,
    replica: u32 = 0,
    tp: u32 = 1,
    lease: LeaseForm,
    ttl: Millis,
    tokens: u64,
    announced: bool = false,
    writes: bool = false,
    sum: Parsed<Sum, { Sum::CHARS }> = Sum::default(),
    groups: List<TicketGroup, { Ticket::MAX_GROUPS }>,
});

#[derive(Serialize)]
struct BodyRef<'a> {
    key: &'a TransferKey,
    #[serde(serialize_with = "form::text")]
    engine: &'a EngineName,
    #[serde(serialize_with = "form::text")]
    cards: &'a Address,
    replica: u32,
    tp: u32,
    #[serde(serialize_with = "form::lease")]
    lease: LeaseName,
    #[serde(serialize_with = "form::millis")]
    ttl: Duration,
    tokens: u64,
    announced: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    writes: bool,
    #[serde(serialize_with = "form::text")]
    sum: Sum,
    groups: &'a [TicketGroup],
}

impl Ticket {
    /// The ticket as bytes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Peer`](kvx_core::ErrorKind::Peer), naming the field, where no reader would take it: over a limit, or parts that
    /// do not fit together.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.check("ticket")?;
        let body = BodyRef {
            key: &self.key,
            engine: &self.engine,
            cards: &self.cards,
            replica: self.replica,
            tp: self.tp,
            lease: self.lease,
            ttl: self.ttl,
            tokens: self.tokens,
            announced: self.parts == Parts::Announced,
            writes: self.access == Access::Write,
            sum: Sum::of(self),
            groups: &self.groups,
        };
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&SCHEMAS.oldest().to_le_bytes());
        bytes.extend_from_slice(&SCHEMAS.newest().to_le_bytes());
        bytes.extend_from_slice(&wire::to_bytes("ticket", &body)?);
        Ok(bytes)
    }

    /// The ticket that these bytes are.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Peer`](kvx_core::ErrorKind::Peer), naming the field: too long, malformed, over a limit, or parts that do not
    ///   fit together.
    /// - [`ErrorKind::Unsupported`](kvx_core::ErrorKind::Unsupported): of schemas that this version does not read.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        if bytes.len() > Self::MAX_BYTES {
            return Err(Error::peer("ticket", "the ticket is too long")
                .with_context("bytes", bytes.len())
                .with_context("limit", Self::MAX_BYTES));
        }
        let Some((&[m0, m1, m2, m3, o0, o1, n0, n1], body)) = bytes.split_first_chunk::<HEADER>()
        else {
            return Err(
                Error::peer("ticket", "the ticket is cut short").with_context("bytes", bytes.len())
            );
        };
        if [m0, m1, m2, m3] != MAGIC {
            return Err(Error::peer("ticket", "not a ticket: it does not begin with \"kvxT\""));
        }
        check_schemas(u16::from_le_bytes([o0, o1]), u16::from_le_bytes([n0, n1]))?;
        let body: Body = wire::from_bytes("ticket", "the ticket", body)?;
        let sum = body.sum;
        let ticket = Self {
            key: body.key,
            engine: body.engine,
            cards: body.cards,
            replica: body.replica,
            tp: body.tp,
            lease: body.lease,
            access: if body.writes { Access::Write } else { Access::Read },
            ttl: body.ttl,
            tokens: body.tokens,
            parts: if body.announced { Parts::Announced } else { Parts::Whole },
            groups: body.groups,
        };
        ticket.check("ticket")?;
        sum.check("ticket", &ticket)?;
        Ok(ticket)
    }
}
