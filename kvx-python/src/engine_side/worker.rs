//! A worker's side.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvx_connector::worker::{WorkerConnector, WorkerSetup};
use kvx_core::memory::{MemoryKind, Region};
use kvx_core::{Error, ErrorKind, Result};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::backends;
use super::config::{self, WorkerForm};
use crate::error::raise;
use crate::memory::lent;

/// What a worker process of an engine calls: one rank, with its caches registered, its thread and its control channel.
#[pyclass(frozen, module = "kvx._kvx")]
#[derive(Debug)]
pub(crate) struct WorkerSide {
    /// None after `shutdown`.
    inner: Mutex<Option<Arc<WorkerConnector>>>,
    backends: Vec<String>,
}

#[pymethods]
impl WorkerSide {
    /// Registers a rank's caches and starts it: its configuration as JSON, the engine's life, and its memory in the layout's order, as
    /// (address, bytes, the object that keeps it).
    #[new]
    fn new(
        py: Python<'_>,
        config: &str,
        life: &[u8],
        regions: Vec<(usize, u64, Py<PyAny>)>,
    ) -> PyResult<Self> {
        let regions = regions.into_iter().map(|(address, bytes, owner)| {
            // SAFETY: the engine says that its tensors are there, and the owner keeps them.
            let region = unsafe { lent::region(address, bytes, MemoryKind::Host, owner) };
            region
                .unwrap_or_else(|| Err(Error::misuse("region", "there is no memory at address 0")))
        });
        let regions = regions.collect::<Result<Vec<Region>>>().map_err(raise)?;
        let (inner, backends) = py.detach(|| start(config, life, regions)).map_err(raise)?;
        Ok(Self { inner: Mutex::new(Some(Arc::new(inner))), backends })
    }

    /// Names of the backends that it has open.
    #[getter]
    fn backends(&self) -> Vec<String> {
        self.backends.clone()
    }

    /// The rank's card.
    fn handshake_metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let card = self.with(py, |inner| Ok(inner.handshake_metadata()))?;
        Ok(PyBytes::new(py, &card))
    }

    /// Where its control channel listens.
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |inner| Ok(inner.address().to_string()))
    }

    /// Takes the cards of all ranks of the engine: to be called once, before the first step that loads something.
    fn serve_cards(&self, py: Python<'_>, cards: Vec<Vec<u8>>) -> PyResult<()> {
        self.with(py, |inner| inner.serve_cards(&cards))
    }

    /// Begins what a step says.
    fn start_load(&self, py: Python<'_>, step: &[u8]) -> PyResult<()> {
        self.with(py, |inner| inner.start_load(step))
    }

    /// Whether something has finished that the scheduler waits for.
    fn has_report(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |inner| Ok(inner.has_report()))
    }

    /// Waits until something has finished that the scheduler waits for, or so many seconds have passed; whether something has.
    fn wait_for_report(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .map_err(|error| raise(Error::misuse("worker", format!("timeout_s: {error}"))))?;
        self.with(py, |inner| Ok(inner.wait_for_report(timeout)))
    }

    /// What has finished since the last report, as bytes.
    fn take_report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let report = self.with(py, |inner| inner.take_report().encode())?;
        Ok(PyBytes::new(py, &report))
    }

    /// What it has done since it was started, by name. Times are in microseconds.
    fn stats(&self, py: Python<'_>) -> PyResult<BTreeMap<&'static str, u64>> {
        let stats = self.with(py, |inner| Ok(inner.stats()))?;
        Ok([
            ("loads", stats.loads),
            ("failed_loads", stats.failed_loads),
            ("bytes", stats.bytes),
            ("segments", stats.segments),
            ("transfer_us", stats.transfer_us),
            ("quarantined", stats.quarantined),
        ]
        .into())
    }

    /// All peers, as they are now: JSON.
    fn peers(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |inner| {
            serde_json::to_string(&inner.peers()).map_err(|error| {
                Error::new(ErrorKind::Internal, "peers", "cannot be JSON").with_source(error)
            })
        })
    }

    /// Leases that are not freed, and requests that are not over or whose blocks are kept.
    fn open(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        self.with(py, |inner| Ok(inner.open()))
    }

    /// Tells all peers goodbye, and ends its thread. May be called more than once.
    fn shutdown(&self, py: Python<'_>) {
        py.detach(|| {
            let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(inner) = inner.and_then(Arc::into_inner) {
                inner.shutdown();
            }
        });
    }
}

impl WorkerSide {
    /// Calls the connector, without the lock that `shutdown` takes.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&WorkerConnector) -> Result<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| {
            let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let closed = || Error::new(ErrorKind::Closed, "worker", "it was shut down");
            act(&*inner.ok_or_else(closed)?)
        })
        .map_err(raise)
    }
}

fn start(
    config: &str,
    life: &[u8],
    regions: Vec<Region>,
) -> Result<(WorkerConnector, Vec<String>)> {
    let form: WorkerForm = config::read("worker", config)?;
    let (security, facts) = (form.security()?, form.facts()?);
    let opened = backends::open_for(form.backend.as_deref())?;
    let names = opened.backends.iter().map(|backend| backend.name().to_owned()).collect();
    let setup = WorkerSetup::new(
        (form.engine.parse()?, config::life(life)?),
        (form.listen.parse()?, security),
        facts,
        (form.layout, regions),
        (opened.backends, Box::new(opened.policy)),
    );
    let worker = WorkerConnector::register_caches(setup.with_digests(form.digests))?;
    Ok((worker, names))
}
