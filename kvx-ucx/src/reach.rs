//! Whether anybody can be reached from here at all, and what is said where a peer cannot.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use kvx_core::wire::Text;
use kvx_core::{Error, ErrorKind, Result};

use crate::config::{Names, Options};
use crate::error::{BACKEND, down, failed};
use crate::handshake::checksum;
use crate::peer::Peer;
use crate::sys::{Context, Failure, Library, Status};

/// Transports within a host, or a process. None reports a dead peer, but for those of shared memory where they are told to.
const WITHIN: &[&str] = &["self", "sysv", "posix", "xpmem", "cma", "knem", "cuda", "gdr", "rocm", "ze"];
const SHARED_MEMORY: &[&str] = &["sysv", "posix", "xpmem"];
/// What has them do so.
const TOLD: &str = "MM_ERROR_HANDLING";
/// How UCX says that a device, or a transport, is not here.
const ABSENT: &str = " is not available";
/// How it says that there is no address of the peer's that an interface reaches.
const NO_ROUTE: &str = "no route to ";
/// What comes before an address to which the system has no way.
const NO_WAY: &str = "dest_addr=";

/// The transports that reach other hosts, with their devices, as a peer is told: as many as there is room for.
pub(crate) type Networks = Text<256>;

fn is_one_of(names: &[&str], resource: &str) -> bool {
    let transport = resource.split('/').next().unwrap_or(resource);
    names.iter().any(|name| transport.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('_')))
}

/// Of resources as in `tcp/eth0`.
pub(crate) fn networks(resources: &[String]) -> Networks {
    let mut text = String::new();
    for name in resources.iter().filter(|name| !is_one_of(WITHIN, name)) {
        if text.len() + name.len() + 5 > 256 {
            text += " ...";
            break;
        }
        let space = if text.is_empty() { "" } else { " " };
        text += &format!("{space}{name}");
    }
    Text::new(text).unwrap_or_default()
}

/// Whether TCP is all that reaches other processes, but for shared memory.
pub(crate) fn is_over_tcp_alone(resources: &[String]) -> bool {
    resources.iter().filter(|name| !is_one_of(WITHIN, name)).all(|name| is_one_of(&["tcp"], name))
}

/// Refuses what could never be connected.
pub(crate) fn check(context: &Context, options: &Options, said: &[&str]) -> Result<()> {
    let resources = context.resources();
    let reports = |name: &String| !is_one_of(WITHIN, name) || (options.says(TOLD) && is_one_of(SHARED_MEMORY, name));
    if resources.is_empty() || resources.iter().any(reports) {
        return Ok(());
    }
    let absent = said.iter().find(|line| line.contains(ABSENT));
    let (message, remedy) = match absent {
        Some(_) => (
            "nothing that was chosen and is here reaches a peer",
            "use what is here: kvx backends lists it where neither tls and devices nor UCX_TLS and UCX_NET_DEVICES choose",
        ),
        None if options.tls.is_some() || options.is_told("TLS") => (
            "no transport of those that were chosen reports a dead peer, so that no connection could be made",
            "add one that does, such as tcp, to tls or UCX_TLS; or see docs/ucx.md for ucx.MM_ERROR_HANDLING",
        ),
        None => (
            "UCX finds no network, so that no connection could be made",
            "see that an interface is up, and that /sys is there; or see docs/ucx.md for ucx.MM_ERROR_HANDLING",
        ),
    };
    let error = Error::unsupported("open", message).with_backend(BACKEND).with_context("found", resources.join(" "));
    let error = chosen(error, options).with_remedy(remedy);
    Err(match absent {
        Some(line) => error.with_context("said", line),
        None => error,
    })
}

/// With what this side was told to use.
fn chosen(mut error: Error, options: &Options) -> Error {
    let own = |names: &Option<Names>| names.as_ref().map(ToString::to_string);
    for (option, given, name) in [("tls", own(&options.tls), "TLS"), ("devices", own(&options.devices), "NET_DEVICES")] {
        if let Some(value) = given {
            error = error.with_context(option, value);
        } else if let Some(value) = options.said(name) {
            error = error.with_context(if name == "TLS" { "UCX_TLS" } else { "UCX_NET_DEVICES" }, value);
        }
    }
    error
}

/// An error for which it may be the reason that the two sides have different versions of UCX: then it names them.
pub(crate) fn of_versions(error: Error, library: &Library, peer: &Peer) -> Error {
    let ours = library.version_text();
    if peer.library.as_str() == ours {
        return error;
    }
    error.with_context("this side's UCX", ours).with_context("the peer's UCX", &peer.library)
}

/// With versions, where they differ, the networks of both sides, and what this one was told to use.
pub(crate) fn of_the_two(error: Error, library: &Library, options: &Options, here: &Networks, peer: &Peer) -> Error {
    let words = |networks: &Networks| if networks.as_str().is_empty() { "none".to_owned() } else { networks.to_string() };
    let error = error.with_context("here", words(here)).with_context("the peer has", words(&peer.networks));
    of_versions(chosen(error, options), library, peer)
}

