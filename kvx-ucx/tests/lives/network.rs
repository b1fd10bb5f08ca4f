//! Two network namespaces, joined by a pair of virtual interfaces.

use std::process::Command;
use std::time::{Duration, Instant};

use kvx_core::backend::TransferBackend as _;
use kvx_core::id::TransferId;
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};

use crate::pair::{block, open_with, skip, transfer};
use crate::peer::Process;

/// A namespace, deleted with its interfaces when dropped.
struct Namespace {
    name: String,
    inside: String,
    outside: String,
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("`ip {arguments}` failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

impl Namespace {
    fn new(six: bool) -> Result<Self, String> {
        let process = std::process::id();
        // The interfaces of a namespace that is gone take a while to go.
        static MADE: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let mark = format!("n{}", MADE.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        let name = format!("kvxu{process}{mark}");
        let (inside, outside) = (format!("ui{process}{mark}"), format!("uo{process}{mark}"));
        ip(&format!("netns add {name}"))?;
        let made = Self { name, inside, outside };
        let Self { name, inside, outside } = &made;
        ip(&format!("link add {outside} type veth peer name {inside} netns {name}"))?;
        // Of the ranges that are set aside for tests and for documents.
        let block = process % 60 * 4;
        let (here, there) = if six {
            (format!("2001:db8:{process:x}::1/64"), format!("2001:db8:{process:x}::2/64"))
        } else {
            (format!("198.19.255.{}/30", block + 1), format!("198.19.255.{}/30", block + 2))
        };
        let nodad = if six { " nodad" } else { "" };
        ip(&format!("addr add {here} dev {outside}{nodad}"))?;
        ip(&format!("link set {outside} up"))?;
        ip(&format!("-n {name} addr add {there} dev {inside}{nodad}"))?;
        ip(&format!("-n {name} link set lo up"))?;
        ip(&format!("-n {name} link set {inside} up"))?;
        for _ in 0..2000 {
            let state = std::fs::read_to_string(format!("/sys/class/net/{outside}/operstate"));
            if state.is_ok_and(|state| state.trim() == "up") {
                return Ok(made);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(format!("{outside} does not come up"))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Its interfaces go with it. There is nobody to tell if it fails.
        let _ = ip(&format!("netns del {}", self.name));
    }
}

/// Both, before UCX has read the machine's routes.
fn both() -> Option<[Namespace; 2]> {
    let made = Namespace::new(false).and_then(|four| Ok([four, Namespace::new(true)?]));
    made.map_err(|reason| skip(format!("two network namespaces cannot be had: {reason}"))).ok()
}

pub(crate) fn two_namespaces_of_both_families() {
    let Some(namespaces) = both() else { return };
    // In a process that has not connected yet: UCX 1.20 and later keep the routes that they find first.
    for (namespace, six) in namespaces.iter().zip([false, true]) {
        let family = if six { "inet6" } else { "inet" };
        let options = |device: &str| format!("tls=tcp,devices={device},ucx.TCP_AF_PRIO={family}");
        let one = match open_with(&options(&namespace.outside)) {
            Ok(one) => one,
            Err(error) if error.to_string().contains("TCP_AF_PRIO") => {
                skip("this UCX cannot be told the family of addresses");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let memory = Region::host(1 << 20).unwrap();
        let local = one.register(&memory).unwrap();
        let mut process = Process::start_in(&namespace.name, &options(&namespace.inside));
        let (peer, remote) = process.meet(&one).unwrap();
        block(one.connect(peer)).unwrap();
        let info = one.peer_info(peer).unwrap();
        assert_eq!(
            (info.transport.as_str(), info.device.as_deref()),
            ("tcp", Some(&*namespace.outside))
        );
        let segment =
            PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 1 << 20 };
        for (id, mode) in [(1, Mode::Read), (2, Mode::Write)] {
            transfer(&one, peer, TransferId(id), mode, &[segment]);
        }
    }
}

/// The two sides are told interfaces that do not reach each other: an error that says so, in time.
pub(crate) fn an_interface_that_leads_nowhere() {
    let Some([namespace, _other]) = both() else { return };
    let one = open_with(&format!("tls=tcp,devices={},connect_ms=1500", namespace.outside)).unwrap();
    let mut process = Process::start_in(&namespace.name, "tls=tcp,devices=lo");
    let begin = Instant::now();
    let met = process.meet(&one).and_then(|(peer, _)| block(one.connect(peer)));
    let error = met.unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}: {error}", begin.elapsed());
    assert!(error.remedy().is_some_and(|remedy| remedy.contains("devices")), "{error}");
}
