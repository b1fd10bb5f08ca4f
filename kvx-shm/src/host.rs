//! Where this process is: the host, the namespaces, the user. Two engines that differ in what matters cannot meet, and are
//! told in what.

use std::io;
use std::os::unix::fs::MetadataExt as _;

use kvx_core::registry::Apart;
use kvx_core::{Error, Result};

use crate::bytes::{Reader, Writer};
use crate::config::Tracer;
use crate::error::BACKEND;
use crate::message::Probe;
use crate::sys::vm;

/// A place, as it is told to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// Drawn by the kernel when it started.
    boot: [u8; 16],
    /// Of the network namespace: in another one the socket cannot be found.
    network: Namespace,
    /// Of the namespace of process numbers: in another one, memory cannot be read through the kernel.
    processes: Namespace,
    user: u32,
}

/// Device and inode of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Namespace(u64, u64);

impl std::fmt::Display for Namespace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.1)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Host {
    pub(crate) const BYTES: usize = 16 + 4 * 8 + 8;

    /// This process's.
    ///
    /// # Errors
    ///
    /// `/proc` does not tell.
    pub(crate) fn here() -> io::Result<Self> {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        let boot = u128::from_str_radix(&digits, 16).map_err(io::Error::other)?.to_be_bytes();
        let namespace = |name: &str| {
            let about = std::fs::metadata(format!("/proc/self/ns/{name}"))?;
            io::Result::Ok(Namespace(about.dev(), about.ino()))
        };
        let user = rustix::process::geteuid().as_raw();
        Ok(Self { boot, network: namespace("net")?, processes: namespace("pid")?, user })
    }

    /// Where a peer has to be: what [`meets`](Self::meets) asks for, in short.
    pub(crate) fn place(&self) -> String {
        format!("{}/{}", hex(&self.boot), self.network)
    }

    pub(crate) fn encode(&self, to: &mut Writer) {
        to.bytes(&self.boot);
        for Namespace(device, inode) in [self.network, self.processes] {
            to.u64(device).u64(inode);
        }
        to.u64(self.user.into());
    }

    pub(crate) fn decode(from: &mut Reader<'_>) -> Option<Self> {
        let boot = from.array()?;
        let network = Namespace(from.u64()?, from.u64()?);
        let processes = Namespace(from.u64()?, from.u64()?);
        Some(Self { boot, network, processes, user: u32::try_from(from.u64()?).ok()? })
    }

    /// Whether a peer there can be met from here.
    ///
    /// # Errors
    ///
    /// [`kvx_core::ErrorKind::Unsupported`], with what differs, both values, and what to do about it.
    pub(crate) fn meets(&self, operation: &'static str, peer: &Self) -> Result<()> {
        let differ = |apart: Apart, here: String, there: String| {
            Err(Error::unsupported(operation, apart.why)
                .with_backend(BACKEND)
                .with_context("here", here)
                .with_context("there", there)
                .with_remedy(apart.remedy))
        };
        if self.boot != peer.boot {
            return differ(other_host(), hex(&self.boot), hex(&peer.boot));
        }
        if self.network != peer.network {
            return differ(other_network(), self.network.to_string(), peer.network.to_string());
        }
        Ok(())
    }

    pub(crate) fn sees_processes_of(&self, peer: &Self) -> bool {
        self.processes == peer.processes
    }
}

/// In what two [places](Host::place) differ.
pub(crate) fn apart(here: &str, there: &str) -> Option<Apart> {
    let ((boot, network), (boot_there, network_there)) =
        (here.split_once('/')?, there.split_once('/')?);
    match (boot == boot_there, network == network_there) {
        (false, _) => Some(other_host()),
        (true, false) => Some(other_network()),
        (true, true) => None,
    }
}

fn other_host() -> Apart {
    Apart {
        why: "the two sides are on different hosts (their boot ids differ), which share no memory".into(),
        remedy: "use a backend that reaches other hosts, such as ucx, on both sides".into(),
    }
}

