//! Presets: how the fabric of an engine behaves.

use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::{Error, Result};

/// How an engine's fabric behaves: its capabilities, and what it calls its transport. Engines of different presets do not
/// talk to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preset {
    name: &'static str,
    transport: &'static str,
    capabilities: Capabilities,
}

impl Preset {
    /// The names that [`by_name`](Self::by_name) knows.
    pub const NAMES: [&'static str; 3] = ["rc", "efa", "ucx-tcp"];

    /// Like reliable connections of InfiniBand or RoCE: batches to one peer become visible in order, a peer's access can
    /// be ended by destroying the connection, notifications ride on the data (immediate). As there, a connection that is down
    /// gives no access any more: once *peer down* is reported, that peer reads and writes nothing.
    #[must_use]
    pub const fn rc() -> Self {
        let mut capabilities = both_modes();
        capabilities.limits.max_segment_bytes = 1 << 31;
        capabilities.limits.max_batch_segments = 4096;
        capabilities.limits.max_notification_bytes = 4096;
        capabilities.limits.max_in_flight = 128;
        capabilities.ordering = Ordering::PerPeer;
        capabilities.revoke = Revoke::PerPeer;
        capabilities.native_notification = true;
        Self { name: "rc", transport: "mock-rc", capabilities }
    }

    /// Like the scalable reliable datagrams of EFA: everything in any order, no way to end a peer's access, few segments in
    /// a batch.
    #[must_use]
    pub const fn efa() -> Self {
        let mut capabilities = both_modes();
        capabilities.limits.max_segment_bytes = 1 << 30;
        capabilities.limits.max_batch_segments = 256;
        capabilities.limits.max_notification_bytes = 1024;
        capabilities.limits.max_in_flight = 64;
        Self { name: "efa", transport: "mock-srd", capabilities }
    }

    /// Like UCX over TCP: a target in software, everything in any order, no way to end a peer's access, large limits.
    #[must_use]
    pub const fn ucx_tcp() -> Self {
        let mut capabilities = both_modes();
        capabilities.limits.max_segment_bytes = 1 << 40;
        capabilities.limits.max_batch_segments = 8192;
        capabilities.limits.max_notification_bytes = 8192;
        capabilities.limits.max_in_flight = 1024;
        Self { name: "ucx-tcp", transport: "mock-tcp", capabilities }
    }

    /// With these capabilities: tiny limits, say, so that splitting is exercised.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse), naming the field, when they contradict each other or claim what
    /// this fabric does not do: memory of CUDA devices, an event descriptor, or revoking by region.
    pub fn custom(capabilities: Capabilities) -> Result<Self> {
        let refuse = |what: &str| Err(Error::misuse("preset", what.to_owned()));
        if let Err(error) = capabilities.check() {
            return refuse(error.message());
        }
        if capabilities.cuda_memory {
            return refuse("cuda_memory: this fabric reaches host memory only");
        }
        if capabilities.event_fd {
            return refuse("event_fd: this fabric has no descriptor to sleep on");
        }
        if capabilities.revoke == Revoke::PerRegion {
            return refuse("revoke: this fabric revokes per peer or not at all");
        }
        Ok(Self { name: "custom", transport: "mock-custom", capabilities })
    }

    /// The preset of this name, one of [`NAMES`](Self::NAMES).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](kvx_core::ErrorKind::Config), listing the names.
    pub fn by_name(name: &str) -> Result<Self> {
        match name {
            "rc" => Ok(Self::rc()),
            "efa" => Ok(Self::efa()),
            "ucx-tcp" => Ok(Self::ucx_tcp()),
            _ => Err(Error::config("preset", format!("no preset is named {name:?}"))
                .with_context("presets", Self::NAMES.join(", "))),
        }
    }

    /// Its name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// What it calls its transport.
    #[must_use]
    pub const fn transport(&self) -> &'static str {
        self.transport
    }

    /// What it can do.
    #[must_use]
    pub const fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
}

const fn both_modes() -> Capabilities {
    let mut capabilities = Capabilities::none();
    capabilities.read = true;
    capabilities.write = true;
    capabilities.host_memory = true;
    capabilities
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_consistent_and_found_by_name() {
        for name in Preset::NAMES {
            let preset = Preset::by_name(name).unwrap();
            assert_eq!(preset.name(), name);
            preset.capabilities().check().unwrap();
        }
        let error = Preset::by_name("roce").unwrap_err().to_string();
        assert!(error.contains("\"roce\"") && error.contains("rc, efa, ucx-tcp"), "{error}");
    }

    #[test]
    fn a_custom_preset_claims_nothing_that_is_not_done() {
        let good = Preset::rc().capabilities().clone();
        assert_eq!(Preset::custom(good.clone()).unwrap().capabilities(), &good);
        type Break = fn(&mut Capabilities);
        let refused: [(&str, Break); 4] = [
            ("cuda_memory", |c| c.cuda_memory = true),
            ("event_fd", |c| c.event_fd = true),
            ("revoke", |c| c.revoke = Revoke::PerRegion),
            ("max_in_flight", |c| c.limits.max_in_flight = 0),
        ];
        for (field, break_it) in refused {
            let mut bad = good.clone();
            break_it(&mut bad);
            let error = Preset::custom(bad).unwrap_err();
            assert!(error.message().contains(field), "{error}");
        }
    }
}
