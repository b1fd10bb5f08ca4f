//! Words in memory that two processes share.
//!
//! Each page has one writer. The other side only loads, relaxed: Rust allows no other atomic access to memory that is
//! mapped for reading only. Where an order matters it is made by a fence.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::memfd::{Foreign, Own, Pages};

/// A page that this side writes.
#[derive(Debug)]
pub(crate) struct OwnPage(Own);

/// A page that the peer writes.
#[derive(Debug)]
pub(crate) struct ForeignPage(Foreign);

/// The place of an aligned word in memory of `bytes` bytes.
fn place<T>(address: NonNull<u8>, bytes: usize, offset: usize) -> NonNull<T> {
    assert!(
        offset.is_multiple_of(size_of::<T>()) && offset + size_of::<T>() <= bytes,
        "a word at {offset} of a page of {bytes} bytes"
    );
    // SAFETY: inside the mapping, as was just checked.
    unsafe { address.add(offset) }.cast()
}

impl OwnPage {
    pub(crate) fn new(name: &str, bytes: usize) -> std::io::Result<Self> {
        Own::new(name, bytes, Pages::Normal, |_, _| Ok(())).map(Self)
    }

    pub(crate) fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.fd()
    }

    pub(crate) fn word32(&self, offset: usize) -> &AtomicU32 {
        let place = place::<AtomicU32>(self.0.address(), self.0.bytes(), offset);
        // SAFETY: aligned (a page is, and so is the offset), in a mapping that lives as long as `self`, and used by atomic
        // accesses only.
        unsafe { place.as_ref() }
    }

    pub(crate) fn word64(&self, offset: usize) -> &AtomicU64 {
        let place = place::<AtomicU64>(self.0.address(), self.0.bytes(), offset);
        // SAFETY: as for `word32`.
        unsafe { place.as_ref() }
    }

    /// Puts bytes at `offset`. Whole words, at an aligned place: nothing else is ever there.
    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        assert!(rest.is_empty(), "{} bytes are not whole words", bytes.len());
        for (index, word) in words.iter().enumerate() {
            let word = u64::from_ne_bytes(*word);
            self.word64(offset + index * 8).store(word, Ordering::Relaxed);
        }
    }
}

impl ForeignPage {
    /// # Errors
    ///
    /// Why it cannot be relied on, in words.
    pub(crate) fn map(fd: &std::os::fd::OwnedFd, least: usize) -> Result<Self, String> {
        let foreign = Foreign::map(fd)?;
        if foreign.bytes() < least {
            return Err(format!("the page has {} bytes, not {least}", foreign.bytes()));
        }
        Ok(Self(foreign))
    }

    /// The value of a word, now. What the peer wrote before it is seen after it.
    pub(crate) fn load32(&self, offset: usize) -> u32 {
        let place = place::<AtomicU32>(self.0.address(), self.0.bytes(), offset);
        // SAFETY: aligned, in a mapping that lives as long as `self`; relaxed loads of this size may be made of memory that
        // cannot be written.
        let value = unsafe { place.as_ref() }.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        value
    }

    /// As [`load32`](Self::load32).
    pub(crate) fn load64(&self, offset: usize) -> u64 {
        let place = place::<AtomicU64>(self.0.address(), self.0.bytes(), offset);
        // SAFETY: as for `load32`.
        let value = unsafe { place.as_ref() }.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        value
    }

    /// Copies whole words out.
    pub(crate) fn take(&self, offset: usize, out: &mut [u8]) {
        let (words, rest) = out.as_chunks_mut::<8>();
        assert!(rest.is_empty(), "not whole words");
        for (index, word) in words.iter_mut().enumerate() {
            let place =
                place::<AtomicU64>(self.0.address(), self.0.bytes(), offset + index * 8);
            // SAFETY: as for `load32`.
            *word = unsafe { place.as_ref() }.load(Ordering::Relaxed).to_ne_bytes();
        }
    }
}
