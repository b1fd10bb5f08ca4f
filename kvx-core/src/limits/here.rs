//! What this process may have, and has: as `/proc` tells.

use std::fs;

/// Limits, and what counts against them. `None`: there is no limit, or the system does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// Bytes of address space (`ulimit -v`).
    pub(super) address_space: Option<u64>,
    /// Bytes of data and stacks (`ulimit -d`).
    pub(super) data: Option<u64>,
    /// Bytes of a file (`ulimit -f`).
    pub(super) file: Option<u64>,
    /// Bytes of address space in use.
    pub(super) mapped: u64,
    /// Bytes of data and stacks in use.
    pub(super) used: u64,
    /// Ranges of memory that a process may have mapped (`vm.max_map_count`).
    pub(super) ranges: Option<u64>,
    /// Ranges that are.
    pub(super) mapped_ranges: u64,
}

impl Limits {
    pub(super) fn read() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let ranges = text("/proc/sys/vm/max_map_count").trim().parse().ok();
        // Many lines: looked at where it may be that many.
        let mapped_ranges = ranges.map_or(0, |_| text("/proc/self/maps").lines().count() as u64);
        Self {
            ranges,
            mapped_ranges,
            ..Self::of(&text("/proc/self/limits"), &text("/proc/self/status"))
        }
    }

    /// From the texts of `limits` and `status`.
    fn of(limits: &str, status: &str) -> Self {
        let word = |text: &str, name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let used = |name: &str| word(status, name).unwrap_or(0).saturating_mul(1024);
        Self {
            address_space: word(limits, "Max address space"),
            data: word(limits, "Max data size"),
            file: word(limits, "Max file size"),
            mapped: used("VmSize:"),
            used: used("VmData:").saturating_add(used("VmStk:")),
            ranges: None,
            mapped_ranges: 0,
        }
    }

    pub(super) fn room(&self) -> Option<u64> {
        Some(self.address_space?.saturating_sub(self.mapped))
    }

    pub(super) fn data_room(&self) -> Option<u64> {
        Some(self.data?.saturating_sub(self.used))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_the_system_writes_them() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                      Max file size             unlimited            unlimited            bytes\n\
                      Max data size             1024                 unlimited            bytes\n\
                      Max address space         204800000            unlimited            bytes\n";
        let said = Limits::of(limits, "VmSize:\t     400 kB\nVmData:\t 150 kB\nVmStk:\t  50 kB\n");
        assert_eq!(
            (said.file, said.data, said.address_space),
            (None, Some(1024), Some(204_800_000))
        );
        assert_eq!((said.mapped, said.used), (409_600, 204_800));
        assert_eq!((said.room(), said.data_room()), (Some(204_390_400), Some(0)));
        assert_eq!(Limits::of("", ""), Limits::default());
    }

    #[test]
    fn this_process_has_something_mapped() {
        let here = Limits::read();
        assert!(here.mapped > here.used && here.used > 0, "{here:?}");
        assert!(here.mapped_ranges > 0 && here.ranges.is_some(), "{here:?}");
    }
}
