//! Copying out of a peer's memory, stride by stride, as long as its owner allows it.
//!
//! Whoever copies is *inside* during a stride, and the owner that ends the connection waits until it is out. An owner does not wait
//! for ever, though: a process can stand still in the midst of a stride, and what it copies when it goes on is what the owner
//! has put there since, for others. So before it is out it looks whether it still was allowed to be inside. If not, it wipes
//! what it may have copied of that. The transfer is not done, its target holds nothing that anybody counts on, and what does
//! not belong here stays no longer than this takes: until then the connection is not reported as down on this side.

use std::ops::Range;

use crate::host::Reach;
use crate::link::Link;
use crate::state::Place;
use crate::sys::copy;
use crate::sys::runs::{Runs, ThroughKernel};
use crate::work::{Halt, Scratch};

/// Bytes between two looks at whether to go on. Whoever ends a connection waits for no more than these.
pub(crate) const STRIDE: usize = 256 << 10;

/// Bytes of one call to the kernel, at most about.
pub(crate) const CALL: usize = 4 << 20;

/// Parts of runs that are left to be copied, by the runs' indices: each run at most once.
#[derive(Clone)]
struct Left<I> {
    first: Option<(usize, Range<usize>)>,
    rest: I,
}

impl<I: Iterator<Item = (usize, Range<usize>)>> Left<I> {
    fn new(rest: I) -> Self {
        let mut left = Self { first: None, rest };
        left.next_part();
        left
    }

    fn next_part(&mut self) {
        self.first = self.rest.find(|(_, part)| !part.is_empty());
    }

    /// Takes so many bytes off the first part.
    fn advance(&mut self, bytes: usize) {
        if let Some((_, part)) = &mut self.first {
            part.start += bytes;
            if part.start >= part.end {
                self.next_part();
            }
        }
    }

    /// Visits the parts from here to where `end` is, which has come from here.
    fn until(self, end: &Self, mut visit: impl FnMut(usize, Range<usize>)) {
        for (index, part) in self.first.into_iter().chain(self.rest) {
            match &end.first {
                Some((last, left)) if *last == index => return visit(index, part.start..left.start),
                _ => visit(index, part),
            }
        }
    }
}

/// Copies these parts of runs, each run at most once, as long as the connection and `stop` allow it.
pub(crate) fn run(
    link: &Link,
    places: &[Place],
    runs: &Runs,
    parts: impl Iterator<Item = (usize, Range<usize>)> + Clone,
    stop: &dyn Fn() -> bool,
    scratch: &mut Scratch,
) -> Result<(), Halt> {
    copy::job(runs.bytes());
    let mut left = Left::new(parts);
    let mut strides = Strides { link, places, runs, kernel: runs.through_kernel(&mut scratch.vectors) };
    let mut begin = left.clone();
    loop {
        if stop() {
            return Err(Halt::Stopped);
        }
        let inside = link.enter().ok_or(Halt::Over)?;
        let copied = strides.stride(&mut left);
        if inside.was_revoked() {
            begin.until(&left, |index, part| runs.wipe(index, part));
            return Err(Halt::Over);
        }
        drop(inside);
        copied?;
        if left.first.is_none() {
            break;
        }
        // What the kernel has not been asked for yet is read in a stride to come.
        if strides.kernel.bytes() == 0 {
            begin = left.clone();
        }
    }
    // A process that is still there was there all the time, so the number did not come to name another one.
    let through_kernel = places.iter().any(|place| matches!(place, Place::Process(_)));
    if through_kernel && link.is_dead() { Err(Halt::Over) } else { Ok(()) }
}

/// What a stride needs.
struct Strides<'a> {
    link: &'a Link,
    places: &'a [Place],
    runs: &'a Runs,
    kernel: ThroughKernel<'a>,
}

impl Strides<'_> {
    /// Copies until it is time to look whether to go on, or nothing is left.
    fn stride(
        &mut self,
        parts: &mut Left<impl Iterator<Item = (usize, Range<usize>)>>,
    ) -> Result<(), Halt> {
        let mut room = STRIDE;
        while let Some((index, part)) = parts.first.clone() {
            let run = &self.runs.list()[index];
            let offset = run.offset() + part.start as u64;
            match &self.places[run.place() as usize] {
                Place::Shared(memory, base) => {
                    let bytes = part.len().min(room);
                    let from = usize::try_from(base + offset).unwrap_or(usize::MAX);
                    parts.advance(bytes);
                    self.runs.fill(index, part.start..part.start + bytes, memory, from);
                    room -= bytes;
                    if room == 0 && parts.first.is_some() {
                        return Ok(());
                    }
                }
                Place::Process(address) => {
                    let bytes = part.len().min(CALL);
                    parts.advance(bytes);
                    self.kernel.push(index, part.start..part.start + bytes, address + offset);
                    if self.kernel.is_full() || self.kernel.bytes() >= CALL {
                        return self.read_process();
                    }
                }
            }
        }
        self.read_process()
    }

    fn read_process(&mut self) -> Result<(), Halt> {
        let expected = self.kernel.bytes();
        if expected == 0 {
            return Ok(());
        }
        if let Reach::No(why) = &self.link.reach {
            return Err(Halt::NoAccess(why.clone()));
        }
        match self.kernel.read(self.link.pid) {
            Ok(count) if count == expected => Ok(()),
            // It stops at the first page that is not there.
            Ok(_) => Err(Halt::Kernel(libc::EFAULT)),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(Halt::Over),
            Err(error) => Err(Halt::Kernel(error.raw_os_error().unwrap_or(libc::EIO))),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// What is left and what is visited until there make all of it, whatever steps were taken.
        #[test]
        fn what_was_passed_is_visited(
            parts in prop::collection::vec((0_usize..40, 0_usize..40), 0..8),
            steps in prop::collection::vec(1_usize..50, 0..20),
            mark in 0_usize..20,
        ) {
            let parts: Vec<_> = parts.into_iter().map(|(at, bytes)| at..at + bytes).enumerate().collect();
            let bytes = |parts: &[(usize, Range<usize>)]| -> Vec<(usize, usize)> {
                parts.iter().flat_map(|(index, part)| part.clone().map(|at| (*index, at))).collect()
            };
            let whole = bytes(&parts);
            let mut left = Left::new(parts.into_iter());
            let (mut begin, mut begun, mut passed) = (left.clone(), 0, 0);
            for (index, step) in steps.into_iter().enumerate() {
                if index == mark {
                    (begin, begun) = (left.clone(), passed);
                }
                let step = left.first.as_ref().map_or(0, |(_, part)| part.len().min(step));
                left.advance(step);
                passed += step;
            }
            let mut visited = Vec::new();
            begin.until(&left, |index, part| visited.push((index, part)));
            prop_assert_eq!(bytes(&visited), &whole[begun..passed]);
        }
    }
}
