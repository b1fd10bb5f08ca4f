//! Cancel, sever, revoke, close, and peers that go away.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvx_core::backend::{Event, Outcome, Submit, TransferBackend as _};
use kvx_core::capability::Revoke;
use kvx_core::handshake::Handshake as _;
use kvx_core::id::TransferId;
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::Mode;
use kvx_core::{ErrorKind, Retry};
use kvx_mock::{Fabric, How, Preset};

use crate::common::{
    bytes, ends_down, import, meet, memory, outcome, pair, poll, poll_until, presets, seeds,
    segment, write,
};
use crate::handshake::now;

/// The ids that settled, and how; each at most once, and before the peer was down.
fn settled(events: &[Event]) -> Vec<(u64, How)> {
    let mut list = Vec::new();
    let mut down = false;
    for event in events {
        match event {
            Event::Settled { id, outcome } => {
                assert!(!down, "settled after the peer was down");
                assert!(list.iter().all(|(known, _)| *known != id.0), "{id} settled twice");
                list.push((id.0, outcome.into()));
            }
            Event::PeerDown { .. } => {
                assert!(!down, "down twice");
                down = true;
            }
            _ => assert!(!down, "notified by a peer that is down"),
        }
    }
    list
}

/// Both engines write up to `count` batches into each other's memory.
struct Crossfire {
    fabric: Fabric,
    ends: [End; 2],
    posted: u64,
}

struct End {
    backend: Arc<kvx_mock::MockBackend>,
    peer: kvx_core::id::PeerId,
    target: Region,
    segments: Vec<kvx_core::transfer::PostedSegment>,
}

fn crossfire(seed: u64, preset: &Preset, count: u64) -> Crossfire {
    let fabric = Fabric::new(seed);
    let (first, second, at_first, at_second) = pair(&fabric, preset);
    let end = |mine: &Arc<kvx_mock::MockBackend>, peer, other: &Arc<kvx_mock::MockBackend>| {
        let (_, local) = memory(mine, 64, 2);
        let (target, remote) = memory(other, 64, 1);
        let remote = import(other, remote, mine, peer);
        let segments = vec![segment(local, remote, 0, 32), segment(local, remote, 32, 32)];
        End { backend: Arc::clone(mine), peer, target, segments }
    };
    let ends = [end(&first, at_first, &second), end(&second, at_second, &first)];
    let posted = count.min(preset.capabilities().limits.max_in_flight.into());
    for end in &ends {
        for id in 0..posted {
            let post = end.backend.submit(
                TransferId(id),
                end.peer,
                Mode::Write,
                &end.segments,
                Some(&[u8::try_from(id).unwrap()]),
            );
            assert_eq!(post.unwrap(), Submit::Submitted);
        }
    }
    Crossfire { fabric, ends, posted }
}

#[test]
fn after_sever_everything_settles_on_both_sides_and_the_peer_is_down_last() {
    for preset in presets() {
        let mut seen = BTreeSet::new();
        for seed in seeds(100) {
            println!("seed {seed}, preset {}", preset.name());
            let Crossfire { fabric, ends: [one, other], posted } = crossfire(seed, &preset, 16);
            fabric.advance(u32::try_from(seed % 20).unwrap());
            one.backend.sever(one.peer).unwrap();
            one.backend.sever(one.peer).unwrap();
            let again = |end: &End| {
                end.backend.submit(TransferId(99), end.peer, Mode::Write, &end.segments, None)
            };
            let error = again(&one).unwrap_err();
            assert_eq!((error.kind(), error.retry()), (ErrorKind::Peer, Retry::Reconnect));
            // The other side has not heard of it: what it posts now settles like the rest.
            let late = u64::from(again(&other).unwrap() == Submit::Submitted);
            let mine = poll_until(&one.backend, ends_down);
            let theirs = poll_until(&other.backend, ends_down);
            for (end, events, severed) in [(&one, &mine, true), (&other, &theirs, false)] {
                let list = settled(events);
                let posted = if severed { posted } else { posted + late };
                assert_eq!(list.len() as u64, posted, "everything settles");
                seen.extend(list.into_iter().map(|(_, how)| (severed, how)));
                let Some(Event::PeerDown { peer, error }) = events.last() else { unreachable!() };
                assert_eq!((*peer, error.is_none()), (end.peer, severed));
                assert!(poll(&end.backend).is_empty());
                assert_eq!(end.backend.sever(end.peer).unwrap_err().kind(), ErrorKind::Misuse);
            }
            let before = (bytes(&one.target), bytes(&other.target));
            assert_eq!(fabric.advance(1000), 0, "something moves after all is settled");
            assert_eq!((bytes(&one.target), bytes(&other.target)), before);
        }
        let many = preset.capabilities().limits.max_in_flight > 1;
        let mut all = BTreeSet::from([(true, How::Cancelled), (false, How::Failed)]);
        if many {
            all.extend([(true, How::Done), (false, How::Done)]);
        }
        assert!(seen.is_superset(&all), "preset {}: {seen:?}", preset.name());
    }
}

