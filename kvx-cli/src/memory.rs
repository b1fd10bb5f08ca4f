//! How much memory this machine has left.

use std::fs;

/// Bytes that can be had without swapping; `None` where the system does not say.
#[must_use]
pub(crate) fn free() -> Option<u64> {
    fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text))
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
