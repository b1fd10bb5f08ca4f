//! An allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Counts what this thread holds since it was last asked, and the most that it has held.
struct Counting;

thread_local! {
    // Below zero where memory is freed that another thread, or this one before it was asked, allocated.
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn add(bytes: usize) {
    LARGEST.set(LARGEST.get().max(bytes));
    HELD.set(HELD.get().wrapping_add(bytes.cast_signed()));
    PEAK.set(PEAK.get().max(HELD.get()));
}

fn take_away(bytes: usize) {
    HELD.set(HELD.get().wrapping_sub(bytes.cast_signed()));
}

// SAFETY: all calls are passed on as they are; counting neither allocates nor unwinds (the cells have constant initial
// values and nothing to drop).
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        take_away(layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both exist for a moment.
        add(size);
        take_away(layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What some work took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// The most bytes that it held at once.
    pub(crate) held: usize,
    /// Bytes of its largest allocation.
    pub(crate) largest: usize,
}

/// Does `work`, and says what it took on this thread.
pub(crate) fn measure<T>(work: impl FnOnce() -> T) -> (T, Taken) {
    HELD.set(0);
    PEAK.set(0);
    LARGEST.set(0);
    let result = work();
    (result, Taken { held: PEAK.get().cast_unsigned(), largest: LARGEST.get() })
}

#[test]
fn what_is_taken_is_counted() {
    let (_, taken) = measure(|| drop((vec![0_u8; 1000], vec![0_u8; 300])));
    assert!(taken.held >= 1300 && taken.largest == 1000, "{taken:?}");
    let (_, taken) = measure(|| (0..3).for_each(|_| drop(std::hint::black_box(vec![0_u8; 500]))));
    assert!(taken.held == 500 && taken.largest == 500, "{taken:?}");
}