fn other_network() -> Apart {
    Apart {
        why: "the two sides are in different network namespaces (containers that share no network), where neither finds the other's \
              socket"
            .into(),
        remedy: "run both in one network namespace (one pod; docker: --network container:NAME; for both the host's: --network host, \
                 hostNetwork: true), or use another backend, such as ucx over TCP, on both sides"
            .into(),
    }
}

/// Whether a peer's memory can be read through the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    Yes,
    /// Why not, and what to do about it.
    No(String),
}

impl Reach {
    /// Tries it.
    pub(crate) fn find(here: &Host, there: &Host, pid: i32, probe: Probe) -> Self {
        if !here.sees_processes_of(there) {
            return Self::No(format!(
                "the two sides are in different PID namespaces (containers that do not see each other's processes), where neither may read \
                 the other's memory (here {}, there {}); run both in one (Kubernetes: shareProcessNamespace: true; docker: --pid \
                 container:NAME, or --pid host for both), or allocate the memory with kvx (kvx_shm::SharedMemory)",
                here.processes, there.processes
            ));
        }
        match vm::can_read(pid, probe.address, probe.value) {
            Ok(()) => Self::Yes,
            Err(error) => {
                let why = why_not(vm::ptrace_scope(), vm::has_ptrace_capability(), &error);
                Self::No(format!("{why}; or allocate the memory with kvx (kvx_shm::SharedMemory)"))
            }
        }
    }
}

/// Why the kernel does not let a process read another one's memory, and what to do about it: by Yama's `ptrace_scope`, whether
/// the reader has `CAP_SYS_PTRACE`, and what the kernel said.
///
/// Yama forbids by `EPERM`, as do the checks of users, of dumpable processes and of seccomp filters. Of these it is named where
/// it would have forbidden it in any case: with 3 to all, with 2 and 1 to those without the capability. With 1 a process may
/// read its descendants, and those that have named it (`PR_SET_PTRACER`).
fn why_not(scope: Option<u32>, capable: bool, error: &io::Error) -> String {
    match (scope, error.raw_os_error()) {
        (Some(3), Some(libc::EPERM)) => {
            "kernel.yama.ptrace_scope is 3, which forbids it to all until the next boot".into()
        }
        (Some(2), Some(libc::EPERM)) if !capable => {
            "kernel.yama.ptrace_scope is 2, which forbids it without CAP_SYS_PTRACE; give it to this process, or set a \
             lower value"
                .into()
        }
        (Some(1), Some(libc::EPERM)) if !capable => {
            "kernel.yama.ptrace_scope is 1, and the peer has not allowed it; give the peer the option ptracer=any, or \
             this process CAP_SYS_PTRACE. If that is no help, it is another user's process, or one that is not dumpable"
                .into()
        }
        (_, Some(libc::EPERM)) => format!(
            "the kernel forbids it ({error}): another user's process, one that is not dumpable, or a container without \
             CAP_SYS_PTRACE; run both as one user, or give this process CAP_SYS_PTRACE"
        ),
        (_, Some(libc::ENOSYS)) => "the kernel, or a seccomp filter, has no process_vm_readv; allow it".into(),
        _ => format!("reading it failed: {error}"),
    }
}

