//! Whether what arrived is what was sent: digests of a cache's contents in logical coordinates.
//!
//! A *row* is one head of one tensor at one token: what no layout and no sharding takes apart. Its digest depends on its bytes
//! and on its logical name (layer, role, head, token), and the digest of many rows is their sum. So it does not matter how
//! many ranks hold them, in which layout, in blocks of which size: two sides that speak of the same rows get the same
//! digest, exactly if (but for a chance of 2⁻¹²⁸ or so) every row has the same bytes in the right place. A row that is missing,
//! doubled or in another's place changes the sum.
//!
//! It finds mistakes and broken memory, not malice: whoever has the key of the control channel can lie about a digest as well
//! as about the bytes.
//!
//! 1. The reader lists with [`rows`] what it has read from one rank.
//! 2. Both sides [`digest`] these rows, each in its own memory, in buckets of as many tokens as the reader likes.
//! 3. [`Digest`]s that differ name the tokens that are not what they should be.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use kvx_core::layout::{CacheGroup, Granularity, GroupKind, RankLayout, Tensor, TensorKey};
use kvx_core::memory::Region;
use kvx_core::plan::{BlockTable, PeerPlan};
use kvx_core::{Error, Result, wire};
use serde::{Deserialize, Serialize};

mod row;

const OPERATION: &str = "digest";

/// Sum of the digests of some rows.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(u128);

impl Digest {
    /// With these rows too.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0.wrapping_add(other.0))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// Some heads of one tensor, at some tokens of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rows {
    /// Layer and role.
    pub key: TensorKey,
    /// Global heads.
    pub heads: Range<u32>,
    /// Tokens of the request. Of a state: those after which it is the state.
    pub tokens: Range<u64>,
}

/// The most [`Rows`] that one question may have: as many as a layout may have tensors.
pub const MAX_ROWS: usize = RankLayout::MAX_ITEMS;

/// The most buckets of one answer.
pub const MAX_BUCKETS: usize = 1 << 16;

/// What a consumer rank reads from a producer rank, and so what both digest: `range` of the request's `tokens` tokens, in
/// these global layers.
///
/// Of a layer with a window, only tokens that it still needs; nothing of what is moved only because blocks are moved whole.
#[must_use]
pub fn rows(
    (producer, consumer): (&RankLayout, &RankLayout),
    plan: &PeerPlan,
    tokens: u64,
    range: &Range<u64>,
    layers: &Range<u32>,
) -> Vec<Rows> {
    let mut list = Vec::new();
    for share in plan.shares().iter().filter(|share| layers.contains(&share.key.layer)) {
        let (Some(from), Some(to)) = (producer.tensor(share.key), consumer.tensor(share.key))
        else {
            continue;
        };
        let kind = consumer.groups().get(to.group as usize).map(|group| group.kind);
        let tokens = match kind {
            Some(GroupKind::State) if range.end == tokens => range.clone(),
            Some(GroupKind::State) | None => continue,
            _ => {
                let needed = from.window.first_needed(tokens).max(to.window.first_needed(tokens));
                range.start.max(needed)..range.end
            }
        };
        if !tokens.is_empty() {
            list.push(Rows { key: share.key, heads: share.first_head..share.end_head, tokens });
        }
    }
    list
}

/// A request's rows in one rank's memory.
#[derive(Clone, Copy, Debug)]
pub struct Extent<'a> {
    /// The rank's layout.
    pub layout: &'a RankLayout,
    /// Its memory, in the layout's order.
    pub regions: &'a [Region],
    /// The request's block tables, one per cache group.
    pub tables: &'a [BlockTable<'a>],
}

/// Digests `rows` in buckets of `grain` tokens: bucket `i` has tokens `i * grain ..`. A state is in the bucket of its last
/// token. Buckets without rows are not listed.
///
/// # Errors
///
/// - [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse): a grain of 0; a tensor, head or token that this rank does not have;
///   a block table that does not reach a token, or has the null block or an id out of range there. Names what it was.
/// - [`ErrorKind::Unsupported`](kvx_core::ErrorKind::Unsupported): the memory is not host memory.
pub fn digest(extent: Extent<'_>, rows: &[Rows], grain: u64) -> Result<BTreeMap<u64, Digest>> {
    if grain == 0 {
        return Err(Error::misuse(OPERATION, "buckets of 0 tokens"));
    }
    let mut buckets = BTreeMap::new();
    let mut buffer = Vec::new();
    for one in rows {
        let tensor = extent.layout.tensor(one.key).ok_or_else(|| {
            Error::misuse(OPERATION, "the rank has no such tensor").with_context("tensor", one.key)
        })?;
        let held = tensor.head_range();
        if one.heads.start < held.start || one.heads.end > held.end || one.heads.is_empty() {
            return Err(Error::misuse(OPERATION, "the rank does not have these heads")
                .with_context("tensor", one.key)
                .with_context("heads", format_args!("{}..{}", one.heads.start, one.heads.end))
                .with_context("held", format_args!("{}..{}", held.start, held.end)));
        }
        Walk { extent, tensor, rows: one, grain }.add(&mut buckets, &mut buffer)?;
    }
    Ok(buckets)
}

/// One [`Rows`] in one tensor.
struct Walk<'a> {
    extent: Extent<'a>,
    tensor: &'a Tensor,
    rows: &'a Rows,
    grain: u64,
}

/// A position of a tensor's token axis.
struct Spot {
    /// Its number in the request: the token, or the kernel block, or 0 for a state.
    logical: u64,
    kernel_block: u64,
    position: u64,
    bucket: u64,
}

