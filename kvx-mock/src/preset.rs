//! Presets: how the fabric of an engine behaves.

use std::time::Duration;

use kvx_core::capability::{Capabilities, Ordering, Revoke};
use kvx_core::{Error, Result};

use crate::timing::{Span, Timing};

/// How an engine's fabric behaves: its capabilities, what it calls its transport, and how long things take. Engines of
/// different presets do not talk to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preset {
    name: &'static str,
    transport: &'static str,
    capabilities: Capabilities,
    timing: Timing,
    target: Target,
    loss: Loss,
    most_notifications: usize,
}

/// Who serves accesses to an engine's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// Its network card: it goes on when the process is stopped.
    Hardware,
    /// A thread of its process.
    Software,
}

/// What ends when data is lost for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The transfer to which it belongs.
    Transfer,
    /// The connection.
    Connection,
}

impl Preset {
    /// The names that [`by_name`](Self::by_name) knows.
    pub const NAMES: [&'static str; 3] = ["rc", "efa", "ucx-tcp"];

    /// Most notifications that wait to be polled by one engine, unless a preset
    /// [says otherwise](Self::with_most_notifications).
    pub const MOST_NOTIFICATIONS: usize = 4096;

    /// Like reliable connections of InfiniBand or RoCE: batches to one peer become visible in order, a peer's access can
    /// be ended by destroying the connection, notifications ride on the data (immediate), and what is lost for good takes the
    /// connection with it. As there, a connection that is down gives no access any more: once *peer down* is reported, that
    /// peer reads and writes nothing. A process that is stopped is read and written all the same.
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
        let timing = Timing {
            latency: Span::micros(1, 5),
            per_kib: Duration::from_nanos(20),
            death: Span::micros(200_000, 800_000),
            silence: Span::micros(500_000, 2_000_000),
            sever: Span::micros(1, 100_000),
        };
        Self::made_of("rc", "mock-rc", capabilities, timing)
    }

    /// Like the scalable reliable datagrams of EFA: everything in any order, no way to end a peer's access, few segments in
    /// a batch. Data that is lost for good fails its transfer only. A process that is stopped is read and written all the
    /// same.
    #[must_use]
    pub const fn efa() -> Self {
        let mut capabilities = both_modes();
        capabilities.limits.max_segment_bytes = 1 << 30;
        capabilities.limits.max_batch_segments = 256;
        capabilities.limits.max_notification_bytes = 1024;
        capabilities.limits.max_in_flight = 64;
        let timing = Timing {
            latency: Span::micros(10, 60),
            per_kib: Duration::from_nanos(40),
            death: Span::micros(1_000_000, 4_000_000),
            silence: Span::micros(1_000_000, 4_000_000),
            sever: Span::micros(1, 1_000_000),
        };
        let mut made = Self::made_of("efa", "mock-srd", capabilities, timing);
        made.loss = Loss::Transfer;
        made
    }

    /// Like UCX over TCP: everything in any order, no way to end a peer's access, large limits. The target is software: while
    /// a process is stopped, nothing gets into or out of its memory, and its peers notice nothing but that.
    #[must_use]
    pub const fn ucx_tcp() -> Self {
        let mut capabilities = both_modes();
        capabilities.limits.max_segment_bytes = 1 << 40;
        capabilities.limits.max_batch_segments = 8192;
        capabilities.limits.max_notification_bytes = 8192;
        capabilities.limits.max_in_flight = 1024;
        let timing = Timing {
            latency: Span::micros(20, 200),
            per_kib: Duration::from_nanos(300),
            death: Span::micros(20, 1_000),
            silence: Span::micros(10_000_000, 30_000_000),
            sever: Span::micros(1, 1_900_000),
        };
        let mut made = Self::made_of("ucx-tcp", "mock-tcp", capabilities, timing);
        made.target = Target::Software;
        made
    }

    const fn made_of(
        name: &'static str,
        transport: &'static str,
        capabilities: Capabilities,
        timing: Timing,
    ) -> Self {
        let most_notifications = Self::MOST_NOTIFICATIONS;
        let (target, loss) = (Target::Hardware, Loss::Connection);
        Self { name, transport, capabilities, timing, target, loss, most_notifications }
    }

    /// With these capabilities: tiny limits, say, so that splitting is exercised. Otherwise like [`rc`](Self::rc) where
    /// they promise order or revoking, and like [`efa`](Self::efa) where they do not.
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
        let connected =
            capabilities.ordering == Ordering::PerPeer || capabilities.revoke == Revoke::PerPeer;
        let like = if connected { Self::rc() } else { Self::efa() };
        Ok(Self { name: "custom", transport: "mock-custom", capabilities, ..like })
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

    /// With other durations.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Misuse`](kvx_core::ErrorKind::Misuse), naming the field, when a range is empty, or severing may take
    /// longer than the contract allows.
    pub fn with_timing(self, timing: Timing) -> Result<Self> {
        timing.check()?;
        Ok(Self { timing, ..self })
    }

    /// With room for `most` notifications that wait to be polled (at least 1).
    ///
    /// What does not fit waits at the peers: their transfers with a notification do not settle until there is room, so that
    /// their queues fill up and say full. The other events of an engine are bounded by what it does itself.
    #[must_use]
    pub fn with_most_notifications(self, most: usize) -> Self {
        Self { most_notifications: most.max(1), ..self }
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

    /// How long things take.
    #[must_use]
    pub const fn timing(&self) -> &Timing {
        &self.timing
    }

    /// How many notifications may wait to be polled by one engine.
    #[must_use]
    pub const fn most_notifications(&self) -> usize {
        self.most_notifications
    }

    /// Whether accesses to a process's memory need that process: while it is stopped, they wait.
    #[must_use]
    pub const fn is_software(&self) -> bool {
        matches!(self.target, Target::Software)
    }

    pub(crate) const fn loss(&self) -> Loss {
        self.loss
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
            preset.timing().check().unwrap();
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
