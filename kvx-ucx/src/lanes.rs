//! What an endpoint uses, from what UCX prints of it: every version does, and only later ones can be asked otherwise.

use std::fmt;

use kvx_core::backend::PeerInfo;
use kvx_core::transfer::Mode;

use crate::config::Names;

/// Transports and devices of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lanes {
    lanes: Vec<Lane>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Lane {
    transport: String,
    device: String,
    /// It moves data by itself. Where no lane does, messages do.
    data: bool,
    /// The peer's memory domain that it reaches.
    domain: Option<u32>,
}

/// What of a peer's memory UCX reads and writes without UCX's messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reach {
    /// What is registered with one of these memory domains of the peer's, a bit each.
    domains: u64,
    /// All of it.
    all: bool,
    /// All of it, to be written.
    writes: bool,
}

/// It has writes of its own, and no reads.
const ONLY_WRITES: &str = "tcp";
/// It reaches whatever the peer has mapped.
const WITHOUT_KEYS: &str = "cma";

impl Reach {
    /// Whether it reads, or writes, memory that is registered with these domains.
    pub(crate) const fn is_direct(self, mode: Mode, domains: u64) -> bool {
        self.all || self.domains & domains != 0 || (self.writes && matches!(mode, Mode::Write))
    }
}

impl Lanes {
    /// Reads lanes: `3:cma/memory.0 md[4] -> md[4]/cma/sysdev[255] rma_bw#0`.
    pub(crate) fn of(lines: &[String]) -> Self {
        let lanes = lines.iter().filter_map(|line| {
            let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            let name = name.split_once(':').map_or(name, |(_, name)| name);
            let (transport, device) = name.split_once('/')?;
            let device = device.rsplit_once('.').map_or(device, |(device, _)| device);
            let data = rest.split_whitespace().any(|word| word.starts_with("rma"));
            let there = rest.split_once("-> md[").and_then(|(_, rest)| rest.split_once(']'));
            let domain = there.and_then(|(number, _)| number.parse().ok());
            Some(Lane { transport: transport.to_owned(), device: device.to_owned(), data, domain })
        });
        Self { lanes: lanes.collect() }
    }

    /// Those that carry the data.
    fn data(&self) -> impl Iterator<Item = &Lane> {
        let any = self.lanes.iter().any(|lane| lane.data);
        self.lanes.iter().filter(move |lane| lane.data || !any)
    }

    /// What of the peer's memory they reach by themselves.
    pub(crate) fn reach(&self) -> Reach {
        let mut reach = Reach::default();
        for lane in self.lanes.iter().filter(|lane| lane.data) {
            match lane.transport.as_str() {
                ONLY_WRITES => reach.writes = true,
                WITHOUT_KEYS => reach.all = true,
                _ => reach.domains |= lane.domain.and_then(|domain| 1_u64.checked_shl(domain)).unwrap_or(0),
            }
        }
        reach
    }

    /// Whether all data goes by these transports.
    pub(crate) fn admitted_by(&self, names: &Names) -> bool {
        self.data().next().is_some() && self.data().all(|lane| names.admit(&lane.transport))
    }

    /// Transports, those that carry the data first, and their devices.
    pub(crate) fn info(&self) -> PeerInfo {
        let ordered = || self.data().chain(self.lanes.iter().filter(|lane| !lane.data));
        let join = |name: fn(&Lane) -> &str| {
            let mut names: Vec<&str> = Vec::new();
            for lane in ordered() {
                if !names.contains(&name(lane)) {
                    names.push(name(lane));
                }
            }
            names.join("+")
        };
        let info = PeerInfo::new(join(|lane| &lane.transport));
        match join(|lane| &lane.device) {
            device if device.is_empty() => info,
            device => info.with_device(device),
        }
    }
}

impl fmt::Display for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let info = self.info();
        match info.device {
            Some(device) => write!(f, "{} ({device})", info.transport),
            None => f.write_str(&info.transport),
        }
    }
}
