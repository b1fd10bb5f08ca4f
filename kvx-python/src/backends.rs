//! What can move bytes here.

use kvx_core::config::BackendConfig;
use kvx_core::registry::Probe;
use pyo3::prelude::*;
use serde::Serialize;

use crate::{error, objects};

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
            let entry = |one: &'static kvx_core::registry::Registration| Entry {
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
