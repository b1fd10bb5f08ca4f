//! Tests of registered memory. All of them run under Miri, where accesses of different sizes need
//! `MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-disable-weak-memory-emulation"`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use proptest::prelude::*;

use super::*;
use crate::error::ErrorKind;

const fn assert_send_sync<T: Send + Sync>() {}

#[test]
fn memory_goes_to_any_thread() {
    assert_send_sync::<Region>();
    assert_send_sync::<HostMemory>();
    assert_send_sync::<KeyBlob>();
    assert_send_sync::<Arc<dyn Backing>>();
    let region = Region::host(8).unwrap();
    let clone = region.clone();
    let other = std::thread::spawn(move || clone.write_at(0, b"elsewhere"[..8].as_ref()));
    other.join().unwrap().unwrap();
    let mut bytes = [0; 8];
    region.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"elsewher");
}

/// Known failure 102 (Mooncake PR#701): a registration of zero bytes spoiled the metadata of all.
#[test]
fn no_region_is_empty() {
    for bytes in [HostMemory::zeroed(0).map(drop), Region::host(0).map(drop)] {
        assert_eq!(bytes.unwrap_err().kind(), ErrorKind::Misuse);
    }
    // SAFETY: nothing is at no bytes.
    let borrowed = unsafe { Region::borrowed(NonNull::dangling(), 0, MemoryKind::Host) };
    let error = borrowed.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(error.remedy().is_some());
}

#[test]
fn more_than_there_is_is_an_error_and_not_an_abort() {
    // Miri has no way to say that the last is not to be had.
    let count = if cfg!(miri) { 2 } else { 3 };
    for bytes in [u64::MAX, u64::MAX / 2, 1 << 62].into_iter().take(count) {
        let error = Region::host(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Resources);
        assert!(error.to_string().contains(&format!("bytes={bytes}")), "{error}");
    }
}

#[test]
fn a_region_that_wraps_around_is_refused() {
    let end = NonNull::without_provenance(std::num::NonZero::new(usize::MAX - 7).unwrap());
    for bytes in [8, 9, u64::MAX] {
        // SAFETY: the memory is never touched: device memory is not reachable from here.
        let region = unsafe { Region::borrowed(end, bytes, MemoryKind::Cuda(0)) };
        assert_eq!(region.unwrap_err().kind(), ErrorKind::Misuse);
    }
    // SAFETY: as before.
    assert!(unsafe { Region::borrowed(end, 7, MemoryKind::Cuda(0)) }.is_ok());
}

#[test]
fn host_memory_is_zeroed_and_aligned_to_a_page() {
    let region = Region::host(5000).unwrap();
    assert_eq!((region.bytes(), region.kind()), (5000, MemoryKind::Host));
    assert_eq!(region.address().as_ptr().addr() % 4096, 0);
    let mut bytes = vec![1; 5000];
    region.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
}

#[test]
fn ranges_outside_a_region_are_refused_with_the_values() {
    let region = Region::host(100).unwrap();
    let other = Region::host(50).unwrap();
    region.read_at(100, &mut []).unwrap();
    region.write_at(99, &[1]).unwrap();
    for (offset, len) in [(100, 1), (99, 2), (101, 0), (u64::MAX, 1), (u64::MAX - 1, 2), (0, 101)] {
        let mut bytes = vec![0; len];
        let results = [
            region.read_at(offset, &mut bytes),
            region.write_at(offset, &bytes),
            region.copy_to(offset, &other, 0, len as u64),
            other.copy_to(0, &region, offset, len as u64),
        ];
        for (i, result) in results.into_iter().enumerate() {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misuse);
            let text = error.to_string();
            // The last copy may fail on its source first.
            if i < 3 || len <= 50 {
                assert!(text.contains(&format!("offset={offset}, bytes={len}")), "{text}");
                assert!(text.contains("region=100"), "{text}");
            }
        }
    }
    assert_eq!(
        region.copy_to(0, &other, 0, u64::MAX).unwrap_err().kind(),
        ErrorKind::Misuse,
        "more than any region"
    );
}

