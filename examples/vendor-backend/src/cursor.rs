//! Where the next bytes of a batch go: batches cross the wire in pieces.

use kvx_core::memory::Region;
use kvx_core::{Error, Result};

/// The next byte of a list of ranges.
#[derive(Debug)]
pub(crate) struct Cursor {
    /// Offset and size of each.
    ranges: Vec<(u64, u64)>,
    index: usize,
    done: u64,
    left: u64,
}

impl Cursor {
    /// At the first byte of these ranges.
    ///
    /// # Errors
    ///
    /// `Peer`: they are more bytes than can be counted.
    pub(crate) fn new(ranges: impl IntoIterator<Item = (u64, u64)>) -> Result<Self> {
        let ranges: Vec<_> = ranges.into_iter().collect();
        let sum = |sum: u64, range: &(u64, u64)| sum.checked_add(range.1);
        let left = ranges.iter().try_fold(0, sum);
        let left = left.ok_or_else(|| Error::peer("batch", "more bytes than can be counted"))?;
        Ok(Self { ranges, index: 0, done: 0, left })
    }

    /// How many bytes are left.
    pub(crate) const fn left(&self) -> u64 {
        self.left
    }

    /// The next range, or up to `most` bytes of it: its number, offset and size.
    fn step(&mut self, most: usize) -> Option<(usize, u64, usize)> {
        while let Some((offset, bytes)) = self.ranges.get(self.index).copied() {
            if self.done == bytes {
                self.index += 1;
                self.done = 0;
                continue;
            }
            let count = (bytes - self.done).min(most as u64);
            let step = (self.index, offset + self.done, usize::try_from(count).ok()?);
            self.done += count;
            self.left -= count;
            return Some(step);
        }
        None
    }

    /// The next bytes, up to `most`. None is the end.
    ///
    /// # Errors
    ///
    /// Those of `region`, and `Misuse` where a range is outside it.
    pub(crate) fn take<'a>(
        &mut self,
        most: usize,
        region: impl Fn(usize) -> Result<&'a Region>,
    ) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while bytes.len() < most
            && let Some((index, offset, count)) = self.step(most - bytes.len())
        {
            let at = bytes.len();
            bytes.resize(at + count, 0);
            region(index)?.read_at(offset, &mut bytes[at..])?;
        }
        Ok(bytes)
    }

    /// Puts the next bytes where they belong.
    ///
    /// # Errors
    ///
    /// `Peer` where there are too many; those of `region`, and `Misuse` where a range is outside it.
    pub(crate) fn put<'a>(
        &mut self,
        mut bytes: &[u8],
        region: impl Fn(usize) -> Result<&'a Region>,
    ) -> Result<()> {
        if bytes.len() as u64 > self.left {
            return Err(Error::peer("batch", "more bytes than were asked for")
                .with_context("bytes", bytes.len())
                .with_context("left", self.left));
        }
        while !bytes.is_empty()
            && let Some((index, offset, count)) = self.step(bytes.len())
        {
            let (now, rest) = bytes.split_at(count);
            region(index)?.write_at(offset, now)?;
            bytes = rest;
        }
        Ok(())
    }
}
