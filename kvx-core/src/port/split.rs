//! Checking segments and cutting them into batches. Pure: no backend, no locks.

use super::peers::RemoteRegion;
use super::regions::SetMember;
use crate::capability::Limits;
use crate::error::{Error, Result};
use crate::transfer::{PostedSegment, Segment};

const OPERATION: &str = "port.transfer";

/// How much a transfer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) bytes: u64,
    /// Segments once those that are too long are split.
    pub(super) segments: u64,
    /// Batches of those.
    pub(super) batches: u64,
}

/// Checks every segment, and appends it to `out` with the backend's handles. `used[i]` is set where a segment uses
/// local region `i`.
///
/// # Errors
///
/// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse), naming the first bad segment and its values.
pub(super) fn check(
    segments: &[Segment],
    local: &[SetMember],
    remote: &[RemoteRegion],
    limits: &Limits,
    used: &mut [bool],
    out: &mut Vec<PostedSegment>,
) -> Result<Size> {
    let mut size = Size::default();
    out.reserve(segments.len());
    for (index, segment) in segments.iter().enumerate() {
        let Segment { local_offset, remote_offset, bytes, .. } = *segment;
        let here = local.get(segment.local_region as usize);
        let there = remote.get(segment.remote_region as usize);
        let (Some(here), Some(there)) = (here, there) else {
            return Err(no_region(index, segment, local.len(), remote.len()));
        };
        if bytes == 0 {
            return Err(bad(index, "a segment is empty"));
        }
        if !fits(local_offset, bytes, here.bytes) {
            return Err(outside(index, "local", segment.local_region, local_offset, bytes)
                .with_context("region_bytes", here.bytes));
        }
        if !fits(remote_offset, bytes, there.bytes) {
            return Err(outside(index, "remote", segment.remote_region, remote_offset, bytes)
                .with_context("region_bytes", there.bytes));
        }
        size.bytes = size
            .bytes
            .checked_add(bytes)
            .ok_or_else(|| bad(index, "more bytes in all than can be counted"))?;
        // Never more than `bytes`, so their sum cannot overflow either. The first case only saves a division.
        size.segments += match bytes <= limits.max_segment_bytes {
            true => 1,
            false => bytes.div_ceil(limits.max_segment_bytes),
        };
        if let Some(mark) = used.get_mut(segment.local_region as usize) {
            *mark = true;
        }
        let (local, remote) = (here.backend, there.id);
        out.push(PostedSegment { local, remote, local_offset, remote_offset, bytes });
    }
    size.batches = size.segments.div_ceil(u64::from(limits.max_batch_segments));
    Ok(size)
}

fn fits(offset: u64, bytes: u64, region: u64) -> bool {
    offset.checked_add(bytes).is_some_and(|end| end <= region)
}

#[cold]
fn bad(index: usize, message: &'static str) -> Error {
    Error::misuse(OPERATION, message).with_context("segment", index)
}

#[cold]
fn outside(index: usize, side: &str, region: u32, offset: u64, bytes: u64) -> Error {
    Error::misuse(OPERATION, format!("a segment is outside its {side} region"))
        .with_context("segment", index)
        .with_context("region", region)
        .with_context("offset", offset)
        .with_context("bytes", bytes)
}

#[cold]
fn no_region(index: usize, segment: &Segment, local: usize, remote: usize) -> Error {
    let (side, region, count) = if segment.local_region as usize >= local {
        ("local", segment.local_region, local)
    } else {
        ("remote", segment.remote_region, remote)
    };
    bad(index, "a segment names a region that does not exist")
        .with_context("side", side)
        .with_context("region", region)
        .with_context("regions", count)
}

/// The checked segments of one transfer, and how far they have been posted.
#[derive(Debug, Default)]
pub(super) struct Cutter {
    segments: Vec<PostedSegment>,
    at: Cursor,
    /// Where the batch that was cut last ends.
    next: Cursor,
    /// A batch with split segments; reused.
    pieces: Vec<PostedSegment>,
}

/// A place in the list of segments: `offset` bytes into segment `index`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cursor {
    index: usize,
    offset: u64,
}

impl Cutter {
    pub(super) fn new(segments: Vec<PostedSegment>) -> Self {
        Self { segments, ..Self::default() }
    }

    /// The next batch. The same one again until [`advance`](Self::advance) says that it was posted.
    pub(super) fn cut(&mut self, limits: &Limits) -> &[PostedSegment] {
        let most = usize::try_from(limits.max_batch_segments).unwrap_or(usize::MAX);
        let longest = limits.max_segment_bytes;
        let index = self.at.index;
        let end = index.saturating_add(most).min(self.segments.len());
        let whole = &self.segments[index..end];
        // A segment that was begun is longer than `longest`: then this does not hold.
        if whole.iter().all(|segment| segment.bytes <= longest) {
            self.next = Cursor { index: end, offset: 0 };
            return whole;
        }
        self.pieces.clear();
        self.next = self.at;
        while self.pieces.len() < most && self.next.index < self.segments.len() {
            let segment = self.segments[self.next.index];
            let done = self.next.offset;
            let bytes = (segment.bytes - done).min(longest);
            self.pieces.push(PostedSegment {
                local_offset: segment.local_offset + done,
                remote_offset: segment.remote_offset + done,
                bytes,
                ..segment
            });
            self.next = if done + bytes == segment.bytes {
                Cursor { index: self.next.index + 1, offset: 0 }
            } else {
                Cursor { index: self.next.index, offset: done + bytes }
            };
        }
        &self.pieces
    }

    /// The batch that was cut last was posted.
    pub(super) fn advance(&mut self) {
        self.at = self.next;
    }

    /// The empty list, for reuse.
    pub(super) fn into_spare(self) -> Vec<PostedSegment> {
        let mut list = self.segments;
        list.clear();
        list
    }
}
