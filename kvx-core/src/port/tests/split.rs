//! Segments: what is checked, and how they are cut.

use proptest::prelude::*;

use super::*;
use crate::error::{Error, ErrorKind};
use crate::transfer::PostedSegment;

fn refused(setup: &Setup, bad: Segment) -> Error {
    let list = [segment(0), segment(1), bad, segment(3)];
    let result = setup.port.transfer(setup.peer, Mode::Read, &setup.set, &list, Some(b"n"));
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(error.to_string().contains("segment=2"), "{error}");
    assert_eq!(setup.fake.lock().submits, 0);
    error
}

#[test]
fn bad_segments_are_named_with_their_values() {
    let setup = Setup::new();
    let bad = |change: fn(&mut Segment)| {
        let mut bad = segment(2);
        change(&mut bad);
        refused(&setup, bad).to_string()
    };
    let text = bad(|segment| segment.bytes = 0);
    assert!(text.contains("empty"), "{text}");
    let text = bad(|segment| segment.local_offset = BYTES - 15);
    assert!(text.contains("local") && text.contains("offset=4081"), "{text}");
    assert!(text.contains("bytes=16") && text.contains("region_bytes=4096"), "{text}");
    let text = bad(|segment| segment.remote_offset = u64::MAX - 3);
    assert!(text.contains("remote") && text.contains("offset=18446744073709551612"), "{text}");
    let text = bad(|segment| segment.local_region = 1);
    assert!(text.contains("side=local") && text.contains("regions=1"), "{text}");
    let text = bad(|segment| segment.remote_region = u32::MAX);
    assert!(text.contains("side=remote, region=4294967295"), "{text}");
}

#[test]
fn the_last_byte_of_a_region_is_in_range() {
    let setup = Setup::new();
    let last =
        Segment { local_offset: BYTES - 1, remote_offset: BYTES - 1, bytes: 1, ..segment(0) };
    setup.fake.always(Say::Inline);
    assert_eq!(block_on(setup.write(&[last], None)).unwrap().bytes, 1);
}

#[test]
fn a_mode_that_the_backend_lacks_is_refused() {
    let setup = Setup::with(|capabilities| capabilities.write = false);
    let result = setup.port.transfer(setup.peer, Mode::Write, &setup.set, &segments(1), None);
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("no writes"), "{error}");
}

#[test]
fn a_notification_that_is_too_long_is_refused_at_the_call() {
    let setup = Setup::new();
    let notify = [0; 65];
    let result =
        setup.port.transfer(setup.peer, Mode::Write, &setup.set, &segments(1), Some(&notify));
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    let text = error.to_string();
    assert!(text.contains("bytes=65") && text.contains("limit=64"), "{text}");
    assert_eq!(setup.fake.lock().submits, 0);
    drop(setup.write(&segments(1), Some(&notify[..64])));
}

#[test]
fn nothing_is_done_at_once_and_a_bare_notification_is_sent() {
    let setup = Setup::new();
    let mut nothing = setup.write(&[], None);
    assert!(nothing.is_settled());
    assert_eq!(nothing.try_result().unwrap().unwrap().batches, 0);
    assert_eq!(setup.fake.lock().submits, 0);
    let mut bare = setup.write(&[], Some(b"hello"));
    let posts = setup.fake.posts();
    assert_eq!((posts.len(), posts[0].segments.len()), (1, 0));
    assert_eq!(posts[0].notify.as_deref(), Some(&b"hello"[..]));
    assert!(bare.try_result().is_none());
    setup.settle_all();
    let report = bare.try_result().unwrap().unwrap();
    assert_eq!((report.bytes, report.segments, report.batches), (0, 0, 1));
}

#[test]
fn the_report_says_what_was_posted() {
    let setup = Setup::with(|capabilities| {
        capabilities.limits.max_segment_bytes = 7;
        capabilities.limits.max_batch_segments = 4;
    });
    setup.fake.always(Say::Inline);
    let report = block_on(setup.write(&segments(2), None)).unwrap();
    assert_eq!((report.bytes, report.segments, report.batches), (32, 6, 2));
    assert_eq!(&*report.transport, "wire");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["bytes"], 32);
    assert_eq!(json["transport"], "wire");
    let stats = setup.port.peer_stats(setup.peer).unwrap();
    assert_eq!((stats.transfers, stats.done, stats.bytes), (1, 1, 32));
    assert_eq!((stats.segments, stats.batches), (6, 2));
    assert_eq!(stats, setup.port.stats(), "one peer");
}

