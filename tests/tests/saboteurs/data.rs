//! Wrong bytes, wrong places.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use kvx_core::backend::{Event, Events, Outcome, Submit};
use kvx_core::id::{PeerId, RemoteRegionId};
use kvx_core::memory::KeyBlob;
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::{Error, Result};

use crate::tools::{Later, Queue, lock, settled};
use crate::wrapper::{At, Post, Sabotage};

/// Segments are changed before they are posted.
pub(crate) struct Changed(pub(crate) fn(&At, Vec<PostedSegment>) -> Vec<PostedSegment>);

impl Sabotage for Changed {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        let segments = (self.0)(at, post.segments.to_vec());
        Post { segments: &segments, ..post }.to(at)
    }
}

pub(crate) fn last_byte_missing(_: &At, mut segments: Vec<PostedSegment>) -> Vec<PostedSegment> {
    for segment in segments.iter_mut().filter(|segment| segment.bytes > 1) {
        segment.bytes -= 1;
    }
    segments
}

pub(crate) fn one_byte_too_many(_: &At, mut segments: Vec<PostedSegment>) -> Vec<PostedSegment> {
    if let Some(last) = segments.last_mut() {
        last.bytes += 1;
    }
    segments
}

pub(crate) fn second_segment_off_by_one(
    _: &At,
    mut segments: Vec<PostedSegment>,
) -> Vec<PostedSegment> {
    if let [_, second, ..] = &mut segments[..] {
        second.remote_offset += 1;
    }
    segments
}

pub(crate) fn segments_swapped(_: &At, mut segments: Vec<PostedSegment>) -> Vec<PostedSegment> {
    if let [first, second, ..] = &mut segments[..] {
        std::mem::swap(&mut first.local_offset, &mut second.local_offset);
    }
    segments
}

pub(crate) fn offsets_aligned_down(_: &At, mut segments: Vec<PostedSegment>) -> Vec<PostedSegment> {
    for segment in &mut segments {
        segment.local_offset &= !7;
    }
    segments
}

pub(crate) fn limit_cut(at: &At, mut segments: Vec<PostedSegment>) -> Vec<PostedSegment> {
    let limit = at.backend.capabilities().limits.max_segment_bytes;
    for segment in segments.iter_mut().filter(|segment| segment.bytes == limit) {
        segment.bytes -= 1;
    }
    segments
}

pub(crate) fn full_batch_cut(at: &At, mut segments: Vec<PostedSegment>) -> Vec<PostedSegment> {
    if segments.len() == at.backend.capabilities().limits.max_batch_segments as usize {
        segments.pop();
    }
    segments
}

pub(crate) fn wraps_at_a_mebibyte(_: &At, mut segments: Vec<PostedSegment>) -> Vec<PostedSegment> {
    const MIB: u64 = 1 << 20;
    let large: Vec<_> = segments.extract_if(.., |segment| segment.bytes > MIB).collect();
    for segment in large {
        for start in (0..segment.bytes).step_by(1 << 20) {
            let (local_offset, bytes) =
                (segment.local_offset + start, MIB.min(segment.bytes - start));
            segments.push(PostedSegment { local_offset, bytes, ..segment });
        }
    }
    segments
}

#[derive(Default)]
pub(crate) struct ReadAsWrite;

impl Sabotage for ReadAsWrite {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        Post { mode: Mode::Write, ..post }.to(at)
    }
}

/// Says that a transfer settled before it even begins.
#[derive(Default)]
pub(crate) struct SettledBeforeData {
    /// It says so within the call.
    at_once: bool,
    later: Later,
    queue: Queue,
}

impl SettledBeforeData {
    pub(crate) fn at_once() -> Self {
        Self { at_once: true, ..Self::default() }
    }
}

impl Sabotage for SettledBeforeData {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        self.later.hold(at, 3, post.held());
        if self.at_once {
            return Ok(Submit::Done { route: None });
        }
        self.queue.push(at, settled(post.id, Outcome::done()));
        Ok(Submit::Submitted)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.later.poll(at);
        self.queue.give(at, events, |event| match event {
            Event::Settled { .. } => Vec::new(),
            other => vec![other],
        });
    }
}

/// Posts each batch after the one that came after it.
#[derive(Default)]
pub(crate) struct PostsReversed {
    later: Later,
}

impl Sabotage for PostsReversed {
    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        let held = self.later.take(|index| index == at.index);
        if held.is_empty() {
            self.later.hold(at, 4, post.held());
            return Ok(Submit::Submitted);
        }
        let submitted = post.to(at)?;
        for (_, held) in held {
            self.later.hold(at, 1, held);
        }
        self.later.poll(at);
        Ok(submitted)
    }

    fn poll(&self, at: &At, events: &mut Events) {
        self.later.poll(at);
        at.backend.poll(events);
    }
}

/// Moves bytes of another peer's memory.
#[derive(Default)]
pub(crate) struct WrongPeer {
    keys: Mutex<BTreeMap<(usize, PeerId), Vec<RemoteRegionId>>>,
}

impl Sabotage for WrongPeer {
    fn import_key(&self, at: &At, peer: PeerId, blob: &KeyBlob) -> Result<RemoteRegionId> {
        let key = at.backend.import_key(peer, blob)?;
        lock(&self.keys).entry((at.index, peer)).or_default().push(key);
        Ok(key)
    }

