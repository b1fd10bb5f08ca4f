//! The envelope of fixed size around a card: what a reader must know before it decodes anything.

use std::fmt;

use super::CardReader;
use crate::{Error, Result};

pub(super) const MAGIC: [u8; 8] = *b"KVX card";
/// The version of the envelope itself. Changes only when a reader could not even find the schemas any more.
const VERSION: u16 = 1;
/// Bytes of the envelope.
pub(super) const BYTES: usize = 40;

/// The schemas that somebody speaks: all from the oldest to the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SchemaRange {
    oldest: u16,
    newest: u16,
}

impl SchemaRange {
    /// Those that this version of kvx speaks.
    pub const CURRENT: Self = Self { oldest: 1, newest: 1 };

    /// All from `oldest` to `newest`; `None` where that is not a range, or has the schema 0, which there never was.
    #[must_use]
    pub const fn new(oldest: u16, newest: u16) -> Option<Self> {
        if oldest == 0 || oldest > newest { None } else { Some(Self { oldest, newest }) }
    }

    /// The oldest.
    #[must_use]
    pub const fn oldest(self) -> u16 {
        self.oldest
    }

    /// The newest.
    #[must_use]
    pub const fn newest(self) -> u16 {
        self.newest
    }

    /// The newest schema that both speak, if there is one.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u16> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }
}

impl fmt::Display for SchemaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.oldest == self.newest {
            write!(f, "schema {}", self.oldest)
        } else {
            write!(f, "schemas {} to {}", self.oldest, self.newest)
        }
    }
}

/// A set of features, a bit each.
///
/// A bit's meaning is given once and never changed. Bits below 32 are for `kvx-core` (none is in use yet), those from 32 on
/// for what is built on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FeatureSet(u64);

impl FeatureSet {
    /// None.
    pub const NONE: Self = Self(0);

    /// The set with these bits.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Its bits.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// What is in this set and not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether all of `other` is in it.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        other.without(self).is_empty()
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// The numbers of its bits, the lowest first.
impl fmt::Display for FeatureSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        let bits: Vec<_> =
            (0..64).filter(|bit| self.0 >> bit & 1 == 1).map(|bit| bit.to_string()).collect();
        f.write_str(&bits.join(", "))
    }
}

/// The features of a card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Features {
    /// Those that a reader must know: one that does not refuses the card.
    pub required: FeatureSet,
    /// Those that a reader may use where it knows them.
    pub optional: FeatureSet,
}

impl Features {
    /// None.
    pub const NONE: Self = Self { required: FeatureSet::NONE, optional: FeatureSet::NONE };
}

/// An envelope whose promises hold: both sections are there, nothing follows them, and this reader may read them.
#[derive(Debug)]
pub(super) struct Opened<'a> {
    pub(super) schemas: SchemaRange,
    pub(super) features: Features,
    pub(super) head: &'a [u8],
    pub(super) body: &'a [u8],
}

pub(super) fn seal(schemas: SchemaRange, features: Features, head: &[u8], body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(BYTES + head.len() + body.len());
    bytes.extend_from_slice(&MAGIC);
    for number in [VERSION, schemas.oldest, schemas.newest, 0] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    for set in [features.required, features.optional] {
        bytes.extend_from_slice(&set.bits().to_le_bytes());
    }
    for section in [head, body] {
        // A section over 4 GiB would be refused by its size at once; its length cannot be taken for another.
        let length = u32::try_from(section.len()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&length.to_le_bytes());
    }
    bytes.extend_from_slice(head);
    bytes.extend_from_slice(body);
    bytes
}

pub(super) fn open<'a>(reader: &CardReader, bytes: &'a [u8]) -> Result<Opened<'a>> {
    let refuse = |why: String| Error::peer("card", why).with_context("bytes", bytes.len());
    if bytes.len() > reader.max_bytes {
        return Err(refuse("the card is too long".into()).with_context("limit", reader.max_bytes));
    }
    let cut = || refuse("the card is cut short".into());
    let begins = &bytes[..bytes.len().min(MAGIC.len())];
    if !MAGIC.starts_with(begins) {
        return Err(refuse(format!(
            "not a card: it begins with {:?}, a card with {:?}",
            begins.escape_ascii().to_string(),
            MAGIC.escape_ascii().to_string()
        )));
    }
    let mut rest = &bytes[begins.len()..];
    let version = u16::from_le_bytes(take(&mut rest).ok_or_else(cut)?);
    if version != VERSION {
        return Err(Error::mismatch_between(
            "card",
            "envelope",
            ("this side", format!("version {VERSION}")),
            ("the card", format!("version {version}")),
        )
        .with_remedy("run versions of kvx that can talk to each other"));
    }
    let oldest = u16::from_le_bytes(take(&mut rest).ok_or_else(cut)?);
    let newest = u16::from_le_bytes(take(&mut rest).ok_or_else(cut)?);
    let reserved = u16::from_le_bytes(take(&mut rest).ok_or_else(cut)?);
    let required = FeatureSet(u64::from_le_bytes(take(&mut rest).ok_or_else(cut)?));
    let optional = FeatureSet(u64::from_le_bytes(take(&mut rest).ok_or_else(cut)?));
    let head_bytes = u32::from_le_bytes(take(&mut rest).ok_or_else(cut)?) as usize;
    let body_bytes = u32::from_le_bytes(take(&mut rest).ok_or_else(cut)?) as usize;
    let (head, rest) = rest.split_at_checked(head_bytes).ok_or_else(cut)?;
    let (body, rest) = rest.split_at_checked(body_bytes).ok_or_else(cut)?;
    if !rest.is_empty() {
        return Err(
            refuse("other bytes follow the card".into()).with_context("too_many", rest.len())
        );
    }
    if reserved != 0 {
        return Err(refuse(format!("the envelope has {reserved} where it must have 0")));
    }
    let schemas = SchemaRange::new(oldest, newest)
        .ok_or_else(|| refuse(format!("schemas {oldest} to {newest} are no range")))?;
    if reader.schemas.common(schemas).is_none() {
        return Err(Error::mismatch_between(
            "card",
            "schema",
            ("this side", reader.schemas),
            ("the card", schemas),
        )
        .with_remedy("run versions of kvx that can talk to each other"));
    }
    let unknown = required.without(reader.features);
    if !unknown.is_empty() {
        return Err(Error::unsupported(
            "card",
            format!("the card requires features that this side does not know: {unknown}"),
        )
        .with_context("known", reader.features)
        .with_remedy("run a newer version here, or turn the feature off there"));
    }
    Ok(Opened { schemas, features: Features { required, optional }, head, body })
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, others) = rest.split_first_chunk::<N>()?;
    *rest = others;
    Some(*first)
}