/// Why no endpoint to a peer can be made.
pub(crate) fn unreached(
    operation: &'static str,
    failure: &Failure,
    (library, options): (&Library, &Options),
    (here, peer): (&Networks, &Peer),
) -> Error {
    let has = |what: &str| failure.said.iter().any(|line| line.contains(what));
    let transport = |name: &str| name.split('/').next().map(str::to_owned);
    let theirs: Vec<_> = peer.networks.as_str().split(' ').map(transport).collect();
    let in_common = here.as_str().split(' ').any(|name| name.contains('/') && theirs.contains(&transport(name)));
    let (message, remedy) = if in_common || has(NO_WAY) || has(NO_ROUTE) {
        (
            "no interface that is used here reaches the peer's",
            "choose interfaces that reach each other, on both sides: devices=...",
        )
    } else if has("no peer failure handler") {
        (
            "the two sides have no transport in common that reaches the peer",
            "add a transport that reports a dead peer, such as tcp, to tls and devices on both sides, or see docs/ucx.md for \
             ucx.MM_ERROR_HANDLING",
        )
    } else {
        (
            "the two sides have no transport in common that reaches the peer",
            "compare tls and devices of both sides (kvx backends)",
        )
    };
    // What later versions know of routes, and what the two sides were told to use, does not change until one of them is started anew.
    let passes = in_common && library.is_fragile();
    let error = if failure.status == Status::UNREACHABLE && passes {
        down(operation, message)
    } else if failure.status == Status::UNREACHABLE {
        Error::config(operation, message).with_backend(BACKEND)
    } else {
        failed(operation, "no endpoint can be made", library, failure.status)
    };
    let error = of_the_two(error.with_native(failure.status.0.into()).with_remedy(remedy), library, options, here, peer);
    match failure.said.first() {
        Some(line) => error.with_context("said", plain(line)),
        None => error,
    }
}

/// UCX's words without what it prints of addresses that it does not know.
fn plain(line: &str) -> String {
    let mut words = line.replace(" to <no debug data>", "");
    let mut from = 0;
    while let Some(at) = words[from..].find(NO_ROUTE).map(|at| from + at + NO_ROUTE.len()) {
        let length = words[at..].find([',', ' ']).unwrap_or(words.len() - at);
        words.replace_range(at..at + length, "the peer");
        from = at;
    }
    words
}

/// Addresses to which the system had no way, by the checksum of the worker's address that names them. For each attempt UCX 1.13 keeps a
/// socket until the worker ends, so it is asked again only once there is a way.
#[derive(Default)]
pub(crate) struct Barred(HashMap<u64, (SocketAddr, Error)>);

/// Most that are kept.
const MOST: usize = 1024;

impl Barred {
    /// Why there is no endpoint to be made still.
    pub(crate) fn why(&mut self, worker: &[u8]) -> Option<Error> {
        let key = checksum(worker);
        let (address, error) = self.0.get(&key)?;
        if has_way(*address) {
            self.0.remove(&key);
            return None;
        }
        Some(error.again())
    }

    pub(crate) fn note(&mut self, worker: &[u8], failure: &Failure, error: &Error) {
        let address = failure.said.iter().find_map(|line| {
            let (_, rest) = line.split_once(NO_WAY)?;
            rest.split([')', ' ']).next()?.parse::<SocketAddr>().ok()
        });
        if let Some(address) = address.filter(|address| !has_way(*address)) {
            if self.0.len() >= MOST {
                self.0.clear();
            }
            self.0.insert(checksum(worker), (address, error.again()));
        }
    }
}

/// Whether the system knows where to send to. Nothing is sent.
fn has_way(address: SocketAddr) -> bool {
    let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    UdpSocket::bind((any, 0)).is_ok_and(|socket| socket.connect(address).is_ok())
}

/// A peer to which too many connections wait to be ended: none of them ever came about.
pub(crate) fn stuck(operation: &'static str, count: usize) -> Error {
    Error::new(ErrorKind::Peer, operation, "none of the last connections to this peer came about, and UCX 1.13 still tries")
        .with_backend(BACKEND)
        .with_retry(kvx_core::Retry::Reconnect)
        .with_context("connections", count)
        .with_remedy("choose interfaces that reach each other, on both sides: devices=...; or use a later UCX")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_told_from_what_stays_within_a_host() {
        let names = ["cma/memory", "cuda_copy/cuda", "dc_mlx5/mlx5_0:1", "posix/memory", "self/memory0", "tcp/eth0", "zenith/x"];
        let names = names.map(str::to_owned);
        assert_eq!(networks(&names).as_str(), "dc_mlx5/mlx5_0:1 tcp/eth0 zenith/x");
        assert!(!is_over_tcp_alone(&names) && is_over_tcp_alone(&names[5..6]) && !is_over_tcp_alone(&names[2..3]));
        let many: Vec<_> = (0..100).map(|at| format!("tcp/eth{at}")).collect();
        assert!(networks(&many).as_str().ends_with(" ..."), "{}", networks(&many));
    }

    #[test]
    fn ucx_words_are_left_without_addresses_that_are_none() {
        let line = "no active messages transport to <no debug data>: self/memory - no peer failure handler, tcp/lo - no route to 184.191.184.105:53310, tcp/eth0 - no route to 1.2.3.4:5";
        assert_eq!(
            plain(line),
            "no active messages transport: self/memory - no peer failure handler, tcp/lo - no route to the peer, tcp/eth0 - no route to the peer"
        );
    }

    #[test]
    fn an_address_is_asked_for_again_only_once_there_is_a_way() {
        // Every system knows where to send for the loopback, and none lets anybody connect to all hosts.
        assert!(has_way("127.0.0.1:9".parse().unwrap()));
        let mut barred = Barred::default();
        let failure = |address: &str| Failure {
            call: "ucp_ep_create",
            status: Status::UNREACHABLE,
            said: vec![format!("connect(fd=65, dest_addr={address}) failed: Network is unreachable")],
        };
        let error = down("connect", "no way");
        barred.note(&[1], &failure("127.0.0.1:9"), &error);
        assert!(barred.why(&[1]).is_none());
        barred.note(&[1], &failure("255.255.255.255:9"), &error);
        assert!(barred.why(&[2]).is_none());
        assert!(barred.why(&[1]).is_some_and(|why| why.message() == "no way"));
    }
}
