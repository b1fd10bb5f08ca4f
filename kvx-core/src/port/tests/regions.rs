//! Regions: kinds, handles, and what holds them.

use std::ptr::NonNull;
use std::sync::Arc;

use super::*;
use crate::error::{ErrorKind, Retry};
use crate::memory::{Backing, HostMemory, MemoryKind};

/// Host memory that tells, by its count, who holds it.
#[derive(Debug)]
struct Counted(HostMemory, #[expect(dead_code, reason = "held for its count")] Arc<()>);

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
fn memory_that_the_backend_cannot_reach_is_refused_with_both_kinds() {
    let setup = Setup::new();
    // SAFETY: nobody looks at the memory.
    let region = unsafe { Region::borrowed(NonNull::dangling(), 64, MemoryKind::Cuda(3)) }.unwrap();
    let error = setup.port.register(&region).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let text = error.to_string();
    assert!(text.contains("memory=cuda:3") && text.contains("supported=host"), "{text}");
}

#[test]
fn a_region_in_use_is_not_deregistered_and_the_error_counts() {
    let setup = Setup::new();
    let transfers = [setup.write(&segments(2), None), setup.write(&segments(1), None)];
    let error = setup.port.deregister(setup.id).unwrap_err();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Misuse, Retry::Backoff));
    assert!(error.to_string().contains("transfers=2"), "{error}");
    setup.settle_all();
    drop(transfers);
    setup.port.deregister(setup.id).unwrap();
}

#[test]
fn a_region_that_no_segment_names_is_not_held() {
    let setup = Setup::new();
    let other = setup.port.register(&Region::host(64).unwrap()).unwrap();
    let set = setup.port.region_set(&[setup.id, other]).unwrap();
    let transfer = setup.port.transfer(setup.peer, Mode::Read, &set, &segments(1), None).unwrap();
    setup.port.deregister(other).unwrap();
    setup.port.deregister(setup.id).unwrap_err();
    drop(transfer);
}

#[test]
fn stale_handles_are_misuse_and_never_reach_the_backend() {
    let setup = Setup::new();
    setup.port.deregister(setup.id).unwrap();
    let again = setup.port.register(&Region::host(BYTES).unwrap()).unwrap();
    assert_eq!(again.slot(), setup.id.slot(), "the slot is given out again");
    assert_ne!(again, setup.id);
    let never = RegionId::new(77, 0);
    for id in [setup.id, never] {
        assert_eq!(setup.port.key_blob(id).unwrap_err().kind(), ErrorKind::Misuse);
        assert_eq!(setup.port.deregister(id).unwrap_err().kind(), ErrorKind::Misuse);
        assert_eq!(setup.port.region_set(&[id]).unwrap_err().kind(), ErrorKind::Misuse);
    }
    let error =
        setup.port.transfer(setup.peer, Mode::Write, &setup.set, &segments(1), None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert_eq!(setup.fake.lock().submits, 0);
    assert!(setup.port.key_blob(again).is_ok());
}

#[test]
fn a_set_of_another_port_is_refused() {
    let (one, two) = (Setup::new(), Setup::new());
    let error = one.port.transfer(one.peer, Mode::Write, &two.set, &segments(1), None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(error.to_string().contains("another port"), "{error}");
}

/// Known failure 94 (nixl#2067): releasing the handle of a transfer in flight freed what it used.
#[test]
fn memory_lives_until_every_batch_is_quiet_whoever_lets_go() {
    let setup = Setup::one_by_one(8);
    let count = Arc::new(());
    let weak = Arc::downgrade(&count);
    let memory = HostMemory::zeroed(BYTES).unwrap();
    let region = Region::new(Counted(memory, count)).unwrap();
    let id = setup.port.register(&region).unwrap();
    let set = setup.port.region_set(&[id]).unwrap();
    drop(region);
    let before = weak.strong_count();
    let transfer = setup.port.transfer(setup.peer, Mode::Read, &set, &segments(2), None).unwrap();
    transfer.cancel();
    drop((transfer, set));
    let held = setup.fake.held();
    assert_eq!(held.len(), 2);
    setup.fake.done(held[0]);
    setup.port.poll();
    setup.port.deregister(id).unwrap_err();
    assert_eq!(weak.strong_count(), before, "one region, one backing");
    setup.fake.done(held[1]);
    setup.port.poll();
    setup.port.deregister(id).unwrap();
    assert_eq!(weak.strong_count(), 0, "nobody holds it any more");
}

#[test]
fn a_transfer_holds_its_regions_although_the_backend_lets_go() {
    // A backend that forgets its clone at once, as one over borrowed handles could.
    let setup = Setup::new();
    let count = Arc::new(());
    let weak = Arc::downgrade(&count);
    let region = Region::new(Counted(HostMemory::zeroed(BYTES).unwrap(), count)).unwrap();
    let id = setup.port.register(&region).unwrap();
    let set = setup.port.region_set(&[id]).unwrap();
    let transfer = setup.port.transfer(setup.peer, Mode::Read, &set, &segments(1), None).unwrap();
    drop(region);
    setup.fake.forget_regions();
    setup.port.inner.lock().regions = Default::default();
    assert_eq!(weak.strong_count(), 1, "only the transfer is left");
    setup.settle_all();
    assert_eq!(weak.strong_count(), 0);
    drop(transfer);
}
