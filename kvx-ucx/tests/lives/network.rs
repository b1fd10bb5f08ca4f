//! Two network namespaces, joined by pairs of virtual interfaces. Each test in a process of its own: UCX 1.20 and later keep the
//! routes that they find first.

use std::process::Command;
use std::time::{Duration, Instant};

use kvx_core::ErrorKind;
use kvx_core::backend::{Events, TransferBackend as _};
use kvx_core::id::TransferId;
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};

use crate::count::Left;
use crate::pair::{alone, block, is_1_13, open_with, skip, transfer};
use crate::peer::Process;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Four,
    Six,
}

/// A namespace, deleted with its interfaces when dropped.
pub(crate) struct Namespace {
    pub(crate) name: String,
    pub(crate) links: Vec<Link>,
}

/// The two ends of a pair of virtual interfaces.
pub(crate) struct Link {
    pub(crate) inside: String,
    pub(crate) outside: String,
    /// The address of the outside.
    here: String,
    /// What both addresses are in, as long as nothing of it may leave this host.
    kept: Option<String>,
}

pub(crate) fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("`ip {arguments}` failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// Four addresses that nothing here has a way to yet, of which this is the first's last number.
fn free_block(from: u32) -> Result<u32, String> {
    let listed = |of: &str| {
        let output = Command::new("ip").args(["-4", "route", "show"]).args(of.split(' ')).output();
        output
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
            .map_err(|error| error.to_string())
    };
    let taken = listed("table all")? + &listed("cache")?;
    let last =
        |word: &str| word.strip_prefix("198.19.255.")?.split('/').next()?.parse::<u32>().ok();
    let taken: Vec<u32> = taken.split_whitespace().filter_map(last).collect();
    let mut blocks = (0..60).map(|next| (from + next) % 60 * 4);
    let free = blocks.find(|block| !taken.iter().any(|last| last / 4 == block / 4));
    free.ok_or_else(|| "no addresses are left in 198.19.255.0/24".to_owned())
}

impl Namespace {
    /// With as many links.
    pub(crate) fn new(family: Family, links: u32) -> Result<Self, String> {
        let process = std::process::id();
        let name = format!("kvxu{process}");
        ip(&format!("netns add {name}"))?;
        let mut made = Self { name, links: Vec::new() };
        ip(&format!("-n {} link set lo up", made.name))?;
        for index in 0..links {
            made.join(family, index)?;
        }
        Ok(made)
    }

    fn join(&mut self, family: Family, index: u32) -> Result<(), String> {
        let (name, process) = (&self.name, std::process::id());
        let (inside, outside) = (format!("ui{process}n{index}"), format!("uo{process}n{index}"));
        ip(&format!("link add {outside} type veth peer name {inside} netns {name}"))?;
        // Of the ranges that are set aside for tests and for documents.
        let (here, there, net) = match family {
            Family::Four => {
                let block = free_block(process * 2 + index)?;
                let address = |last| format!("198.19.255.{}/30", block + last);
                (address(1), address(2), Some(address(0)))
            }
            Family::Six => {
                let (process, net) = (process & 0xffff, index + 1);
                let address = |end| format!("2001:db8:{process:x}:{net:x}::{end}/64");
                (address(1), address(2), None)
            }
        };
        // What is sent while the link is down, or gone, must not leave by another interface: the system would remember of that way
        // how long its packets may be, and UCX 1.20 and later take it for the better one until it is forgotten, minutes later.
        let kept =
            net.filter(|net| ip(&format!("route add unreachable {net} metric 4000000000")).is_ok());
        let at_once = if family == Family::Six { " nodad" } else { "" };
        ip(&format!("addr add {here} dev {outside}{at_once}"))?;
        ip(&format!("link set {outside} up"))?;
        ip(&format!("-n {name} addr add {there} dev {inside}{at_once}"))?;
        ip(&format!("-n {name} link set {inside} up"))?;
        for _ in 0..2000 {
            let state = std::fs::read_to_string(format!("/sys/class/net/{outside}/operstate"));
            if state.is_ok_and(|state| state.trim() == "up") {
                let (here, _) = here.split_once('/').unwrap_or_default();
                self.links.push(Link { inside, outside, here: here.to_owned(), kept });
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(format!("{outside} does not come up"))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // With it they would go some time later: whoever opens UCX meanwhile may find one that is gone when it is to be used.
        for Link { outside, kept, .. } in &self.links {
            let _ = ip(&format!("link del {outside}"));
            if let Some(net) = kept {
                let _ = ip(&format!("route del unreachable {net} metric 4000000000"));
            }
        }
        // There is nobody to tell if it fails.
        let _ = ip(&format!("netns del {}", self.name));
    }
}

impl Link {
    /// Bytes that came through this side's end.
    fn bytes(&self) -> u64 {
        let path = |way| format!("/sys/class/net/{}/statistics/{way}_bytes", self.outside);
        let read = |way| std::fs::read_to_string(path(way)).unwrap().trim().parse::<u64>().unwrap();
        read("rx") + read("tx")
    }
}

/// Runs a test in a process of its own, with a namespace.
fn with_namespace(test: &str, family: Family, links: u32, act: impl FnOnce(&Namespace)) {
    let priority = if family == Family::Six { "inet6" } else { "inet" };
    // UCX 1.13 takes it from the environment only.
    alone(test, &[("UCX_TCP_AF_PRIO", priority)], || match Namespace::new(family, links) {
        Ok(namespace) => act(&namespace),
        Err(reason) => skip(format!("network namespaces cannot be had: {reason}")),
    });
}

/// Megabytes in both directions over one of two links, and nothing over the other.
fn over_the_chosen_link(namespace: &Namespace) {
    let [other, chosen] = namespace.links.as_slice() else { panic!("two links") };
    let options = |device: &str| format!("tls=tcp,devices={device}");
    let one = open_with(&options(&chosen.outside)).unwrap();
    let memory = Region::host(1 << 20).unwrap();
    let local = one.register(&memory).unwrap();
    let mut process = Process::start_in(&namespace.name, &options(&chosen.inside));
    let (peer, remote) = process.meet(&one).unwrap();
    block(one.connect(peer)).unwrap();
    let info = one.peer_info(peer).unwrap();
    let device = info.device.as_deref();
    assert_eq!((info.transport.as_str(), device), ("tcp", Some(&*chosen.outside)));
    let before = [other.bytes(), chosen.bytes()];
    let segment =
        PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 1 << 20 };
    for (id, mode) in [(1, Mode::Read), (2, Mode::Write)] {
        transfer(&one, peer, TransferId(id), mode, &[segment]);
    }
    let moved = [other.bytes() - before[0], chosen.bytes() - before[1]];
    assert!(
        moved[1] > 2 << 20 && moved[0] < 10_000,
        "bytes over the other and the chosen: {moved:?}"
    );
}

pub(crate) fn two_namespaces_over_ipv4() {
    with_namespace("two_namespaces_over_ipv4", Family::Four, 2, over_the_chosen_link);
}

pub(crate) fn two_namespaces_over_ipv6() {
    with_namespace("two_namespaces_over_ipv6", Family::Six, 2, over_the_chosen_link);
}

/// The two sides are told interfaces that do not reach each other: an error that says so, in time.
pub(crate) fn an_interface_that_leads_nowhere() {
    with_namespace("an_interface_that_leads_nowhere", Family::Four, 1, |namespace| {
        let outside = &namespace.links[0].outside;
        let options = format!("tls=tcp,devices={outside},connect_ms=1500");
        let one = open_with(&options).unwrap();
        let mut process = Process::start_in(&namespace.name, "tls=tcp,devices=lo");
        let begin = Instant::now();
        let met = process.meet(&one).and_then(|(peer, _)| block(one.connect(peer)));
        let error = met.unwrap_err();
        assert!(begin.elapsed() < Duration::from_secs(4), "{:?}: {error}", begin.elapsed());
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("devices")), "{error}");
    });
}