#[test]
fn ranges_that_overlap_are_not_copied() {
    let region = Region::host(100).unwrap();
    region.write_at(0, &[7; 10]).unwrap();
    for (from, to) in [(0, 0), (0, 9), (9, 0), (90, 81)] {
        let error = region.copy_to(from, &region, to, 10).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse);
        assert!(error.to_string().contains("overlap"), "{error}");
    }
    region.copy_to(0, &region, 10, 10).unwrap();
    region.copy_to(10, &region, 0, 10).unwrap();
    region.copy_to(5, &region, 5, 0).unwrap();
    let mut bytes = [0; 21];
    region.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes[..20], [7; 20]);
    assert_eq!(bytes[20], 0);
}

#[test]
fn memory_that_the_processor_cannot_reach_is_never_touched() {
    // SAFETY: nothing is there, and the test is that nobody looks.
    let region = unsafe { Region::borrowed(NonNull::dangling(), 64, MemoryKind::Cuda(1)) };
    let (region, host) = (region.unwrap(), Region::host(64).unwrap());
    let results = [
        region.read_at(0, &mut [0]),
        region.write_at(0, &[0]),
        region.copy_to(0, &host, 0, 1),
        host.copy_to(0, &region, 0, 1),
    ];
    for result in results {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("memory=cuda:1"), "{error}");
    }
}

#[test]
fn borrowed_memory_is_used_in_place_and_not_freed() {
    let mut owner = vec![0_u8; 32];
    let address = NonNull::new(owner.as_mut_ptr()).unwrap();
    // SAFETY: `owner` is neither moved nor looked at until the region is gone.
    let region = unsafe { Region::borrowed(address, 32, MemoryKind::Host) }.unwrap();
    let clone = region.clone();
    assert_eq!((clone.address(), clone.bytes()), (address, 32));
    clone.write_at(3, b"abc").unwrap();
    drop((region, clone));
    assert_eq!(&owner[2..7], b"\0abc\0");
}

#[derive(Debug)]
struct Counted(HostMemory, Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, SeqCst);
    }
}

// SAFETY: as for `HostMemory`, which it is.
unsafe impl Backing for Counted {
    fn address(&self) -> NonNull<u8> {
        self.0.address()
    }
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
    fn kind(&self) -> MemoryKind {
        self.0.kind()
    }
}

#[test]
fn what_backs_a_region_is_dropped_once_with_its_last_clone() {
    let drops = Arc::new(AtomicUsize::new(0));
    let memory = HostMemory::zeroed(16).unwrap();
    let region = Region::new(Counted(memory, Arc::clone(&drops))).unwrap();
    let clone = region.clone();
    drop(region);
    assert_eq!(drops.load(SeqCst), 0);
    clone.write_at(8, &[1; 8]).unwrap();
    drop(clone);
    assert_eq!(drops.load(SeqCst), 1);
}

#[test]
fn threads_that_copy_at_once_tear_at_worst() {
    // Each thread writes its own byte everywhere. What is read is always of one of them, and each of their last bytes that
    // nobody else touches is there in the end.
    let rounds = if cfg!(miri) { 3 } else { 200 };
    let region = Region::host(67).unwrap();
    std::thread::scope(|scope| {
        for name in 1..=3_u8 {
            let region = &region;
            scope.spawn(move || {
                for _ in 0..rounds {
                    // The same alignment for all: mixed sizes at one place are a device's privilege.
                    region.write_at(0, &[name; 64]).unwrap();
                    region.write_at(63 + u64::from(name), &[name]).unwrap();
                    let mut seen = [9; 64];
                    region.read_at(0, &mut seen).unwrap();
                    assert!(seen.iter().all(|byte| (1..=3).contains(byte)), "{seen:?}");
                }
            });
        }
    });
    let mut last = [0; 3];
    region.read_at(64, &mut last).unwrap();
    assert_eq!(last, [1, 2, 3]);
}

