//! What an endpoint uses, from what UCX prints of it: every version does, and only later ones can be asked otherwise.

use std::fmt;

use kvx_core::backend::PeerInfo;

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
    /// It moves data by itself. Where no lane does, messages of UCX's own do.
    data: bool,
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
            Some(Lane { transport: transport.to_owned(), device: device.to_owned(), data })
        });
        Self { lanes: lanes.collect() }
    }

    /// Those that carry the data.
    fn data(&self) -> impl Iterator<Item = &Lane> {
        let any = self.lanes.iter().any(|lane| lane.data);
        self.lanes.iter().filter(move |lane| lane.data || !any)
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
