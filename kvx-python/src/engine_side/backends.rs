//! Opens the backends of a rank.

use std::sync::Arc;

use kvx_connector::{Policy, choose_every, open_every};
use kvx_core::backend::TransferBackend;
use kvx_core::{Error, ErrorKind, Result};

/// A rank's backends, and what of them is taken for whom.
pub(super) struct Opened {
    pub(super) backends: Vec<Arc<dyn TransferBackend>>,
    pub(super) policy: Policy,
}

/// Opens the backend that is named (`NAME`, or `NAME,OPTION=VALUE,...`); without a name the one of the environment; else all that can be
/// used here, and between two engines the best that both have is taken. One that cannot be opened is left out, as long as another can.
pub(super) fn open_for(name: Option<&str>) -> Result<Opened> {
    let mut policy = Policy::from_env()?;
    if let Some(text) = name {
        policy = policy.with_text("backend", text)?;
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|source| {
            Error::new(ErrorKind::Resources, "backends", "no runtime").with_source(source)
        })?;
    let choices = choose_every(&policy)?;
    let backends = runtime.block_on(open_every(&choices, &policy.options))?;
    Ok(Opened { backends, policy })
}
