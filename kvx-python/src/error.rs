//! Errors of kvx as Python exceptions. Their classes are written in Python (`kvx/errors.py`), one for each kind.

use kvx_core::{Error, Retry};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

/// `kvx.errors._of`: makes the exception of a kind.
static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Finds the classes. To be called once, before there is an error.
///
/// # Errors
///
/// `kvx.errors` cannot be imported.
pub(crate) fn prepare(py: Python<'_>) -> PyResult<()> {
    let make = py.import("kvx.errors")?.getattr("_of")?;
    // Where the package is imported anew, its first classes stay those that are raised.
    let _ = MAKE.set(py, make.unbind());
    Ok(())
}

/// The exception that says what `error` says.
pub(crate) fn raise(error: Error) -> PyErr {
    Python::attach(|py| raised(py, &error))
}

/// The same, of an error that others look at, too.
pub(crate) fn raised(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error).map_or_else(|failed| failed, PyErr::from_value)
}

/// The same, as an object.
///
/// # Errors
///
/// Those of Python.
pub(crate) fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let facts = PyDict::new(py);
    facts.set_item("kind", error.kind().as_str())?;
    facts.set_item("retry", retry(error.retry()))?;
    facts.set_item("operation", error.operation())?;
    facts.set_item("backend", error.backend())?;
    facts.set_item("code", error.native())?;
    facts.set_item("remedy", error.remedy())?;
    facts.set_item("message", error.message())?;
    let context = PyDict::new(py);
    for (name, value) in error.context() {
        context.set_item(name, value)?;
    }
    facts.set_item("context", context)?;
    let mismatch = error.as_mismatch();
    facts.set_item("mismatch", mismatch.map(|it| (&*it.field, &*it.left.1, &*it.right.1)))?;
    let text = error.in_full();
    let make = MAKE
        .get(py)
        .ok_or_else(|| PyErr::new::<pyo3::exceptions::PyRuntimeError, _>("kvx is not imported"))?;
    make.bind(py).call((text,), Some(&facts))
}

/// What may be done, in a word.
pub(crate) const fn retry(retry: Retry) -> &'static str {
    match retry {
        Retry::Backoff => "backoff",
        Retry::Reconnect => "reconnect",
        _ => "never",
    }
}