/// An address that this host does not reach, until dropped.
struct NoWay(String);

impl NoWay {
    fn to(address: String) -> Self {
        ip(&format!("route add unreachable {address}")).unwrap();
        Self(address)
    }
}

impl Drop for NoWay {
    fn drop(&mut self) {
        let _ = ip(&format!("route del unreachable {}", self.0));
    }
}

/// A second interface of the peer's, to which this host has no way: UCX may choose it. Then the error says so, and nothing is left
/// behind, however often it is tried.
pub(crate) fn an_interface_that_only_the_peer_reaches() {
    with_namespace("an_interface_that_only_the_peer_reaches", Family::Four, 1, |namespace| {
        let (name, process) = (&namespace.name, std::process::id());
        let (far, farther) = (format!("uf{process}"), format!("ug{process}"));
        let address = format!("198.19.254.{}/32", process % 254 + 1);
        ip(&format!("-n {name} link add {far} type veth peer name {farther}")).unwrap();
        ip(&format!("-n {name} addr add {address} dev {far}")).unwrap();
        for end in [&far, &farther] {
            ip(&format!("-n {name} link set {end} up")).unwrap();
        }
        // As on a host without a default route.
        let _route = NoWay::to(address);
        let options = "tls=tcp,connect_ms=1000";
        let one = open_with(&format!("{options},devices={}", namespace.links[0].outside)).unwrap();
        let mut process = Process::start_in(name, &format!("{options},devices={far}"));
        let mut before = None;
        for round in 0..6 {
            let met = process.meet(&one).and_then(|(peer, _)| block(one.connect(peer)));
            let error = met.unwrap_err();
            let text = error.to_string();
            // UCX 1.20 and later have the peer see it first.
            assert!(
                text.contains(&format!("=tcp/{far}")) && text.contains("the peer has="),
                "{text}"
            );
            assert!(error.remedy().is_some_and(|remedy| remedy.contains("devices")), "{text}");
            one.poll(&mut Events::with_limit(64));
            if round == 0 {
                before = Some(Left::at_rest());
            }
        }
        before.unwrap().is_all_that_is_left("six attempts");
    });
}