const REGIONS: [u64; 3] = [1, 1000, 100_000];

/// A port with three regions on either side.
fn three(max_segment_bytes: u64, max_batch_segments: u32) -> Setup {
    let mut setup = Setup::with(|capabilities| {
        capabilities.limits.max_segment_bytes = max_segment_bytes;
        capabilities.limits.max_batch_segments = max_batch_segments;
    });
    let ids = REGIONS.map(|bytes| setup.port.register(&Region::host(bytes).unwrap()).unwrap());
    setup.set = setup.port.region_set(&ids).unwrap();
    setup.peer = meet(&setup.port, 2);
    let keys = REGIONS.map(|bytes| (key(bytes), bytes));
    setup.port.add_regions(setup.peer, &keys).unwrap();
    setup.fake.always(Say::Inline);
    setup
}

fn in_range() -> impl Strategy<Value = Segment> {
    (0..3_u32, 0..3_u32).prop_flat_map(|(local_region, remote_region)| {
        let (here, there) = (REGIONS[local_region as usize], REGIONS[remote_region as usize]);
        (1..=here.min(there)).prop_flat_map(move |bytes| {
            (0..=here - bytes, 0..=there - bytes).prop_map(move |(local_offset, remote_offset)| {
                Segment { local_region, remote_region, local_offset, remote_offset, bytes }
            })
        })
    })
}

/// What is wrong is of every order of magnitude, and just beyond the edge.
fn out_of_range() -> impl Strategy<Value = Segment> {
    let number = prop_oneof![
        0..4_u64,
        (0..64_u32).prop_map(|bit| 1 << bit),
        (0..64_u32).prop_map(|bit| u64::MAX >> bit),
        any::<u64>(),
        prop::sample::select(vec![1_u64, 999, 1000, 1001, 99_999, 100_000, 100_001]),
    ];
    let region = prop_oneof![0..4_u32, any::<u32>()];
    (region.clone(), region, number.clone(), number.clone(), number)
        .prop_map(|(local_region, remote_region, local_offset, remote_offset, bytes)| Segment {
            local_region,
            remote_region,
            local_offset,
            remote_offset,
            bytes,
        })
        .prop_filter("out of range", |segment| !is_in_range(segment))
}

/// In numbers that cannot overflow: another way than the port's.
fn is_in_range(segment: &Segment) -> bool {
    let fits = |region: u32, offset: u64| {
        let size = REGIONS.get(region as usize).copied().unwrap_or(0);
        u128::from(offset) + u128::from(segment.bytes) <= u128::from(size)
    };
    segment.bytes > 0
        && fits(segment.local_region, segment.local_offset)
        && fits(segment.remote_region, segment.remote_offset)
}

