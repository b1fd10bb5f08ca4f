//! How much memory this machine, and this process, has left.

use std::fs;

use kvx_core::limits;

use crate::size;

/// A limit of this process's own, and what it leaves for caches.
struct Limit {
    /// What there should be more of, and what sets that.
    name: &'static str,
    /// Bytes that the process takes besides its caches. Where that is short, Rust's allocator ends the process, and nothing can be
    /// said any more.
    besides: u64,
    /// Bytes that it leaves for caches.
    room: u64,
}

impl Limit {
    fn of(name: &'static str, besides: u64, left: Option<u64>) -> Option<Self> {
        Some(Self { name, besides, room: left?.saturating_sub(besides) })
    }

    /// The one that leaves least.
    fn tightest() -> Option<Self> {
        // The allocator keeps 64 MiB of address space for each of some twenty threads.
        let mapped = Self::of("address space: ulimit -v", 3 << 29, limits::room());
        // A demo in two processes was seen to have 85 MiB.
        let data = Self::of("data: ulimit -d", 128 << 20, limits::data_room());
        [mapped, data].into_iter().flatten().min_by_key(|limit| limit.room)
    }
}

/// Bytes that can be had without swapping, and that this process may have; `None` where the system does not say.
#[must_use]
pub(crate) fn free() -> Option<u64> {
    let there = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text))?;
    Some(Limit::tightest().map_or(there, |limit| limit.room.min(there)))
}

/// What to do where `most` bytes are too little, of what [`free`] says: this process's own limit is named where that is the reason, and
/// else what `raise` says; or what `less` says.
#[must_use]
pub(crate) fn remedy(most: u64, raise: &str, less: &str) -> String {
    match Limit::tightest() {
        Some(Limit { name, besides, room }) if room / 2 <= most => format!(
            "let this process have more {name} (of what is left {} are for other things than caches), or {less}",
            size::bytes(besides)
        ),
        _ => format!("{raise}{less}"),
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
