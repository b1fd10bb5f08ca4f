//! The backend under test, as its crate describes it to the kit.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::TransferBackend;
use kvx_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// A backend under test.
pub trait Subject: Sync {
    /// The backend's name, as in the registry. It is what `KVX_REQUIRE` names.
    fn name(&self) -> &'static str;

    /// The ways to set it up that are to be tested, at least one: presets, transports, providers.
    fn setups(&self) -> Vec<Setup>;

    /// Whether a setup can be tested here, in the manner of [`Probe`](kvx_core::registry::Probe).
    ///
    /// # Errors
    ///
    /// Why not: a library or a device that is missing, and what to install. It is printed, and is a failure where
    /// `KVX_REQUIRE` names the backend.
    fn probe(&self, setup: &str) -> Result<(), String> {
        let _ = setup;
        Ok(())
    }

    /// Whether the fabric reaches this far in a setup.
    ///
    /// # Errors
    ///
    /// Why not. It is printed, and is no failure: what a fabric cannot be is not missing.
    fn reaches(&self, setup: &str, place: Place) -> Result<(), String> {
        let _ = (setup, place);
        Ok(())
    }

    /// The faults that [`Stage::inflict`] knows when both sides are in one process. Across processes the kit kills and
    /// stops the peer's process.
    fn faults(&self) -> &[Fault] {
        &[]
    }

    /// A fabric of its own for one run of one clause. Across processes each side's process asks for one.
    ///
    /// # Errors
    ///
    /// When it cannot be had.
    fn stage(&self, ground: &Ground) -> Result<Box<dyn Stage>>;
}

/// The fabric of one run of one clause.
pub trait Stage: Send + Sync {
    /// Opens the backend of a side: `one`, `other` and `third`, by name; a name that is opened again is a new life of
    /// that side. The stage keeps no reference to it that would keep it alive.
    ///
    /// # Errors
    ///
    /// When it cannot be opened.
    fn open(&self, side: &str) -> Result<Arc<dyn TransferBackend>>;

    /// Does this to the newest life of a side, in one process.
    ///
    /// # Errors
    ///
    /// When it is not among [`Subject::faults`], or fails.
    fn inflict(&self, fault: Fault, side: &str) -> Result<()> {
        Err(Error::unsupported("inflict", format!("{fault} {side}: there is no such hook")))
    }
}

/// Where the run takes place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ground {
    /// Name of the [`Setup`].
    pub setup: String,
    /// Where the peer is.
    pub place: Place,
    /// What a fabric that has choices takes them from.
    pub seed: u64,
    /// The address at which this side can be reached, where the two are in different network namespaces.
    pub address: Option<IpAddr>,
    /// Memory under test is what the backend [allocates](kvx_core::memory::MemoryRegistry::allocate).
    pub allocated: bool,
}

impl Ground {
    pub(crate) fn new(setup: &Setup, place: Place, seed: u64) -> Self {
        let (setup, allocated) = (setup.name.clone(), setup.allocated);
        Self { setup, place, seed, address: None, allocated }
    }
}

/// Something that happens to a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// It is gone, from one moment to the next, and says nothing.
    Kill,
    /// It stands still.
    Stop,
    /// It goes on after it stood still.
    Resume,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
            Self::Resume => "resume",
        })
    }
}

/// Where the peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// In this process.
    OneProcess,
    /// In a process of its own.
    TwoProcesses,
    /// In a process and a network namespace of its own.
    TwoNamespaces,
}

impl Place {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::OneProcess, Self::TwoProcesses, Self::TwoNamespaces];

    /// Its name, as in names of tests.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneProcess => "one_process",
            Self::TwoProcesses => "two_processes",
            Self::TwoNamespaces => "two_namespaces",
        }
    }
}

/// One way to set the backend up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    pub(crate) name: String,
    pub(crate) seeds: u32,
    pub(crate) pace: Pace,
    pub(crate) allocated: bool,
}

/// How long a run waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pace {
    /// A wait for something that must happen ends after this long, and this many polls.
    pub(crate) patience: Duration,
    pub(crate) polls: u32,
    /// What must not happen is waited for this long, and this many polls.
    pub(crate) quiet: Duration,
    pub(crate) quiet_polls: u32,
    /// The most that one run of a clause may take: then it hangs.
    pub(crate) budget: Duration,
}

impl Setup {
    /// A setup of a fabric that takes its time: one run per clause, waits of up to ten seconds.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        let pace = Pace {
            patience: Duration::from_secs(10),
            polls: 100,
            quiet: Duration::from_millis(50),
            quiet_polls: 50,
            budget: Duration::from_secs(60),
        };
        Self { name: name.into(), seeds: 1, pace, allocated: false }
    }

    /// A setup of a fabric without a clock: it moves with each poll, so waits are counted in polls. One run per clause and
    /// seed.
    #[must_use]
    pub fn stepped(name: impl Into<String>, seeds: u32) -> Self {
        let pace = Pace {
            patience: Duration::from_millis(50),
            polls: 4000,
            quiet: Duration::ZERO,
            quiet_polls: 300,
            budget: Duration::from_secs(30),
        };
        Self { name: name.into(), seeds: seeds.max(1), pace, allocated: false }
    }

    /// Waits this long for what must happen.
    #[must_use]
    pub const fn with_patience(mut self, patience: Duration) -> Self {
        self.pace.patience = patience;
        self
    }

    /// Gives what must not happen this long to happen.
    #[must_use]
    pub const fn with_quiet(mut self, quiet: Duration) -> Self {
        self.pace.quiet = quiet;
        self
    }

    /// Runs every clause with this many seeds.
    #[must_use]
    pub const fn with_seeds(mut self, seeds: u32) -> Self {
        self.seeds = if seeds == 0 { 1 } else { seeds };
        self
    }

    /// Takes all memory under test from the backend's own
    /// [`allocate`](kvx_core::memory::MemoryRegistry::allocate), instead of the heap.
    #[must_use]
    pub const fn with_allocated_memory(mut self) -> Self {
        self.allocated = true;
        self
    }

    /// Its name, as in names of tests.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}
