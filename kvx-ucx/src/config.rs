//! Options, and opening by name.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kvx_core::backend::TransferBackend;
use kvx_core::config::BackendConfig;
use kvx_core::registry::Opener;
use kvx_core::{Error, Result};

use crate::backend::UcxBackend;
use crate::error::BACKEND;
use crate::nonsense;

/// How to open the backend. Each field is an option of the same name ([`BackendConfig`]), but for [`settings`](Self::settings).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// The library: a path to `libucp.so.0`, the directory that it is in, or a name for the loader to find. Unless said: the environment's `KVX_UCX_LIB`, or
    /// else the system's. A process can open one.
    pub lib: Option<String>,
    /// Transports that may be used, as in `UCX_TLS`: any that UCX chooses, unless said. As text: `tcp+sm`.
    pub tls: Option<Names>,
    /// Network devices that may be used, as in `UCX_NET_DEVICES`: any, unless said. As text: `eth0+mlx5_0:1`.
    pub devices: Option<Names>,
    /// One of these transports must carry the data, or connecting fails: none is required, unless said. A name that ends in
    /// `*` stands for all that begin like it. As text: `rc_*+dc_*`.
    pub require: Option<Names>,
    /// Most operations to one peer that UCX is given at a time: 256 unless said. The rest of a batch waits.
    pub window: u32,
    /// A region is registered in pieces of at most this many bytes: in one, unless said.
    pub piece_bytes: u64,
    /// The longest time that connecting may take, in milliseconds: 5000 unless said.
    pub connect_ms: u64,
    /// More settings of UCX's, by their names without `UCX_`. As options: `ucx.NAME=value`.
    pub settings: Vec<(String, String)>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            lib: None,
            tls: None,
            devices: None,
            require: None,
            window: 256,
            piece_bytes: u64::MAX,
            connect_ms: 5000,
            settings: Vec::new(),
        }
    }
}

/// The names of all options, but for those of UCX's own.
const NAMES: &[&str] =
    &["lib", "tls", "devices", "require", "window", "piece_bytes", "connect_ms", "ucx.NAME"];

/// What options of UCX's own begin with.
const PREFIX: &str = "ucx.";

impl Options {
    /// Reads the options of a [`BackendConfig`].
    ///
    /// # Errors
    ///
    /// [`kvx_core::ErrorKind::Config`], naming the option and its text.
    pub fn read(config: &BackendConfig) -> Result<Self> {
        let (settings, plain): (Vec<_>, Vec<_>) =
            config.iter().partition(|(name, _)| name.starts_with(PREFIX));
        let plain: BackendConfig = plain.into_iter().collect();
        plain.refuse_unknown(NAMES).map_err(|error| error.with_backend(BACKEND))?;
        let default = Self::default();
        let options = Self {
            lib: config.text("lib").map(str::to_owned),
            tls: config.value("tls")?,
            devices: config.value("devices")?,
            require: config.value("require")?,
            window: config.value("window")?.unwrap_or(default.window),
            piece_bytes: config.value("piece_bytes")?.unwrap_or(default.piece_bytes),
            connect_ms: config.value("connect_ms")?.unwrap_or(default.connect_ms),
            settings: settings
                .into_iter()
                .map(|(name, value)| setting(&name[PREFIX.len()..], value))
                .collect::<Result<_>>()?,
        };
        options.check()?;
        Ok(options)
    }

    fn check(&self) -> Result<()> {
        let wrong = |name: &'static str, value: u64, remedy: &'static str| {
            Err(Error::config("options", format!("{name} is out of range"))
                .with_backend(BACKEND)
                .with_context(name, value)
                .with_remedy(remedy))
        };
        if self.lib.as_ref().is_some_and(String::is_empty) {
            return Err(Error::config("options", "lib names no library")
                .with_backend(BACKEND)
                .with_remedy("name its libucp.so.0, or the directory that it is in; or leave lib out"));
        }
        for (option, given, name) in
            [("tls", self.tls.is_some(), "TLS"), ("devices", self.devices.is_some(), "NET_DEVICES")]
        {
            if given && self.settings.iter().any(|(known, _)| known == name) {
                return Err(Error::config("options", format!("{option} and ucx.{name} are the same setting"))
                    .with_backend(BACKEND)
                    .with_remedy("leave one of them out"));
            }
        }
        if self.window == 0 {
            return wrong("window", 0, "use 1 or more");
        }
        if self.piece_bytes < 4096 {
            return wrong("piece_bytes", self.piece_bytes, "use 4096 or more");
        }
        if !(1..=600_000).contains(&self.connect_ms) {
            return wrong("connect_ms", self.connect_ms, "use 1 to 600000");
        }
        Ok(())
    }

