//! The backend keeps the contract: in one process, across processes, and across network namespaces.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::Result;
use kvx_core::backend::TransferBackend;
use kvx_tests::suite::{Ground, Setup, Stage, Subject};
use vendor_backend::{Config, NAME, PlainTcp};

struct Plain;

impl Subject for Plain {
    fn name(&self) -> &'static str {
        NAME
    }

    fn setups(&self) -> Vec<Setup> {
        // What must not happen would happen within milliseconds here.
        vec![Setup::new("tcp").with_quiet(Duration::from_millis(8))]
    }

    fn stage(&self, ground: &Ground) -> Result<Box<dyn Stage>> {
        // In a namespace of its own, a side must be told where it can be reached.
        let address = ground.address.unwrap_or(Config::default().address);
        Ok(Box::new(At(Config { address })))
    }
}

/// How every side is opened.
struct At(Config);

impl Stage for At {
    fn open(&self, _: &str) -> Result<Arc<dyn TransferBackend>> {
        Ok(Arc::new(PlainTcp::open(&self.0)?))
    }
}

kvx_tests::conformance!(Plain);