#[test]
fn key_blobs_are_bounded_and_secret() {
    assert!(KeyBlob::new(vec![0; KeyBlob::MAX_BYTES]).is_ok());
    let error = KeyBlob::new(vec![0; KeyBlob::MAX_BYTES + 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    let text = error.to_string();
    assert!(text.contains("bytes=4097") && text.contains("limit=4096"), "{text}");
    let blob = KeyBlob::new(vec![0xAB, 0xCD, 171]).unwrap();
    assert_eq!(format!("{blob:?}"), "KeyBlob(3 bytes)");
    assert_eq!(blob.as_bytes(), [0xAB, 0xCD, 171]);
}

#[test]
fn key_blobs_that_are_too_long_are_refused_when_read() {
    let write = |bytes: usize| rmp_serde::to_vec(&vec![7_u8; bytes]).unwrap();
    let read: KeyBlob = rmp_serde::from_slice(&write(KeyBlob::MAX_BYTES)).unwrap();
    assert_eq!(read.as_bytes().len(), KeyBlob::MAX_BYTES);
    assert_eq!(rmp_serde::from_slice::<KeyBlob>(&rmp_serde::to_vec(&read).unwrap()).unwrap(), read);
    rmp_serde::from_slice::<KeyBlob>(&write(KeyBlob::MAX_BYTES + 1)).unwrap_err();
}

#[test]
fn kinds_have_names() {
    assert_eq!(MemoryKind::Host.to_string(), "host");
    assert_eq!(MemoryKind::Cuda(12).to_string(), "cuda:12");
    let json = serde_json::to_string(&[MemoryKind::Host, MemoryKind::Cuda(2)]).unwrap();
    assert_eq!(json, r#"["host",{"cuda":2}]"#);
}

const SIZE: usize = 70;

#[derive(Clone, Debug)]
enum Access {
    Read { at: usize, len: usize },
    Write { at: usize, bytes: Vec<u8> },
    Copy { from: usize, to: usize, len: usize, back: bool },
}

fn access() -> impl Strategy<Value = Access> {
    let range = (0..SIZE + 2, 0..SIZE);
    prop_oneof![
        range.clone().prop_map(|(at, len)| Access::Read { at, len }),
        (0..SIZE + 2, prop::collection::vec(any::<u8>(), 0..SIZE))
            .prop_map(|(at, bytes)| Access::Write { at, bytes }),
        (range, 0..SIZE + 2, any::<bool>()).prop_map(|((from, len), to, back)| Access::Copy {
            from,
            to,
            len,
            back
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 8 } else { 256 },
        // Miri has no file system to keep failures in.
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Regions at every alignment do what two plain vectors do.
    #[test]
    fn regions_do_what_vectors_do(
        shift in 0..9_usize,
        list in prop::collection::vec(access(), 0..if cfg!(miri) { 8 } else { 40 }),
    ) {
        let mut owner = vec![0_u8; SIZE + 8];
        let address = NonNull::new(owner.as_mut_ptr()).unwrap();
        // SAFETY: `shift` is at most 8, and there are 8 bytes more than the region has.
        let address = unsafe { address.add(shift) };
        // SAFETY: `owner` is neither moved nor looked at until the region is gone.
        let region = unsafe { Region::borrowed(address, SIZE as u64, MemoryKind::Host) }.unwrap();
        let other = Region::host(SIZE as u64).unwrap();
        let (mut model, mut other_model) = (vec![0; SIZE], vec![0; SIZE]);
        for access in list {
            match access {
                Access::Read { at, len } => {
                    let mut bytes = vec![0xEE; len];
                    let result = region.read_at(at as u64, &mut bytes);
                    match model.get(at..at + len) {
                        Some(expected) => {
                            result.unwrap();
                            prop_assert_eq!(bytes, expected);
                        }
                        None => {
                            result.unwrap_err();
                            prop_assert_eq!(bytes, vec![0xEE; len]);
                        }
                    }
                }
                Access::Write { at, bytes } => {
                    let result = region.write_at(at as u64, &bytes);
                    match model.get_mut(at..at + bytes.len()) {
                        Some(target) => {
                            result.unwrap();
                            target.copy_from_slice(&bytes);
                        }
                        None => drop(result.unwrap_err()),
                    }
                }
                Access::Copy { from, to, len, back } => {
                    let (source, target) = if back { (&other, &region) } else { (&region, &other) };
                    let (read, written) = if back {
                        (&other_model, &mut model)
                    } else {
                        (&model, &mut other_model)
                    };
                    let result = source.copy_to(from as u64, target, to as u64, len as u64);
                    match (read.get(from..from + len), written.get_mut(to..to + len)) {
                        (Some(read), Some(written)) => {
                            result.unwrap();
                            written.copy_from_slice(read);
                        }
                        _ => drop(result.unwrap_err()),
                    }
                }
            }
        }
        let mut all = vec![0; SIZE];
        other.read_at(0, &mut all).unwrap();
        prop_assert_eq!(all, other_model);
        drop(region);
        prop_assert_eq!(&owner[shift..shift + SIZE], model);
        prop_assert!(owner[..shift].iter().chain(&owner[shift + SIZE..]).all(|byte| *byte == 0));
    }
}