    pub(crate) const fn connect_bound(&self) -> Duration {
        Duration::from_millis(self.connect_ms)
    }

    /// Whether a setting of UCX's that is off unless asked for is on, here or in the environment.
    pub(crate) fn says(&self, name: &str) -> bool {
        self.said(name).is_some_and(|value| matches!(&*value.to_ascii_lowercase(), "y" | "yes" | "1" | "on" | "true"))
    }

    /// Whether one that is on unless asked for is off.
    pub(crate) fn denies(&self, name: &str) -> bool {
        self.said(name).is_some_and(|value| matches!(&*value.to_ascii_lowercase(), "n" | "no" | "0" | "off" | "false"))
    }

    /// Whether a setting of UCX's has a value, here or in the environment.
    pub(crate) fn is_told(&self, name: &str) -> bool {
        self.said(name).is_some()
    }

    pub(crate) fn said(&self, name: &str) -> Option<String> {
        let here = self.settings.iter().rev().find(|(known, _)| known == name);
        let value = here.map(|(_, value)| value.clone());
        value.or_else(|| std::env::var(format!("UCX_{name}")).ok())
    }

    /// What UCX is told.
    pub(crate) fn told(&self) -> Vec<(String, String)> {
        let own = [("TLS", &self.tls), ("NET_DEVICES", &self.devices)];
        let own = own.into_iter().filter_map(|(name, value)| {
            Some((name.to_owned(), value.as_ref()?.0.join(",")))
        });
        let quiet = self.unless_said(&[KEEPALIVE]);
        let eager = (EAGER.0.to_owned(), EAGER.1.to_owned());
        own.chain(quiet).chain(self.settings.iter().cloned()).chain([eager]).collect()
    }

    /// What UCX is told besides, if it takes it.
    pub(crate) fn preferred(&self) -> Vec<(String, String)> {
        self.unless_said(PREFERRED).collect()
    }

    /// What 1.13 is told where only TCP reaches other processes.
    pub(crate) fn copying(&self) -> Vec<(String, String)> {
        self.unless_said(&[COPYING]).collect()
    }

    /// Those of these settings that neither the options nor the environment have.
    fn unless_said(&self, settings: &[(&str, &str)]) -> impl Iterator<Item = (String, String)> {
        settings.iter().filter(|(name, _)| {
            !self.settings.iter().any(|(said, _)| said == name)
                && std::env::var_os(format!("UCX_{name}")).is_none()
        }).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
    }
}

/// What is as good as said where nobody says otherwise, and the library takes it. TCP sends, and carries data where it has none of
/// its own ways, in messages of so many bytes; UCX's choice of 8 KiB makes that half as fast. No more than UCX's own choice of what
/// a receiver has room for: it may be a library that does not take this. By reading and writing the other's memory (CMA) it makes one copy in
/// each round of progress, and asks the other transports in between, by a system call for TCP: so eight.
const PREFERRED: &[(&str, &str)] = &[("TCP_TX_SEG_SIZE", "64k"), ("CMA_TX_QUOTA", "8")];

/// UCX's keepalive, off unless asked for. On, 1.22 may look through an endpoint that is still being made at a lane that it does
/// not have yet, and crash (`ucp_ep_do_uct_ep_am_keepalive` with a null pointer).
const KEEPALIVE: (&str, &str) = ("KEEPALIVE_INTERVAL", "inf");

/// What is sent is copied into UCX's own buffers first. Where it is not, 1.13 was seen to end the process when a peer dies: over TCP it
/// seems to tell of the end of such a piece twice (`uct_invoke_completion`, "comp->count > 0"). Cards would need to copy, too.
const COPYING: (&str, &str) = ("ZCOPY_THRESH", "inf");