#[test]
fn sever_needs_no_more_polls_than_a_few_of_ones_own() {
    for seed in seeds(20) {
        let Crossfire { ends: [one, _], .. } = crossfire(seed, &Preset::ucx_tcp(), 200);
        one.backend.sever(one.peer).unwrap();
        let mut events = kvx_core::backend::Events::with_limit(1000);
        for _ in 0..10 {
            one.backend.poll(&mut events);
        }
        let all: Vec<_> = events.drain().collect();
        assert_eq!(settled(&all).len(), 200);
        assert!(ends_down(&all), "seed {seed}");
    }
}

#[test]
fn revoke_ends_access_at_once_where_the_capability_says_so() {
    let mut stopped = 0;
    for seed in seeds(100) {
        println!("seed {seed}");
        let Crossfire { fabric, ends: [one, other], posted } = crossfire(seed, &Preset::rc(), 16);
        fabric.advance(u32::try_from(seed % 40).unwrap());
        // What `other` writes into is memory of `one`.
        one.backend.revoke(one.peer).unwrap();
        other.target.write_at(0, &[9; 64]).unwrap();
        let theirs = poll_until(&other.backend, ends_down);
        let mine = poll_until(&one.backend, ends_down);
        assert_eq!(bytes(&other.target), [9; 64], "written after revoke returned");
        let list = settled(&theirs);
        assert_eq!(list.len() as u64, posted);
        assert_eq!(settled(&mine).len() as u64, posted);
        stopped += list.iter().filter(|(_, how)| *how == How::Failed).count();
    }
    assert!(stopped > 0, "no seed was in time");
}

#[test]
fn revoke_after_sever_still_ends_access() {
    let mut went_on = 0;
    for seed in seeds(100) {
        for revoke in [false, true] {
            let Crossfire { ends: [one, other], .. } = crossfire(seed, &Preset::rc(), 16);
            one.backend.sever(one.peer).unwrap();
            if revoke {
                one.backend.revoke(one.peer).unwrap();
            }
            other.target.write_at(0, &[9; 64]).unwrap();
            poll_until(&other.backend, ends_down);
            if revoke {
                assert_eq!(bytes(&other.target), [9; 64], "seed {seed}");
            } else {
                went_on += u32::from(bytes(&other.target) != [9; 64]);
            }
        }
    }
    assert!(went_on > 0, "sever alone says nothing about the peer's own transfers");
}

#[test]
fn on_reliable_connections_a_peer_that_is_down_has_no_access() {
    for seed in seeds(100) {
        for by_peer in [false, true] {
            let Crossfire { fabric, ends: [one, other], .. } = crossfire(seed, &Preset::rc(), 16);
            let by = if by_peer { &other } else { &one };
            by.backend.sever(by.peer).unwrap();
            poll_until(&one.backend, ends_down);
            other.target.write_at(0, &[9; 64]).unwrap();
            poll_until(&other.backend, ends_down);
            assert_eq!(fabric.advance(1000), 0);
            assert_eq!(bytes(&other.target), [9; 64], "seed {seed}, by the peer: {by_peer}");
        }
    }
}

#[test]
fn revoke_is_refused_where_it_cannot_be_done() {
    for preset in presets() {
        let fabric = Fabric::new(1);
        let (first, _second, peer, _) = pair(&fabric, &preset);
        let revoked = first.revoke(peer).map_err(|error| error.kind());
        match preset.capabilities().revoke {
            Revoke::PerPeer => assert_eq!(revoked, Ok(())),
            _ => assert_eq!(revoked, Err(ErrorKind::Unsupported)),
        }
    }
}

