//! What this machine can do at most: the same segments, without a backend.

use std::time::Instant;

use kvx_core::Result;
use kvx_core::layout::RankLayout;
use kvx_core::memory::Region;
use kvx_core::transfer::{Mode, Segment};
use kvx_shm::limit::{Memcpy, ProcessVm};

use super::rig::{Link, Rig};
use crate::remote::{Copies, Process, Taken};

/// What carries the same segments without a backend.
pub(crate) struct Limits {
    /// One per link.
    memcpy: Vec<Memcpy>,
    /// Of reads.
    readv: Vec<ProcessVm>,
    /// Of writes: the other process takes the bytes, and this one gives them.
    taken: bool,
    writev: Vec<ProcessVm>,
}

/// One round of the limits, in seconds; `None` where there is none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LimitRound {
    pub(crate) memcpy: Option<f64>,
    /// `process_vm_readv`, by the process that the bytes are for.
    pub(crate) process_vm: Option<f64>,
    pub(crate) process_vm_writev: Option<f64>,
}

impl Limits {
    /// Prepares all: the copies between mappings of their own, the system calls between the memory of the two engines.
    pub(crate) fn new(rig: &mut Rig<'_>) -> Result<Self> {
        let mode = rig.engines.mode;
        let sizes = |layout: &RankLayout| -> Vec<u64> {
            layout.regions().iter().map(|region| region.bytes).collect()
        };
        let (mut memcpy, mut readv, mut writev) = (Vec::new(), Vec::new(), Vec::new());
        for link in &rig.links {
            // The memory of each takes seconds.
            rig.process.look()?;
            let here = &rig.ranks.list()[link.here];
            let there = &rig.process.ranks[link.there];
            let remote: Vec<u64> = there.keys.iter().map(|(_, bytes)| *bytes).collect();
            let segments = &link.segments;
            memcpy.push(Memcpy::new(&sizes(&here.layout), &remote, mode, segments)?);
            let (pid, addresses) = (rig.process.pid, &there.addresses);
            let calls = |mode| ProcessVm::new(pid, &here.regions, addresses, mode, segments);
            match mode {
                Mode::Read => readv.push(calls(Mode::Read)?),
                Mode::Write => {
                    writev.push(calls(Mode::Write)?);
                    rig.process.prepare_copies(taken(link, &here.regions))?;
                }
            }
        }
        Ok(Self { memcpy, readv, taken: mode == Mode::Write, writev })
    }

    /// Moves everything once by each, who is first changing from round to round. What the kernel does not allow is no limit.
    pub(crate) fn round(&mut self, process: &mut Process, round: u32) -> LimitRound {
        let mut measured = LimitRound::default();
        for turn in 0..3 {
            match (round + turn) % 3 {
                0 => {
                    let begun = Instant::now();
                    self.memcpy.iter_mut().for_each(Memcpy::run);
                    measured.memcpy = Some(begun.elapsed().as_secs_f64());
                }
                1 if self.taken => {
                    measured.process_vm = process.copy().ok().map(|took| took.as_secs_f64());
                }
                1 => measured.process_vm = timed(&mut self.readv),
                _ => measured.process_vm_writev = timed(&mut self.writev),
            }
        }
        measured
    }
}

/// The segments of a write, as its target takes them.
fn taken(link: &Link, regions: &[Region]) -> Copies {
    let address = |region: &Region| region.address().as_ptr().addr() as u64;
    let turned = |segment: &Segment| Taken {
        here: (segment.remote_region, segment.remote_offset),
        there: (segment.local_region, segment.local_offset),
        bytes: segment.bytes,
    };
    Copies {
        rank: link.there,
        pid: std::process::id(),
        addresses: regions.iter().map(address).collect(),
        segments: link.segments.iter().map(turned).collect(),
    }
}

/// How long the calls take, where there are some and the kernel allows them.
fn timed(calls: &mut [ProcessVm]) -> Option<f64> {
    let begun = Instant::now();
    let moved = calls.iter_mut().try_for_each(ProcessVm::run);
    (!calls.is_empty() && moved.is_ok()).then(|| begun.elapsed().as_secs_f64())
}
