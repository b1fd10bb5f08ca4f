//! Whether the backend can be used here, found out without keeping anything open.

use std::net::TcpListener;

use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::config::BackendConfig;
use kvx_core::registry::Probe;

use crate::config::Config;

/// What to do about an address that is not this host's.
pub(crate) const REMEDY: &str =
    "give an address of this host: address=ADDRESS (ip address lists them)";

pub(crate) fn probe(options: &BackendConfig) -> Probe {
    let config = match Config::read(options) {
        Ok(config) => config,
        Err(error) => {
            let remedy = format!("the options are {}", Config::OPTIONS.join(", "));
            return Probe::bad_options(&error, remedy);
        }
    };
    match TcpListener::bind((config.address, 0)) {
        Ok(_) => Probe::Available {
            detail: format!("TCP at {}", config.address),
            capabilities: Box::new(capabilities()),
        },
        Err(error) => Probe::Unavailable {
            reason: format!("it cannot listen at {}: {error}", config.address),
            remedy: Some(REMEDY.into()),
        },
    }
}

/// What it can do: no more than the code does, because the conformance kit tests every claim.
pub(crate) fn capabilities() -> Capabilities {
    let mut can = Capabilities::none();
    can.read = true;
    can.write = true;
    can.host_memory = true;
    can.limits.max_segment_bytes = 1 << 20;
    can.limits.max_batch_segments = 64;
    can.limits.max_notification_bytes = 1024;
    can.limits.max_in_flight = 32;
    // One connection each way, and the target does one batch after the other.
    can.ordering = Ordering::PerPeer;
    // The target carries out what peers ask for, and stops when the connection is over.
    can.revoke = Revoke::PerPeer;
    can.event_fd = true;
    can
}
