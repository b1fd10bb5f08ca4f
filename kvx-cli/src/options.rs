//! What options the built-in backends take, for people. What they mean at length is in `docs/`.

use std::borrow::Cow;

use kvx_core::config::BackendConfig;
use kvx_core::registry::{Probe, Registration};
use serde::Serialize;

/// An option of a backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct BackendOption {
    pub(crate) name: Cow<'static, str>,
    pub(crate) default: &'static str,
    /// What it does, with its unit and what may be said.
    pub(crate) about: &'static str,
}

const fn option(name: &'static str, default: &'static str, about: &'static str) -> BackendOption {
    BackendOption { name: Cow::Borrowed(name), default, about }
}

const MOCK: &[BackendOption] = &[
    option(
        "preset",
        "rc",
        "which fabric it behaves like: rc, efa, ucx-tcp; loopback: none, it copies at once",
    ),
    option("seed", "--seed, or 0", "number from which the order in which it does things follows"),
];

const SHM: &[BackendOption] = &[
    option("copy_threads", "1", "threads that copy, 1 to 64"),
    option("copy_nice", "0", "niceness of these threads, 0 to 19"),
    option(
        "together_bytes",
        "16777216",
        "bytes from which a transfer is copied by all free threads together",
    ),
    option("cpus", "any", "processors for all threads of the backend, for example 0-3+8"),
    option(
        "inline_bytes",
        "131072",
        "bytes up to which a read may be made within submit; 0: none is",
    ),
    option(
        "spin_us",
        "0",
        "microseconds between two polls below which a program counts as polling without pause, 0 to 1000",
    ),
    option("users", "same", "whose processes may connect: same, one more user's number, any"),
    option(
        "ptracer",
        "peer",
        "who may read borrowed memory where ptrace_scope is 1: none, peer, any",
    ),
    option("huge_pages", "never", "pages of what the backend allocates: never, try, require"),
    option("node", "any", "NUMA node of what the backend allocates, by number"),
];

const UCX: &[BackendOption] = &[
    option(
        "lib",
        "KVX_UCX_LIB, or found",
        "the library: its file libucp.so.0, the folder that it is in, or a name for the loader to find",
    ),
    option("tls", "UCX's choice", "transports that may be used, as in UCX_TLS: rc+sm+self"),
    option(
        "devices",
        "all",
        "network devices that may be used, as in UCX_NET_DEVICES: eth0, mlx5_0:1",
    ),
    option(
        "require",
        "any",
        "transports of which only these may carry the data; rc_*: all that begin so",
    ),
    option("window", "256", "operations to a peer that UCX is given at a time"),
    option("connect_ms", "5000", "milliseconds that connecting may take"),
    option("piece_bytes", "in one", "bytes of the pieces in which a region is registered"),
    option("ucx.NAME", "UCX's", "any other setting of UCX, by its name without UCX_"),
];

/// The options of a backend: those that are described here, and those that it takes besides.
pub(crate) fn of(registration: &Registration) -> Vec<BackendOption> {
    let described = described(registration.name);
    let mut all = described.to_vec();
    for name in names(registration) {
        if !described.iter().any(|option| option.name == name) {
            let about = "see the backend's documentation";
            all.push(BackendOption { name: Cow::Owned(name), default: "", about });
        }
    }
    all
}

fn described(backend: &str) -> &'static [BackendOption] {
    match backend {
        "mock" => MOCK,
        "shm" => SHM,
        "ucx" => UCX,
        _ => &[],
    }
}

/// What options a backend takes: it says so when it is given one that it does not know. None where it does not say so.
fn names(registration: &Registration) -> Vec<String> {
    let unknown = BackendConfig::new().with("no-such-option", "1");
    let Probe::BadOptions { reason, .. } = (registration.probe)(&unknown) else {
        return Vec::new();
    };
    let listed = reason.split_once("options=").map_or("", |(_, listed)| listed);
    let names = listed.trim_end_matches(')').split(',').map(str::trim);
    names.filter(|name| !name.is_empty() && *name != "none").map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_option_of_a_backend_is_described_and_no_other() {
        for registration in kvx_connector::backends().unwrap() {
            let takes: BTreeSet<String> = names(registration).into_iter().collect();
            let described = described(registration.name).iter();
            let described: BTreeSet<String> =
                described.map(|option| option.name.clone().into_owned()).collect();
            assert!(!takes.is_empty(), "{} does not say what it takes", registration.name);
            assert!(described.is_subset(&takes), "{}: {described:?}", registration.name);
            // Of the others, what is not described here is listed all the same.
            if ["mock", "shm"].contains(&registration.name) {
                assert_eq!(takes, described, "{}", registration.name);
            }
            assert_eq!(of(registration).len(), takes.len(), "{}", registration.name);
        }
    }
}
