//! What an engine's memory must hold: every byte, at any time.

use std::collections::BTreeMap;

use kvx_core::memory::Region;

use super::violation::{Violation, ensure};

/// One region, and what must be in it.
pub(super) struct Memory {
    region: Region,
    expected: Vec<u8>,
    /// Ranges into which data is under way, by their first byte: what arrives. None overlap.
    coming: BTreeMap<u64, Vec<u8>>,
    /// Ranges that are read by somebody: by whom, first byte, length.
    read: Vec<(u64, u64, u64)>,
    scratch: Vec<u8>,
}

/// What was found in a range when nothing was to come into it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rest {
    /// Everything that was under way is there.
    pub(super) landed: bool,
    /// It is not as it was before.
    pub(super) changed: bool,
}

impl Rest {
    pub(super) const UNTOUCHED: Self = Self { landed: false, changed: false };
    /// Of the memory of a dead engine: nobody looks.
    pub(super) const UNSEEN: Self = Self { landed: true, changed: false };
}

impl Memory {
    /// A region with these contents.
    pub(super) fn new(region: &Region, contents: Vec<u8>) -> kvx_core::Result<Self> {
        region.write_at(0, &contents)?;
        let scratch = contents.clone();
        let region = region.clone();
        Ok(Self { region, expected: contents, coming: BTreeMap::new(), read: Vec::new(), scratch })
    }

    fn range(offset: u64, bytes: u64) -> Option<std::ops::Range<usize>> {
        let from = usize::try_from(offset).ok()?;
        Some(from..from.checked_add(usize::try_from(bytes).ok()?)?)
    }

    /// What must be in a range.
    pub(super) fn expected(&self, offset: u64, bytes: u64) -> Option<&[u8]> {
        self.expected.get(Self::range(offset, bytes)?)
    }

    /// Whether nothing is under way into a range, or out of it.
    pub(super) fn is_free(&self, offset: u64, bytes: u64) -> bool {
        let end = offset.saturating_add(bytes);
        let before = self.coming.range(..end).next_back();
        before.is_none_or(|(at, new)| at + new.len() as u64 <= offset)
            && self.read.iter().all(|(_, at, length)| at + length <= offset || end <= *at)
    }

    /// Its owner writes.
    pub(super) fn rewrite(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        let place = Self::range(offset, bytes.len() as u64);
        let place = place.and_then(|range| self.expected.get_mut(range));
        let Some(place) = place else { return Err(Violation::new("rewritten outside the region")) };
        place.copy_from_slice(bytes);
        let written = self.region.write_at(offset, bytes);
        written.map_err(|error| Violation::new(error.to_string()))
    }

    pub(super) fn begin_reading(&mut self, by: u64, offset: u64, bytes: u64) {
        self.read.push((by, offset, bytes));
    }

    pub(super) fn end_reading(&mut self, by: u64) {
        self.read.retain(|(reader, ..)| *reader != by);
    }

    pub(super) fn expect(&mut self, offset: u64, new: Vec<u8>) {
        self.coming.insert(offset, new);
    }

    /// Whether what was under way into a range is there, all of it.
    pub(super) fn has_landed(&mut self, offset: u64) -> Result<bool, Violation> {
        let Some(new) = self.coming.get(&offset) else { return Ok(false) };
        self.scratch.resize(new.len(), 0);
        let read = self.region.read_at(offset, &mut self.scratch);
        read.map_err(|error| Violation::new(error.to_string()))?;
        Ok(self.scratch == *new)
    }

    /// From now on a range must stay as it is.
    pub(super) fn freeze(&mut self, offset: u64) -> Result<Rest, Violation> {
        let landed = self.has_landed(offset)?;
        let Some(new) = self.coming.remove(&offset) else { return Ok(Rest::UNTOUCHED) };
        let place = Self::range(offset, new.len() as u64);
        let place = place.and_then(|range| self.expected.get_mut(range));
        let Some(place) = place else { return Ok(Rest::UNTOUCHED) };
        for (at, ((old, new), now)) in place.iter().zip(&new).zip(&self.scratch).enumerate() {
            ensure!(now == old || now == new, "{}", neither(offset + at as u64, *now));
        }
        let changed = *place != *self.scratch;
        place.copy_from_slice(&self.scratch);
        Ok(Rest { landed, changed })
    }

    /// Compares every byte: what is under way may have arrived or not, everything else must be as expected.
    pub(super) fn check(&mut self) -> Result<(), Violation> {
        self.scratch.resize(self.expected.len(), 0);
        let read = self.region.read_at(0, &mut self.scratch);
        read.map_err(|error| Violation::new(error.to_string()))?;
        for (offset, new) in &self.coming {
            let Some(range) = Self::range(*offset, new.len() as u64) else { continue };
            let (Some(now), Some(old)) =
                (self.scratch.get_mut(range.clone()), self.expected.get(range))
            else {
                continue;
            };
            for (at, ((now, old), new)) in now.iter_mut().zip(old).zip(new).enumerate() {
                ensure!(*now == *old || *now == *new, "{}", neither(offset + at as u64, *now));
                *now = *old;
            }
        }
        if self.scratch == self.expected {
            return Ok(());
        }
        let both = self.scratch.iter().zip(&self.expected);
        let wrong = both.enumerate().find(|(_, (now, expected))| now != expected);
        let (at, (now, expected)) = wrong.unwrap_or((0, (&0, &0)));
        Err(Violation::new(format!(
            "byte {at} holds {now:#04x} and not {expected:#04x}, though nothing is under way to it"
        )))
    }
}

fn neither(at: u64, now: u8) -> String {
    format!("byte {at} holds {now:#04x}: neither what was there nor what is under way to it")
}
