//! Copying memory that another process may write at the same time.

use std::ptr::NonNull;

/// Copies `bytes` bytes.
///
/// # Safety
///
/// `from` must be valid for reads and `to` for writes of `bytes` bytes, and they must not overlap. Nobody may have a
/// reference to either. Somebody else may access them at the same time: what is copied is then any mixture.
pub(crate) unsafe fn copy(from: NonNull<u8>, to: NonNull<u8>, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: what the caller vouches for. The processor, not the compiler, sees these accesses, so a concurrent one
    // mixes bytes and does no more; the direction flag is clear, as everywhere in Rust.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") bytes => _,
            inout("rsi") from.as_ptr() => _,
            inout("rdi") to.as_ptr() => _,
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: what the caller vouches for.
    unsafe {
        words(from, to, bytes);
    }
}

/// By relaxed atomic words where both sides are aligned alike, by bytes otherwise.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn words(from: NonNull<u8>, to: NonNull<u8>, bytes: usize) {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
    let mut at = 0;
    let aligned = |at: usize| {
        (from.addr().get() + at).is_multiple_of(8) && (to.addr().get() + at).is_multiple_of(8)
    };
    while at < bytes {
        if bytes - at >= 8 && aligned(at) {
            // SAFETY: eight bytes are left of the source.
            let source = unsafe { from.add(at) }.cast::<u64>();
            // SAFETY: eight bytes are left of the target.
            let target = unsafe { to.add(at) }.cast::<u64>();
            // SAFETY: aligned, as was just checked, and readable.
            let word = unsafe { AtomicU64::from_ptr(source.as_ptr()) }.load(Relaxed);
            // SAFETY: aligned, as was just checked, and writable.
            unsafe { AtomicU64::from_ptr(target.as_ptr()) }.store(word, Relaxed);
            at += 8;
        } else {
            // SAFETY: a byte is left of the source.
            let source = unsafe { from.add(at) };
            // SAFETY: a byte is left of the target.
            let target = unsafe { to.add(at) };
            // SAFETY: readable.
            let byte = unsafe { AtomicU8::from_ptr(source.as_ptr()) }.load(Relaxed);
            // SAFETY: writable.
            unsafe { AtomicU8::from_ptr(target.as_ptr()) }.store(byte, Relaxed);
            at += 1;
        }
    }
}
