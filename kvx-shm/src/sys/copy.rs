//! Copying memory that another process may write at the same time.
//!
//! On x86-64 the copies are made by instructions that the compiler does not look into: a concurrent access of another process
//! then mixes bytes, as it does for a device, and does no more. Which instructions was decided by measuring, on an EPYC and
//! cold memory: vectors up to half a kibibyte, where `rep movsb` takes its time to begin (3 against 11 ns); `rep movsb` up to
//! eight; beyond that stores past the cache, which spare reading what is overwritten (1.4 to 1.6 times as fast as `memcpy`),
//! in four streams, one in each of four pages.

use std::ptr::NonNull;

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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    /// From here on bytes are copied by the string instruction.
    const STRING: usize = 512;
    /// From here on they are stored past the cache.
    const PAST_CACHE: usize = 8 << 10;

    /// # Safety
    ///
    /// As for [`super::copy`].
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
        if bytes >= PAST_CACHE && std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: what the caller vouches for; the processor has AVX.
            unsafe { past_cache(from, to, bytes) };
        } else if !(16..STRING).contains(&bytes) {
            // SAFETY: what the caller vouches for.
            unsafe { string(from, to, bytes) };
        } else {
            // SAFETY: what the caller vouches for; there are at least 16 bytes.
            unsafe { vectors(from, to, bytes) };
        }
    }

    /// # Safety
    ///
    /// As for [`super::copy`].
    unsafe fn string(from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: reads and writes the two ranges; the direction flag is clear, as everywhere in Rust.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") bytes => _,
                inout("rsi") from => _,
                inout("rdi") to => _,
                options(nostack, preserves_flags),
            );
        }
    }

    /// # Safety
    ///
    /// As for [`super::copy`], and of at least 16 bytes.
    unsafe fn vectors(from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: reads and writes the two ranges: 16 bytes at a time as long as more than 16 are left, and the last 16, which
        // were read first and may have been written in part already.
        unsafe {
            asm!(
                "movdqu {last}, [{from} + {bytes} - 16]",
                "lea {end}, [{to} + {bytes} - 16]",
                "sub {bytes}, 16",
                "jbe 3f",
                "2:",
                "movdqu {next}, [{from}]",
                "movdqu [{to}], {next}",
                "add {from}, 16",
                "add {to}, 16",
                "sub {bytes}, 16",
                "ja 2b",
                "3:",
                "movdqu [{end}], {last}",
                from = inout(reg) from => _,
                to = inout(reg) to => _,
                bytes = inout(reg) bytes => _,
                end = out(reg) _,
                last = out(xmm_reg) _,
                next = out(xmm_reg) _,
                options(nostack),
            );
        }
    }

    /// # Safety
    ///
    /// As for [`super::copy`], of at least 64 bytes, on a processor with AVX.
    #[target_feature(enable = "avx")]
    unsafe fn past_cache(from: *const u8, to: *mut u8, bytes: usize) {
        const PAGE: usize = 4096;
        const LINE: usize = 64;
        // Stores past the cache need aligned targets.
        let head = to.addr().wrapping_neg() % LINE;
        // SAFETY: the first bytes of both ranges.
        unsafe { string(from, to, head) };
        let mut at = head;
        while bytes - at >= 4 * PAGE {
            // SAFETY: four pages of both ranges are left.
            unsafe { four_pages(from.wrapping_add(at), to.wrapping_add(at)) };
            at += 4 * PAGE;
        }
        let lines = (bytes - at) / LINE * LINE;
        if lines > 0 {
            // SAFETY: so many lines of both ranges are left.
            unsafe { some_lines(from.wrapping_add(at), to.wrapping_add(at), lines) };
            at += lines;
        }
        // SAFETY: touches no memory. The fence makes the stores past the cache visible before what comes after; no upper halves
        // of vectors are left behind that would slow down other code.
        unsafe { asm!("sfence", "vzeroupper", clobber_abi("C"), options(nostack)) };
        // SAFETY: what is left of both ranges.
        unsafe { string(from.wrapping_add(at), to.wrapping_add(at), bytes - at) };
    }

    /// # Safety
    ///
    /// Four pages at `from` must be readable, at `to` writable and aligned to 32 bytes; the processor has AVX.
    #[target_feature(enable = "avx")]
    unsafe fn four_pages(from: *const u8, to: *mut u8) {
        // SAFETY: reads and writes 64 lines of each of four neighbouring pages' sizes.
        unsafe {
            asm!(
                "2:",
                "vmovdqu {a}, [{from}]",
                "vmovdqu {b}, [{from} + 32]",
                "vmovdqu {c}, [{from} + 4096]",
                "vmovdqu {d}, [{from} + 4128]",
                "vmovdqu {e}, [{from} + 8192]",
                "vmovdqu {f}, [{from} + 8224]",
                "vmovdqu {g}, [{from} + 12288]",
                "vmovdqu {h}, [{from} + 12320]",
                "vmovntdq [{to}], {a}",
                "vmovntdq [{to} + 32], {b}",
                "vmovntdq [{to} + 4096], {c}",
                "vmovntdq [{to} + 4128], {d}",
                "vmovntdq [{to} + 8192], {e}",
                "vmovntdq [{to} + 8224], {f}",
                "vmovntdq [{to} + 12288], {g}",
                "vmovntdq [{to} + 12320], {h}",
                "add {from}, 64",
                "add {to}, 64",
                "sub {left}, 64",
                "jnz 2b",
                from = inout(reg) from => _,
                to = inout(reg) to => _,
                left = inout(reg) 4096_usize => _,
                a = out(ymm_reg) _,
                b = out(ymm_reg) _,
                c = out(ymm_reg) _,
                d = out(ymm_reg) _,
                e = out(ymm_reg) _,
                f = out(ymm_reg) _,
                g = out(ymm_reg) _,
                h = out(ymm_reg) _,
                options(nostack),
            );
        }
    }

    /// # Safety
    ///
    /// `bytes` bytes, a multiple of 64 and not 0, must be readable at `from`, and writable at `to`, which is aligned to 32;
    /// the processor has AVX.
    #[target_feature(enable = "avx")]
    unsafe fn some_lines(from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: reads and writes the two ranges, 64 bytes at a time.
        unsafe {
            asm!(
                "2:",
                "vmovdqu {a}, [{from}]",
                "vmovdqu {b}, [{from} + 32]",
                "vmovntdq [{to}], {a}",
                "vmovntdq [{to} + 32], {b}",
                "add {from}, 64",
                "add {to}, 64",
                "sub {left}, 64",
                "jnz 2b",
                from = inout(reg) from => _,
                to = inout(reg) to => _,
                left = inout(reg) bytes => _,
                a = out(ymm_reg) _,
                b = out(ymm_reg) _,
                options(nostack),
            );
        }
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
    use super::*;

    const SIZE: usize = 64 << 10;

    /// Whatever the size and the alignment of the two ends: the right bytes, and no other.
    fn is_exact(copy: unsafe fn(NonNull<u8>, NonNull<u8>, usize)) {
        let mut from: Vec<u8> =
            (0_u32..).take(SIZE).map(|i| (i * 7 + i / 251).to_le_bytes()[0]).collect();
        let mut to = vec![0xee_u8; SIZE];
        let source = NonNull::new(from.as_mut_ptr()).unwrap();
        let target = NonNull::new(to.as_mut_ptr()).unwrap();
        let sizes = (0..130).chain([255, 511, 512, 513, 4096, 8191, 8192, 8193, 16383, 16384]);
        for bytes in sizes.chain([16448, 20000, 32768, 50000]) {
            for (left, right) in [(0, 0), (1, 0), (0, 1), (3, 33), (31, 32), (64, 63), (7, 4000)] {
                // SAFETY: inside the vector.
                let a = unsafe { source.add(left) };
                // SAFETY: inside the vector.
                let b = unsafe { target.add(right) };
                // SAFETY: inside the two vectors, to which no reference is in use.
                unsafe { copy(a, b, bytes) };
                assert!(to[right..right + bytes] == from[left..left + bytes], "{bytes} bytes");
                assert!(to[..right].iter().all(|byte| *byte == 0xee), "before {bytes} bytes");
                assert!(to[right + bytes..].iter().all(|byte| *byte == 0xee), "after {bytes} bytes");
                to[right..right + bytes].fill(0xee);
            }
        }
    }

    #[test]
    fn copies_are_exact() {
        is_exact(copy);
    }

    #[test]
    fn copies_by_words_are_exact() {
        is_exact(words);
    }
}
