//! Whether it can be used here, and what was found.

use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::config::BackendConfig;
use kvx_core::limits::{self, Wanted};
use kvx_core::registry::Probe;

use crate::config::{Options, Tracer};
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

/// The oldest that has all that it needs: `memfd_create` with `F_SEAL_FUTURE_WRITE` came with 5.1, `pidfd_open` with 5.3.
const LINUX: &str = "Linux 5.3 or later";

pub(crate) fn capabilities(host: &Host) -> Capabilities {
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
    can.place = Some(host.place());
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
            return Probe::bad_options(&error, "docs/shm.md says which options there are, and of what values");
        }
    };
    let host = match Host::here() {
        Ok(host) => host,
        Err(error) => {
            let why = format!("/proc does not say where this process is: {error}");
            return unavailable(why, "mount /proc");
        }
    };
    let refused = |what: &str, error: &std::io::Error, otherwise: &str| {
        let remedy = limits::remedy(error, Wanted::Shared(1));
        unavailable(format!("{what}: {error}"), remedy.as_deref().unwrap_or(otherwise))
    };
    if let Err(error) = Own::new("kvx-shm-probe", 1, Pages::Normal, |_, _| Ok(())) {
        let otherwise =
            format!("use {LINUX}, and allow memfd_create and fcntl(F_ADD_SEALS) in seccomp filters");
        return refused("memory cannot be made and sealed", &error, &otherwise);
    }
    let name = format!("kvx-shm-probe-{}", std::process::id());
    if let Err(error) = socket::listen(name.as_bytes())
        && error.kind() != std::io::ErrorKind::AddrInUse
    {
        return refused("no Unix socket can be had", &error, "allow Unix sockets in seccomp filters");
    }
    if let Err(error) = socket::sees_processes() {
        let otherwise = format!("use {LINUX}, and allow pidfd_open in seccomp filters");
        return refused("the end of another process cannot be seen", &error, &otherwise);
    }
    let borrowed = borrowed(vm::ptrace_scope(), vm::has_ptrace_capability(), options.ptracer);
    let detail = format!("one host; borrowed memory {borrowed}; {}", huge_pages());
    Probe::Available { detail, capabilities: Box::new(capabilities(&host)) }
}

/// What is known about reading other processes' memory before there is a peer: by Yama's `ptrace_scope`, whether this process
/// has `CAP_SYS_PTRACE`, and whom it lets read its own.
fn borrowed(scope: Option<u32>, capable: bool, ptracer: Tracer) -> &'static str {
    match scope {
        Some(3) => "cannot be read: kernel.yama.ptrace_scope is 3; allocate with kvx",
        Some(2) if !capable => {
            "cannot be read: kernel.yama.ptrace_scope is 2 and CAP_SYS_PTRACE is missing; allocate with kvx"
        }
        Some(1) if !capable && ptracer == Tracer::None => {
            "is not read by others: kernel.yama.ptrace_scope is 1; set ptracer=peer or ptracer=any"
        }
        Some(1) if !capable && ptracer == Tracer::Peer => {
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
    fn ptrace_scope_is_named_where_it_matters() {
        for (scope, capable, ptracer, says) in [
            (None, false, Tracer::Peer, "by process_vm_readv"),
            (Some(0), false, Tracer::None, "by process_vm_readv"),
            (Some(1), false, Tracer::None, "is not read by others"),
            (Some(1), false, Tracer::Peer, "one peer at a time"),
            (Some(1), false, Tracer::Any, "by process_vm_readv"),
            (Some(1), true, Tracer::None, "by process_vm_readv"),
            (Some(2), false, Tracer::Any, "CAP_SYS_PTRACE is missing"),
            (Some(2), true, Tracer::Any, "by process_vm_readv"),
            (Some(3), true, Tracer::Any, "ptrace_scope is 3"),
        ] {
            let said = borrowed(scope, capable, ptracer);
            assert!(said.contains(says), "{scope:?} {capable} {ptracer:?}: {said}");
            assert_eq!(said.contains("ptrace_scope"), said != "by process_vm_readv", "{said}");
        }
    }

    /// What is said where it cannot be used is what the documents say.
    #[test]
    fn documents_name_the_same_system() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        for (document, in_a_table) in [("README.md", false), ("../docs/shm.md", true)] {
            let text = std::fs::read_to_string(folder.join(document)).unwrap();
            let named = if in_a_table { LINUX.replace(" or later", ", 64 bits") } else { LINUX.into() };
            assert!(text.contains(&named), "{document} does not name {named}");
        }
    }

    #[test]
    fn it_says_what_it_found_and_what_it_claims() {
        let Probe::Available { detail, capabilities } = probe(&BackendConfig::new()) else {
            panic!("not available on the machine that runs its tests");
        };
        assert!(detail.contains("borrowed memory") && detail.contains("huge pages"), "{detail}");
        capabilities.check().unwrap();
        let Probe::BadOptions { reason, remedy } = probe(&"sped=1".parse().unwrap()) else {
            panic!("an unknown option was taken");
        };
        assert!(reason.contains("\"sped\"") && remedy.is_some(), "{reason}");
    }
}
