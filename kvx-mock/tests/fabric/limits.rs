//! What `submit` refuses, and when it is full.

use kvx_core::ErrorKind;
use kvx_core::backend::{Submit, TransferBackend as _};
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::transfer::Mode;
use kvx_mock::{Fabric, Preset};

use crate::common::{bytes, import, meet, memory, outcome, pair, poll, presets, segment};

#[test]
fn what_is_refused_posts_nothing() {
    let mut capabilities = Preset::efa().capabilities().clone();
    capabilities.read = false;
    capabilities.limits.max_segment_bytes = 16;
    capabilities.limits.max_batch_segments = 2;
    capabilities.limits.max_notification_bytes = 4;
    let preset = Preset::custom(capabilities).unwrap();
    let fabric = Fabric::new(1);
    let (first, second, peer, _) = pair(&fabric, &preset);
    let (target, remote) = memory(&second, 64, 7);
    let remote = import(&second, remote, &first, peer);
    let (_, local) = memory(&first, 64, 9);
    let good = segment(local, remote, 0, 16);
    let third = fabric.backend(preset, "third");
    let (other_peer, _) = meet(&first, &third);
    let id = TransferId(1);
    let write = |peer, segments: &[_], note: Option<&[u8]>| {
        first.submit(id, peer, Mode::Write, segments, note)
    };
    let stale = RegionId::new(local.slot(), local.generation() + 1);
    let cases = [
        ("nothing", write(peer, &[], None)),
        ("long notification", write(peer, &[good], Some(b"12345"))),
        ("three segments", write(peer, &[good; 3], None)),
        ("large segment", write(peer, &[segment(local, remote, 0, 17)], None)),
        ("empty segment", write(peer, &[segment(local, remote, 0, 0)], None)),
        ("unknown peer", write(PeerId::new(9, 0), &[good], None)),
        ("stale local", write(peer, &[good, segment(stale, remote, 0, 1)], None)),
        ("unknown remote", write(peer, &[segment(local, RemoteRegionId::new(9, 0), 0, 1)], None)),
        ("another peer's region", write(other_peer, &[good], None)),
    ];
    for (what, result) in cases {
        assert_eq!(result.expect_err(what).kind(), ErrorKind::Misuse, "{what}");
    }
    let read = first.submit(id, peer, Mode::Read, &[good], None).unwrap_err();
    assert_eq!(read.kind(), ErrorKind::Unsupported);
    assert_eq!(fabric.advance(1000), 0);
    assert!(poll(&first).is_empty() && bytes(&target) == [7; 64]);

    assert_eq!(write(peer, &[good], Some(b"1234")).unwrap(), Submit::Submitted);
    let twice = write(peer, &[good], None).unwrap_err();
    assert_eq!(twice.kind(), ErrorKind::Misuse);
    assert!(outcome(&first, 1).is_done());
    assert_eq!(write(peer, &[good], None).unwrap(), Submit::Submitted);
}

#[test]
fn full_is_counted_per_peer_until_settled_was_polled() {
    for preset in presets() {
        let most = u64::from(preset.capabilities().limits.max_in_flight);
        let fabric = Fabric::new(1);
        let (first, second, peer, _) = pair(&fabric, &preset);
        let third = fabric.backend(preset, "third");
        let (third_at_first, _) = meet(&first, &third);
        let post =
            |id, peer| first.submit(TransferId(id), peer, Mode::Write, &[], Some(b"x")).unwrap();
        for id in 0..most {
            assert_eq!(post(id, peer), Submit::Submitted);
        }
        while fabric.advance(1) == 1 {}
        assert_eq!(post(most, peer), Submit::Full, "settled, but nobody was told");
        assert_eq!(post(most, third_at_first), Submit::Submitted);
        let told = poll(&first).len() as u64;
        assert!(told >= 1);
        let mut heard = 0;
        while heard < most {
            let events = poll(&second).len() as u64;
            assert!(events > 0 || fabric.advance(1) == 1);
            heard += events;
        }
        assert_eq!(post(most + 1, peer), Submit::Submitted);
    }
}
