//! What a process has open.

use std::time::{Duration, Instant};

/// Descriptors, threads, and bytes of memory in use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    descriptors: usize,
    threads: usize,
    bytes: u64,
}

/// What an allocator may keep for later.
const SLACK: u64 = 16 << 20;

/// Sockets of a connection that has just ended are closed a little later.
const FEW: usize = 4;

impl Left {
    pub(crate) fn count() -> Self {
        let entries = |path: &str| std::fs::read_dir(path).unwrap().count();
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split(' ').nth(1).unwrap().parse().unwrap();
        Self {
            descriptors: entries("/proc/self/fd"),
            threads: entries("/proc/self/task"),
            bytes: pages * 4096,
        }
    }

    fn covers(&self, now: &Self) -> bool {
        now.descriptors <= self.descriptors + FEW
            && now.threads <= self.threads
            && now.bytes <= self.bytes + SLACK
    }

    /// Fails if there is more now, and still is after a while.
    pub(crate) fn is_all_that_is_left(&self, after: &str) {
        let begin = Instant::now();
        loop {
            let now = Self::count();
            if self.covers(&now) {
                return;
            }
            assert!(
                begin.elapsed() < Duration::from_secs(5),
                "after {after} there is {now:?}, before there was {self:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Processor time of all threads of this process.
pub(crate) fn processor_time() -> Duration {
    let mut nanoseconds = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let Ok(text) = std::fs::read_to_string(task.path().join("schedstat")) else { continue };
        nanoseconds += text.split(' ').next().unwrap().parse::<u64>().unwrap();
    }
    Duration::from_nanos(nanoseconds)
}
