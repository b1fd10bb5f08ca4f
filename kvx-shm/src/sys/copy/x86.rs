//! The instructions of x86-64.

use std::arch::asm;

use super::pace::Pace;

/// From here on bytes are copied by the string instruction.
const STRING: usize = 512;
/// From here on they may be stored past the cache.
const LONG: usize = 8 << 10;

thread_local! {
    /// Of long copies.
    static PACE: Pace = const { Pace::new() };
}

/// A way to make long copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The string instruction.
    String,
    /// Stores past the cache, in one stream.
    Stream,
    /// The same, whole lines at a time: with AVX-512.
    Lines,
    /// In four streams, one in each of four pages.
    Streams,
}

/// The ways that there are on this processor.
fn ways() -> &'static [Way] {
    match (is_x86_feature_detected!("avx"), is_x86_feature_detected!("avx512f")) {
        (false, _) => &[Way::String],
        (true, false) => &[Way::Streams, Way::Stream, Way::String],
        (true, true) => &[Way::Streams, Way::Lines, Way::String],
    }
}

pub(super) fn job(bytes: u64) {
    PACE.with(|pace| pace.job(bytes));
}

/// # Safety
///
/// As for [`super::copy`].
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes >= LONG {
        // SAFETY: what the caller vouches for.
        unsafe { long(from, to, bytes) };
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
/// As for [`super::copy`], of at least [`LONG`] bytes.
unsafe fn long(from: *const u8, to: *mut u8, bytes: usize) {
    let ways = ways();
    // SAFETY: what the caller vouches for; the processor has what its ways need.
    let by = |way: usize| unsafe { along(ways[way], from, to, bytes) };
    PACE.with(|pace| pace.copies(ways.len(), bytes, by));
}

/// # Safety
///
/// As for [`super::copy`], of at least [`LONG`] bytes, on a processor that has what the way needs.
unsafe fn along(way: Way, from: *const u8, to: *mut u8, bytes: usize) {
    if way == Way::String {
        // SAFETY: what the caller vouches for.
        unsafe { string(from, to, bytes) };
    } else {
        // SAFETY: what the caller vouches for: each of the others needs AVX.
        unsafe { past_cache(way, from, to, bytes) };
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
/// As for [`super::copy`], of at least 64 bytes, on a processor with AVX, and for [`Way::Lines`] with AVX-512.
#[target_feature(enable = "avx")]
unsafe fn past_cache(way: Way, from: *const u8, to: *mut u8, bytes: usize) {
    const PAGE: usize = 4096;
    const LINE: usize = 64;
    const LINES: usize = 4 * LINE;
    // Stores past the cache need aligned targets.
    let head = to.addr().wrapping_neg() % LINE;
    // SAFETY: the first bytes of both ranges.
    unsafe { string(from, to, head) };
    let mut at = head;
    while way == Way::Streams && bytes - at >= 4 * PAGE {
        // SAFETY: four pages of both ranges are left.
        unsafe { four_pages(from.wrapping_add(at), to.wrapping_add(at)) };
        at += 4 * PAGE;
    }
    let lines = (bytes - at) / LINES * LINES;
    if way == Way::Lines && lines > 0 {
        // SAFETY: so many lines of both ranges are left; the processor has AVX-512.
        unsafe { whole_lines(from.wrapping_add(at), to.wrapping_add(at), lines) };
        at += lines;
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

/// # Safety
///
/// `bytes` bytes, a multiple of 256 and not 0, must be readable at `from`, and writable at `to`, which is aligned to 64;
/// the processor has AVX-512. Whoever calls it has the upper halves of vectors cleared.
#[target_feature(enable = "avx")]
unsafe fn whole_lines(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: reads and writes the two ranges, 256 bytes at a time. To say that a register's lower part is written says so of all of it.
    unsafe {
        asm!(
            "2:",
            "vmovdqu64 zmm0, [{from}]",
            "vmovdqu64 zmm1, [{from} + 64]",
            "vmovdqu64 zmm2, [{from} + 128]",
            "vmovdqu64 zmm3, [{from} + 192]",
            "vmovntdq [{to}], zmm0",
            "vmovntdq [{to} + 64], zmm1",
            "vmovntdq [{to} + 128], zmm2",
            "vmovntdq [{to} + 192], zmm3",
            "add {from}, 256",
            "add {to}, 256",
            "sub {left}, 256",
            "jnz 2b",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            left = inout(reg) bytes => _,
            out("ymm0") _,
            out("ymm1") _,
            out("ymm2") _,
            out("ymm3") _,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use super::*;

    #[test]
    fn each_way_is_exact() {
        for way in ways().iter().copied() {
            super::super::tests::is_exact(LONG.., |from: NonNull<u8>, to: NonNull<u8>, bytes| {
                // SAFETY: what the caller vouches for: inside two vectors. The processor has this way.
                unsafe { along(way, from.as_ptr(), to.as_ptr(), bytes) };
            });
        }
    }

    #[test]
    fn there_are_no_more_ways_than_are_measured() {
        assert!((1..=super::super::pace::WAYS).contains(&ways().len()));
    }
}
