//! What the control channel needs: a port, a name, a key.

use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use kvx_connector::control::Key;
use kvx_core::card::Address;

use super::Finding;
use crate::args::DoctorArgs;
use crate::serve;

pub(super) fn look(args: &DoctorArgs) -> Vec<Finding> {
    let mut findings = vec![loopback()];
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let resolved = (name.as_str(), 0).to_socket_addrs();
    let addresses = resolved.map(|all| all.map(|address| address.ip()).collect());
    findings.push(host_name(&name, addresses.map_err(|error| error.to_string())));
    findings.extend(args.listen.iter().map(|text| port(text)));
    findings.extend(args.key.iter().map(|path| key(path)));
    findings
}

/// Whether two processes of this host can meet where the control channel of `kvx demo` does.
fn loopback() -> Finding {
    const CHECK: &str = "loopback";
    // The system answers by itself, unless it drops what comes.
    const PATIENCE: Duration = Duration::from_secs(2);
    let met = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|here| TcpStream::connect_timeout(&here.local_addr()?, PATIENCE));
    match met {
        Ok(_) => Finding::ok(CHECK, "this host reaches itself at 127.0.0.1"),
        Err(error) => Finding::failure(
            CHECK,
            format!("this host does not reach itself at 127.0.0.1: {error}"),
            "let this host, or container, have its loopback interface: ip link set lo up",
        ),
    }
}

/// Whether others may find this host by its own name.
fn host_name(name: &str, addresses: Result<Vec<IpAddr>, String>) -> Finding {
    const CHECK: &str = "host name";
    const REMEDY: &str = "let engines listen at an address, or a name that all hosts can look up (Kubernetes: a headless service)";
    match addresses {
        Ok(addresses) if addresses.iter().any(|ip| !ip.is_loopback()) => {
            let all: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            let mut all = all;
            all.dedup();
            Finding::ok(CHECK, format!("{name} is {}", all.join(", ")))
        }
        Ok(_) => Finding::warning(CHECK, format!("{name} is a loopback address here"), REMEDY),
        Err(error) => {
            Finding::warning(CHECK, format!("{name} cannot be looked up: {error}"), REMEDY)
        }
    }
}

/// Whether an engine could listen there.
fn port(text: &str) -> Finding {
    const CHECK: &str = "port";
    let address: Address = match serve::listened(text) {
        Ok(address) => address,
        Err(error) => {
            let remedy = error.remedy().unwrap_or("write HOST:PORT").to_owned();
            return Finding::failure(CHECK, error.message().to_owned(), remedy);
        }
    };
    let (place, found) = match address.port() {
        0 => (address.host().to_string(), "has a free port"),
        _ => (address.to_string(), "is free"),
    };
    match TcpListener::bind(address.to_string()) {
        Ok(_) => Finding::ok(CHECK, format!("{place} {found}")),
        Err(error) => {
            let remedy = match error.kind() {
                std::io::ErrorKind::AddrInUse => {
                    "find out who listens there (ss -ltnp), or choose another port"
                }
                std::io::ErrorKind::PermissionDenied => {
                    "choose a port from 1024 on, or give CAP_NET_BIND_SERVICE"
                }
                _ => "give an address of this host: ip addr lists them",
            };
            Finding::failure(CHECK, format!("{place}: {error}"), remedy)
        }
    }
}

fn key(path: &std::path::Path) -> Finding {
    const CHECK: &str = "key";
    match Key::from_file(path) {
        Ok(_) => Finding::ok(CHECK, format!("{} can be read by its owner alone", path.display())),
        Err(error) if Key::from_file_of_group(path).is_ok() => Finding::warning(
            CHECK,
            format!("{}: its group can read it, too: {}", path.display(), error.message()),
            "chmod 600 it; where Kubernetes mounts it so, say --key-of-group",
        ),
        Err(error) => {
            let remedy = error.remedy().unwrap_or("make another: kvx key").to_owned();
            Finding::failure(CHECK, format!("{}: {}", path.display(), error.message()), remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn a_name_that_others_cannot_use_is_warned_about() {
        let of = |addresses: &[&str]| {
            host_name("here", Ok(addresses.iter().map(|text| text.parse().unwrap()).collect()))
        };
        assert_eq!(of(&["10.0.0.1", "10.0.0.1"]), Finding::ok("host name", "here is 10.0.0.1"));
        assert_eq!(of(&["127.0.1.1"]).state, State::Warning);
        assert_eq!(of(&[]).state, State::Warning);
        let lost = host_name("here", Err("no such host".into()));
        assert!(lost.state == State::Warning && lost.found.contains("no such host"), "{lost:?}");
    }
}
