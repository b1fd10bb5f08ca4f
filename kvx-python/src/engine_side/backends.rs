//! Opens the backends of a rank.

use std::sync::Arc;

use kvx_connector::{Choice, Policy, choose, offers, open};
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
        let (name, options) = text.split_once(',').unwrap_or((text, ""));
        policy = policy.with_name(Some(name.trim()));
        policy.options = options.parse()?;
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|source| {
            Error::new(ErrorKind::Resources, "backends", "no runtime").with_source(source)
        })?;
    let (mut backends, mut first) = (Vec::new(), None);
    for choice in choices(&policy)? {
        match runtime.block_on(open(&choice, &policy.options)) {
            Ok(backend) => backends.push(backend),
            Err(error) => {
                first.get_or_insert(error);
            }
        }
    }
    match first {
        Some(error) if backends.is_empty() => Err(error),
        _ => Ok(Opened { backends, policy }),
    }
}

fn choices(policy: &Policy) -> Result<Vec<Choice>> {
    if policy.name.is_some() || policy.environment.is_some() {
        return Ok(vec![choose(policy, None)?]);
    }
    let offers = offers(policy)?;
    let names = offers.iter().map(|offer| offer.split('@').next().unwrap_or(offer));
    let choices: Vec<Choice> = names
        .map(|name| choose(&policy.clone().with_name(Some(name)), None))
        .collect::<Result<_>>()?;
    match choices.is_empty() {
        // It says what speaks against each.
        true => Ok(vec![choose(policy, None)?]),
        false => Ok(choices),
    }
}
