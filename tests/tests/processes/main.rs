//! The kit across processes and network namespaces: on a small backend over TCP, which is here for nothing else.

mod backend;
mod connection;
mod message;
mod state;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use kvx_core::Result;
use kvx_core::backend::TransferBackend;
use kvx_tests::suite::{Ground, Setup, Stage, Subject};

struct Plain;

impl Subject for Plain {
    fn name(&self) -> &'static str {
        "plain-tcp"
    }

    fn setups(&self) -> Vec<Setup> {
        vec![Setup::new("tcp").with_quiet(Duration::from_millis(8))]
    }

    fn stage(&self, ground: &Ground) -> Result<Box<dyn Stage>> {
        Ok(Box::new(At(ground.address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)))))
    }
}

/// The address at which sides listen.
struct At(IpAddr);

impl Stage for At {
    fn open(&self, _: &str) -> Result<Arc<dyn TransferBackend>> {
        Ok(backend::Plain::open(self.0)?)
    }
}

kvx_tests::conformance!(Plain);
