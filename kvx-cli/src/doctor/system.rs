//! Limits and settings of the system.

use super::Finding;
use crate::group;
use crate::host::Host;
use crate::size;

/// `CAP_IPC_LOCK` and `CAP_SYS_PTRACE`.
const IPC_LOCK: u32 = 14;
const SYS_PTRACE: u32 = 19;
/// Fewest open files: a session takes one, and an engine of some ranks has hundreds.
const FILES: u64 = 4096;
/// Least of `/dev/shm`, in bytes.
const SHM: u64 = 1 << 30;
/// Least memory of a container, in bytes.
const MEMORY: u64 = 2 << 30;
/// Fewest threads of a container: a rank has three to five.
const THREADS: u64 = 256;
/// Clocks that are read without a system call.
const CLOCKS: [&str; 4] = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"];

pub(super) fn look(host: &Host) -> Vec<Finding> {
    let all = [
        memlock(host),
        files(host),
        ptrace(host),
        huge_pages(host),
        shm(host),
        memory(host),
        processors(host),
        threads(host),
        clock(host),
    ];
    all.into_iter().flatten().collect()
}

fn has_rdma(host: &Host) -> bool {
    !host.names("/sys/class/infiniband").is_empty()
}

fn memlock(host: &Host) -> Option<Finding> {
    const CHECK: &str = "memlock";
    const REMEDY: &str = "set LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (docker), memlock unlimited in \
                          limits.conf, or give the container CAP_IPC_LOCK: registered memory is pinned";
    let Some(limit) = host.limit("Max locked memory")? else {
        return Some(Finding::ok(CHECK, "unlimited"));
    };
    let found = format!("{} of memory may be locked", size::bytes(limit));
    if host.has_capability(IPC_LOCK) {
        return Some(Finding::ok(CHECK, format!("{found}, and CAP_IPC_LOCK lifts that")));
    }
    if has_rdma(host) {
        return Some(Finding::failure(CHECK, format!("{found}; RDMA needs a whole cache"), REMEDY));
    }
    Some(Finding::ok(CHECK, format!("{found}; there is no RDMA device that needs more")))
}

fn files(host: &Host) -> Option<Finding> {
    const CHECK: &str = "open files";
    let limit = host.limit("Max open files")?;
    Some(match limit {
        Some(limit) if limit < FILES => Finding::warning(
            CHECK,
            format!("{} at most", size::count(limit)),
            "raise the limit to 65536 (ulimit -n, LimitNOFILE=): each session and each peer takes some",
        ),
        Some(limit) => Finding::ok(CHECK, format!("{} at most", size::count(limit))),
        None => Finding::ok(CHECK, "unlimited"),
    })
}

fn ptrace(host: &Host) -> Option<Finding> {
    const CHECK: &str = "ptrace scope";
    let Some(scope) = host.number("/proc/sys/kernel/yama/ptrace_scope") else {
        return Some(Finding::ok(CHECK, "not restricted: borrowed memory can be read by peers"));
    };
    let found = format!("kernel.yama.ptrace_scope is {scope}");
    Some(match (scope, host.has_capability(SYS_PTRACE)) {
        (0, _) | (1 | 2, true) => Finding::ok(CHECK, found),
        (1, false) => Finding::warning(
            CHECK,
            format!("{found}: one peer at a time may read borrowed memory"),
            "let kvx allocate, set ptracer=any on the backend shm, or sysctl kernel.yama.ptrace_scope=0",
        ),
        _ => Finding::warning(
            CHECK,
            format!("{found}: shared memory cannot move what others have allocated"),
            "let kvx allocate, or set kernel.yama.ptrace_scope to 0 or 1 (3 lasts until the host is restarted)",
        ),
    })
}

fn huge_pages(host: &Host) -> Option<Finding> {
    const CHECK: &str = "huge pages";
    let at = |name| host.number(&format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}"));
    let all = at("nr_hugepages")?;
    let free = at("free_hugepages").unwrap_or(0);
    Some(match (all, free) {
        (0, _) => {
            Finding::ok(CHECK, "none of 2 MiB; nothing needs them, the backend shm can use them")
        }
        (_, 0) => Finding::warning(
            CHECK,
            format!("all {} of 2 MiB are in use", size::count(all)),
            "raise vm.nr_hugepages, or do not set huge_pages=require on the backend shm",
        ),
        (_, free) => {
            Finding::ok(CHECK, format!("{} of {} of 2 MiB are free", free, size::count(all)))
        }
    })
}

