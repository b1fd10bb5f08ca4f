//! Listing a request's segments.

use super::blocks::BlockTable;
use super::compile::{Band, Class, Nest, PeerPlan, Place};
use super::fold::{Folded, Shape};
use super::list::SegmentList;
use super::pieces::{self, Piece, Side};
use super::request::Request;
use crate::capability::Limits;
use crate::layout::GroupKind;
use crate::transfer::{Mode, Segment};
use crate::{Error, Result};

impl PeerPlan {
    /// Lists the segments of `request` into `list`, replacing what it held: local and remote as `mode`'s initiator sees them
    /// (the consumer reads, the producer writes).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse), naming side, group and table entry: a range outside the request, a block
    /// table that is missing, does not reach a needed block, has the null block or an id out of range there, or has a block
    /// twice where it is written; a range that begins within a block of which something is kept once per block. The list is
    /// empty then.
    pub fn segments(
        &self,
        request: &Request<'_>,
        mode: Mode,
        limits: &Limits,
        list: &mut SegmentList,
    ) -> Result<()> {
        list.segments.clear();
        list.set_limits(limits);
        let done = match mode {
            Mode::Read => self.list::<true>(request, list),
            Mode::Write => self.list::<false>(request, list),
        };
        match done {
            Ok(()) => cut(&mut list.segments, limits.max_segment_bytes),
            Err(error) => {
                list.segments.clear();
                Err(error)
            }
        }
    }

    fn list<const READ: bool>(&self, request: &Request<'_>, list: &mut SegmentList) -> Result<()> {
        request.check()?;
        let SegmentList { segments, scratch, pieces, folds, .. } = list;
        folds.clear();
        folds.resize(self.shapes.len(), None);
        pieces.resize_with(pieces.len().max(self.classes.len()), Vec::new);
        for (class, pieces) in self.classes.iter().zip(pieces.iter_mut()) {
            class.pieces(request, pieces)?;
        }
        let mut writer = Writer::<READ>::new(segments, scratch);
        for band in &self.bands {
            self.band(band, request, &pieces[band.class], folds, &mut writer);
        }
        writer.finish()
    }

    fn band<const READ: bool>(
        &self,
        band: &Band,
        request: &Request<'_>,
        pieces: &[Piece],
        folds: &mut [Option<(u32, Folded)>],
        writer: &mut Writer<'_, READ>,
    ) {
        let all = request.layers.start <= self.layers.0 && self.layers.1 <= request.layers.end;
        let block_tokens = self.classes[band.class].to.kernel_tokens;
        let mut rest = pieces;
        if let Some(runs) = band.whole.as_deref().filter(|_| all) {
            // Blocks of one size on both sides: a piece is alone in its block.
            while let Some((piece, others)) = rest.split_first() {
                if piece.tokens != block_tokens {
                    self.block(band, all, request, &rest[..1], folds, writer);
                } else {
                    for nest in runs {
                        let to = start(nest.to, piece.to_block);
                        writer.push(nest, to, start(nest.from, piece.from_block), nest.run);
                    }
                }
                rest = others;
            }
            return;
        }
        while let Some(first) = rest.first() {
            let count = rest.iter().take_while(|piece| piece.to_block == first.to_block).count();
            let (block, others) = rest.split_at(count);
            self.block(band, all, request, block, folds, writer);
            rest = others;
        }
    }

    /// All pieces of one block. They may interleave where they are written; what is written in different blocks of a band does
    /// not.
    fn block<const READ: bool>(
        &self,
        band: &Band,
        all: bool,
        request: &Request<'_>,
        pieces: &[Piece],
        folds: &mut [Option<(u32, Folded)>],
        writer: &mut Writer<'_, READ>,
    ) {
        writer.open_window();
        for piece in pieces {
            for nest in band.nests.iter().filter(|nest| all || request.layers.contains(&nest.layer))
            {
                let folded = fold(&self.shapes, folds, nest.shape, piece.tokens);
                let to = start(nest.to, piece.to_block) + nest.to.token * u64::from(piece.to_slot);
                let from = start(nest.from, piece.from_block)
                    + nest.from.token * u64::from(piece.from_slot);
                folded.each(to, from, |to, from| writer.push(nest, to, from, folded.run));
            }
        }
        writer.close_window();
    }
}

fn start(place: Place, block: u32) -> u64 {
    place.base + place.block * u64::from(block)
}