/// What is sent under a tag is waited for already, and goes at once: UCX must not ask the receiver for it, by messages of its own that
/// end the process where the receiver is gone.
const EAGER: (&str, &str) = ("RNDV_THRESH", "inf");

fn setting(name: &str, value: &str) -> Result<(String, String)> {
    let plain = !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_');
    if !plain || value.contains('\0') {
        return Err(Error::config("options", format!("ucx.{name} is no name of a setting of UCX"))
            .with_backend(BACKEND)
            .with_remedy("write the name as in UCX's documentation, without UCX_: ucx.TCP_PORT_RANGE=..."));
    }
    if name == EAGER.0 {
        return Err(Error::config("options", format!("ucx.{name} is set by kvx"))
            .with_backend(BACKEND)
            .with_context(EAGER.0, EAGER.1)
            .with_remedy("leave it out"));
    }
    nonsense::check("options", PREFIX, name, value)?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Names, at least one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Names(pub Vec<String>);

impl Names {
    /// Whether a name is among them. One that ends in `*` stands for all that begin like it.
    #[must_use]
    pub fn admit(&self, name: &str) -> bool {
        self.0.iter().any(|known| match known.strip_suffix('*') {
            Some(begin) => name.starts_with(begin),
            None => known == name,
        })
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("+"))
    }
}

/// Reads names with plus signs or commas between them.
impl FromStr for Names {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names: Vec<String> =
            text.split(['+', ',']).map(|name| name.trim().to_owned()).collect();
        let plain = |name: &String| !name.is_empty() && !name.contains(char::is_control);
        if names.iter().all(plain) {
            Ok(Self(names))
        } else {
            Err("write names with plus signs between, for example tcp+sm".to_owned())
        }
    }
}

/// Opens the backend.
pub(crate) struct Open;

#[async_trait]
impl Opener for Open {
    async fn open(&self, config: &BackendConfig) -> Result<Arc<dyn TransferBackend>> {
        Ok(UcxBackend::open(&Options::read(config)?)?)
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::ErrorKind;

    use super::*;

    #[test]
    fn options_are_read_and_refused_by_name() {
        let read = |text: &str| Options::read(&text.parse().unwrap());
        assert_eq!(read("").unwrap(), Options::default());
        let options = read("tls=sm+tcp,devices=eth0,window=3,ucx.TCP_PORT_RANGE=1000-2000").unwrap();
        let told: Vec<_> = options.told();
        let told: Vec<_> = told.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        let wanted = [("TLS", "sm,tcp"), ("NET_DEVICES", "eth0"), KEEPALIVE, ("TCP_PORT_RANGE", "1000-2000"), EAGER];
        assert_eq!(told, wanted);
        let asked = ("KEEPALIVE_INTERVAL".to_owned(), "20s".to_owned());
        assert_eq!(read("ucx.KEEPALIVE_INTERVAL=20s").unwrap().told().first(), Some(&asked));
        assert_eq!(read("").unwrap().preferred().len(), PREFERRED.len());
        let left = read("ucx.TCP_TX_SEG_SIZE=8k").unwrap().preferred();
        assert_eq!(left, [("CMA_TX_QUOTA".to_owned(), "8".to_owned())]);
        for wrong in ["tsl=tcp", "window=0", "window=x", "ucx.=1", "ucx.tls=tcp", "tls=", "piece_bytes=1", "connect_ms=0", "ucx.RNDV_THRESH=1m", "lib=",
            "tls=tcp,ucx.TLS=sm", "devices=lo,ucx.NET_DEVICES=eth0"] {
            let error = read(wrong).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{wrong}: {error}");
        }
        assert!(read("tsl=tcp").unwrap_err().to_string().contains("require"));
    }

    #[test]
    fn required_transports_may_be_families() {
        let names: Names = "rc_*+tcp".parse().unwrap();
        assert!(names.admit("rc_mlx5") && names.admit("tcp"));
        assert!(!names.admit("tcp6") && !names.admit("ud_mlx5") && !names.admit(""));
    }
}
