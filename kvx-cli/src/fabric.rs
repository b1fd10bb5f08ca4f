//! Which backend, and what opens it.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use kvx_connector::{Choice, Policy, choose, choose_every, open, open_every};
use kvx_core::backend::TransferBackend;
use kvx_core::config::BackendConfig;
use kvx_core::limits::{self, Wanted};
use kvx_core::port::Port;
use kvx_core::{Error, ErrorKind, Result};
use tokio::runtime::Runtime;

use crate::engine::live::Opened;

/// The backend that is there when no other is.
const MOCK: &str = "mock";

/// What opens backends.
#[derive(Debug)]
pub(crate) struct Fabric {
    choice: Choice,
    options: BackendConfig,
    pub(crate) runtime: Runtime,
    /// Nobody asked for the mock: why there was nothing else.
    pub(crate) fallback: Option<Error>,
}

impl Fabric {
    /// Those of the backend.
    pub(crate) const fn options(&self) -> &BackendConfig {
        &self.options
    }

    /// Chooses a backend: `name` (with options: `name,option=value`), what the environment says, the best that there is, or
    /// the mock.
    pub(crate) fn choose(name: Option<&str>, seed: u64) -> Result<Self> {
        let policy = policy(name)?;
        let (choice, fallback) = match choose(&policy, None) {
            Err(error) if error.kind() == ErrorKind::Unsupported && policy_is_open(&policy) => {
                let mock = policy.clone().with_name(Some(MOCK));
                // Where there is no mock either, the first error says more.
                match choose(&mock, None) {
                    Ok(mock) => (mock, Some(error)),
                    Err(_) => return Err(error),
                }
            }
            other => (other?, None),
        };
        let mut options = policy.options;
        if choice.registration.name == MOCK && options.text("seed").is_none() {
            options = options.with("seed", seed.to_string());
        }
        Ok(Self { choice, options, runtime: runtime()?, fallback })
    }

    /// The backend's name.
    pub(crate) fn name(&self) -> &'static str {
        self.choice.registration.name
    }

    /// Which backend, and why, for people.
    pub(crate) fn about(&self) -> String {
        if self.fallback.is_some() {
            let others = self.choice.considered.iter().filter(|other| other.name != MOCK);
            let others: Vec<&str> = others.map(|other| other.name).collect();
            return if others.is_empty() {
                "mock (in-process): no fabric backend is built in".to_owned()
            } else {
                format!(
                    "mock (in-process): {} cannot be used here, see kvx backends",
                    others.join(", ")
                )
            };
        }
        let process = if self.is_in_process() { " (in-process)" } else { " (two processes)" };
        format!("{}{process}: {}", self.name(), self.choice.reason)
    }

    /// What opens the same backend in another process: its name and options.
    pub(crate) fn spec(&self) -> String {
        let mut spec = self.name().to_owned();
        for (key, value) in self.options.iter() {
            spec.push_str(&format!(",{key}={value}"));
        }
        spec
    }

    /// Whether its engines must be in one process.
    pub(crate) fn is_in_process(&self) -> bool {
        self.name() == MOCK
    }

    fn backend(&self) -> Result<Arc<dyn TransferBackend>> {
        self.runtime.block_on(open(&self.choice, &self.options))
    }

    /// Opens a backend, and a port over it.
    pub(crate) fn port(&self) -> Result<Port> {
        Port::new(self.backend()?)
    }

    /// Opens a backend for a rank with the whole connector.
    pub(crate) fn open(&self) -> Result<Opened> {
        let mut policy = Policy::default().with_name(Some(self.name()));
        policy.options = self.options.clone();
        Ok(Opened { backends: vec![self.backend()?], policy })
    }

    /// Closes ports, each within the bound that a port keeps.
    pub(crate) fn close<'a>(&self, ports: impl Iterator<Item = &'a Port>) -> Result<()> {
        for port in ports {
            self.runtime.block_on(port.close())?;
        }
        Ok(())
    }
}

/// What opens all backends that can be used here, or the one that is named: between two engines, the best that both have is
/// chosen.
#[derive(Debug)]
pub(crate) struct Every {
    policy: Policy,
    /// The one of this host first: all the others take its memory.
    choices: Vec<Choice>,
}

impl Every {
    /// Finds out what there is: what `name` (with options) or the environment says, or all.
    pub(crate) fn find(name: Option<&str>) -> Result<Self> {
        let policy = policy(name)?;
        let choices = choose_every(&policy)?;
        Ok(Self { policy, choices })
    }

    /// Their names.
    pub(crate) fn names(&self) -> String {
        let names: Vec<&str> = self.choices.iter().map(|one| one.registration.name).collect();
        names.join(", ")
    }

    /// Opens them for one rank. One that cannot be opened is left out, as long as another can.
    pub(crate) fn open(&self, runtime: &Runtime) -> Result<Opened> {
        let backends = runtime.block_on(open_every(&self.choices, &self.policy.options))?;
        Ok(Opened { backends, policy: self.policy.clone() })
    }
}

/// A runtime for one thread.
pub(crate) fn runtime() -> Result<Runtime> {
    // Where descriptors have run out the runtime does not say so, but panics.
    let room: std::io::Result<Vec<_>> =
        (0..DESCRIPTORS).map(|_| std::io::stderr().as_fd().try_clone_to_owned()).collect();
    drop(room.map_err(|refused| {
        let what = "there are too few descriptors";
        limits::explain(
            Error::new(ErrorKind::Resources, "runtime", what),
            refused,
            Wanted::Descriptor,
        )
    })?);
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|source| {
        Error::new(ErrorKind::Resources, "runtime", "no runtime").with_source(source)
    })
}

/// Descriptors that a runtime takes, and some.
const DESCRIPTORS: usize = 12;

/// What the environment says, and what `--backend` says before it.
fn policy(name: Option<&str>) -> Result<Policy> {
    let mut policy = Policy::from_env()?;
    if let Some(text) = name {
        policy = policy.with_text("--backend", text)?;
    }
    refuse_unknown(&policy)?;
    Ok(policy)
}

/// Refuses a name that no backend built into this program has.
fn refuse_unknown(policy: &Policy) -> Result<()> {
    let (operation, name) = match (&policy.name, &policy.environment) {
        (Some(name), _) => ("--backend", name),
        (None, Some(name)) => ("KVX_BACKEND", name),
        (None, None) => return Ok(()),
    };
    let known: Vec<&str> = kvx_connector::backends()?.iter().map(|one| one.name).collect();
    if name.is_empty() {
        return Err(Error::config(operation, "it names no backend")
            .with_remedy(format!("name one of {}", known.join(", "))));
    }
    if known.contains(&name.as_str()) {
        return Ok(());
    }
    if name.contains(',') {
        // The options of `--backend` were taken off. What to write instead is said by whoever chooses.
        return Ok(());
    }
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    Err(Error::unsupported(operation, format!("backend {name} is not built in; built in: {known}")))
}

fn policy_is_open(policy: &Policy) -> bool {
    policy.name.is_none() && policy.environment.is_none()
}