/// The loops of a shape for so many tokens. Nearly always those of the piece before.
#[inline]
fn fold<'a>(
    shapes: &[Shape],
    folds: &'a mut [Option<(u32, Folded)>],
    shape: usize,
    tokens: u32,
) -> &'a Folded {
    let known = &mut folds[shape];
    if known.is_none_or(|(known, _)| known != tokens) {
        *known = None;
    }
    &known.get_or_insert_with(|| (tokens, shapes[shape].fold(tokens))).1
}

impl Class {
    pub(super) fn pieces(&self, request: &Request<'_>, pieces: &mut Vec<Piece>) -> Result<()> {
        if request.without.iter().any(|group| usize::from(*group) == self.to.group()) {
            pieces.clear();
            return Ok(());
        }
        let start = request.range.start;
        let block = self.to.kernel_tokens;
        if self.per_block && !request.range.is_empty() && !start.is_multiple_of(u64::from(block)) {
            return Err(Error::misuse(
                "plan.segments",
                "the token range begins within a block of which something is kept once",
            )
            .with_context("start", start)
            .with_context("block_tokens", block)
            .with_remedy("let the range begin with a block"));
        }
        let to = table(&self.to, request.consumer, "consumer")?;
        let from = table(&self.from, request.producer, "producer")?;
        let (to, from) = ((&self.to, &to), (&self.from, &from));
        match self.kind {
            GroupKind::Attention => {
                pieces::attention(to, from, request.tokens, &request.range, self.window, pieces)
            }
            GroupKind::State => pieces::state(to, from, request.tokens, &request.range, pieces),
        }
    }
}

fn table<'a>(side: &Side, tables: &[BlockTable<'a>], name: &'static str) -> Result<BlockTable<'a>> {
    tables.get(side.group()).copied().ok_or_else(|| {
        Error::misuse("plan.segments", "a cache group has no block table")
            .with_context("side", name)
            .with_context("group", side.group())
            .with_context("tables", tables.len())
            .with_remedy("give a block table for each cache group, in the layout's order")
    })
}

/// Takes runs, merges each with the one before where it continues that on both sides, and keeps them sorted by where they are
/// written.
///
/// Runs come in windows (a block of a band). Within a window they may come in any order and are sorted when it closes; windows
/// nearly always ascend, and all is sorted at the end where they did not (cache groups that share memory).
struct Writer<'a, const READ: bool> {
    segments: &'a mut Vec<Segment>,
    scratch: &'a mut Vec<Segment>,
    /// Where the last segment ends: (region, offset) where it is written and where it is read.
    end: ((u32, u64), (u32, u64)),
    /// Number of segments when the window was opened.
    start: usize,
    /// No run since the window was opened came before the one before it.
    ascending: bool,
    /// The segments before the window, and it and they, ascend.
    sorted: bool,
}

/// A place where no segment ends.
const NOWHERE: (u32, u64) = (u32::MAX, 0);

impl<'a, const READ: bool> Writer<'a, READ> {
    fn new(segments: &'a mut Vec<Segment>, scratch: &'a mut Vec<Segment>) -> Self {
        Self { segments, scratch, end: (NOWHERE, NOWHERE), start: 0, ascending: true, sorted: true }
    }

    #[inline]
    fn push(&mut self, nest: &Nest, to: u64, from: u64, bytes: u64) {
        let (to_region, from_region) = (nest.to.region, nest.from.region);
        let continues = self.end == ((to_region, to), (from_region, from));
        // Regions ascend with the bands.
        self.ascending &= to >= self.end.0.1 || to_region != self.end.0.0;
        self.end = ((to_region, to + bytes), (from_region, from + bytes));
        match self.segments.last_mut() {
            Some(last) if continues => last.bytes += bytes,
            _ => self.segments.push(if READ {
                Segment {
                    local_region: to_region,
                    remote_region: from_region,
                    local_offset: to,
                    remote_offset: from,
                    bytes,
                }
            } else {
                Segment {
                    local_region: from_region,
                    remote_region: to_region,
                    local_offset: from,
                    remote_offset: to,
                    bytes,
                }
            }),
        }
    }

    fn open_window(&mut self) {
        self.sorted &= self.ascending;
        self.ascending = true;
        self.start = self.segments.len();
    }

    fn close_window(&mut self) {
        if self.ascending {
            return;
        }
        self.ascending = true;
        // A band lies in one region.
        sort_runs(&mut self.segments[self.start..], self.scratch, |segment| {
            place::<READ>(segment).1
        });
        // The last segment before the window may have been made longer by the window's first run.
        let before = self.start.saturating_sub(1);
        merge(self.segments, before);
        self.sorted &=
            self.segments[before..].is_sorted_by(|a, b| end::<READ>(a) <= place::<READ>(b));
        if let Some(last) = self.segments.last() {
            let (to, from) = (end::<READ>(last), end_of_source::<READ>(last));
            self.end = (to, from);
        }
    }

