//! Other systems than Linux: the backend sleeps on descriptors that only Linux has.

use std::sync::Arc;

use async_trait::async_trait;
use kvx_core::backend::TransferBackend;
use kvx_core::config::BackendConfig;
use kvx_core::registry::{Opener, Probe};
use kvx_core::{Error, Result};

const WHY: &str = "it needs 64-bit Linux";

pub(crate) fn probe(_: &BackendConfig) -> Probe {
    Probe::Unavailable { reason: WHY.to_owned(), remedy: Some("use another backend".to_owned()) }
}

pub(crate) struct Open;

#[async_trait]
impl Opener for Open {
    async fn open(&self, _: &BackendConfig) -> Result<Arc<dyn TransferBackend>> {
        Err(Error::unsupported("open", WHY).with_backend("ucx"))
    }
}
