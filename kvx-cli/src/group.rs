//! What this process's control group, as of a container, lets it have of memory. Whoever takes more is ended by the system, without a
//! word.

use crate::host::Host;

/// Files of a group: its limit, what it uses, and what that consists of, with the name of what is given back where it is needed.
const VERSIONS: [[&str; 4]; 2] = [
    ["memory.max", "memory.current", "memory.stat", "inactive_file"],
    ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"],
];

/// Bytes that the group, and those around it, may have: the least. `None` where none has a limit.
#[must_use]
pub(crate) fn memory_limit(host: &Host) -> Option<u64> {
    all(host, |at, files| limit(&host.text(&format!("{at}/{}", files[0]))?))
}

/// Bytes that the group, and those around it, have left: the least. `None` where none has a limit.
#[must_use]
pub(crate) fn memory_left(host: &Host) -> Option<u64> {
    all(host, |at, [limit, usage, stat, given_back]| {
        let text = |file: &str| host.text(&format!("{at}/{file}"));
        let (usage, stat) = (text(usage).unwrap_or_default(), text(stat).unwrap_or_default());
        left(&text(limit)?, &usage, &stat, given_back)
    })
}

/// The least of all groups, in the version in which any has a limit.
fn all(host: &Host, of: impl Fn(&str, [&str; 4]) -> Option<u64>) -> Option<u64> {
    let versions = host.cgroups("memory").into_iter().zip(VERSIONS);
    versions.filter_map(|(groups, files)| groups.iter().filter_map(|at| of(at, files)).min()).min()
}

/// A limit, where it is one: version 2 says `max` where there is none, version 1 a huge number.
fn limit(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|limit| *limit < 1 << 60)
}

fn left(max: &str, usage: &str, stat: &str, given_back: &str) -> Option<u64> {
    let inactive = stat.lines().find_map(|line| {
        line.strip_prefix(given_back)?.strip_prefix(' ')?.trim().parse::<u64>().ok()
    });
    let used: u64 = usage.trim().parse().unwrap_or(0);
    Some(limit(max)?.saturating_sub(used.saturating_sub(inactive.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_is_left_is_the_limit_less_what_is_not_given_back() {
        let stat = "cache 9\ninactive_file 30\ntotal_inactive_file 40\nactive_file 500\n";
        assert_eq!(left("1000\n", "600\n", stat, "inactive_file"), Some(430));
        assert_eq!(left("1000", "600", stat, "total_inactive_file"), Some(440));
        assert_eq!(left("1000", "600", "", "inactive_file"), Some(400));
        assert_eq!(left("1000", "2000", stat, "inactive_file"), Some(0));
        // More is said to be given back than is used: the two are not read at the same time.
        assert_eq!(left("1000", "20", stat, "inactive_file"), Some(1000));
        assert_eq!(left("1000", "", "inactive_file x", "inactive_file"), Some(1000));
        for none in ["max", "", "9223372036854771712", "-1"] {
            assert_eq!(left(none, "600", stat, "inactive_file"), None);
        }
    }

    /// A host of these files, in the version that they are of.
    fn host(name: &str, files: &[(&str, &str)]) -> (std::path::PathBuf, Host) {
        let root = std::env::temp_dir().join(format!("kvx-group-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let host = Host::new(&root);
        (root, host)
    }

    /// A group may have no limit of its own, and be in one that has.
    #[test]
    fn the_tightest_of_all_groups_around_counts_in_both_versions() {
        for (name, line, at, max, usage) in [
            ("two", "0::/pod/a", "sys/fs/cgroup", "memory.max", "memory.current"),
            (
                "one",
                "4:memory:/pod/a\n0::/",
                "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            ),
        ] {
            let file = |group: &str, file: &str| format!("{at}/{group}{file}");
            let files = [
                ("proc/self/cgroup".to_owned(), line),
                (file("pod/a/", max), "max"),
                (file("pod/a/", usage), "5"),
                (file("pod/", max), "1000"),
                (file("pod/", usage), "300"),
                (file("", max), "2000"),
                (file("", usage), "1900"),
            ];
            let files: Vec<(&str, &str)> =
                files.iter().map(|(path, text)| (&**path, *text)).collect();
            let (root, host) = host(name, &files);
            let said = (memory_limit(&host), memory_left(&host));
            fs::remove_dir_all(root).unwrap();
            assert_eq!(said, (Some(1000), Some(100)), "{name}");
        }
        let (root, host) = host("none", &[("proc/self/cgroup", "0::/a\n")]);
        assert_eq!((memory_limit(&host), memory_left(&host)), (None, None));
        fs::remove_dir_all(root).unwrap();
    }
}
