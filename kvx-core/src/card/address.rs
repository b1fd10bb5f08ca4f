//! Where a control channel listens.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use crate::wire::printable;
use crate::{Error, Result};

/// A host and a port, in one form: two addresses that are written differently and mean the same are equal, so that an
/// address can be a key.
///
/// Read from `10.0.0.1:5600`, `[2001:db8::1]:5600` or `decode-7.example:5600`. Names are lower case, without a dot at the
/// end; an IPv4 address mapped into IPv6 is IPv4. A name and the address that it resolves to remain two.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    host: Host,
    port: u16,
}

/// A host: an address or a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Host {
    /// An IPv4 address.
    V4(Ipv4Addr),
    /// An IPv6 address.
    V6(Ipv6Addr),
    /// A name, to be resolved by whoever dials.
    Name(String),
}

impl Address {
    /// Most bytes of an address as text: the longest name, and a port.
    pub const MAX_BYTES: usize = 253 + 6;

    /// An address of numbers.
    #[must_use]
    pub const fn new(ip: IpAddr, port: u16) -> Self {
        let host = match ip.to_canonical() {
            IpAddr::V4(ip) => Host::V4(ip),
            IpAddr::V6(ip) => Host::V6(ip),
        };
        Self { host, port }
    }

    /// The same host, and another port.
    #[must_use]
    pub const fn with_port(mut self, port: u16) -> Self {
        self.port = port;
        self
    }

    /// The host.
    #[must_use]
    pub const fn host(&self) -> &Host {
        &self.host
    }

    /// The port.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Whether it is on this very host: a loopback address, or `localhost`.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        match &self.host {
            Host::V4(ip) => ip.is_loopback(),
            Host::V6(ip) => ip.is_loopback(),
            Host::Name(name) => name == "localhost" || name.ends_with(".localhost"),
        }
    }

    /// One listens at `0.0.0.0` or port 0, but nobody can be reached there.
    pub(super) fn check_dialable(&self) -> Result<()> {
        let unspecified = match &self.host {
            Host::V4(ip) => ip.is_unspecified(),
            Host::V6(ip) => ip.is_unspecified(),
            Host::Name(_) => false,
        };
        if unspecified || self.port == 0 {
            return Err(Error::config("card", format!("nobody can be reached at {self}"))
                .with_remedy("publish the address and port by which peers reach this rank"));
        }
        Ok(())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::V6(ip) => write!(f, "[{ip}]:{}", self.port),
            host => write!(f, "{host}:{}", self.port),
        }
    }
}

/// The host alone: an IPv6 address has no brackets.
impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::V4(ip) => ip.fmt(f),
            Self::V6(ip) => ip.fmt(f),
            Self::Name(name) => f.write_str(name),
        }
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |why: &str| {
            Error::config("address", format!("{:?}: {why}", printable(text)))
                .with_remedy("write 10.0.0.1:5600, [2001:db8::1]:5600 or name:5600")
        };
        if text.len() > Self::MAX_BYTES {
            return Err(refuse("too long"));
        }
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (ip, port) =
                    rest.split_once(']').ok_or_else(|| refuse("the bracket is not closed"))?;
                if ip.contains('%') {
                    return Err(refuse("an address with a zone means something on one host only"));
                }
                let ip: Ipv6Addr = ip.parse().map_err(|_| refuse("not an IPv6 address"))?;
                let port = port.strip_prefix(':').ok_or_else(|| refuse("there is no port"))?;
                (IpAddr::V6(ip).into(), port)
            }
            None => {
                let (host, port) =
                    text.rsplit_once(':').ok_or_else(|| refuse("there is no port"))?;
                if host.contains(':') {
                    return Err(refuse("an IPv6 address stands in brackets"));
                }
                let host = match host.parse::<Ipv4Addr>() {
                    Ok(ip) => Host::V4(ip),
                    Err(_) => Host::Name(name(host).ok_or_else(|| refuse("not a host's name"))?),
                };
                (host, port)
            }
        };
        // `u16::from_str` would take "+5600".
        let port = Some(port)
            .filter(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
            .and_then(|port| port.parse().ok())
            .ok_or_else(|| refuse("the port is not a number up to 65535"))?;
        Ok(Self { host, port })
    }
}

impl From<IpAddr> for Host {
    fn from(ip: IpAddr) -> Self {
        match ip.to_canonical() {
            IpAddr::V4(ip) => Self::V4(ip),
            IpAddr::V6(ip) => Self::V6(ip),
        }
    }
}

/// A host's name in lower case, without a dot at the end: labels of letters, digits, `-` and `_`, the last not of digits
/// alone (that would be an IPv4 address gone wrong).
fn name(text: &str) -> Option<String> {
    let text = text.strip_suffix('.').unwrap_or(text);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let last = text.rsplit('.').next()?;
    let numeric = last.bytes().all(|byte| byte.is_ascii_digit());
    (text.len() <= 253 && text.split('.').all(label) && !numeric).then(|| text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Address> {
        text.parse()
    }

    /// Known failure 117 (sglang#24064, dynamo#3019): every way to write an address, and one form of it.
    #[test]
    fn one_form_of_every_address() {
        for (text, form) in [
            ("10.0.0.1:5600", "10.0.0.1:5600"),
            ("[::1]:5600", "[::1]:5600"),
            ("[2001:0DB8:0::1]:1", "[2001:db8::1]:1"),
            ("[::ffff:10.0.0.1]:5600", "10.0.0.1:5600"),
            ("localhost:65535", "localhost:65535"),
            ("Decode-7.Example.:5600", "decode-7.example:5600"),
            ("node_1:05600", "node_1:5600"),
        ] {
            let address = parse(text).unwrap();
            assert_eq!(address.to_string(), form);
            assert_eq!(parse(form).unwrap(), address);
        }
    }

    #[test]
    fn what_is_no_address_says_why() {
        for (text, why) in [
            ("::1", "brackets"),
            ("2001:db8::1:5600", "brackets"),
            ("[::1]", "no port"),
            ("[::1", "not closed"),
            ("[fe80::1%eth0]:5600", "zone"),
            ("[10.0.0.1]:5600", "not an IPv6"),
            ("10.0.0.1", "no port"),
            ("10.0.0.256:5600", "not a host's name"),
            ("10.0.1:5600", "not a host's name"),
            (":5600", "not a host's name"),
            ("-a:5600", "not a host's name"),
            ("a..b:5600", "not a host's name"),
            ("tcp//a:5600", "not a host's name"),
            ("a b:5600", "not a host's name"),
            ("a:", "the port"),
            ("a:+5600", "the port"),
            ("a:65536", "the port"),
            ("tcp://a:5600", "brackets"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text:?}: {error} does not say {why:?}");
        }
        assert!(parse(&format!("{}:1", "a".repeat(300))).unwrap_err().to_string().contains("long"));
    }

    #[test]
    fn nobody_is_reached_at_any_address() {
        for text in ["0.0.0.0:5600", "[::]:5600", "10.0.0.1:0"] {
            assert!(parse(text).unwrap().check_dialable().is_err(), "{text}");
        }
        parse("[::1]:5600").unwrap().check_dialable().unwrap();
    }

    #[test]
    fn loopback_is_known() {
        for (text, loopback) in
            [("127.0.0.9:1", true), ("[::1]:1", true), ("localhost:1", true), ("10.0.0.1:1", false)]
        {
            assert_eq!(parse(text).unwrap().is_loopback(), loopback, "{text}");
        }
    }
}
