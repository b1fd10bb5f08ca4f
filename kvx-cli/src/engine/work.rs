//! What a rank does with its own memory: fills a request's blocks with tags, and checks them.

use kvx_core::layout::{Axis, CacheGroup, Granularity, GroupKind, RankLayout, Tensor};
use kvx_core::memory::Region;
use kvx_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::sweep::{Piece, Steps, Sweep};
use super::tags::{HeadTag, Prompt, mix};

/// Most wrong elements that are told apart.
const MAX_TOLD: usize = 8;

/// A request, as one rank sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share<'a> {
    pub(crate) prompt: &'a Prompt,
    /// Block ids by cache group, from the request's first block on.
    pub(crate) tables: &'a [Vec<u32>],
}

/// An element that is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Wrong {
    pub(crate) layer: u32,
    /// K, V, or what else the tensor holds.
    pub(crate) role: String,
    /// Entry of the block table.
    pub(crate) block: u32,
    /// Token of the request; `None` where a tensor has something for a whole block or request.
    pub(crate) token: Option<u64>,
    /// Head of the whole layer.
    pub(crate) head: u32,
    pub(crate) dim: u32,
    pub(crate) expected: String,
    pub(crate) found: String,
}

/// What a check came to.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Checked {
    /// Elements compared.
    pub(crate) elements: u64,
    /// Elements that are wrong.
    pub(crate) wrong: u64,
    /// The first of these.
    pub(crate) told: Vec<Wrong>,
}

/// Where one element lies.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) region: u32,
    pub(crate) offset: u64,
    /// Bytes of it.
    pub(crate) element: u64,
}

/// Some token positions of one block of a tensor.
struct Spot {
    /// Entry of the block table.
    block: u32,
    kernel_block: u64,
    first_slot: u32,
    /// Token of the request at the first position.
    first_token: u64,
}

/// Buffers, used again and again.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    piece: Vec<u8>,
    row: Vec<u8>,
    tokens: Vec<u64>,
    heads: Vec<HeadTag>,
}

impl Worker {
    /// Writes the tags of all tokens from number `from` on that the rank's layers need, and of the state.
    pub(crate) fn fill(
        &mut self,
        layout: &RankLayout,
        regions: &[Region],
        share: Share<'_>,
        from: u64,
    ) -> Result<()> {
        self.each(layout, share, from, |worker, tensor, spot, sweep| {
            let region = &regions[tensor.region as usize];
            let element = tensor.dtype.bytes();
            for piece in sweep.pieces() {
                let at = place(tensor, spot) + piece.offset;
                worker.piece.resize(index(sweep.span), 0);
                if sweep.held(element) != sweep.span {
                    region.read_at(at, &mut worker.piece)?;
                }
                worker.rows(sweep, &piece, index(element), |row, buffer, offset, steps| {
                    put(row, buffer, offset, steps, index(element));
                });
                region.write_at(at, &worker.piece)?;
            }
            Ok(())
        })
    }

    /// Compares all elements that the rank's layers need with their tags.
    pub(crate) fn check(
        &mut self,
        layout: &RankLayout,
        regions: &[Region],
        share: Share<'_>,
    ) -> Result<Checked> {
        let mut checked = Checked::default();
        self.each(layout, share, 0, |worker, tensor, spot, sweep| {
            let region = &regions[tensor.region as usize];
            let element = index(tensor.dtype.bytes());
            for piece in sweep.pieces() {
                worker.piece.resize(index(sweep.span), 0);
                region.read_at(place(tensor, spot) + piece.offset, &mut worker.piece)?;
                let mut order = 0;
                worker.rows(sweep, &piece, element, |row, buffer, offset, steps| {
                    let number = order;
                    order += 1;
                    checked.elements += u64::from(steps.count);
                    if same(row, buffer, offset, steps, element) {
                        return;
                    }
                    let heads = sweep.inner[1].count;
                    let (token, head) = (piece.token + number / heads, piece.head + number % heads);
                    checked.tell(
                        tensor,
                        spot,
                        (token, head, piece.dim),
                        row,
                        buffer,
                        offset,
                        steps,
                    );
                });
            }
            Ok(())
        })?;
        Ok(checked)
    }

    /// Some element of those that the rank's layers need of the tokens from number `from` on, or of the state.
    pub(crate) fn sample(
        &mut self,
        layout: &RankLayout,
        share: Share<'_>,
        from: u64,
    ) -> Result<Option<Sample>> {
        let mut last = None;
        self.each(layout, share, from, |_, tensor, spot, _| {
            let (offset, element) = (place(tensor, spot), tensor.dtype.bytes());
            last = Some(Sample { region: tensor.region, offset, element });
            Ok(())
        })?;
        Ok(last)
    }