    fn submit(&self, at: &At, post: Post<'_>) -> Result<Submit> {
        let keys = lock(&self.keys);
        let other = keys.iter().find(|((index, peer), _)| *index == at.index && *peer != post.peer);
        let Some(((_, peer), others)) = other else { return post.to(at) };
        let mut segments = post.segments.to_vec();
        for segment in &mut segments {
            segment.remote = others[0];
        }
        Post { peer: *peer, segments: &segments, ..post }.to(at)
    }
}

/// Refuses peers whose limits are not its own.
#[derive(Default)]
pub(crate) struct UnequalLimitsRefused {
    limits: Mutex<Vec<kvx_core::capability::Limits>>,
}

impl Sabotage for UnequalLimitsRefused {
    fn opened(&self, at: &At) {
        lock(&self.limits).push(at.backend.capabilities().limits);
    }

    fn accept(
        &self,
        at: &At,
        offer: &kvx_core::handshake::HandshakeBytes,
    ) -> Result<(PeerId, kvx_core::handshake::HandshakeBytes)> {
        let limits = lock(&self.limits);
        if limits.iter().any(|other| *other != limits[0]) {
            return Err(Error::unsupported("accept", "the limits differ"));
        }
        at.backend.accept(offer)
    }
}

/// Touches the byte before a page, too.
pub(crate) fn page_begins_a_byte_early(
    _: &At,
    mut segments: Vec<PostedSegment>,
) -> Vec<PostedSegment> {
    if let [only] = &mut segments[..]
        && only.bytes == 4096
        && only.remote_offset > 0
        && only.local_offset > 0
    {
        only.remote_offset -= 1;
        only.local_offset -= 1;
        only.bytes += 1;
    }
    segments
}

/// Has room for the handles of two regions.
pub(crate) fn third_region_dropped(_: &At, mut segments: Vec<PostedSegment>) -> Vec<PostedSegment> {
    let regions: BTreeSet<_> = segments.iter().map(|segment| segment.local).collect();
    if regions.len() > 2 {
        segments.pop();
    }
    segments
}

/// Forgets the segments of all but the first sixteen of the peer's regions.
pub(crate) fn seventeenth_region_lost(_: &At, segments: Vec<PostedSegment>) -> Vec<PostedSegment> {
    let mut known = BTreeSet::new();
    let keeps = |segment: &PostedSegment| {
        known.contains(&segment.remote) || (known.len() < 16 && known.insert(segment.remote))
    };
    segments.into_iter().filter(keeps).collect()
}

fn shortened(mut segments: Vec<PostedSegment>, bits: u32) -> Vec<PostedSegment> {
    for segment in &mut segments {
        segment.remote_offset %= 1 << bits;
    }
    segments
}

pub(crate) fn offsets_of_24_bits(_: &At, segments: Vec<PostedSegment>) -> Vec<PostedSegment> {
    shortened(segments, 24)
}

pub(crate) fn offsets_of_32_bits(_: &At, segments: Vec<PostedSegment>) -> Vec<PostedSegment> {
    shortened(segments, 32)
}

pub(crate) fn local_offsets_of_32_bits(
    _: &At,
    mut segments: Vec<PostedSegment>,
) -> Vec<PostedSegment> {
    for segment in &mut segments {
        segment.local_offset %= 1 << 32;
    }
    segments
}

pub(crate) fn cut_at_four_mebibytes(
    _: &At,
    mut segments: Vec<PostedSegment>,
) -> Vec<PostedSegment> {
    for segment in &mut segments {
        segment.bytes = segment.bytes.min(4 << 20);
    }
    segments
}

/// Makes one segment of neighbours, where `touch` holds of two in the same regions.
fn merged(
    segments: Vec<PostedSegment>,
    touch: impl Fn(&PostedSegment, &PostedSegment) -> bool,
) -> Vec<PostedSegment> {
    let mut all: Vec<PostedSegment> = Vec::new();
    for segment in segments {
        match all.last_mut() {
            Some(last)
                if (last.local, last.remote) == (segment.local, segment.remote)
                    && touch(last, &segment) =>
            {
                last.bytes += segment.bytes;
            }
            _ => all.push(segment),
        }
    }
    all
}

fn touch_locally(one: &PostedSegment, next: &PostedSegment) -> bool {
    one.local_offset + one.bytes == next.local_offset
}

pub(crate) fn merged_where_local_touches(
    _: &At,
    segments: Vec<PostedSegment>,
) -> Vec<PostedSegment> {
    merged(segments, touch_locally)
}

pub(crate) fn merged_where_remote_touches(
    _: &At,
    segments: Vec<PostedSegment>,
) -> Vec<PostedSegment> {
    merged(segments, |one, next| one.remote_offset + one.bytes == next.remote_offset)
}

pub(crate) fn merged_in_threes(_: &At, mut segments: Vec<PostedSegment>) -> Vec<PostedSegment> {
    if let [first, second, third, ..] = &segments[..]
        && touch_locally(first, second)
        && touch_locally(second, third)
    {
        let rest = segments.split_off(3);
        segments = merged(segments, touch_locally);
        segments.extend(rest);
    }
    segments
}
