//! What this machine can do at most: the same segments, without a backend.

use std::time::Instant;

use kvx_core::Result;
use kvx_core::layout::RankLayout;
use kvx_shm::limit::{Memcpy, ProcessVm};

use super::rig::Rig;

/// What carries the same segments without a backend.
pub(crate) struct Limits {
    /// One per link.
    memcpy: Vec<Memcpy>,
    process_vm: Vec<ProcessVm>,
}

/// One round of the limits, in seconds; `None` where there is none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LimitRound {
    pub(crate) memcpy: Option<f64>,
    pub(crate) process_vm: Option<f64>,
}

impl Limits {
    /// Prepares both: the copies between mappings of their own, the system calls between the memory of the two engines.
    pub(crate) fn new(rig: &Rig<'_>) -> Result<Self> {
        let mode = rig.engines.mode;
        let sizes = |layout: &RankLayout| -> Vec<u64> {
            layout.regions().iter().map(|region| region.bytes).collect()
        };
        let (mut memcpy, mut process_vm) = (Vec::new(), Vec::new());
        for link in &rig.links {
            let here = &rig.ranks.list()[link.here];
            let there = &rig.process.ranks[link.there];
            let remote: Vec<u64> = there.keys.iter().map(|(_, bytes)| *bytes).collect();
            let segments = &link.segments;
            memcpy.push(Memcpy::new(&sizes(&here.layout), &remote, mode, segments)?);
            let (pid, addresses) = (rig.process.pid, &there.addresses);
            process_vm.push(ProcessVm::new(pid, &here.regions, addresses, mode, segments)?);
        }
        Ok(Self { memcpy, process_vm })
    }

    /// Moves everything once by each, who is first changing from round to round. What the kernel does not allow is no limit.
    pub(crate) fn round(&mut self, round: u32) -> LimitRound {
        let mut measured = LimitRound::default();
        for turn in 0..2 {
            if (round + turn).is_multiple_of(2) {
                let begun = Instant::now();
                self.memcpy.iter_mut().for_each(Memcpy::run);
                measured.memcpy = Some(begun.elapsed().as_secs_f64());
            } else {
                let begun = Instant::now();
                let moved = self.process_vm.iter_mut().try_for_each(ProcessVm::run);
                measured.process_vm = moved.is_ok().then(|| begun.elapsed().as_secs_f64());
            }
        }
        measured
    }
}
