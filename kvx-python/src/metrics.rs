//! What kvx counts, in Prometheus's text format.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use pyo3::prelude::*;

use crate::error;

/// Upper bounds of the buckets of times, in seconds.
const SECONDS: &[f64] =
    &[1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0];
/// Upper bounds of the buckets of sizes, in bytes: the powers of two from 4 KiB to 16 GiB by fours.
const BYTES: [f64; 12] = {
    let mut bounds = [4096.0; 12];
    let mut at = 1;
    while at < bounds.len() {
        bounds[at] = bounds[at - 1] * 4.0;
        at += 1;
    }
    bounds
};
/// How often what was recorded is put into buckets, also where nobody asks.
const UPKEEP: Duration = Duration::from_secs(5);

static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();

/// Counts, from now on, in every engine that is started.
#[pyfunction]
pub(crate) fn record_metrics() -> PyResult<()> {
    static FIRST: Mutex<()> = Mutex::new(());
    let _first = FIRST.lock().unwrap_or_else(PoisonError::into_inner);
    if RECORDER.get().is_none() {
        let handle = install().map_err(error::raise)?;
        let _only = RECORDER.set(handle);
    }
    Ok(())
}

fn install() -> Result<PrometheusHandle> {
    let failed = |error: BuildError| {
        Error::new(ErrorKind::Internal, "metrics", "nothing can be recorded").with_source(error)
    };
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)
        .and_then(|builder| {
            builder.set_buckets_for_metric(Matcher::Suffix("_bytes".into()), &BYTES)
        })
        .map_err(failed)?
        .install_recorder()
        .map_err(failed)?;
    let kept = handle.clone();
    // It ends with the process, and touches nothing of Python.
    std::thread::Builder::new()
        .name("kvx-metrics".into())
        .spawn(move || {
            loop {
                std::thread::sleep(UPKEEP);
                kept.run_upkeep();
            }
        })
        .map_err(|source| {
            Error::new(ErrorKind::Resources, "metrics", "there is no thread").with_source(source)
        })?;
    Ok(handle)
}

/// Everything counted so far, in Prometheus's text format.
#[pyfunction]
pub(crate) fn metrics(py: Python<'_>) -> PyResult<String> {
    let handle = RECORDER.get().ok_or_else(|| {
        error::raise(
            Error::misuse("metrics", "nothing is recorded")
                .with_remedy("call kvx.record_metrics() before the engines are started"),
        )
    })?;
    Ok(py.detach(|| handle.render()))
}
