//! What a process has open.

use std::time::{Duration, Instant};

/// Descriptors, threads, mappings of shared memory, and bytes of memory in use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    descriptors: usize,
    threads: usize,
    mappings: usize,
    pub(crate) bytes: u64,
}

/// What an allocator may keep for later.
const SLACK: u64 = 16 << 20;

impl Left {
    pub(crate) fn count() -> Self {
        let entries = |path: &str| std::fs::read_dir(path).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split(' ').nth(1).unwrap().parse().unwrap();
        Self {
            descriptors: entries("/proc/self/fd"),
            threads: entries("/proc/self/task"),
            // Those of an allocator come and go, and are private.
            mappings: maps.lines().filter(|line| is_shared(line)).count(),
            bytes: pages * 4096,
        }
    }

    /// What there is once nothing changes any more: whatever ends late must not make room for what leaks.
    pub(crate) fn at_rest() -> Self {
        let begin = Instant::now();
        let (mut last, mut same) = (Self::count(), 0);
        while same < 10 {
            assert!(begin.elapsed() < Duration::from_secs(5), "it does not come to rest: {last:?}");
            std::thread::sleep(Duration::from_millis(5));
            let now = Self::count();
            same = if last.is_open(&now) && now.is_open(&last) { same + 1 } else { 0 };
            last = now;
        }
        last
    }

    /// Whether there is no more now of what is open.
    const fn is_open(&self, now: &Self) -> bool {
        now.descriptors <= self.descriptors
            && now.threads <= self.threads
            && now.mappings <= self.mappings
    }

    /// The most of each.
    pub(crate) fn most(&self, other: &Self) -> Self {
        Self {
            descriptors: self.descriptors.max(other.descriptors),
            threads: self.threads.max(other.threads),
            mappings: self.mappings.max(other.mappings),
            bytes: self.bytes.max(other.bytes),
        }
    }

    pub(crate) const fn covers(&self, now: &Self) -> bool {
        self.is_open(now) && now.bytes <= self.bytes + SLACK
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
                "after {after} there is {now:?}, before there was {self:?}: {}",
                descriptors().join("; ")
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// What each descriptor is of; of connections over TCP, their lines of the system's table.
fn descriptors() -> Vec<String> {
    let table = |of| std::fs::read_to_string(format!("/proc/net/{of}")).unwrap_or_default();
    let table = table("tcp") + &table("tcp6");
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    open.map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        let target = target.to_string_lossy().into_owned();
        let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
        let line = inode.and_then(|inode| {
            table.lines().find(|line| line.split_whitespace().nth(9) == Some(inode))
        });
        let words: Vec<_> = line.unwrap_or("").split_whitespace().skip(1).take(4).collect();
        format!("{name} {target} {}", words.join(" "))
    })
    .collect()
}

/// Whether a line of `/proc/self/maps` is of memory that is shared with others.
fn is_shared(line: &str) -> bool {
    line.split_whitespace().nth(1).is_some_and(|access| access.ends_with('s'))
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

/// What is counted finds one descriptor, mapping or thread too many, and memory beyond what an allocator keeps.
pub(crate) fn one_too_many_of_anything_is_found() {
    let before = Left::at_rest();
    assert!(before.covers(&Left::count()));
    let descriptor = std::fs::File::open("/dev/null").unwrap();
    assert!(!before.covers(&Left::count()), "a descriptor");
    drop(descriptor);
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || wait.recv().is_err());
    assert!(!before.covers(&Left::count()), "a thread");
    drop(go);
    thread.join().unwrap();
    let pages = std::hint::black_box(vec![1_u8; 32 << 20]);
    assert!(!before.covers(&Left::count()), "memory");
    drop(pages);
    before.is_all_that_is_left("all of them");
    assert!(is_shared("7f00-7f01 rw-s 00000000 00:01 32769 /SYSV00000000 (deleted)"));
    assert!(!is_shared("7f00-7f01 rw-p 00000000 00:00 0 "));
}
