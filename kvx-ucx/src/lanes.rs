//! What an endpoint uses, from what UCX prints of it: every version does, and only later ones can be asked otherwise.

use std::fmt;

use kvx_core::backend::PeerInfo;
use kvx_core::transfer::Mode;

use crate::config::{Names, Options};
use crate::sys::Library;

/// Transports and devices of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lanes {
    lanes: Vec<Lane>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Lane {
    transport: String,
    device: String,
    /// It reads and writes the peer's memory by itself.
    data: bool,
    /// It carries messages.
    messages: bool,
    /// The peer's memory domain that it reaches.
    domain: Option<u32>,
}

/// Which lanes UCX's reads and writes take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// All that can: UCX from 1.20 on.
    All,
    /// Only those that are also for the smallest ones. The others are for rendezvous, which kvx has switched off: 1.13, which takes CMA
    /// for nothing else, and later ones without their new protocols (`PROTO_ENABLE=n`).
    Plain,
}

impl Taken {
    pub(crate) fn by(library: &Library, options: &Options) -> Self {
        if library.is_fragile() || options.denies("PROTO_ENABLE") { Self::Plain } else { Self::All }
    }
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
    /// Reads lanes: `3:cma/memory.0 md[4] -> md[4]/cma/sysdev[255] rma_bw#0`. Those that nothing takes are left out.
    pub(crate) fn of(lines: &[String], taken: Taken) -> Self {
        let lanes = lines.iter().filter_map(|line| {
            let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            let name = name.split_once(':').map_or(name, |(_, name)| name);
            let (transport, device) = name.split_once('/')?;
            let device = device.rsplit_once('.').map_or(device, |(device, _)| device);
            let roles = || rest.split_whitespace().map(|word| word.split('#').next().unwrap_or(word));
            let data = roles().any(|role| role == "rma" || (role == "rma_bw" && taken == Taken::All));
            let messages = roles().any(|role| role == "am" || role == "am_bw");
            if !data && roles().any(|role| role == "rma_bw") && !roles().any(|role| matches!(role, "am" | "am_bw" | "wireup")) {
                return None;
            }
            let there = rest.split_once("-> md[").and_then(|(_, rest)| rest.split_once(']'));
            let domain = there.and_then(|(number, _)| number.parse().ok());
            Some(Lane { transport: transport.to_owned(), device: device.to_owned(), data, messages, domain })
        });
        Self { lanes: lanes.collect() }
    }

    /// Those that carry the data: where none of them reads, those of messages do that.
    fn data(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().filter(|lane| self.carries(lane))
    }

    fn carries(&self, lane: &Lane) -> bool {
        let reads = self.lanes.iter().any(|lane| lane.data && lane.transport != ONLY_WRITES);
        let any = |of: fn(&Lane) -> bool| self.lanes.iter().any(of);
        lane.data || (!reads && lane.messages) || !any(|lane| lane.data || lane.messages)
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
        let ordered = || self.data().chain(self.lanes.iter().filter(|lane| !self.carries(lane)));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(lines: &[&str], taken: Taken) -> Lanes {
        let lines: Vec<_> = lines.iter().map(|line| (*line).to_owned()).collect();
        Lanes::of(&lines, taken)
    }

    /// 1.13 lists CMA, and reads and writes by TCP's messages.
    #[test]
    fn what_only_rendezvous_would_take_carries_nothing() {
        let lines = [
            "2:tcp/lo.0 md[1]                -> md[1]/tcp/sysdev[255] am am_bw#0 wireup",
            "5:cma/memory.0 md[4]            -> md[4]/cma/sysdev[255] rma_bw#0",
        ];
        let [old, new] = [Taken::Plain, Taken::All].map(|taken| lanes(&lines, taken));
        assert_eq!((old.to_string(), new.to_string()), ("tcp (lo)".into(), "cma+tcp (memory+lo)".into()));
        let names = |text: &str| text.parse::<Names>().unwrap();
        assert!(old.admitted_by(&names("tcp")) && !old.admitted_by(&names("cma")));
        assert!(new.admitted_by(&names("cma")) && !new.admitted_by(&names("tcp")));
        let reads = |lanes: &Lanes| lanes.reach().is_direct(Mode::Read, 0);
        assert!(!reads(&old) && reads(&new));
        // What is for all reads and writes is taken by every version.
        let card = ["0:rc_mlx5/mlx5_0:1.0 md[4] -> md[3]/ib/sysdev[1] rma#0 rma_bw#0 am am_bw#0"];
        assert!([Taken::Plain, Taken::All].iter().all(|taken| lanes(&card, *taken).reach().is_direct(Mode::Read, 1 << 3)));
    }

    /// TCP writes by itself; what is read comes by messages, and those may go elsewhere.
    #[test]
    fn what_carries_reads_is_required_too() {
        let lines = ["0:tcp/lo.0 md[0] -> md[0]/tcp/sysdev[255] rma_bw#0", "1:sysv/memory.0 md[1] -> md[1]/sysv/sysdev[255] am"];
        let lanes = lanes(&lines, Taken::All);
        assert!(!lanes.admitted_by(&"tcp".parse().unwrap()) && lanes.admitted_by(&"tcp+sysv".parse().unwrap()));
    }
}
