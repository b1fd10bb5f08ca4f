//! Opening by name: the options, and the fabrics that backends opened by name share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use async_trait::async_trait;
use kvx_core::Result;
use kvx_core::backend::TransferBackend;
use kvx_core::config::BackendConfig;
use kvx_core::id::Incarnation;
use kvx_core::registry::Opener;

use crate::fabric::{Fabric, Shared};
use crate::preset::Preset;

/// What the options say.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Of the fabric: 0 unless said.
    pub(crate) seed: u64,
    /// How it behaves: like `rc` unless said.
    pub(crate) preset: Preset,
}

impl Config {
    pub(crate) fn read(config: &BackendConfig) -> Result<Self> {
        config.refuse_unknown(&["seed", "preset"])?;
        Ok(Self {
            seed: config.value("seed")?.unwrap_or(0),
            preset: config.text("preset").map_or_else(|| Ok(Preset::rc()), Preset::by_name)?,
        })
    }
}

/// Opens the backend of an engine, on the process's fabric of the seed that `config` says.
pub(crate) struct Open;

#[async_trait]
impl Opener for Open {
    async fn open(&self, config: &BackendConfig) -> Result<Arc<dyn TransferBackend>> {
        let Config { seed, preset } = Config::read(config)?;
        Ok(shared(seed)?.backend(preset, "mock"))
    }
}

/// The fabrics that are in use, by seed.
static SHARED: Mutex<BTreeMap<u64, Weak<Shared>>> = Mutex::new(BTreeMap::new());

/// The process's fabric of this seed: made for the first backend, gone with the last.
fn shared(seed: u64) -> Result<Fabric> {
    let mut all = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(shared) = all.get(&seed).and_then(Weak::upgrade) {
        return Ok(Fabric { shared });
    }
    let fabric = Fabric::with_process(seed, *Incarnation::random()?.as_bytes());
    all.retain(|_, shared| shared.strong_count() > 0);
    all.insert(seed, Arc::downgrade(&fabric.shared));
    Ok(fabric)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_have_defaults_and_are_refused_by_name() {
        let config = Config::read(&BackendConfig::new()).unwrap();
        assert_eq!((config.seed, config.preset), (0, Preset::rc()));
        let config: BackendConfig = "seed=7,preset=ucx-tcp".parse().unwrap();
        let config = Config::read(&config).unwrap();
        assert_eq!((config.seed, config.preset), (7, Preset::ucx_tcp()));
        for (bad, named) in [("seed=x", "seed=\"x\""), ("preset=x", "\"x\""), ("sed=1", "\"sed\"")]
        {
            let error = Config::read(&bad.parse().unwrap()).unwrap_err();
            assert_eq!(error.kind(), kvx_core::ErrorKind::Config);
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    #[test]
    fn a_seed_names_one_fabric_as_long_as_it_is_used() {
        let (one, other) = (shared(0x5eed).unwrap(), shared(0x5eed).unwrap());
        assert!(Arc::ptr_eq(&one.shared, &other.shared));
        assert!(!Arc::ptr_eq(&one.shared, &shared(0x5eee).unwrap().shared));
        let id = one.shared.id;
        drop((one, other));
        assert!(shared(0x5eed).unwrap().shared.id != id);
    }
}
