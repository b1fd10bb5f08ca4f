//! Threads that wait for each other on one processor.

#[cfg(target_os = "linux")]
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Keeps the calling thread on one processor for as long as it lives.
#[derive(Debug)]
pub(crate) struct Pinned {
    #[cfg(target_os = "linux")]
    before: CpuSet,
}

/// A processor on which this process may run.
pub(crate) fn any() -> Option<u32> {
    #[cfg(target_os = "linux")]
    {
        let may = sched_getaffinity(None).ok()?;
        let last = (0..CpuSet::MAX_CPU).rev().find(|cpu| may.is_set(*cpu))?;
        u32::try_from(last).ok()
    }
    #[cfg(not(target_os = "linux"))]
    None
}

impl Pinned {
    /// `None` where no processor is named, or the thread may not be kept there: then it runs where the system puts it.
    pub(crate) fn to(cpu: Option<u32>) -> Option<Self> {
        #[cfg(target_os = "linux")]
        {
            let before = sched_getaffinity(None).ok()?;
            let mut one = CpuSet::new();
            one.set(usize::try_from(cpu?).ok().filter(|cpu| *cpu < CpuSet::MAX_CPU)?);
            sched_setaffinity(None, &one).ok()?;
            Some(Self { before })
        }
        #[cfg(not(target_os = "linux"))]
        cpu.and(None)
    }
}

#[cfg(target_os = "linux")]
impl Drop for Pinned {
    fn drop(&mut self) {
        // They were allowed before.
        let _lost = sched_setaffinity(None, &self.before);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_kept_on_one_processor_and_let_go_again() {
        let count = || sched_getaffinity(None).unwrap().count();
        let before = count();
        let pinned = Pinned::to(any()).unwrap();
        assert_eq!(count(), 1);
        drop(pinned);
        assert_eq!(count(), before);
        assert!(Pinned::to(None).is_none() && Pinned::to(Some(u32::MAX)).is_none());
    }
}
