//! Whether it can be used here: always, if its options are right.

use kvx_core::config::BackendConfig;
use kvx_core::registry::Probe;

use crate::config::{Config, Kind};

pub(crate) fn probe(config: &BackendConfig) -> Probe {
    match Config::read(config) {
        Ok(Config { seed, kind }) => Probe::Available {
            detail: match kind {
                Kind::Simulated(_) => {
                    format!("in memory, one process, preset {}, seed {seed}", kind.name())
                }
                Kind::Loopback => "in memory, one process, loopback: no fabric, only a copy".into(),
            },
            capabilities: Box::new(kind.capabilities()),
        },
        Err(error) => Probe::bad_options(
            &error,
            format!("use seed=NUMBER, preset={}", Kind::names().join("|")),
        ),
    }
}
