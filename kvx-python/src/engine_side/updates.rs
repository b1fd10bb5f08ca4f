//! What the ranks' reports come to, for Python.

use kvx_connector::scheduler::{OnFailure, Updates};
use pyo3::prelude::*;

/// What of a rank's report the engine has to act on.
#[pyclass(frozen, get_all, module = "kvx._kvx")]
#[derive(Debug)]
pub(crate) struct StepUpdates {
    /// Finished requests whose blocks were held for another engine, and are not any more.
    sent: Vec<String>,
    /// Aborted or preempted requests whose blocks were held because something might still have been written there.
    drained: Vec<String>,
    /// Requests that are loaded by every rank, and how many tokens may count as computed.
    received: Vec<(String, u64)>,
    /// Requests that could not be loaded.
    failed: Vec<Py<LoadFailure>>,
    /// Blocks, as (group, block), that must not be used again yet.
    quarantined: Vec<(u16, u32)>,
    /// Blocks that were, and may be.
    unquarantined: Vec<(u16, u32)>,
}

/// A request that could not be loaded.
#[pyclass(frozen, get_all, module = "kvx._kvx")]
#[derive(Debug)]
pub(crate) struct LoadFailure {
    /// The request.
    request: String,
    /// What is not proven good, as (group, block).
    blocks: Vec<(u16, u32)>,
    /// How many tokens, from the first on, may count as computed all the same.
    computed: u64,
    /// Whether the engine is to compute it itself, or else to fail it.
    recompute: bool,
    /// What went wrong, at the first rank that said so.
    reason: String,
}

impl StepUpdates {
    pub(super) fn new(py: Python<'_>, updates: Updates) -> PyResult<Self> {
        let names = |ids: Vec<_>| -> Vec<String> { ids.iter().map(ToString::to_string).collect() };
        let flat = |groups: std::collections::BTreeMap<u16, std::collections::BTreeSet<u32>>| {
            let blocks = groups.into_iter();
            blocks.flat_map(|(group, ids)| ids.into_iter().map(move |id| (group, id))).collect()
        };
        let failed = updates.failed.into_iter().map(|it| {
            let failure = LoadFailure {
                request: it.request.to_string(),
                blocks: it.blocks.into_iter().collect(),
                computed: it.computed,
                recompute: it.then == OnFailure::Recompute,
                reason: it.reason,
            };
            Py::new(py, failure)
        });
        Ok(Self {
            failed: failed.collect::<PyResult<_>>()?,
            sent: names(updates.sent),
            drained: names(updates.drained),
            received: (updates.received.into_iter())
                .map(|it| (it.request.to_string(), it.computed))
                .collect(),
            quarantined: flat(updates.quarantined),
            unquarantined: flat(updates.unquarantined),
        })
    }
}
