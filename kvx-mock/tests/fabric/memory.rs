//! Registrations, key blobs, and what a transfer finds when they are gone.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvx_core::ErrorKind;
use kvx_core::backend::{Outcome, TransferBackend as _};
use kvx_core::id::{RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{Backing, HostMemory, KeyBlob, MemoryKind, MemoryRegistry as _, Region};
use kvx_core::transfer::Mode;
use kvx_mock::{Fabric, Preset};

use crate::common::{bytes, import, memory, outcome, pair, presets, seeds, segment, write};

fn failure(outcome: &Outcome) -> ErrorKind {
    match outcome {
        Outcome::Failed(error) => error.kind(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn stale_handles_are_errors() {
    let fabric = Fabric::new(1);
    let (first, second, peer, _) = pair(&fabric, &Preset::rc());
    let (_, old) = memory(&first, 64, 0);
    first.deregister(old).unwrap();
    let (_, new) = memory(&first, 64, 0);
    assert_eq!(new.slot(), old.slot());
    assert_eq!(first.deregister(old).unwrap_err().kind(), ErrorKind::Misuse);
    assert_eq!(first.key_blob(old).unwrap_err().kind(), ErrorKind::Misuse);
    first.key_blob(new).unwrap();

    let (_, region) = memory(&second, 64, 0);
    let remote = import(&second, region, &first, peer);
    first.release_key(peer, remote).unwrap();
    assert_eq!(first.release_key(peer, remote).unwrap_err().kind(), ErrorKind::Misuse);
    let unknown = first.release_key(peer, RemoteRegionId::new(9, 9)).unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Misuse);
    let released = segment(new, remote, 0, 1);
    let error = first.submit(TransferId(1), peer, Mode::Read, &[released], None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
}

#[test]
fn a_target_that_is_gone_or_another_fails_the_transfer_and_nothing_moves() {
    for preset in presets() {
        for seed in seeds(20) {
            for mode in [Mode::Read, Mode::Write] {
                let fabric = Fabric::new(seed);
                let (first, second, peer, _) = pair(&fabric, &preset);
                let (theirs, remote) = memory(&second, 32, 1);
                let imported = import(&second, remote, &first, peer);
                second.deregister(remote).unwrap();
                // The same memory in the same slot again: the old key still names the old registration.
                let again = second.register(&theirs).unwrap();
                assert_eq!(again.slot(), remote.slot());
                let (mine, local) = memory(&first, 32, 2);
                let segments = [segment(local, imported, 0, 32)];
                let _ = first.submit(TransferId(1), peer, mode, &segments, Some(b"no")).unwrap();
                assert_eq!(failure(&outcome(&first, 1)), ErrorKind::Peer);
                while fabric.advance(1) == 1 {}
                assert!(crate::common::poll(&second).is_empty(), "notified of what failed");
                assert_eq!((bytes(&mine), bytes(&theirs)), (vec![2; 32], vec![1; 32]));
            }
        }
    }
}

#[test]
fn a_forged_key_reaches_nothing() {
    let fabric = Fabric::new(1);
    let (first, second, peer, _) = pair(&fabric, &Preset::rc());
    let (theirs, remote) = memory(&second, 32, 1);
    let (_, local) = memory(&first, 32, 2);
    let good = second.key_blob(remote).unwrap();
    // The last eight bytes are the secret.
    for at in good.as_bytes().len() - 8..good.as_bytes().len() {
        let mut forged = good.as_bytes().to_vec();
        forged[at] ^= 1;
        let forged = first.import_key(peer, &KeyBlob::new(forged).unwrap()).unwrap();
        write(&first, 1, peer, &[segment(local, forged, 0, 32)]);
        assert_eq!(failure(&outcome(&first, 1)), ErrorKind::Peer);
    }
    assert_eq!(bytes(&theirs), [1; 32]);
}

#[test]
fn malformed_blobs_are_the_peers_fault() {
    let fabric = Fabric::new(1);
    let (first, second, peer, _) = pair(&fabric, &Preset::rc());
    let good = second.key_blob(memory(&second, 32, 1).1).unwrap();
    let good = good.as_bytes();
    let mut bad: Vec<Vec<u8>> = (0..good.len()).map(|len| good[..len].to_vec()).collect();
    bad.push([good, b"x"].concat());
    bad.push(vec![0xff; KeyBlob::MAX_BYTES]);
    // The tag, the version, or another incarnation's.
    for at in 0..21 {
        let mut changed = good.to_vec();
        changed[at] ^= 0x80;
        bad.push(changed);
    }
    for blob in bad {
        let error = first.import_key(peer, &KeyBlob::new(blob.clone()).unwrap()).expect_err("bad");
        assert_eq!(error.kind(), ErrorKind::Peer, "{blob:?}");
    }
    first.import_key(peer, &KeyBlob::new(good.to_vec()).unwrap()).unwrap();
}

#[test]
fn outside_a_region_or_onto_itself_is_an_outcome() {
    let fabric = Fabric::new(1);
    let (first, second, peer, _) = pair(&fabric, &Preset::rc());
    let (small, large) = (Region::host(16).unwrap(), Region::host(64).unwrap());
    let (at_first, at_second) = (first.register(&small).unwrap(), second.register(&large).unwrap());
    let (own, shared) = (first.register(&large).unwrap(), second.register(&small).unwrap());
    let large_remote = import(&second, at_second, &first, peer);
    let small_remote = import(&second, shared, &first, peer);
    let cases = [
        (segment(at_first, large_remote, 8, 16), ErrorKind::Misuse, "outside mine"),
        (segment(own, small_remote, 8, 16), ErrorKind::Fabric, "outside the peer's"),
        (segment(own, small_remote, u64::MAX, 2), ErrorKind::Fabric, "wraps around"),
        (segment(own, large_remote, 8, 16), ErrorKind::Misuse, "source and target overlap"),
    ];
    for (segment, kind, what) in cases {
        for mode in [Mode::Read, Mode::Write] {
            let _ = first.submit(TransferId(1), peer, mode, &[segment], None).unwrap();
            assert_eq!(failure(&outcome(&first, 1)), kind, "{what}, {mode}");
        }
    }
    assert_eq!((bytes(&small), bytes(&large)), (vec![0; 16], vec![0; 64]));
}

#[test]
fn deregistering_fails_transfers_in_flight_and_no_access_begins_after_it() {
    for preset in presets() {
        let mut failed = 0;
        for seed in seeds(50) {
            let fabric = Fabric::new(seed);
            let (first, second, peer, _) = pair(&fabric, &preset);
            let (mine, local) = memory(&first, 64, 2);
            let (theirs, remote) = memory(&second, 64, 1);
            let remote = import(&second, remote, &first, peer);
            let segments = [segment(local, remote, 0, 32), segment(local, remote, 32, 32)];
            write(&first, 1, peer, &segments);
            fabric.advance(u32::try_from(seed % 3).unwrap());
            first.deregister(local).unwrap();
            let before = bytes(&theirs);
            mine.write_at(0, &[3; 64]).unwrap();
            let ended = outcome(&first, 1);
            assert_eq!(bytes(&theirs), before, "seed {seed}: moved after deregister");
            match ended {
                Outcome::Done { .. } => assert_eq!(before, [2; 64], "seed {seed}"),
                other => {
                    assert_eq!(failure(&other), ErrorKind::Misuse);
                    failed += 1;
                }
            }
        }
        assert!(failed > 0, "preset {}: no seed was in time", preset.name());
    }
}

/// Memory that tells when it is dropped. Dropping it calls the fabric, as an application's allocator may.
#[derive(Debug)]
struct Watched {
    memory: HostMemory,
    fabric: Fabric,
    dropped: Arc<AtomicBool>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.fabric.advance(1);
        self.dropped.store(true, Ordering::SeqCst);
    }
}

// SAFETY: everything is that of `HostMemory`, which this owns.
unsafe impl Backing for Watched {
    fn address(&self) -> NonNull<u8> {
        self.memory.address()
    }

    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

#[test]
fn a_region_lives_as_long_as_a_transfer_needs_it_and_no_longer() {
    let fabric = Fabric::new(1);
    let (first, second, peer, _) = pair(&fabric, &Preset::rc());
    let dropped = Arc::new(AtomicBool::new(false));
    let watched = |dropped: &Arc<AtomicBool>| {
        Region::new(Watched {
            memory: HostMemory::zeroed(64).unwrap(),
            fabric: fabric.clone(),
            dropped: Arc::clone(dropped),
        })
        .unwrap()
    };
    let local = first.register(&watched(&dropped)).unwrap();
    let (_, remote) = memory(&second, 64, 1);
    let remote = import(&second, remote, &first, peer);
    write(&first, 1, peer, &[segment(local, remote, 0, 64)]);
    first.deregister(local).unwrap();
    assert!(!dropped.load(Ordering::SeqCst), "a transfer in flight holds it");
    outcome(&first, 1);
    assert!(dropped.load(Ordering::SeqCst));

    let dropped = Arc::new(AtomicBool::new(false));
    first.register(&watched(&dropped)).unwrap();
    drop(first);
    assert!(dropped.load(Ordering::SeqCst), "an engine that is gone holds nothing");
}

#[test]
fn memory_of_another_kind_is_refused_by_name() {
    let fabric = Fabric::new(1);
    let first = fabric.backend(Preset::rc(), "first");
    let address = NonNull::new(std::ptr::without_provenance_mut(0x1000)).unwrap();
    // SAFETY: the region is never accessed: registering it is refused.
    let device = unsafe { Region::borrowed(address, 4096, MemoryKind::Cuda(3)) }.unwrap();
    let error = first.register(&device).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("cuda:3"), "{error}");
    assert_eq!(first.key_blob(RegionId::new(0, 0)).unwrap_err().kind(), ErrorKind::Misuse);
}