/// A way to an address that UCX 1.20 and later take for better than the link's, in the peer's namespace: in a table that the system
/// itself does not look at.
fn seems_elsewhere(namespace: &Namespace, address: &str) {
    ip(&format!("-n {} route add {address}/32 dev lo table 4711", namespace.name)).unwrap();
}

/// The peer finds no way to this side, and this side does to it: the two do not meet, it says why, and lives.
pub(crate) fn a_peer_that_does_not_reach_this_side_lives() {
    with_namespace("a_peer_that_does_not_reach_this_side_lives", Family::Four, 1, |namespace| {
        let link = &namespace.links[0];
        let options = |device: &str| format!("tls=tcp,devices={device}");
        seems_elsewhere(namespace, &link.here);
        let one = open_with(&options(&link.outside)).unwrap();
        let mut process = Process::start_in(&namespace.name, &options(&link.inside));
        for round in 0..4 {
            let met = process.meet(&one);
            assert!(process.ended().is_none(), "round {round}: the peer has ended");
            // It does not look at routes.
            if is_1_13() {
                met.unwrap();
                continue;
            }
            let text = met.unwrap_err().to_string();
            assert!(text.contains("no interface that is used here reaches the peer's"), "{text}");
            assert!(text.contains(&format!("the peer has=tcp/{}", link.outside)), "{text}");
        }
    });
}

/// An interface without an address, and one that is down: refused by name when the backend is opened.
pub(crate) fn an_interface_that_is_of_no_use() {
    with_namespace("an_interface_that_is_of_no_use", Family::Four, 1, |namespace| {
        let outside = &namespace.links[0].outside;
        ip(&format!("addr flush dev {outside}")).unwrap();
        for state in ["up", "down"] {
            ip(&format!("link set {outside} {state}")).unwrap();
            let begin = Instant::now();
            let error = open_with(&format!("tls=tcp,devices={outside}")).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains(outside), "{state}: {error}");
            assert!(begin.elapsed() < Duration::from_secs(2), "{:?}: {error}", begin.elapsed());
        }
    });
}
