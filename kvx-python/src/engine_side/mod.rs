//! What an inference engine in Python calls: the scheduler's side and a worker's side, which only bytes join.
//!
//! Configurations come as JSON, so that a field that is missing or wrong is named. Every call gives up Python's lock.

mod backends;
mod config;
mod scheduler;
mod updates;
mod worker;

use pyo3::prelude::*;

/// Adds its classes to the module.
///
/// # Errors
///
/// Those of Python.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<scheduler::SchedulerSide>()?;
    module.add_class::<updates::StepUpdates>()?;
    module.add_class::<updates::LoadFailure>()?;
    module.add_class::<worker::WorkerSide>()?;
    Ok(())
}
