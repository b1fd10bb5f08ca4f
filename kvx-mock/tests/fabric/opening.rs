//! Opening by name, as the registry does.

use std::sync::Arc;

use kvx_core::backend::TransferBackend;
use kvx_core::config::BackendConfig;
use kvx_core::registry::{self, Probe};
use kvx_core::{ErrorKind, Result};
use kvx_mock::{Fabric, Preset};

use crate::handshake::now;

fn open(options: &str) -> Result<Arc<dyn TransferBackend>> {
    now(kvx_mock::REGISTRATION.opener.open(&options.parse::<BackendConfig>()?))
}

#[test]
fn it_is_registered_and_never_chosen_unasked() {
    let found = registry::find("mock").unwrap();
    assert!(std::ptr::eq(found, &raw const kvx_mock::REGISTRATION));
    assert_eq!(found.rank, None);
}

#[test]
fn two_opened_by_name_in_one_process_meet() {
    let (first, second) = (open("seed=11").unwrap(), open("seed=11").unwrap());
    let (at_second, reply) = second.accept(&first.offer().unwrap()).unwrap();
    let (at_first, completion) = first.complete(&reply).unwrap();
    assert_eq!(second.finish(&completion).unwrap(), at_second);
    assert_eq!(first.name(), "mock");
    assert_eq!(first.peer_info(at_first).unwrap().transport, "mock-rc");
}

#[test]
fn other_seeds_and_other_processes_are_other_fabrics() {
    let (first, other) = (open("seed=12").unwrap(), open("seed=13").unwrap());
    // Another process's fabric of the same seed differs from this one's as a fabric of one's own does.
    let elsewhere = Fabric::new(12).backend(Preset::rc(), "elsewhere");
    for offer in
        [other.offer().unwrap(), kvx_core::handshake::Handshake::offer(&*elsewhere).unwrap()]
    {
        let error = first.accept(&offer).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.as_mismatch().expect("a mismatch").field, "fabric");
    }
}

#[test]
fn the_probe_says_what_opening_would() {
    let probe = |options: &str| (kvx_mock::REGISTRATION.probe)(&options.parse().unwrap());
    let Probe::Available { detail, capabilities } = probe("preset=efa,seed=3") else { panic!() };
    assert!(detail.contains("preset efa") && detail.contains("seed 3"), "{detail}");
    assert_eq!(&*capabilities, open("preset=efa,seed=3").unwrap().capabilities());
    let Probe::BadOptions { reason, remedy } = probe("preset=roce") else { panic!() };
    assert!(reason.contains("\"roce\"") && remedy.unwrap().contains("ucx-tcp"), "{reason}");
    assert_eq!(open("preset=roce").unwrap_err().kind(), ErrorKind::Config);
}

#[test]
fn loopback_is_opened_by_name_and_says_what_it_is() {
    let (first, second) = (open("preset=loopback").unwrap(), open("preset=loopback").unwrap());
    let (at_second, reply) = second.accept(&first.offer().unwrap()).unwrap();
    let (at_first, completion) = first.complete(&reply).unwrap();
    assert_eq!(second.finish(&completion).unwrap(), at_second);
    assert_eq!(first.peer_info(at_first).unwrap().transport, "mock-loopback");
    let probe = (kvx_mock::REGISTRATION.probe)(&"preset=loopback".parse().unwrap());
    let Probe::Available { detail, capabilities } = probe else { panic!() };
    assert!(detail.contains("loopback: no fabric"), "{detail}");
    assert_eq!(&*capabilities, first.capabilities());
    // It does not meet the simulated fabric.
    let error = first.accept(&open("seed=0").unwrap().offer().unwrap()).unwrap_err();
    assert_eq!(error.as_mismatch().expect("a mismatch").field, "fabric");
}
