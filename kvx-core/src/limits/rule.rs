//! Which limit it was.

use super::Wanted;
use super::here::Limits;
use crate::error::limit_remedy;

/// What the stack of a thread takes, unless a program says otherwise.
const STACK: u64 = 2 << 20;

/// What a huge page takes.
const PAGE: u64 = 2 << 20;

pub(super) fn remedy(code: i32, wanted: Wanted, limits: &Limits) -> Option<String> {
    match (code, wanted) {
        (libc::EMFILE | libc::ENFILE, _) => limit_remedy(code).map(Into::into),
        (libc::EFBIG, Wanted::Shared(bytes)) => Some(match limits.file {
            // It is made in whole pages.
            Some(limit) if limit < bytes.saturating_add(PAGE) => format!(
                "let this process have larger files, which memory with a descriptor counts as: ulimit -f ({} now)",
                size(limit)
            ),
            _ => "ask for less: no file is that large".into(),
        }),
        (libc::ENOMEM, Wanted::Shared(bytes)) => {
            address_space(bytes, limits).or_else(|| ranges(limits))
        }
        (libc::ENOMEM, Wanted::Private(bytes)) => address_space(bytes, limits)
            .or_else(|| data(bytes, limits))
            .or_else(|| ranges(limits)),
        // The system says so too where there is no room for a thread's stack.
        (libc::EAGAIN | libc::ENOMEM, Wanted::Thread) => Some(
            address_space(STACK, limits)
                .or_else(|| data(STACK, limits))
                .or_else(|| ranges(limits))
                .unwrap_or_else(|| {
                    "let this user have more processes and threads (ulimit -u), or this container (--pids-limit, podPidsLimit)".into()
                }),
        ),
        _ => None,
    }
}

fn address_space(bytes: u64, limits: &Limits) -> Option<String> {
    let limit =
        limits.address_space.filter(|limit| limits.mapped.saturating_add(bytes) > *limit)?;
    Some(format!(
        "let this process have more address space: ulimit -v ({} now, {} in use)",
        size(limit),
        size(limits.mapped)
    ))
}

fn data(bytes: u64, limits: &Limits) -> Option<String> {
    let limit = limits.data.filter(|limit| limits.used.saturating_add(bytes) > *limit)?;
    Some(format!(
        "let this process have more data: ulimit -d ({} now, {} in use)",
        size(limit),
        size(limits.used)
    ))
}

fn ranges(limits: &Limits) -> Option<String> {
    // A stack takes some.
    let limit = limits.ranges.filter(|limit| limits.mapped_ranges.saturating_add(4) > *limit)?;
    Some(format!("let processes map more ranges of memory: sysctl vm.max_map_count ({limit} now)"))
}

/// Bytes as `ulimit` counts them, in KiB.
fn size(bytes: u64) -> String {
    format!("{} KiB", bytes / 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODES: [i32; 5] = [libc::EMFILE, libc::ENFILE, libc::EFBIG, libc::ENOMEM, libc::EAGAIN];

    /// The limit that is met is the one that is named, and one that is not met is not.
    #[test]
    fn the_limit_that_was_met_is_named_and_no_other() {
        let tight = Limits {
            address_space: Some(100 << 20),
            data: Some(10 << 20),
            file: Some(0),
            mapped: 99 << 20,
            used: 9 << 20,
            ranges: Some(65_530),
            mapped_ranges: 65_530,
        };
        let ample = Limits {
            mapped: 1 << 20,
            used: 1 << 20,
            file: Some(1 << 30),
            mapped_ranges: 9,
            ..tight
        };
        let wanted =
            [Wanted::Descriptor, Wanted::Shared(4 << 20), Wanted::Private(4 << 20), Wanted::Thread];
        let named = |limits: &Limits, what: &str| {
            let all =
                CODES.iter().flat_map(|code| wanted.map(|wanted| remedy(*code, wanted, limits)));
            all.flatten().any(|text| text.contains(what))
        };
        let only = |limits: Limits, what: &str| {
            for limit in ["ulimit -v", "ulimit -d", "ulimit -f", "vm.max_map_count"] {
                assert_eq!(named(&limits, limit), limit == what, "{limit} of {limits:?}");
            }
        };
        only(ample, "none");
        only(Limits { mapped: tight.mapped, ..ample }, "ulimit -v");
        only(Limits { used: tight.used, ..ample }, "ulimit -d");
        only(Limits { file: tight.file, ..ample }, "ulimit -f");
        only(Limits { mapped_ranges: tight.mapped_ranges, ..ample }, "vm.max_map_count");
        only(Limits::default(), "none");
        for (code, what) in [(libc::EMFILE, "ulimit -n"), (libc::ENFILE, "fs.file-max")] {
            assert!(remedy(code, Wanted::Descriptor, &ample).unwrap().contains(what));
        }
        // Nothing of this process's is known to be the reason: whoever asked knows better.
        assert_eq!(remedy(libc::ENOMEM, Wanted::Shared(1), &ample), None);
        assert_eq!(remedy(libc::ENOMEM, Wanted::Private(1), &ample), None);
        let data =
            remedy(libc::ENOMEM, Wanted::Private(4 << 20), &Limits { used: tight.used, ..ample });
        assert!(data.unwrap().contains("ulimit -d"));
        assert!(remedy(libc::EAGAIN, Wanted::Thread, &ample).unwrap().contains("ulimit -u"));
        assert_eq!(remedy(libc::EINVAL, Wanted::Shared(1), &tight), None);
    }
}
