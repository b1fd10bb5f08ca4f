//! The kernel's copies out of another process's memory, made by the process that is started.

use std::time::Instant;

use kvx_core::Result;
use kvx_core::memory::Region;
use kvx_core::transfer::{Mode, Segment};
use kvx_shm::limit::ProcessVm;

use super::child::processor_time;
use super::message::Copies;

/// Copies that can be made again and again.
#[derive(Debug, Default)]
pub(super) struct Prepared {
    calls: Vec<ProcessVm>,
    /// Processor time of all so far, in nanoseconds.
    spent: u64,
}

impl Prepared {
    /// One rank's: into these regions.
    pub(super) fn add(&mut self, regions: &[Region], copies: Copies) -> Result<()> {
        let segments: Vec<Segment> = copies.segments.into_iter().map(Segment::from).collect();
        let (pid, addresses) = (copies.pid, &copies.addresses);
        self.calls.push(ProcessVm::new(pid, regions, addresses, Mode::Read, &segments)?);
        Ok(())
    }

    /// Makes all of them once: how long it takes, in nanoseconds.
    pub(super) fn run(&mut self) -> Result<u64> {
        let (begun, before) = (Instant::now(), processor_time());
        let moved = self.calls.iter_mut().try_for_each(ProcessVm::run);
        let took = begun.elapsed();
        self.spent += processor_time().saturating_sub(before);
        moved?;
        Ok(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX))
    }

    /// Processor time that all of them took so far, in nanoseconds.
    pub(super) const fn spent(&self) -> u64 {
        self.spent
    }
}
