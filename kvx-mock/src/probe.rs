//! Whether it can be used here: always, if its options are right.

use kvx_core::config::BackendConfig;
use kvx_core::registry::Probe;

use crate::config::Config;
use crate::preset::Preset;

pub(crate) fn probe(config: &BackendConfig) -> Probe {
    match Config::read(config) {
        Ok(Config { seed, preset }) => Probe::Available {
            detail: format!("in memory, one process, preset {}, seed {seed}", preset.name()),
            capabilities: Box::new(preset.capabilities().clone()),
        },
        Err(error) => Probe::Unavailable {
            reason: error.to_string(),
            remedy: Some(format!("use seed=NUMBER, preset={}", Preset::NAMES.join("|"))),
        },
    }
}
