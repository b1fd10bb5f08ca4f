//! How much memory this machine, and this process, has left.

use std::fs;

use kvx_core::limits;

/// Address space that a process takes besides its caches, where there is a limit on it: the allocator keeps 64 MiB for each of some twenty
/// threads. Where that is short, Rust's allocator ends the process, and nothing can be said any more.
const BESIDES: u64 = 3 << 29;

/// Bytes that can be had without swapping, and that this process may map; `None` where the system does not say.
#[must_use]
pub(crate) fn free() -> Option<u64> {
    let there = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text))?;
    Some(room().map_or(there, |room| room.min(there)))
}

/// Bytes that this process may map for caches, where it has a limit.
fn room() -> Option<u64> {
    limits::room().map(|room| room.saturating_sub(BESIDES))
}

/// What to do where `most` bytes are too little, of what [`free`] says: this process's own limit is named where that is the reason, and
/// else what `raise` says; or what `less` says.
#[must_use]
pub(crate) fn remedy(most: u64, raise: &str, less: &str) -> String {
    match room() {
        Some(room) if room / 2 <= most => {
            format!("let this process have more address space (ulimit -v), or {less}")
        }
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