proptest! {
    #[test]
    fn what_is_posted_is_exactly_what_was_asked_for_in_order(
        list in prop::collection::vec(in_range(), 0..20),
        max_segment_bytes in prop_oneof![50..200_u64, 1000..200_000_u64, Just(u64::MAX)],
        max_batch_segments in prop_oneof![1..10_u32, Just(u32::MAX)],
        notify: bool,
    ) {
        let setup = three(max_segment_bytes, max_batch_segments);
        let notify = notify.then_some(&b"n"[..]);
        let report = block_on(setup.write(&list, notify)).unwrap();
        let posts = setup.fake.posts();

        // The fake asserts every limit. Here: the pieces, put together again, are the list.
        let mut pieces = posts.iter().flat_map(|post| &post.segments);
        let mut count = 0;
        for asked in &list {
            let (mut done, mut handles) = (0, None);
            while done < asked.bytes {
                let piece = pieces.next().unwrap();
                count += 1;
                prop_assert_eq!(piece.local_offset, asked.local_offset + done);
                prop_assert_eq!(piece.remote_offset, asked.remote_offset + done);
                prop_assert_eq!(piece.local, backend_id(&setup, asked.local_region));
                prop_assert_eq!(*handles.get_or_insert(piece.remote), piece.remote);
                done += piece.bytes;
                prop_assert!(done == asked.bytes || piece.bytes == max_segment_bytes);
            }
            prop_assert_eq!(done, asked.bytes);
        }
        prop_assert!(pieces.next().is_none());

        // Only the last batch may be short, and the report counts right.
        for post in posts.iter().rev().skip(1) {
            prop_assert_eq!(post.segments.len() as u64, u64::from(max_batch_segments));
        }
        prop_assert_eq!(report.segments, count);
        prop_assert_eq!(report.batches, posts.len() as u64);
        prop_assert_eq!(report.bytes, list.iter().map(|asked| asked.bytes).sum::<u64>());
        let told: Vec<_> = posts.iter().map(|post| post.notify.is_some()).collect();
        prop_assert_eq!(told.iter().filter(|told| **told).count(), usize::from(notify.is_some()));
        prop_assert_eq!(told.last().copied().unwrap_or(false), notify.is_some());
    }

    #[test]
    fn what_is_out_of_range_is_always_refused(
        mut list in prop::collection::vec(in_range(), 0..5),
        bad in out_of_range(),
        at: prop::sample::Index,
    ) {
        let setup = three(1000, 4);
        let at = at.index(list.len() + 1);
        list.insert(at, bad);
        let result = setup.port.transfer(setup.peer, Mode::Read, &setup.set, &list, Some(b"n"));
        let error = result.unwrap_err();
        prop_assert_eq!(error.kind(), ErrorKind::Misuse);
        let named = error.context().iter().find(|(key, _)| *key == "segment").unwrap();
        prop_assert_eq!(&named.1, &at.to_string());
        prop_assert_eq!(setup.fake.lock().submits, 0);
        prop_assert_eq!(setup.port.stats(), PortStats::default());
        for id in setup.set.ids() {
            setup.port.deregister(id).unwrap();
        }
    }
}

fn backend_id(setup: &Setup, region: u32) -> RegionId {
    setup.set.members[region as usize].backend
}

#[test]
fn more_bytes_than_can_be_counted_are_refused() {
    use super::super::peers::RemoteRegion;
    use super::super::regions::SetMember;
    let (id, remote) = (RegionId::new(0, 0), crate::id::RemoteRegionId::new(0, 0));
    let local = [SetMember { id, backend: id, bytes: u64::MAX }];
    let remote = [RemoteRegion { id: remote, bytes: u64::MAX }];
    let big = Segment { local_offset: 0, remote_offset: 0, bytes: u64::MAX, ..segment(0) };
    let limits = crate::capability::Limits::unlimited();
    let mut out: Vec<PostedSegment> = Vec::new();
    let check = super::super::split::check;
    let error =
        check(&[big, segment(0)], &local, &remote, &limits, &mut [false], &mut out).unwrap_err();
    assert!(error.to_string().contains("segment=1"), "{error}");
}

/// Every place at which a batch can end, in the middle of a segment above all: the next batch begins there.
#[test]
fn a_segment_that_was_begun_is_gone_on_with() {
    use super::super::split::Cutter;
    let (local, remote) = (RegionId::new(0, 0), crate::id::RemoteRegionId::new(0, 0));
    let posted = |at: u64, bytes: u64| PostedSegment {
        local,
        remote,
        local_offset: at,
        remote_offset: 1000 + at,
        bytes,
    };
    // The last bytes of the first are not longer than a piece may be, nor is the segment after it.
    let list = vec![posted(0, 20), posted(100, 3), posted(200, 14), posted(300, 7)];
    let mut limits = crate::capability::Limits::unlimited();
    limits.max_segment_bytes = 7;
    let all = [(0, 7), (7, 7), (14, 6), (100, 3), (200, 7), (207, 7), (300, 7)];
    for most in 1..9 {
        limits.max_batch_segments = most;
        let mut cutter = Cutter::new(list.clone());
        let mut cut = Vec::new();
        while cut.len() < all.len() {
            let batch = cutter.cut(&limits).to_vec();
            assert_eq!(cutter.cut(&limits), batch, "until it is posted, it is the same");
            assert_eq!(batch.len(), (most as usize).min(all.len() - cut.len()));
            cut.extend(batch);
            cutter.advance();
        }
        assert_eq!(cut, all.map(|(at, bytes)| posted(at, bytes)), "{most} at a time");
        assert!(cutter.cut(&limits).is_empty());
    }
}
