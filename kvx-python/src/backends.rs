//! What can move bytes here.

use std::sync::Arc;
use std::time::Duration;

use kvx_connector::Policy;
use kvx_core::backend::TransferBackend;
use kvx_core::config::BackendConfig;
use kvx_core::registry::{Probe, Registration};
use kvx_core::{Error, ErrorKind, Result};
use pyo3::prelude::*;
use serde::Serialize;

use crate::memory::PyRegion;
use crate::number::Whole;
use crate::process::Own;
use crate::waiting::run;
use crate::{error, objects};

/// How long a backend may take to open.
const OPEN: Duration = Duration::from_secs(60);
/// How long a backend may take to close.
const CLOSE: Duration = Duration::from_secs(10);

/// A backend, as `kvx backends --json` prints it, too.
#[derive(Serialize)]
struct Entry {
    name: &'static str,
    about: &'static str,
    rank: Option<u32>,
    #[serde(flatten)]
    probe: Probe,
}

/// Every backend of this build, sorted by name, and what its probe says.
#[pyfunction]
pub(crate) fn backends(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    // Probes open libraries.
    let entries: Vec<Entry> = py
        .detach(|| {
            let entry = |one: &'static Registration| Entry {
                name: one.name,
                about: one.about,
                rank: one.rank,
                probe: (one.probe)(&BackendConfig::new()),
            };
            kvx_connector::backends().map(|all| all.into_iter().map(entry).collect())
        })
        .map_err(error::raise)?;
    objects::of(py, &entries)
}

/// A fabric that is open: what registers memory and moves bytes. ``kvx.open_backend`` opens one.
#[pyclass(frozen, name = "Backend", module = "kvx")]
pub(crate) struct PyBackend {
    backend: Own<Arc<dyn TransferBackend>>,
    /// How it was chosen.
    policy: Policy,
    chosen: String,
}

/// Opens a backend: the one that is named, else the one that `KVX_BACKEND` names, else the best that can be used here.
#[pyfunction]
#[pyo3(signature = (name, options))]
pub(crate) fn open_backend(
    py: Python<'_>,
    name: Option<String>,
    options: Vec<(String, String)>,
) -> PyResult<PyBackend> {
    let (policy, choice) = py
        .detach(|| {
            let mut policy = Policy::from_env()?.with_name(name);
            if !options.is_empty() {
                policy.options = options.into_iter().collect();
            }
            let choice = kvx_connector::choose(&policy, None)?;
            Ok((policy, choice))
        })
        .map_err(error::raise)?;
    let (chosen, options) = (choice.to_string(), policy.options.clone());
    let opening = async move { kvx_connector::open(&choice, &options).await };
    let opened = run(py, opening, Some(OPEN))?.ok_or_else(|| late("open", OPEN))?;
    let opened = opened.map_err(error::raise)?;
    let policy = policy.with_name(Some(opened.name()));
    Ok(PyBackend { backend: Own::new(opened), policy, chosen })
}

impl PyBackend {
    pub(crate) fn get(&self, operation: &'static str) -> PyResult<&Arc<dyn TransferBackend>> {
        self.backend.get(operation)
    }
}

fn late(operation: &'static str, after: Duration) -> PyErr {
    error::raise(
        Error::new(ErrorKind::Fabric, operation, "the backend does not come to an end")
            .with_context("seconds", after.as_secs()),
    )
}

/// What may be chosen among these, which one rank has opened.
///
/// # Errors
///
/// There are several, and one has options.
pub(crate) fn policy_of(
    backends: &[&PyBackend],
    transports: Option<Vec<String>>,
) -> Result<Policy> {
    let policy = match backends {
        [one] => one.policy.clone(),
        several => {
            if let Some(one) = several.iter().find(|one| one.policy.options != BackendConfig::new())
            {
                let name = one.policy.name.clone().unwrap_or_default();
                return Err(Error::config("engine", "a backend with options beside another one")
                    .with_context("backend", name)
                    .with_remedy(
                        "give a rank one backend, or set what it wants in the environment",
                    ));
            }
            let names = several.iter().filter_map(|one| one.policy.name.clone()).collect();
            Policy { allow: Some(names), ..Policy::default() }
        }
    };
    Ok(Policy { transports, ..policy })
}

#[pymethods]
impl PyBackend {
    /// Its name.
    #[getter]
    fn name(&self) -> PyResult<&'static str> {
        Ok(self.get("backend")?.name())
    }

    /// Which backend was chosen, why, and what was found.
    #[getter]
    fn chosen(&self) -> &str {
        &self.chosen
    }

    /// What it can do, as it was opened.
    #[getter]
    fn capabilities<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        objects::of(py, self.get("backend")?.capabilities())
    }

    /// Zeroed memory of the kind that it moves fastest: what peers on the same host can map, huge pages, memory near a device.
    fn allocate(&self, py: Python<'_>, nbytes: Whole<u64>) -> PyResult<PyRegion> {
        let backend = self.get("allocate")?;
        py.detach(|| backend.allocate(nbytes.0)).map(PyRegion::new).map_err(error::raise)
    }

    /// Ends every connection, waits until nothing moves any more, and frees everything. Engines that use it must be closed before. Once
    /// is enough; to let go of the backend does the same without waiting.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let backend = self.get("close")?;
        let closing = async { backend.close().await };
        run(py, closing, Some(CLOSE))?.ok_or_else(|| late("close", CLOSE))?.map_err(error::raise)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _exception: &Bound<'_, pyo3::types::PyTuple>,
    ) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        format!("Backend({})", self.chosen)
    }
}