impl Walk<'_> {
    fn add(&self, buckets: &mut BTreeMap<u64, Digest>, buffer: &mut Vec<u8>) -> Result<()> {
        let tokens = &self.rows.tokens;
        let Some(last) = tokens.end.checked_sub(1).filter(|last| *last >= tokens.start) else {
            return Ok(());
        };
        let group = self.group()?;
        let kernel = u64::from(group.kernel_block_tokens);
        let table = self.extent.tables.get(self.tensor.group as usize).ok_or_else(|| {
            Error::misuse(OPERATION, "a block table is missing")
                .with_context("group", self.tensor.group)
        })?;
        match (group.kind, self.tensor.granularity) {
            (GroupKind::State, _) => {
                let entry = (table.ids().len() as u64).checked_sub(1).ok_or_else(|| {
                    Error::misuse(OPERATION, "the block table of a state is empty")
                        .with_context("group", self.tensor.group)
                })?;
                let kernel_block = self.id(group, table, table.first() + entry)?;
                let bucket = last / self.grain;
                let spot = Spot { logical: 0, kernel_block, position: 0, bucket };
                self.spot(&spot, buckets, buffer)
            }
            (_, Granularity::Block) => {
                (tokens.start / kernel..=last / kernel).try_for_each(|block| {
                    let token = block * kernel;
                    let kernel_block = self.kernel_block(group, table, token)?;
                    let bucket = token.max(tokens.start) / self.grain;
                    let spot = Spot { logical: block, kernel_block, position: 0, bucket };
                    self.spot(&spot, buckets, buffer)
                })
            }
            _ => tokens.clone().try_for_each(|token| {
                let kernel_block = self.kernel_block(group, table, token)?;
                let (position, bucket) = (token % kernel, token / self.grain);
                let spot = Spot { logical: token, kernel_block, position, bucket };
                self.spot(&spot, buckets, buffer)
            }),
        }
    }

    fn group(&self) -> Result<&CacheGroup> {
        self.extent.layout.groups().get(self.tensor.group as usize).ok_or_else(|| {
            Error::misuse(OPERATION, "no such cache group").with_context("group", self.tensor.group)
        })
    }

    fn kernel_block(&self, group: &CacheGroup, table: &BlockTable<'_>, token: u64) -> Result<u64> {
        let (logical, kernel) =
            (u64::from(group.block_tokens), u64::from(group.kernel_block_tokens));
        Ok(self.id(group, table, token / logical)? + token % logical / kernel)
    }

    /// First kernel block of the request's logical block number `entry`.
    fn id(&self, group: &CacheGroup, table: &BlockTable<'_>, entry: u64) -> Result<u64> {
        let wrong = |what: &'static str| {
            Error::misuse(OPERATION, what)
                .with_context("group", self.tensor.group)
                .with_context("entry", entry)
        };
        match table.id(entry) {
            None => Err(wrong("the block table does not reach a token")),
            Some(id) if group.null_block == Some(id) => Err(wrong("a token is in the null block")),
            Some(id) if id >= group.blocks => Err(wrong("a block id is out of range")
                .with_context("id", id)
                .with_context("blocks", group.blocks)),
            Some(id) => Ok(u64::from(id) * u64::from(group.kernel_ratio())),
        }
    }

    fn spot(
        &self,
        spot: &Spot,
        buckets: &mut BTreeMap<u64, Digest>,
        buffer: &mut Vec<u8>,
    ) -> Result<()> {
        let tensor = self.tensor;
        let region = self.extent.regions.get(tensor.region as usize).ok_or_else(|| {
            Error::misuse(OPERATION, "a region is missing").with_context("region", tensor.region)
        })?;
        let base = tensor.base
            + spot.kernel_block * tensor.block.stride
            + spot.position * tensor.token.stride;
        let mut sum = Digest::default();
        for head in self.rows.heads.clone() {
            let at = base + u64::from(head - tensor.heads.first) * tensor.head.stride;
            row::read(region, tensor, at, buffer)?;
            sum = sum.with(Digest(row::digest(self.rows.key, head, spot.logical, buffer)));
        }
        if !buckets.contains_key(&spot.bucket) && buckets.len() >= MAX_BUCKETS {
            return Err(Error::misuse(OPERATION, "too many buckets")
                .with_context("limit", MAX_BUCKETS)
                .with_remedy("ask for buckets of more tokens"));
        }
        let bucket = buckets.entry(spot.bucket).or_default();
        *bucket = bucket.with(sum);
        Ok(())
    }
}

/// A reader's question: the owner's digests of what the reader has read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// Of what.
    #[serde(deserialize_with = "wire::list::<_, _, MAX_ROWS>")]
    pub rows: Vec<Rows>,
    /// In buckets of so many tokens.
    pub grain: u64,
}

/// The owner's answer to a [`Question`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Digest of each bucket that has rows.
    #[serde(deserialize_with = "wire::map::<_, _, _, MAX_BUCKETS>")]
    pub buckets: BTreeMap<u64, Digest>,
}

impl Answer {
    /// Buckets that are not the same here and there.
    #[must_use]
    pub fn differing(&self, here: &BTreeMap<u64, Digest>) -> Vec<u64> {
        let all: std::collections::BTreeSet<&u64> =
            self.buckets.keys().chain(here.keys()).collect();
        let differs = |bucket: &&&u64| self.buckets.get(**bucket) != here.get(**bucket);
        all.iter().filter(differs).map(|bucket| **bucket).collect()
    }
}
