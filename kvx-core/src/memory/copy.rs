//! Copies to and from memory that a device, another thread or another process may touch at the same time.
//!
//! Every access is a relaxed atomic one: of eight bytes where the address is aligned to that, of single bytes at the ends.
//! A concurrent writer can therefore tear what is read, as a device can, but cannot make the copy undefined: so it is for
//! devices, for other processes, and for threads whose copies fall on the same words. Threads whose copies overlap at
//! different places race with accesses of different sizes, which processors define and Rust's rules so far do not.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

const WORD: usize = size_of::<u64>();

/// Bytes before the first aligned word, at most `len`.
fn head(address: NonNull<u8>, len: usize) -> usize {
    (address.as_ptr().addr().wrapping_neg() % WORD).min(len)
}

/// # Safety
///
/// `from` must be valid for reads of `out.len()` bytes, and all concurrent accesses to them atomic or foreign.
pub(super) unsafe fn from_shared(from: NonNull<u8>, out: &mut [u8]) {
    let (first, rest) = out.split_at_mut(head(from, out.len()));
    // SAFETY: the first bytes of the range that the caller vouches for.
    unsafe { bytes_from(from, first) };
    // SAFETY: `first.len()` is at most the range's length.
    let mut at = unsafe { from.add(first.len()) };
    let mut words = rest.chunks_exact_mut(WORD);
    for word in &mut words {
        // SAFETY: `at` is aligned to a word and at least a word of the range is left.
        let value = unsafe { AtomicU64::from_ptr(at.as_ptr().cast()) }.load(Relaxed);
        word.copy_from_slice(&value.to_ne_bytes());
        // SAFETY: a word of the range was left.
        at = unsafe { at.add(WORD) };
    }
    // SAFETY: what is left of the range.
    unsafe { bytes_from(at, words.into_remainder()) };
}

/// # Safety
///
/// `to` must be valid for writes of `bytes.len()` bytes, and all concurrent accesses to them atomic or foreign.
pub(super) unsafe fn to_shared(bytes: &[u8], to: NonNull<u8>) {
    let (first, rest) = bytes.split_at(head(to, bytes.len()));
    // SAFETY: the first bytes of the range that the caller vouches for.
    unsafe { bytes_to(first, to) };
    // SAFETY: `first.len()` is at most the range's length.
    let mut at = unsafe { to.add(first.len()) };
    let (words, last) = rest.as_chunks::<WORD>();
    for word in words {
        // SAFETY: `at` is aligned to a word and at least a word of the range is left.
        unsafe { AtomicU64::from_ptr(at.as_ptr().cast()) }
            .store(u64::from_ne_bytes(*word), Relaxed);
        // SAFETY: a word of the range was left.
        at = unsafe { at.add(WORD) };
    }
    // SAFETY: what is left of the range.
    unsafe { bytes_to(last, at) };
}

/// # Safety
///
/// `from` must be valid for reads and `to` for writes of `len` bytes, they must not overlap, and all concurrent accesses
/// to them must be atomic or foreign.
pub(super) unsafe fn between_shared(from: NonNull<u8>, to: NonNull<u8>, len: usize) {
    let first = head(from, len);
    if first != head(to, len) {
        // SAFETY: what the caller vouches for.
        unsafe { through_buffer(from, to, len) };
        return;
    }
    if first > 0 {
        // SAFETY: the first bytes of both ranges.
        unsafe { through_buffer(from, to, first) };
    }
    let end = first + (len - first) / WORD * WORD;
    for at in (first..end).step_by(WORD) {
        // SAFETY: a word of the source is left at `at`.
        let source = unsafe { from.add(at) };
        // SAFETY: a word of the target is left at `at`.
        let target = unsafe { to.add(at) };
        // SAFETY: `first` bytes in, both are aligned to a word; a whole word is left.
        let word = unsafe { AtomicU64::from_ptr(source.as_ptr().cast()) }.load(Relaxed);
        // SAFETY: as for the source.
        unsafe { AtomicU64::from_ptr(target.as_ptr().cast()) }.store(word, Relaxed);
    }
    if end < len {
        // SAFETY: `end` is below `len`.
        let source = unsafe { from.add(end) };
        // SAFETY: as for the source.
        let target = unsafe { to.add(end) };
        // SAFETY: what is left of both ranges.
        unsafe { through_buffer(source, target, len - end) };
    }
}

/// # Safety
///
/// As for [`between_shared`].
unsafe fn through_buffer(from: NonNull<u8>, to: NonNull<u8>, len: usize) {
    let mut buffer = [0; 256];
    let mut done = 0;
    while done < len {
        let part = (len - done).min(buffer.len());
        let part = &mut buffer[..part];
        // SAFETY: `done` is below `len`, so this is inside the source range.
        let source = unsafe { from.add(done) };
        // SAFETY: `part.len()` bytes are left of the source range.
        unsafe { from_shared(source, part) };
        // SAFETY: as for the source.
        let target = unsafe { to.add(done) };
        // SAFETY: as for the source.
        unsafe { to_shared(part, target) };
        done += part.len();
    }
}

/// # Safety
///
/// As for [`from_shared`].
unsafe fn bytes_from(from: NonNull<u8>, out: &mut [u8]) {
    for (i, byte) in out.iter_mut().enumerate() {
        // SAFETY: `i` is inside the range that the caller vouches for.
        let at = unsafe { from.add(i) };
        // SAFETY: valid for the caller's reason; a byte has no alignment.
        *byte = unsafe { AtomicU8::from_ptr(at.as_ptr()) }.load(Relaxed);
    }
}

/// # Safety
///
/// As for [`to_shared`].
unsafe fn bytes_to(bytes: &[u8], to: NonNull<u8>) {
    for (i, byte) in bytes.iter().enumerate() {
        // SAFETY: `i` is inside the range that the caller vouches for.
        let at = unsafe { to.add(i) };
        // SAFETY: valid for the caller's reason; a byte has no alignment.
        unsafe { AtomicU8::from_ptr(at.as_ptr()) }.store(*byte, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use crate::memory::Region;

    const SIZE: usize = 1200;

    /// Whatever the alignment of the two ends: the right bytes, and no other.
    #[test]
    fn copies_between_regions_are_exact() {
        let bytes: Vec<u8> =
            (0_u32..).take(SIZE).map(|i| (i * 7 + i / 251).to_le_bytes()[0]).collect();
        let (from, to) = (Region::host(SIZE as u64).unwrap(), Region::host(SIZE as u64).unwrap());
        from.write_at(0, &bytes).unwrap();
        for source in 0..9 {
            for target in 0..17 {
                for len in (0..40).chain([255, 256, 257, 511, 1000]) {
                    to.write_at(0, &[0xee; SIZE]).unwrap();
                    from.copy_to(source as u64, &to, target as u64, len as u64).unwrap();
                    let mut expected = [0xee; SIZE];
                    expected[target..target + len].copy_from_slice(&bytes[source..source + len]);
                    let mut found = [0; SIZE];
                    to.read_at(0, &mut found).unwrap();
                    assert!(found == expected, "{len} bytes from {source} to {target}");
                }
            }
        }
    }
}