/// Lets a peer's process read this one's memory where Yama asks for that.
pub(crate) fn allow(tracer: Tracer, pid: i32) {
    use rustix::process::{PTracer, Pid, set_ptracer};
    if vm::ptrace_scope() != Some(1) {
        return;
    }
    let allowed = match tracer {
        Tracer::None => return,
        Tracer::Any => PTracer::Any,
        Tracer::Peer => match Pid::from_raw(pid) {
            Some(pid) => PTracer::ProcessID(pid),
            None => return,
        },
    };
    if let Err(error) = set_ptracer(allowed) {
        // The peer finds out that it may not read, and says so where it matters.
        tracing::warn!(backend = BACKEND, %error, "PR_SET_PTRACER failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_come_back_and_differences_are_named() {
        let here = Host::here().unwrap();
        let mut bytes = Writer::default();
        here.encode(&mut bytes);
        assert_eq!(bytes.0.len(), Host::BYTES);
        assert_eq!(Host::decode(&mut Reader(&bytes.0)), Some(here));
        here.meets("accept", &here).unwrap();
        let elsewhere = Host { boot: [9; 16], ..here };
        let error = here.meets("accept", &elsewhere).unwrap_err();
        assert_eq!(error.kind(), kvx_core::ErrorKind::Unsupported);
        assert!(error.to_string().contains(&"09".repeat(16)), "{error}");
        let apart = Host { network: Namespace(1, 4711), ..here };
        let error = here.meets("accept", &apart).unwrap_err();
        assert!(error.to_string().contains("containers that share no network"), "{error}");
        assert!(error.to_string().contains("there=4711"), "{error}");
        assert!(error.remedy().unwrap().contains("--network container:NAME"), "{error}");
        // Whoever compares places says the same, and of what is no place nothing.
        for (other, meets) in [(here, true), (elsewhere, false), (apart, false)] {
            let said = super::apart(&here.place(), &other.place());
            let told = here.meets("accept", &other);
            assert_eq!((said.is_none(), told.is_ok()), (meets, meets));
            assert_eq!(said.map(|said| said.why).as_deref(), told.as_ref().err().map(Error::message));
        }
        assert_eq!(super::apart(&here.place(), "anywhere"), None);
        let unseen = Host { processes: Namespace(1, 4711), ..here };
        here.meets("accept", &unseen).unwrap();
        let probe = Probe { address: 0, value: 0 };
        let Reach::No(why) = Reach::find(&here, &unseen, 1, probe) else { panic!("reached") };
        for words in ["different PID namespaces", "containers", "there 4711", "shareProcessNamespace"] {
            assert!(why.contains(words), "{words}: {why}");
        }
    }

    /// Against the kernel's documentation of Yama: 1 and 2 do not hold for those who have the capability, 3 holds for all, and
    /// where there is no Yama, or 0, it is no reason.
    #[test]
    fn yama_is_blamed_where_it_forbids() {
        let forbidden = io::Error::from_raw_os_error(libc::EPERM);
        for (scope, capable, says) in [
            (None, false, "not dumpable"),
            (None, true, "not dumpable"),
            (Some(0), false, "not dumpable"),
            (Some(1), false, "ptracer=any"),
            (Some(1), true, "not dumpable"),
            (Some(2), false, "ptrace_scope is 2"),
            (Some(2), true, "not dumpable"),
            (Some(3), false, "forbids it to all"),
            (Some(3), true, "forbids it to all"),
        ] {
            let why = why_not(scope, capable, &forbidden);
            assert!(why.contains(says), "{scope:?} {capable}: {why}");
            let blamed = scope.is_some_and(|scope| scope == 3 || (scope > 0 && !capable));
            assert_eq!(why.contains("ptrace_scope"), blamed, "{scope:?} {capable}: {why}");
        }
        for scope in [None, Some(0), Some(1), Some(2), Some(3)] {
            let why = why_not(scope, false, &io::Error::from_raw_os_error(libc::ENOSYS));
            assert!(why.contains("seccomp"), "{why}");
            let why = why_not(scope, false, &io::Error::from_raw_os_error(libc::EFAULT));
            assert!(why.contains("Bad address") && !why.contains("yama"), "{why}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let here = Host::here().unwrap();
        let probe = Probe { address: 8, value: 0 };
        let pid = std::process::id().cast_signed();
        let Reach::No(why) = Reach::find(&here, &here, pid, probe) else { panic!("reached") };
        assert!(why.contains("SharedMemory"), "{why}");
        let word = Box::new(77_u64);
        let probe = Probe { address: std::ptr::from_ref(&*word).addr() as u64, value: *word };
        assert_eq!(Reach::find(&here, &here, pid, probe), Reach::Yes);
    }
}