fn shm(host: &Host) -> Option<Finding> {
    const CHECK: &str = "/dev/shm";
    let found = rustix::fs::statvfs(host.path("/dev/shm")).ok()?;
    let bytes = found.f_blocks.saturating_mul(found.f_frsize);
    Some(shm_of(CHECK, bytes))
}

fn shm_of(check: &'static str, bytes: u64) -> Finding {
    let found = size::bytes(bytes);
    match bytes < SHM {
        true => Finding::warning(
            check,
            format!("{found}: too little for UCX's shared memory (kvx's own is not in it)"),
            "raise it: --shm-size=8g (docker), an emptyDir of medium Memory at /dev/shm (Kubernetes)",
        ),
        false => Finding::ok(check, found),
    }
}

fn memory(host: &Host) -> Option<Finding> {
    const CHECK: &str = "memory limit";
    let limit = group::memory_limit(host);
    Some(match limit {
        None => Finding::ok(CHECK, "the control group has none"),
        Some(limit) if limit < MEMORY => Finding::warning(
            CHECK,
            format!("the control group allows {}", size::bytes(limit)),
            "raise it: caches that kvx allocates count, those that peers have mapped do not",
        ),
        Some(limit) => {
            Finding::ok(CHECK, format!("the control group allows {}", size::bytes(limit)))
        }
    })
}

fn processors(host: &Host) -> Option<Finding> {
    const CHECK: &str = "processor limit";
    let (quota, period) = match host.cgroup("cpu", "cpu.max", "cpu.cfs_quota_us") {
        Some(text) => match text.split_once(' ') {
            Some((quota, period)) => (quota.to_owned(), period.parse().ok()),
            None => {
                (text, host.cgroup("cpu", "-", "cpu.cfs_period_us").and_then(|p| p.parse().ok()))
            }
        },
        None => return Some(Finding::ok(CHECK, "the control group has none")),
    };
    let Some((quota, period)) = quota.parse::<u64>().ok().zip(period.filter(|p: &u64| *p > 0))
    else {
        return Some(Finding::ok(CHECK, "the control group has none"));
    };
    let tenths = quota.saturating_mul(10) / period;
    let found = format!("the control group allows {}.{} processors", tenths / 10, tenths % 10);
    Some(match tenths < 10 {
        true => Finding::warning(
            CHECK,
            format!("{found}: kvx's threads wait when that is used up"),
            "allow one processor at least, besides the engine's own",
        ),
        false => Finding::ok(CHECK, found),
    })
}

fn threads(host: &Host) -> Option<Finding> {
    const CHECK: &str = "thread limit";
    let limit = host.cgroup("pids", "pids.max", "pids.max").and_then(|text| text.parse().ok());
    Some(match limit {
        None => Finding::ok(CHECK, "the control group has none"),
        Some(limit) if limit < THREADS => Finding::warning(
            CHECK,
            format!("the control group allows {limit}"),
            "raise it (--pids-limit, podPidsLimit): a rank has three to five threads of kvx's",
        ),
        Some(limit) => {
            Finding::ok(CHECK, format!("the control group allows {}", size::count(limit)))
        }
    })
}

fn clock(host: &Host) -> Option<Finding> {
    const CHECK: &str = "clock";
    let clock = host.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")?;
    Some(match CLOCKS.contains(&clock.as_str()) {
        true => Finding::ok(CHECK, clock),
        false => Finding::warning(
            CHECK,
            format!("{clock}: each reading of the time is a system call"),
            "find out why the kernel does not trust the processor's counter (dmesg | grep -i tsc)",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn a_small_shared_memory_is_warned_about() {
        assert_eq!(shm_of("x", 64 << 20).state, State::Warning);
        assert_eq!(shm_of("x", 8 << 30).state, State::Ok);
    }
}
