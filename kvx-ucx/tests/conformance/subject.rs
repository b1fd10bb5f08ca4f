//! The backend under test, and the ways in which it is set up.

use std::net::IpAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::TransferBackend;
use kvx_core::config::BackendConfig;
use kvx_core::registry::Probe;
use kvx_core::{Error, Result};
use kvx_tests::suite::{Ground, Place, Setup, Stage, Subject};
use kvx_ucx::{Names, Options, UcxBackend};

pub(crate) struct Ucx;

/// Has UCX take CMA beside TCP, and refuses connections where it does not: with it, all runs of the kit prove CMA.
const CMA: &str = "tls=tcp+sm,ucx.CMA_MEMORY_INVALIDATE=y,require=cma";
/// UCX 1.13 takes that setting from the environment only. With it, it has CMA beside TCP, for what kvx does not use; without, TCP alone.
const CMA_1_13: &str = "tls=tcp+sm,require=tcp";

/// Ways to set it up, and the options of each.
const SETUPS: &[(&str, &str)] = &[
    ("tcp", "tls=tcp"),
    ("both", CMA),
    ("sm", "tls=sm+self,ucx.MM_ERROR_HANDLING=y"),
    ("default", ""),
    // Whatever is in pieces, and waits for its turn.
    ("pieces", "tls=tcp,piece_bytes=1048576,window=2"),
];

/// The options of a setup, as text.
fn text(setup: &str) -> &'static str {
    match SETUPS.iter().find(|(name, _)| *name == setup) {
        Some((_, CMA)) if !is_later_than_1_13() => CMA_1_13,
        Some((_, options)) => options,
        None => "",
    }
}

fn options(setup: &str) -> Result<Options> {
    Options::read(&text(setup).parse()?)
}

impl Subject for Ucx {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn setups(&self) -> Vec<Setup> {
        let setup = |(name, _): &(&str, _)| Setup::new(*name).with_quiet(Duration::from_millis(8));
        SETUPS.iter().map(setup).collect()
    }

    fn probe(&self, setup: &str) -> Result<(), String> {
        let config = text(setup).parse().map_err(|error: Error| error.to_string())?;
        match (kvx_ucx::REGISTRATION.probe)(&config) {
            Probe::Available { .. } => Ok(()),
            Probe::Unavailable { reason, remedy } => {
                Err(format!("{reason}; {}", remedy.unwrap_or_default()))
            }
            _ => Err("the probe said what it never says".into()),
        }
    }

    fn reaches(&self, setup: &str, place: Place) -> Result<(), String> {
        match place {
            Place::TwoNamespaces if setup == "sm" => {
                Err("UCX wakes who sleeps over shared memory by sockets that do not reach into another network namespace".into())
            }
            // Interfaces that the kit makes for one clause are not those of the clause before.
            Place::TwoNamespaces if is_later_than_1_13() => {
                Err("this UCX keeps the routes that it found first, and the kit makes new ones for each clause".into())
            }
            _ => Ok(()),
        }
    }

    fn stage(&self, ground: &Ground) -> Result<Box<dyn Stage>> {
        let mut options = options(&ground.setup)?;
        // The kit makes and deletes interfaces all the time: left alone, UCX may choose one that is about to go.
        let device = ground.address.map_or_else(|| Ok(lasting_interface()), interface)?;
        options.devices = Some(Names(vec![device]));
        Ok(Box::new(Over(options)))
    }
}

/// UCX 1.20 and 1.22 read the machine's routes once in the life of a process, which 1.13 does not look at; and options may
/// be settings of theirs that belong to a transport.
fn is_later_than_1_13() -> bool {
    let probe = (kvx_ucx::REGISTRATION.probe)(&BackendConfig::new());
    matches!(probe, Probe::Available { detail, .. } if !detail.contains("UCX 1.13."))
}

/// The interface of the default route, or else the loopback: by that alone, UCX 1.20 reaches nobody.
fn lasting_interface() -> String {
    let output = Command::new("ip").args(["-o", "route", "show", "default"]).output();
    let listed = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let listed = listed.unwrap_or_default();
    let mut words = listed.split_whitespace().skip_while(|word| *word != "dev");
    words.nth(1).unwrap_or("lo").to_owned()
}

/// The interface that has an address, once it is up: a new one takes a while.
fn interface(address: IpAddr) -> Result<String> {
    let failed =
        |error: &dyn std::fmt::Display| Error::config("interface", format!("{address}: {error}"));
    let output =
        Command::new("ip").args(["-o", "addr"]).output().map_err(|error| failed(&error))?;
    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = listed.lines().find(|line| line.contains(&format!(" {address}/")));
    let name = line.and_then(|line| line.split_whitespace().nth(1));
    let name = name.ok_or_else(|| failed(&"no interface has it"))?;
    for _ in 0..2000 {
        let state = std::fs::read_to_string(format!("/sys/class/net/{name}/operstate"));
        if state.is_ok_and(|state| state.trim() == "up") {
            return Ok(name.to_owned());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(failed(&format!("{name} does not come up")))
}

struct Over(Options);

impl Stage for Over {
    fn open(&self, _: &str) -> Result<Arc<dyn TransferBackend>> {
        Ok(UcxBackend::open(&self.0)?)
    }
}
