//! Copying memory that another process may write at the same time.
//!
//! On x86-64 the copies are made by instructions that the compiler does not look into: a concurrent access of another process
//! then mixes bytes, as it does for a device, and does no more. Which instructions was decided by measuring cold memory: vectors up
//! to half a kibibyte, where `rep movsb` takes its time to begin (3 against 11 ns on an EPYC); `rep movsb` up to eight. Beyond
//! that it depends on the processor, and is [measured in use](pace): stores past the cache spare reading what is overwritten, and
//! have 1.3 to 1.6 times the speed of `memcpy`, in one stream on some processors and in four on others.

#[cfg(target_arch = "x86_64")]
mod pace;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ptr::NonNull;

/// What this thread copies from here on is for a job of so many bytes, and does not follow at once on what it copied before.
pub(crate) fn job(bytes: u64) {
    #[cfg(target_arch = "x86_64")]
    x86::job(bytes);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Copies `bytes` bytes.
///
/// # Safety
///
/// `from` must be valid for reads and `to` for writes of `bytes` bytes, and they must not overlap. Nobody may have a
/// reference to either. Somebody else may access them at the same time: what is copied is then any mixture.
pub(crate) unsafe fn copy(from: NonNull<u8>, to: NonNull<u8>, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: what the caller vouches for.
    unsafe {
        x86::copy(from.as_ptr(), to.as_ptr(), bytes);
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: what the caller vouches for.
    unsafe {
        words(from, to, bytes);
    }
}

/// By relaxed atomic words where both sides are aligned alike, by bytes otherwise.
///
/// # Safety
///
/// As for [`copy`].
#[cfg(any(test, not(target_arch = "x86_64")))]
unsafe fn words(from: NonNull<u8>, to: NonNull<u8>, bytes: usize) {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
    let mut at = 0;
    let aligned = |at: usize| {
        (from.addr().get() + at).is_multiple_of(8) && (to.addr().get() + at).is_multiple_of(8)
    };
    while at < bytes {
        // SAFETY: a byte is left of the source.
        let source = unsafe { from.add(at) };
        // SAFETY: a byte is left of the target.
        let target = unsafe { to.add(at) };
        if bytes - at >= 8 && aligned(at) {
            // SAFETY: aligned, eight bytes are left, and readable.
            let word = unsafe { AtomicU64::from_ptr(source.as_ptr().cast()) }.load(Relaxed);
            // SAFETY: aligned, eight bytes are left, and writable.
            unsafe { AtomicU64::from_ptr(target.as_ptr().cast()) }.store(word, Relaxed);
            at += 8;
        } else {
            // SAFETY: readable.
            let byte = unsafe { AtomicU8::from_ptr(source.as_ptr()) }.load(Relaxed);
            // SAFETY: writable.
            unsafe { AtomicU8::from_ptr(target.as_ptr()) }.store(byte, Relaxed);
            at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::RangeBounds;

    use super::*;

    const SIZE: usize = 64 << 10;

    /// Whatever the size and the alignment of the two ends: the right bytes, and no other.
    pub(super) fn is_exact(of: impl RangeBounds<usize>, copy: impl Fn(NonNull<u8>, NonNull<u8>, usize)) {
        let mut from: Vec<u8> =
            (0_u32..).take(SIZE).map(|i| (i * 7 + i / 251).to_le_bytes()[0]).collect();
        let mut to = vec![0xee_u8; SIZE];
        let source = NonNull::new(from.as_mut_ptr()).unwrap();
        let target = NonNull::new(to.as_mut_ptr()).unwrap();
        let sizes = (0..130).chain([255, 511, 512, 513, 4096, 8191, 8192, 8193, 16383, 16384]);
        for bytes in sizes.chain([16448, 20000, 32768, 50000]).filter(|bytes| of.contains(bytes)) {
            for (left, right) in [(0, 0), (1, 0), (0, 1), (3, 33), (31, 32), (64, 63), (7, 4000)] {
                // SAFETY: inside the vector.
                let a = unsafe { source.add(left) };
                // SAFETY: inside the vector.
                let b = unsafe { target.add(right) };
                copy(a, b, bytes);
                assert!(to[right..right + bytes] == from[left..left + bytes], "{bytes} bytes");
                assert!(to[..right].iter().all(|byte| *byte == 0xee), "before {bytes} bytes");
                assert!(to[right + bytes..].iter().all(|byte| *byte == 0xee), "after {bytes} bytes");
                to[right..right + bytes].fill(0xee);
            }
        }
    }

    #[test]
    fn copies_are_exact() {
        // SAFETY: inside two vectors, to which no reference is in use.
        is_exact(.., |from, to, bytes| unsafe { copy(from, to, bytes) });
    }

    #[test]
    fn copies_by_words_are_exact() {
        // SAFETY: inside two vectors, to which no reference is in use.
        is_exact(.., |from, to, bytes| unsafe { words(from, to, bytes) });
    }
}
