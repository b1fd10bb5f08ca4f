//! For engines that have a scheduler of their own: the scheduler's and the workers' side of kvx-connector. Nothing of it is here
//! yet.

use pyo3::prelude::*;

/// Adds its classes and functions to the module.
///
/// # Errors
///
/// Those of Python.
pub(crate) fn register(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