    fn finish(self) -> Result<()> {
        if self.sorted && self.ascending {
            return Ok(());
        }
        self.segments.sort_unstable_by_key(place::<READ>);
        merge(self.segments, 0);
        let meet = |pair: &[Segment]| end::<READ>(&pair[0]) > place::<READ>(&pair[1]);
        match self.segments.windows(2).find(|pair| meet(pair)).map(|pair| pair[1]) {
            None => Ok(()),
            Some(segment) => Err(Error::misuse(
                "plan.segments",
                "two cache groups that share memory would be written in the same place",
            )
            .with_context("region", place::<READ>(&segment).0)
            .with_context("offset", place::<READ>(&segment).1)
            .with_remedy(
                "give groups that share memory different blocks: each is one group's at a time",
            )),
        }
    }
}

/// Region and offset where a segment is written.
#[inline]
const fn place<const READ: bool>(segment: &Segment) -> (u32, u64) {
    if READ {
        (segment.local_region, segment.local_offset)
    } else {
        (segment.remote_region, segment.remote_offset)
    }
}

/// Region and offset one past the last byte written.
#[inline]
const fn end<const READ: bool>(segment: &Segment) -> (u32, u64) {
    let (region, offset) = place::<READ>(segment);
    (region, offset + segment.bytes)
}

/// Region and offset one past the last byte read.
const fn end_of_source<const READ: bool>(segment: &Segment) -> (u32, u64) {
    if READ { end::<false>(segment) } else { end::<true>(segment) }
}

#[inline]
const fn continues(last: &Segment, next: &Segment) -> bool {
    last.local_offset + last.bytes == next.local_offset
        && last.remote_offset + last.bytes == next.remote_offset
        && last.local_region == next.local_region
        && last.remote_region == next.remote_region
}

/// Sorts segments that consist of a few ascending runs one after the other (a natural merge sort; nothing is allocated once
/// `scratch` has grown).
fn sort_runs(
    segments: &mut [Segment],
    scratch: &mut Vec<Segment>,
    key: impl Fn(&Segment) -> u64 + Copy,
) {
    let run = |rest: &[Segment]| {
        let descends = rest.windows(2).position(|pair| key(&pair[0]) > key(&pair[1]));
        descends.map_or(rest.len(), |at| at + 1)
    };
    loop {
        scratch.clear();
        let mut pairs = 0;
        let mut rest = &*segments;
        while !rest.is_empty() {
            let (mut left, others) = rest.split_at(run(rest));
            let (mut right, others) = others.split_at(run(others));
            while let ([a, left_rest @ ..], [b, right_rest @ ..]) = (left, right) {
                if key(a) <= key(b) {
                    scratch.push(*a);
                    left = left_rest;
                } else {
                    scratch.push(*b);
                    right = right_rest;
                }
            }
            scratch.extend_from_slice(left);
            scratch.extend_from_slice(right);
            pairs += 1;
            rest = others;
        }
        segments.copy_from_slice(scratch);
        if pairs <= 1 {
            return;
        }
    }
}

/// Merges neighbours from index `from` on.
fn merge(segments: &mut Vec<Segment>, from: usize) {
    let mut kept = from;
    for next in from + 1..segments.len() {
        let segment = segments[next];
        if continues(&segments[kept], &segment) {
            segments[kept].bytes += segment.bytes;
        } else {
            kept += 1;
            segments[kept] = segment;
        }
    }
    segments.truncate(kept + 1);
}

/// Cuts segments of over `limit` bytes.
fn cut(segments: &mut Vec<Segment>, limit: u64) -> Result<()> {
    if limit == 0 {
        segments.clear();
        return Err(Error::misuse("plan.segments", "max_segment_bytes is 0")
            .with_remedy("have the backend's capabilities state a limit of one byte at least"));
    }
    if segments.iter().all(|segment| segment.bytes <= limit) {
        return Ok(());
    }
    let whole = std::mem::take(segments);
    for mut segment in whole {
        while segment.bytes > limit {
            segments.push(Segment { bytes: limit, ..segment });
            segment.bytes -= limit;
            segment.local_offset += limit;
            segment.remote_offset += limit;
        }
        segments.push(segment);
    }
    Ok(())
}
