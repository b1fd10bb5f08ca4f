//! Network namespaces for peers, each joined to this process's by a pair of virtual interfaces.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::Command as Program;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A namespace. Deleted, with its interfaces, when dropped.
#[derive(Debug)]
pub(crate) struct Namespace {
    name: String,
    /// Address of this process's end.
    pub(crate) here: IpAddr,
    /// Address of the namespace's end.
    pub(crate) there: IpAddr,
}

/// How many this process has made.
static MADE: AtomicU32 = AtomicU32::new(0);

impl Namespace {
    /// A new namespace, with an address on each side of its link.
    ///
    /// # Errors
    ///
    /// Why it cannot be had, in words.
    pub(crate) fn new() -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("making a network namespace needs root".into());
        }
        static FIRST: Once = Once::new();
        FIRST.call_once(sweep);
        let (process, made) = (std::process::id(), MADE.fetch_add(1, Relaxed));
        // 198.18.0.0/15 is set aside for tests of networks (RFC 2544): 32,768 links of four addresses each.
        let block = process.wrapping_mul(37).wrapping_add(made) % 0x8000 * 4;
        let address = |last| IpAddr::V4(Ipv4Addr::from_bits(0xc612_0000 + block + last));
        let name = format!("kvx{process}n{made}");
        let namespace = Self { name, here: address(1), there: address(2) };
        let (inside, outside) = (format!("ki{process}n{made}"), format!("ko{process}n{made}"));
        let Self { name, here, there } = &namespace;
        ip(&format!("netns add {name}"))?;
        ip(&format!("link add {outside} type veth peer name {inside} netns {name}"))?;
        ip(&format!("addr add {here}/30 dev {outside}"))?;
        ip(&format!("link set {outside} up"))?;
        ip(&format!("-n {name} addr add {there}/30 dev {inside}"))?;
        ip(&format!("-n {name} link set lo up"))?;
        ip(&format!("-n {name} link set {inside} up"))?;
        ip(&format!("-n {name} route add default via {here}"))?;
        Ok(namespace)
    }

    /// A program that will run inside.
    pub(crate) fn program(&self, own: &Path) -> Program {
        let mut program = Program::new("ip");
        program.args(["netns", "exec", &self.name]).arg(own);
        program
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Its interfaces go with it. There is nobody to tell if it fails.
        let _ = ip(&format!("netns del {}", self.name));
    }
}

/// Deletes what was left by processes that were killed: they had no chance to.
fn sweep() {
    let Ok(listed) = Program::new("ip").args(["netns", "list"]).output() else { return };
    for line in String::from_utf8_lossy(&listed.stdout).lines() {
        let name = line.split_whitespace().next().unwrap_or_default();
        if owner(name).is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

/// The process that made a namespace of this name, if it was one of the kit's.
fn owner(name: &str) -> Option<u32> {
    let (process, made) = name.strip_prefix("kvx")?.split_once('n')?;
    made.parse::<u32>().ok()?;
    process.parse().ok()
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Program::new("ip").args(arguments.split(' ')).output().map_err(|error| {
        format!("the program `ip` cannot be run ({error}); install the package iproute2")
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("`ip {arguments}` failed: {}", said.trim()))
}

#[cfg(test)]
mod tests {
    use super::owner;

    #[test]
    fn only_namespaces_of_the_kit_have_an_owner() {
        assert_eq!(owner("kvx4711n3"), Some(4711));
        for other in ["", "kvx", "kvx4711", "kvxn3", "kvx4711nx", "other4711n3", "kvx-4711n3"] {
            assert_eq!(owner(other), None, "{other}");
        }
    }
}
