//! Opening by name: the options, and the fabrics that backends opened by name share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use async_trait::async_trait;
use kvx_core::backend::TransferBackend;
use kvx_core::capability::Capabilities;
use kvx_core::config::BackendConfig;
use kvx_core::id::Incarnation;
use kvx_core::registry::Opener;
use kvx_core::{Error, Result};

use crate::fabric::{Fabric, Shared};
use crate::loopback::{self, Hub, LOOPBACK, Loopback};
use crate::preset::Preset;

/// What the options say.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Of the fabric: 0 unless said. It only tells one loopback from another.
    pub(crate) seed: u64,
    /// How it behaves: like `rc` unless said.
    pub(crate) kind: Kind,
}

/// Which fabric, and how it behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The simulated one.
    Simulated(Box<Preset>),
    /// The one for speed tests.
    Loopback,
}

impl Kind {
    /// All that the option `preset` can say.
    pub(crate) fn names() -> Vec<&'static str> {
        Preset::NAMES.into_iter().chain([LOOPBACK]).collect()
    }

    fn by_name(name: &str) -> Result<Self> {
        if name == LOOPBACK {
            return Ok(Self::Loopback);
        }
        Preset::by_name(name).map(|preset| Self::Simulated(Box::new(preset))).map_err(|_| {
            Error::config("preset", format!("no preset is named {name:?}"))
                .with_context("presets", Self::names().join(", "))
        })
    }

    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Simulated(preset) => preset.name(),
            Self::Loopback => LOOPBACK,
        }
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        match self {
            Self::Simulated(preset) => preset.capabilities().clone(),
            Self::Loopback => loopback::capabilities(),
        }
    }
}

impl Config {
    pub(crate) fn read(config: &BackendConfig) -> Result<Self> {
        config.refuse_unknown(&["seed", "preset"])?;
        Ok(Self {
            seed: config.value("seed")?.unwrap_or(0),
            kind: config
                .text("preset")
                .map_or_else(|| Ok(Kind::Simulated(Box::new(Preset::rc()))), Kind::by_name)?,
        })
    }
}

/// Opens the backend of an engine, on the process's fabric of the seed that `config` says.
pub(crate) struct Open;

#[async_trait]
impl Opener for Open {
    async fn open(&self, config: &BackendConfig) -> Result<Arc<dyn TransferBackend>> {
        let Config { seed, kind } = Config::read(config)?;
        Ok(match kind {
            Kind::Simulated(preset) => shared(seed)?.backend(*preset, "mock"),
            Kind::Loopback => shared_loopback(seed)?.backend("mock")?,
        })
    }
}

/// The loopbacks that are in use, by seed.
static LOOPBACKS: Mutex<BTreeMap<u64, Weak<Hub>>> = Mutex::new(BTreeMap::new());

/// The process's loopback of this number: as [`shared`].
fn shared_loopback(seed: u64) -> Result<Loopback> {
    let mut all = LOOPBACKS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(hub) = all.get(&seed).and_then(Weak::upgrade) {
        return Ok(Loopback { hub });
    }
    let loopback = Loopback::with_seed(seed)?;
    all.retain(|_, hub| hub.strong_count() > 0);
    all.insert(seed, Arc::downgrade(&loopback.hub));
    Ok(loopback)
}

/// The fabrics that are in use, by seed.
static SHARED: Mutex<BTreeMap<u64, Weak<Shared>>> = Mutex::new(BTreeMap::new());

/// The process's fabric of this seed: made for the first backend, gone with the last.
#[expect(
    clippy::disallowed_methods,
    reason = "two processes' fabrics must differ, whatever their seeds"
)]
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
        assert_eq!((config.seed, config.kind), (0, Kind::Simulated(Box::new(Preset::rc()))));
        let config: BackendConfig = "seed=7,preset=ucx-tcp".parse().unwrap();
        let config = Config::read(&config).unwrap();
        assert_eq!((config.seed, config.kind), (7, Kind::Simulated(Box::new(Preset::ucx_tcp()))));
        let config = Config::read(&"preset=loopback".parse().unwrap()).unwrap();
        assert_eq!((config.seed, config.kind), (0, Kind::Loopback));
        for (bad, named) in [
            ("seed=x", "seed=\"x\""),
            ("preset=x", "rc, efa, ucx-tcp, loopback"),
            ("sed=1", "\"sed\""),
        ] {
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
        let (one, other) = (shared_loopback(7).unwrap(), shared_loopback(7).unwrap());
        assert!(Arc::ptr_eq(&one.hub, &other.hub));
        assert!(!Arc::ptr_eq(&one.hub, &shared_loopback(8).unwrap().hub));
    }
}
