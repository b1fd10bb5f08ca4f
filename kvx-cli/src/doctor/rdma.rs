//! RDMA devices, and whether they reach the memory of GPUs.

use super::Finding;
use crate::host::Host;
use crate::size;

const CHECK: &str = "RDMA";

pub(super) fn look(host: &Host) -> Vec<Finding> {
    let devices = host.names("/sys/class/infiniband");
    if devices.is_empty() {
        let mut findings =
            vec![Finding::ok(CHECK, "no device: data goes over TCP or shared memory")];
        findings.extend(gpu(host, false));
        return findings;
    }
    let mut findings: Vec<Finding> =
        devices.iter().flat_map(|device| ports(host, device)).collect();
    findings.push(verbs(host));
    findings.extend(gpu(host, true));
    findings
}

/// The device files that programs open.
fn verbs(host: &Host) -> Finding {
    let names = host.names("/dev/infiniband");
    let verbs: Vec<&String> = names.iter().filter(|name| name.starts_with("uverbs")).collect();
    if verbs.is_empty() {
        return Finding::failure(
            CHECK,
            "there are devices in /sys, and none in /dev/infiniband",
            "load ib_uverbs; in a container, hand in /dev/infiniband (a device plugin, or --device)",
        );
    }
    let usable = |name: &&&String| {
        let path = host.path(&format!("/dev/infiniband/{name}"));
        let access = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
        rustix::fs::access(path, access).is_ok()
    };
    let closed: Vec<&str> =
        verbs.iter().filter(|name| !usable(name)).map(|name| name.as_str()).collect();
    match closed.is_empty() {
        true => Finding::ok(
            CHECK,
            format!("{} can be opened", size::of_many(verbs.len() as u64, "device")),
        ),
        false => Finding::failure(
            CHECK,
            format!("this user may not open /dev/infiniband/{}", closed.join(", ")),
            "let the engine's user read and write them (mode 0666, or the group rdma)",
        ),
    }
}

/// One finding for each port of a device.
fn ports(host: &Host, device: &str) -> Vec<Finding> {
    let base = format!("/sys/class/infiniband/{device}/ports");
    let ports = host.names(&base);
    if ports.is_empty() {
        return vec![Finding::warning(
            CHECK,
            format!("{device} has no port"),
            "see dmesg for why its driver gave it none",
        )];
    }
    ports
        .iter()
        .map(|port| one(host, &format!("{device} port {port}"), &format!("{base}/{port}")))
        .collect()
}

fn one(host: &Host, name: &str, path: &str) -> Finding {
    // As in `4: ACTIVE`.
    let state = host.text(&format!("{path}/state")).unwrap_or_default();
    let state = state.rsplit(' ').next().unwrap_or_default().to_owned();
    let layer = host.text(&format!("{path}/link_layer")).unwrap_or_else(|| "unknown".to_owned());
    let rate = host.text(&format!("{path}/rate")).unwrap_or_default();
    if state != "ACTIVE" {
        return Finding::warning(
            CHECK,
            format!(
                "{name} ({layer}) is {}",
                if state.is_empty() { "in an unknown state" } else { &state }
            ),
            "connect it, bring its interface up, or leave it out (devices= of the backend ucx)",
        );
    }
    let gids = gids(host, path);
    if layer == "Ethernet" {
        let roce = gids
            .iter()
            .find(|gid| gid.is_roce_v2 && gid.is_v4)
            .or_else(|| gids.iter().find(|gid| gid.is_roce_v2));
        return match (gids.is_empty(), roce) {
            (true, _) => Finding::failure(
                CHECK,
                format!("{name} (RoCE) is ACTIVE and has no GID"),
                "give its interface an address: without one nothing can be routed",
            ),
            (false, Some(gid)) => Finding::ok(
                CHECK,
                format!("{name} (RoCE) is ACTIVE, {rate}; GID {} is RoCE v2", gid.index),
            ),
            (false, None) => Finding::warning(
                CHECK,
                format!("{name} (RoCE) is ACTIVE, {rate}; none of its GIDs is RoCE v2"),
                "give its interface an IP address: RoCE v1 does not cross routers",
            ),
        };
    }
    match gids.first() {
        Some(gid) => {
            Finding::ok(CHECK, format!("{name} ({layer}) is ACTIVE, {rate}; GID {}", gid.index))
        }
        None => Finding::failure(
            CHECK,
            format!("{name} ({layer}) is ACTIVE and has no GID"),
            "find out whether a subnet manager runs (opensm, or the switch's)",
        ),
    }
}

/// A GID that is set.
struct Gid {
    index: u32,
    is_roce_v2: bool,
    /// An IPv4 address in the form of an IPv6 one.
    is_v4: bool,
}

fn gids(host: &Host, path: &str) -> Vec<Gid> {
    let mut indexes: Vec<u32> =
        host.names(&format!("{path}/gids")).iter().filter_map(|name| name.parse().ok()).collect();
    indexes.sort_unstable();
    let gid = |index: u32| {
        let text = host.text(&format!("{path}/gids/{index}"))?;
        // What is not set is all zeros; what has only a prefix is no address either.
        let (_, interface) = text.split_at_checked(20)?;
        interface.chars().any(|digit| !matches!(digit, '0' | ':')).then_some(())?;
        let kind = host.text(&format!("{path}/gid_attrs/types/{index}")).unwrap_or_default();
        let is_v4 = text.starts_with("0000:0000:0000:0000:0000:ffff:");
        Some(Gid { index, is_roce_v2: kind == "RoCE v2", is_v4 })
    };
    indexes.into_iter().filter_map(gid).collect()
}

/// Whether cards reach the memory of GPUs.
fn gpu(host: &Host, has_rdma: bool) -> Option<Finding> {
    const CHECK: &str = "GPU direct";
    if !host.exists("/proc/driver/nvidia/version") {
        return has_rdma.then(|| Finding::ok(CHECK, "there is no driver of NVIDIA's"));
    }
    if !has_rdma {
        return Some(Finding::ok(
            CHECK,
            "there is no RDMA device that could reach the GPU's memory",
        ));
    }
    if host.exists("/sys/module/nvidia_peermem") || host.exists("/sys/module/nv_peer_mem") {
        return Some(Finding::ok(CHECK, "nvidia_peermem is loaded"));
    }
    let version = host.text("/proc/driver/nvidia/version").unwrap_or_default();
    let open = version.contains("Open Kernel Module");
    let kernel = host.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    Some(match open && at_least(&kernel, 5, 12) {
        true => Finding::ok(CHECK, format!("by dma-buf: open kernel modules, Linux {kernel}")),
        false => Finding::warning(
            CHECK,
            "nvidia_peermem is not loaded, and dma-buf cannot be used: caches pass through the host's memory",
            "modprobe nvidia-peermem; or use NVIDIA's open kernel modules with Linux 5.12 or later",
        ),
    })
}

/// Whether a kernel's release, as in `6.1.0-13-amd64`, is at least this one.
fn at_least(release: &str, major: u32, minor: u32) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(found)), Some(Ok(second))) = (numbers.next(), numbers.next()) else {
        return false;
    };
    (found, second) >= (major, minor)
}