    /// Calls `visit` for every tensor and every block of it that the request needs.
    fn each(
        &mut self,
        layout: &RankLayout,
        share: Share<'_>,
        from: u64,
        mut visit: impl FnMut(&mut Self, &Tensor, &Spot, &Sweep) -> Result<()>,
    ) -> Result<()> {
        for tensor in layout.tensors() {
            let group = &layout.groups()[tensor.group as usize];
            let table = &share.tables[tensor.group as usize];
            self.heads.clear();
            let named = |head| HeadTag::new(tensor.layer, tensor.role, head);
            self.heads.extend(tensor.head_range().map(named));
            let mut last: Option<(u32, Sweep)> = None;
            let mut each = |worker: &mut Self, spot: &Spot| {
                let positions = u32::try_from(worker.tokens.len()).unwrap_or(u32::MAX);
                let sweep = match last {
                    Some((known, sweep)) if known == positions => sweep,
                    _ => Sweep::new(tensor, positions),
                };
                last = Some((positions, sweep));
                visit(worker, tensor, spot, &sweep)
            };
            if group.kind == GroupKind::State {
                let block = *table.last().ok_or_else(|| absent(tensor, 0))?;
                self.tokens.clear();
                self.tokens.push(share.prompt.state());
                let kernel_block = u64::from(block);
                each(self, &Spot { block, kernel_block, first_slot: 0, first_token: 0 })?;
                continue;
            }
            let (end, size) = (share.prompt.tokens(), u64::from(group.kernel_block_tokens));
            let mut token = tensor.window.first_needed(end).max(from);
            while token < end {
                let next = (token / size + 1) * size;
                let (block, kernel_block) =
                    find(group, table, token).ok_or_else(|| absent(tensor, token))?;
                self.tokens.clear();
                let first_slot = if tensor.granularity == Granularity::Block {
                    // What is kept once for a block follows from its last token.
                    let last = share.prompt.token(next.min(end) - 1);
                    self.tokens.push(mix(last ^ 0x0062_6c6f_636b));
                    0
                } else {
                    self.tokens.extend((token..next.min(end)).map(|t| share.prompt.token(t)));
                    u32::try_from(token % size).unwrap_or(u32::MAX)
                };
                each(self, &Spot { block, kernel_block, first_slot, first_token: token })?;
                token = next;
            }
        }
        Ok(())
    }

    /// Calls `visit` for every row of a piece, head by head within token by token: the row's bytes, the piece's, where in the
    /// piece the row begins, and its steps.
    fn rows(
        &mut self,
        sweep: &Sweep,
        piece: &Piece,
        element: usize,
        mut visit: impl FnMut(&[u8], &mut [u8], usize, Steps),
    ) {
        let [tokens, heads, dims] = sweep.inner;
        let first = index(u64::from(piece.dim)) * element;
        let until = first + dims.count as usize * element;
        self.row.resize(until, 0);
        for token in 0..tokens.count {
            let named = self.tokens[(piece.token + token) as usize];
            let offset = index(tokens.stride) * token as usize;
            for head in 0..heads.count {
                let tag = self.heads[(piece.head + head) as usize];
                tag.row(named).fill(element, &mut self.row);
                let offset = offset + index(heads.stride) * head as usize;
                visit(&self.row[first..until], &mut self.piece, offset, dims);
            }
        }
    }
}

impl Checked {
    #[expect(clippy::too_many_arguments, reason = "one caller; each is one coordinate")]
    #[cold]
    fn tell(
        &mut self,
        tensor: &Tensor,
        spot: &Spot,
        (token, head, first_dim): (u32, u32, u32),
        row: &[u8],
        piece: &[u8],
        offset: usize,
        steps: Steps,
    ) {
        let element = index(tensor.dtype.bytes());
        let before = self.wrong;
        for (dim, expected) in (0_u32..).zip(row.chunks_exact(element)) {
            let at = offset + index(steps.stride) * dim as usize;
            let found = &piece[at..at + element];
            if found == expected {
                continue;
            }
            self.wrong += 1;
            // One of a row will do.
            if self.wrong > before + 1 || self.told.len() == MAX_TOLD {
                continue;
            }
            let per_token = tensor.granularity == Granularity::Token;
            self.told.push(Wrong {
                layer: tensor.layer,
                role: tensor.role.to_string(),
                block: spot.block,
                token: per_token.then(|| spot.first_token + u64::from(token)),
                head: tensor.heads.first + head,
                dim: first_dim + dim,
                expected: hex(expected),
                found: hex(found),
            });
        }
    }
}

/// Entry and kernel block of a token, unless it has none.
fn find(group: &CacheGroup, table: &[u32], token: u64) -> Option<(u32, u64)> {
    let block_tokens = u64::from(group.block_tokens);
    let id = *table.get(index(token / block_tokens))?;
    let inside = token % block_tokens / u64::from(group.kernel_block_tokens);
    let known = group.null_block != Some(id);
    known.then(|| (id, u64::from(id) * u64::from(group.kernel_ratio()) + inside))
}

fn absent(tensor: &Tensor, token: u64) -> Error {
    Error::new(kvx_core::ErrorKind::Internal, "demo", "a needed token has no block")
        .with_context("tensor", tensor.key())
        .with_context("token", token)
}

/// Offset of a spot's first element in its region.
fn place(tensor: &Tensor, spot: &Spot) -> u64 {
    let along = |axis: Axis, index: u64| if axis.extent == 1 { 0 } else { axis.stride * index };
    tensor.base
        + along(tensor.block, spot.kernel_block)
        + along(tensor.token, spot.first_slot.into())
}

fn put(row: &[u8], piece: &mut [u8], offset: usize, steps: Steps, element: usize) {
    if steps.count == 1 || steps.stride == element as u64 {
        piece[offset..offset + row.len()].copy_from_slice(row);
        return;
    }
    for (dim, value) in row.chunks_exact(element).enumerate() {
        let at = offset + index(steps.stride) * dim;
        piece[at..at + element].copy_from_slice(value);
    }
}

fn same(row: &[u8], piece: &[u8], offset: usize, steps: Steps, element: usize) -> bool {
    if steps.count == 1 || steps.stride == element as u64 {
        return piece[offset..offset + row.len()] == *row;
    }
    row.chunks_exact(element).enumerate().all(|(dim, value)| {
        let at = offset + index(steps.stride) * dim;
        piece[at..at + element] == *value
    })
}

fn hex(bytes: &[u8]) -> String {
    let mut text = "0x".to_owned();
    for byte in bytes.iter().rev() {
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// As an index. A layout is checked to fit into the address space before its memory is made.
fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
