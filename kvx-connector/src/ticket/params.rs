//! A ticket inside vLLM's `kv_transfer_params`, which routers and proxies hand on as they are.
//!
//! What vLLM has a name for is under that name, and only there, so that a router that looks at it, or changes it, and kvx
//! agree; what it has no name for is under `kvx`:
//!
//! ```json
//! {
//!   "do_remote_prefill": true, "do_remote_decode": false,
//!   "remote_engine_id": "prefill-0", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 2,
//!   "remote_request_id": "cmpl-1-0", "remote_block_ids": [[7, 3, 12]], "transfer_id": "from-the-router",
//!   "kvx": {
//!     "schema": [1, 1], "key": "from-the-router", "lease": "000102030405060708090a0b0c0d0e0f/17.0", "ttl": 30000,
//!     "tokens": 40, "replica": 0, "announced": false, "sum": "0123456789abcdef",
//!     "groups": [{"kind": "attention", "block_tokens": 16, "first": 0}]
//!   }
//! }
//! ```

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use kvx_core::card::{Address, EngineName, Host};
use kvx_core::layout::GroupKind;
use kvx_core::wire::{Text, printable};
use kvx_core::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::bytes::{SCHEMAS, check_schemas};
use super::sum::Sum;
use super::{Parts, Table, Ticket, TicketGroup};
use crate::form::{self, Ids, LeaseForm, List, Millis, Parsed, named_fields};
use crate::protocol::{Access, LeaseName, TransferKey};

/// What a request's `kv_transfer_params` ask of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferParams {
    /// The cache comes from another engine (`do_remote_prefill`).
    pub remote_prefill: bool,
    /// The cache is for another engine (`do_remote_decode`).
    pub remote_decode: bool,
    /// The router's name for the transfer (`transfer_id`).
    pub transfer_id: Option<TransferKey>,
    /// Where the cache is, if that is said.
    pub ticket: Option<Ticket>,
}

#[derive(Serialize)]
struct Extension {
    schema: (u16, u16),
    key: TransferKey,
    #[serde(serialize_with = "form::lease")]
    lease: LeaseName,
    #[serde(serialize_with = "form::millis")]
    ttl: Duration,
    tokens: u64,
    replica: u32,
    announced: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    writes: bool,
    #[serde(serialize_with = "form::text")]
    sum: Sum,
    groups: Vec<Group>,
}

named_fields!(Extension {
    schema: Schemas,
    key: TransferKey,
    lease: LeaseForm,
    ttl: Millis,
    tokens: u64,
    replica: u32 = 0,
    announced: bool = false,
    writes: bool = false,
    sum: Parsed<Sum, { Sum::CHARS }> = Sum::default(),
    groups: List<Group, { Ticket::MAX_GROUPS }>,
});

#[derive(Deserialize)]
struct Schemas((u16, u16));

impl form::Form for Schemas {
    type Value = (u16, u16);

    fn value(self) -> (u16, u16) {
        self.0
    }
}

#[derive(Serialize)]
struct Group {
    kind: GroupKind,
    block_tokens: u32,
    first: u64,
}

named_fields!(Group { kind: GroupKind, block_tokens: u32, first: u64 = 0 });

impl TransferParams {
    /// Reads `kv_transfer_params`; `null` is as good as none.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Peer`](kvx_core::ErrorKind::Peer), naming the field: malformed, or over a limit.
    /// - [`ErrorKind::Unsupported`](kvx_core::ErrorKind::Unsupported): a ticket of schemas that this version does not read.
    pub fn from_json(params: &Value) -> Result<Self> {
        let mut read = Self::without_ticket(params)?;
        read.ticket = ticket(params)?;
        Ok(read)
    }

    /// All but the ticket, so that a bad ticket does not hide what else was asked for.
    pub(crate) fn without_ticket(params: &Value) -> Result<Self> {
        let Some(map) = object(params)? else {
            return Ok(Self::default());
        };
        Ok(Self {
            remote_prefill: flag(map, "do_remote_prefill")?,
            remote_decode: flag(map, "do_remote_decode")?,
            transfer_id: optional(map, "transfer_id")?,
            ticket: None,
        })
    }
}

