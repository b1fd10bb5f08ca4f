//! A request under way.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use kvx_connector::engine::Fetch;
use kvx_connector::rank::FetchReport;
use kvx_connector::worker::{Aborter, FetchFailure, Fetching};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFrozenSet, PyList};

use crate::engine::{Shared, timeout};
use crate::error;
use crate::lease::reason;
use crate::process::Own;
use crate::waiting::{PyBell, Waiting};

/// A request that is fetched or stored: `kvx.Fetch` is in front of it.
#[pyclass(frozen, name = "Fetch", module = "kvx._kvx")]
pub(crate) struct PyFetch {
    inside: Own<Inside>,
}

struct Inside {
    waiting: Arc<Waiting<End>>,
    aborters: Vec<Aborter>,
    engine: Arc<Shared>,
    /// Ranks and requests that are in quarantine, as far as is known; `None` before it is over.
    kept: Mutex<Option<Vec<(usize, u64)>>>,
}

/// How it ended at all ranks.
struct End {
    result: Result<Vec<FetchReport>, FetchFailure>,
    /// Ranks and requests that ended in quarantine.
    kept: Vec<(usize, u64)>,
}

impl PyFetch {
    pub(crate) fn new(fetch: Fetch, engine: Arc<Shared>) -> Self {
        let ranks = fetch.into_ranks();
        let aborters = ranks.iter().map(Fetching::aborter).collect();
        let waiting = Waiting::new(over(ranks));
        Self { inside: Own::new(Inside { waiting, aborters, engine, kept: Mutex::new(None) }) }
    }
}

async fn over(ranks: Vec<Fetching>) -> End {
    let (mut reports, mut kept) = (Vec::new(), Vec::new());
    let mut failure: Option<FetchFailure> = None;
    for (rank, fetching) in ranks.into_iter().enumerate() {
        let request = fetching.request();
        match fetching.await {
            Ok(report) => reports.push(report),
            Err(failed) => {
                if failed.quarantined {
                    kept.push((rank, request.0));
                }
                match &mut failure {
                    None => failure = Some(failed),
                    Some(first) => {
                        first.blocks.extend(failed.blocks);
                        first.quarantined |= failed.quarantined;
                    }
                }
            }
        }
    }
    End { result: failure.map_or(Ok(reports), Err), kept }
}

impl Inside {
    fn abort(&self) {
        self.aborters.iter().for_each(Aborter::abort);
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        // Nobody waits for it any more. It is followed to its end all the same.
        self.abort();
    }
}

#[pymethods]
impl PyFetch {
    /// Gives it up. It still has to be waited for: its blocks are in use until it is over.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let inside = self.inside.get("abort")?;
        py.detach(|| inside.abort());
        Ok(())
    }

    /// Whether it is over.
    fn done(&self) -> PyResult<bool> {
        Ok(self.inside.get("fetch")?.waiting.outcome().is_some())
    }

    /// Waits until it is over, for at most `timeout` seconds. Whether it is.
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let timeout = self::timeout(timeout)?;
        let inside = self.inside.get("fetch")?;
        loop {
            let over = inside.waiting.wait(py, timeout)?.is_some();
            if over || timeout.is_some() {
                return Ok(over);
            }
        }
    }

    /// Rings `bell` with `number` when it is over.
    fn tell(&self, bell: &PyBell, number: u64) -> PyResult<()> {
        self.inside.get("fetch")?.waiting.tell(&bell.bell, number);
        Ok(())
    }

    /// What each rank moved; `None` while it is not over.
    fn outcome<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        let outcome = self.inside.get("fetch")?.waiting.outcome();
        match outcome.as_deref().map(|end| &end.result) {
            None => Ok(None),
            Some(Ok(reports)) => {
                let list = PyList::empty(py);
                for report in reports {
                    list.append(shown(py, report)?)?;
                }
                Ok(Some(list))
            }
            Some(Err(failure)) => Err(failed(py, failure)?),
        }
    }

    /// Whether it is over, and nothing can move in its blocks any more.
    fn quiet(&self, py: Python<'_>) -> PyResult<bool> {
        let inside = self.inside.get("fetch")?;
        let Some(end) = inside.waiting.outcome() else { return Ok(false) };
        Ok(py.detach(|| {
            let mut kept = inside.kept.lock().unwrap_or_else(PoisonError::into_inner);
            let kept = kept.get_or_insert_with(|| end.kept.clone());
            if !kept.is_empty() {
                inside.engine.still_kept(kept);
            }
            kept.is_empty()
        }))
    }
}

fn shown<'py>(py: Python<'py>, report: &FetchReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("segments", report.segments)?;
    dict.set_item("transfers", report.transfers)?;
    dict.set_item("transports", report.transports.iter().collect::<Vec<_>>())?;
    dict.set_item("routing", report.routing.as_secs_f64())?;
    dict.set_item("moving", report.moving.as_secs_f64())?;
    dict.set_item("elapsed", report.elapsed.as_secs_f64())?;
    Ok(dict)
}

/// The error, with the blocks that are not proven good.
fn failed(py: Python<'_>, failure: &FetchFailure) -> PyResult<PyErr> {
    let raised = error::exception(py, &failure.error)?;
    let blocks: &BTreeSet<(u16, u32)> = &failure.blocks;
    raised.setattr("blocks", PyFrozenSet::new(py, blocks)?)?;
    raised.setattr("quarantined", failure.quarantined)?;
    raised.setattr("reason", failure.reason.map(reason))?;
    Ok(PyErr::from_value(raised))
}
