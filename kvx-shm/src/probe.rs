//! Whether it can be used here, and what was found.

use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::config::BackendConfig;
use kvx_core::registry::Probe;

use crate::config::Options;
use crate::host::Host;
use crate::link::CANCELS;
use crate::sys::memfd::{Own, Pages};
use crate::sys::{socket, vm};

/// Segments of a batch: its record must fit into half of a ring, whatever regions it names.
pub(crate) const BATCH: u32 = 4096;
/// Bytes of a notification.
pub(crate) const NOTIFICATION: u32 = 4096;
/// Bytes of a segment.
pub(crate) const SEGMENT: u64 = 4 << 20;
/// Batches in flight to a peer.
pub(crate) const IN_FLIGHT: u32 = 64;

const _: () = assert!((IN_FLIGHT as u64) < CANCELS);
const _: () = assert!(
    BATCH as usize * (24 + 16 + 32) + NOTIFICATION as usize + 64 <= crate::link::RING / 2,
    "the largest record does not fit"
);

pub(crate) fn capabilities(_: &Options) -> Capabilities {
    let mut can = Capabilities::none();
    can.read = true;
    can.write = true;
    can.host_memory = true;
    can.limits.max_segment_bytes = SEGMENT;
    can.limits.max_batch_segments = BATCH;
    can.limits.max_notification_bytes = NOTIFICATION;
    can.limits.max_in_flight = IN_FLIGHT;
    can.ordering = Ordering::PerPeer;
    can.revoke = Revoke::PerPeer;
    can.native_notification = true;
    can.event_fd = true;
    can
}

pub(crate) fn probe(config: &BackendConfig) -> Probe {
    let unavailable = |reason: String, remedy: &str| Probe::Unavailable {
        reason,
        remedy: Some(remedy.to_owned()),
    };
    let options = match Options::read(config) {
        Ok(options) => options,
        Err(error) => {
            return unavailable(error.to_string(), "see docs/shm.md for the options of this backend");
        }
    };
    if let Err(error) = Host::here() {
        return unavailable(format!("/proc does not say where this process is: {error}"), "mount /proc");
    }
    if let Err(error) = Own::new("kvx-shm-probe", 1, Pages::Normal, |_, _| Ok(())) {
        return unavailable(
            format!("memory cannot be made and sealed: {error}"),
            "use Linux 5.1 or later, and allow memfd_create and fcntl(F_ADD_SEALS) in seccomp filters",
        );
    }
    let name = format!("kvx-shm-probe-{}", std::process::id());
    if let Err(error) = socket::listen(name.as_bytes())
        && error.kind() != std::io::ErrorKind::AddrInUse
    {
        return unavailable(
            format!("no Unix socket can be had: {error}"),
            "raise the limit on open files (ulimit -n)",
        );
    }
    let detail = format!("one host; borrowed memory {}; {}", borrowed(&options), huge_pages());
    Probe::Available { detail, capabilities: Box::new(capabilities(&options)) }
}

/// What is known about reading other processes' memory before there is a peer.
fn borrowed(options: &Options) -> &'static str {
    use crate::config::Tracer;
    let capable = vm::has_ptrace_capability();
    match vm::ptrace_scope() {
        Some(3) => "cannot be read: kernel.yama.ptrace_scope is 3; allocate with kvx",
        Some(2) if !capable => {
            "cannot be read: kernel.yama.ptrace_scope is 2 and CAP_SYS_PTRACE is missing; allocate with kvx"
        }
        Some(1) if !capable && options.ptracer == Tracer::None => {
            "is not read by others: kernel.yama.ptrace_scope is 1; set ptracer=peer or ptracer=any"
        }
        Some(1) if !capable && options.ptracer == Tracer::Peer => {
            "by process_vm_readv, one peer at a time: kernel.yama.ptrace_scope is 1; for several set ptracer=any"
        }
        _ => "by process_vm_readv",
    }
}

fn huge_pages() -> String {
    let read = |name: &str| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()
    };
    match (read("free_hugepages"), read("nr_hugepages")) {
        (Some(free), Some(all)) => format!("huge pages of 2 MiB: {free} of {all} free"),
        _ => "no huge pages".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_it_found_and_what_it_claims() {
        let Probe::Available { detail, capabilities } = probe(&BackendConfig::new()) else {
            panic!("not available on the machine that runs its tests");
        };
        assert!(detail.contains("borrowed memory") && detail.contains("huge pages"), "{detail}");
        capabilities.check().unwrap();
        let Probe::Unavailable { reason, remedy } = probe(&"sped=1".parse().unwrap()) else {
            panic!("an unknown option was taken");
        };
        assert!(reason.contains("\"sped\"") && remedy.is_some(), "{reason}");
    }
}
