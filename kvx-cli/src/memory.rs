//! How much memory this machine, and this process, has left.

use std::fs;
use std::path::Path;

use kvx_core::limits;

use crate::group;
use crate::host::Host;
use crate::size;

/// A limit of this process's own, or of all that are in its control group, and what it leaves for caches.
struct Limit {
    /// What there should be more of, and what sets that.
    name: &'static str,
    /// Bytes that are for other things than caches. Where those are short, Rust's allocator or the system ends the process, and nothing
    /// can be said any more.
    besides: u64,
    /// Bytes that it leaves for caches.
    room: u64,
    /// Bytes of that for a demo whose user says nothing.
    unasked: u64,
}

impl Limit {
    /// One that each of two processes has, which both have the pools.
    fn of_each(name: &'static str, besides: u64, left: Option<u64>) -> Option<Self> {
        let room = left?.saturating_sub(besides);
        Some(Self { name, besides, room, unasked: room / 2 })
    }

    /// That of the control group, where pools that two processes share count once.
    fn of_group() -> Option<Self> {
        const NAME: &str = "memory in its control group, which is its container's: --memory (docker), limits.memory (Kubernetes), MemoryMax= (systemd)";
        // A demo, or a benchmark, in two processes was seen to have 32 MiB.
        const BESIDES: u64 = 64 << 20;
        let left = group::memory_left(&Host::new(Path::new("/")))?;
        let room = left.saturating_sub(BESIDES);
        Some(Self { name: NAME, besides: BESIDES, room, unasked: room })
    }

    fn all() -> impl Iterator<Item = Self> {
        // The allocator keeps 64 MiB of address space for each of some twenty threads.
        let mapped = Self::of_each("address space: ulimit -v", 3 << 29, limits::room());
        // A demo in two processes was seen to have 85 MiB.
        let data = Self::of_each("data: ulimit -d", 128 << 20, limits::data_room());
        [mapped, data, Self::of_group()].into_iter().flatten()
    }
}

/// Bytes that can be had without swapping, by the whole machine.
fn there() -> Option<u64> {
    available(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// Bytes that can be had without swapping, and that this process may have; `None` where the system does not say.
#[must_use]
pub(crate) fn free() -> Option<u64> {
    Limit::all().map(|limit| limit.room).chain(there()).min()
}

/// Bytes for caches where nobody says how many: this many at most.
#[must_use]
pub(crate) fn unasked(most: u64) -> u64 {
    let there = there().map_or(most / 2, |there| there / 2);
    Limit::all().map(|limit| limit.unasked).fold(most.min(there), u64::min)
}

/// Bytes for caches where somebody says how many: fewer where the system would end the process for them.
#[must_use]
pub(crate) fn asked(bytes: u64) -> u64 {
    Limit::of_group().map_or(bytes, |limit| limit.room.min(bytes))
}

/// What to do where `most` bytes are too little, of what this module says: a limit is named where that is the reason, and else what
/// `raise` says; or what `less` says.
#[must_use]
pub(crate) fn remedy(most: u64, raise: &str, less: &str) -> String {
    // It is read once more, and may have grown since.
    let met = Limit::all().filter(|limit| limit.unasked / 8 * 7 <= most);
    match met.min_by_key(|limit| limit.unasked) {
        Some(Limit { name, besides, .. }) => format!(
            "let this process have more {name} (of what is left {} are for other things than caches), or {less}",
            size::bytes(besides)
        ),
        None => format!("{raise}{less}"),
    }
}

/// Bytes that `/proc/meminfo` says are available.
fn available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_read() {
        let text = "MemTotal:       24 kB\nMemFree: 1 kB\nMemAvailable:    3 kB\n";
        assert_eq!(available(text), Some(3072));
        for text in
            ["", "MemAvailable: x kB", "MemAvailable: 3", "MemAvailable: 99999999999999999999 kB"]
        {
            assert_eq!(available(text), None);
        }
    }
}