/// The ticket in `kv_transfer_params` that say that there is one.
pub(crate) fn required(params: &Value) -> Result<Ticket> {
    ticket(params)?.ok_or_else(|| {
        refuse("kvx", "is not there").with_remedy(
            "let the router hand on all of the prefill's kv_transfer_params, and use kvx on both sides",
        )
    })
}

/// The ticket in `kv_transfer_params`, if there is one.
fn ticket(params: &Value) -> Result<Option<Ticket>> {
    let Some(map) = object(params)? else { return Ok(None) };
    let Some(found) = map.get("kvx").filter(|found| !found.is_null()) else { return Ok(None) };
    // Schemas first: what else is there may look otherwise in another.
    let schemas = found.get("schema").ok_or_else(|| refuse("kvx: schema", "is not there"))?;
    let (oldest, newest) =
        <(u16, u16)>::deserialize(schemas).map_err(|why| refuse("kvx: schema", why))?;
    check_schemas(oldest, newest)?;
    let kvx = Extension::deserialize(found).map_err(|why| refuse("kvx", why))?;
    let tables = tables(map)?;
    if tables.len() != kvx.groups.len() {
        return Err(Error::mismatch_between(
            "kv_transfer_params",
            "number of cache groups",
            ("remote_block_ids", tables.len()),
            ("kvx", kvx.groups.len()),
        )
        .with_kind(kvx_core::ErrorKind::Peer));
    }
    let groups = kvx.groups.into_iter().zip(tables).map(|(group, ids)| TicketGroup {
        kind: group.kind,
        block_tokens: group.block_tokens,
        table: Table { first: group.first, ids },
    });
    let ticket = Ticket {
        key: kvx.key,
        engine: engine(map)?,
        cards: address(map)?,
        replica: kvx.replica,
        tp: optional(map, "tp_size")?.unwrap_or(1),
        lease: kvx.lease,
        access: if kvx.writes { Access::Write } else { Access::Read },
        ttl: kvx.ttl,
        tokens: kvx.tokens,
        parts: if kvx.announced { Parts::Announced } else { Parts::Whole },
        groups: groups.collect(),
    };
    ticket.check("kv_transfer_params")?;
    kvx.sum.check("kv_transfer_params", &ticket)?;
    Ok(Some(ticket))
}

impl Ticket {
    /// The ticket as `kv_transfer_params` for the consumer. `request` is the producer's own id of the request, for whoever
    /// reads logs: kvx takes nothing from it.
    ///
    /// # Errors
    ///
    /// As for [`Ticket::to_bytes`].
    pub fn to_params(&self, request: &str) -> Result<Map<String, Value>> {
        self.check("kv_transfer_params")?;
        let host = match self.cards.host() {
            Host::V4(ip) => ip.to_string(),
            Host::V6(ip) => ip.to_string(),
            Host::Name(name) => name.clone(),
            _ => return Err(Error::unsupported("kv_transfer_params", "a host of another kind")),
        };
        let kvx = Extension {
            schema: (SCHEMAS.oldest(), SCHEMAS.newest()),
            key: self.key.clone(),
            lease: self.lease,
            ttl: self.ttl,
            tokens: self.tokens,
            replica: self.replica,
            announced: self.parts == Parts::Announced,
            writes: self.access == Access::Write,
            sum: Sum::of(self),
            groups: self.groups.iter().map(Group::of).collect(),
        };
        let ids = self.groups.iter().map(|group| Value::from(group.table.ids.as_slice()));
        let kvx = serde_json::to_value(&kvx).map_err(|error| {
            Error::new(kvx_core::ErrorKind::Internal, "kv_transfer_params", "cannot be JSON")
                .with_source(error)
        })?;
        let fields: [(&str, Value); 10] = [
            ("do_remote_prefill", true.into()),
            ("do_remote_decode", false.into()),
            ("remote_engine_id", self.engine.as_str().into()),
            ("remote_block_ids", ids.collect::<Vec<_>>().into()),
            ("remote_host", host.into()),
            ("remote_port", self.cards.port().into()),
            ("tp_size", self.tp.into()),
            ("remote_request_id", request.into()),
            ("transfer_id", self.key.as_str().into()),
            ("kvx", kvx),
        ];
        Ok(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }
}

impl Group {
    const fn of(group: &TicketGroup) -> Self {
        Self { kind: group.kind, block_tokens: group.block_tokens, first: group.table.first }
    }
}

fn refuse(field: &str, why: impl std::fmt::Display) -> Error {
    Error::peer("kv_transfer_params", format!("{field}: {}", printable(&why.to_string())))
}

fn object(params: &Value) -> Result<Option<&Map<String, Value>>> {
    match params {
        Value::Null => Ok(None),
        Value::Object(map) => Ok(Some(map)),
        _ => Err(Error::peer("kv_transfer_params", "not a JSON object")),
    }
}

/// The field `name`, if it is there and not `null`.
fn optional<'a, T: Deserialize<'a>>(map: &'a Map<String, Value>, name: &str) -> Result<Option<T>> {
    match map.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => T::deserialize(value).map(Some).map_err(|why| refuse(name, why)),
    }
}

