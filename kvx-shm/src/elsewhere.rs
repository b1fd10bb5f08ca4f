//! Other systems than Linux: there is nothing of what it needs.

use std::sync::Arc;

use async_trait::async_trait;
use kvx_core::backend::TransferBackend;
use kvx_core::config::BackendConfig;
use kvx_core::registry::{Apart, Opener, Probe};
use kvx_core::{Error, Result};

const WHY: &str = "it needs 64-bit Linux: sealed memory (memfd) and process_vm_readv";

pub(crate) fn probe(_: &BackendConfig) -> Probe {
    Probe::Unavailable {
        reason: WHY.to_owned(),
        remedy: Some("use a backend of the network".to_owned()),
    }
}

pub(crate) const fn apart(_: &str, _: &str) -> Option<Apart> {
    None
}

pub(crate) struct Open;

#[async_trait]
impl Opener for Open {
    async fn open(&self, _: &BackendConfig) -> Result<Arc<dyn TransferBackend>> {
        Err(Error::unsupported("open", WHY).with_backend("shm"))
    }
}