#[test]
fn a_cancelled_transfer_settles_and_is_notified_only_if_its_data_arrived() {
    for preset in presets() {
        let mut ways = BTreeSet::new();
        for seed in seeds(100) {
            let fabric = Fabric::new(seed);
            let (first, second, peer, _) = pair(&fabric, &preset);
            let (target, remote) = memory(&second, 64, 1);
            let remote = import(&second, remote, &first, peer);
            let (_, local) = memory(&first, 64, 2);
            let segments = [segment(local, remote, 0, 32), segment(local, remote, 32, 32)];
            let id = TransferId(1);
            let _ = first.submit(id, peer, Mode::Write, &segments, Some(b"x")).unwrap();
            fabric.advance(u32::try_from(seed % 3).unwrap());
            first.cancel(id).unwrap();
            let ended = outcome(&first, 1);
            assert_eq!(first.cancel(id).unwrap_err().kind(), ErrorKind::Misuse);
            while fabric.advance(1) == 1 {}
            let notified = !poll(&second).is_empty();
            let arrived = bytes(&target) == [2; 64];
            assert_eq!(notified, arrived, "seed {seed}");
            ways.insert(match ended {
                Outcome::Done { .. } => (true, arrived),
                Outcome::Cancelled => (false, arrived),
                other => panic!("{other:?}"),
            });
        }
        assert_eq!(ways, BTreeSet::from([(true, true), (false, false)]), "{}", preset.name());
    }
}

#[test]
fn an_engine_that_closes_or_vanishes_takes_only_its_own_down() {
    for preset in presets() {
        for (seed, vanish) in seeds(40).into_iter().flat_map(|seed| [(seed, false), (seed, true)]) {
            println!("seed {seed}, preset {}, vanish {vanish}", preset.name());
            let Crossfire { fabric, ends: [one, other], posted } = crossfire(seed, &preset, 8);
            let third = fabric.backend(preset.clone(), "third");
            let (at_other, at_third) = meet(&other.backend, &third);
            fabric.advance(u32::try_from(seed % 20).unwrap());
            if vanish {
                drop(one.backend);
            } else {
                now(one.backend.close()).unwrap();
                now(one.backend.close()).unwrap();
                let mine = poll_until(&one.backend, ends_down);
                assert_eq!(settled(&mine).len() as u64, posted);
                let closed = one.backend.register(&one.target).unwrap_err();
                assert_eq!(closed.kind(), ErrorKind::Closed);
                assert_eq!(one.backend.offer().unwrap_err().kind(), ErrorKind::Closed);
                let late = one.backend.submit(TransferId(9), one.peer, Mode::Write, &[], Some(&[]));
                assert_eq!(late.unwrap_err().kind(), ErrorKind::Closed);
            }
            let theirs = poll_until(&other.backend, ends_down);
            assert_eq!(settled(&theirs).len() as u64, posted);
            let Some(Event::PeerDown { peer, error: Some(error) }) = theirs.last() else {
                panic!("{theirs:?}")
            };
            assert_eq!((*peer, error.retry()), (other.peer, Retry::Reconnect));
            let (_, local) = memory(&other.backend, 64, 5);
            let (target, remote) = memory(&third, 64, 1);
            let remote = import(&third, remote, &other.backend, at_other);
            write(&other.backend, 1, at_other, &[segment(local, remote, 0, 32)]);
            assert!(outcome(&other.backend, 1).is_done());
            assert_eq!(bytes(&target)[..32], [5; 32]);
            third.peer_info(at_third).unwrap();
        }
    }
}

#[test]
fn the_keys_of_a_peer_are_forgotten_with_it() {
    let fabric = Fabric::new(1);
    let (first, second, peer, _) = pair(&fabric, &Preset::rc());
    let (_, remote) = memory(&second, 64, 1);
    let imported = import(&second, remote, &first, peer);
    let (_, local) = memory(&first, 64, 2);
    first.sever(peer).unwrap();
    poll_until(&first, ends_down);
    poll_until(&second, ends_down);
    let (peer, _) = meet(&first, &second);
    let old = [segment(local, imported, 0, 32)];
    let error = first.submit(TransferId(1), peer, Mode::Write, &old, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    let new = import(&second, remote, &first, peer);
    assert_eq!(new.slot(), imported.slot(), "the old key still takes up a slot");
    write(&first, 1, peer, &[segment(local, new, 0, 32)]);
    assert!(outcome(&first, 1).is_done());
}