fn field<'a, T: Deserialize<'a>>(map: &'a Map<String, Value>, name: &str) -> Result<T> {
    optional(map, name)?.ok_or_else(|| refuse(name, "is not there"))
}

fn flag(map: &Map<String, Value>, name: &str) -> Result<bool> {
    optional(map, name).map(Option::unwrap_or_default)
}

fn engine(map: &Map<String, Value>) -> Result<EngineName> {
    let name = field::<Text<{ EngineName::MAX_BYTES }>>(map, "remote_engine_id")?;
    EngineName::new(name.into_string()).map_err(|why| refuse("remote_engine_id", why.message()))
}

fn address(map: &Map<String, Value>) -> Result<Address> {
    let host = field::<Text<{ Address::MAX_BYTES }>>(map, "remote_host")?;
    let host = host.as_str();
    let port: u16 = field(map, "remote_port")?;
    if port == 0 {
        return Err(refuse("remote_port", "nobody can be reached at port 0"));
    }
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    let address = match bare.parse::<Ipv6Addr>() {
        Ok(ip) => Address::new(ip.into(), port),
        Err(_) => format!("{host}:{port}")
            .parse()
            .map_err(|why: Error| refuse("remote_host", why.message()))?,
    };
    let unspecified = match address.host() {
        Host::V4(ip) => IpAddr::from(*ip).is_unspecified(),
        Host::V6(ip) => ip.is_unspecified(),
        _ => false,
    };
    if unspecified {
        return Err(refuse("remote_host", format!("nobody can be reached at {bare}")));
    }
    Ok(address)
}

/// `remote_block_ids`: a list for each group, or, as vLLM wrote it before it had groups, one list.
fn tables(map: &Map<String, Value>) -> Result<Vec<Vec<u32>>> {
    const FIELD: &str = "remote_block_ids";
    let value = map.get(FIELD).ok_or_else(|| refuse(FIELD, "is not there"))?;
    let list = value.as_array().ok_or_else(|| refuse(FIELD, "not a list"))?;
    let ids = |value: &Value| {
        Ids::<{ Ticket::MAX_BLOCKS }>::deserialize(value)
            .map(form::Form::value)
            .map_err(|why| refuse(FIELD, why))
    };
    match list.first() {
        Some(Value::Array(_)) if list.len() > Ticket::MAX_GROUPS => {
            Err(refuse(FIELD, format!("{} lists; the limit is {}", list.len(), Ticket::MAX_GROUPS)))
        }
        Some(Value::Array(_)) => list.iter().map(ids).collect(),
        _ => Ok(vec![ids(value)?]),
    }
}
