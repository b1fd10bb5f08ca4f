//! What serde can write, as Python's own objects.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error;

/// `what`, as dicts, lists, strings, numbers and `None`.
///
/// # Errors
///
/// It cannot be written as JSON, or those of Python.
pub(crate) fn of<'py>(py: Python<'py>, what: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let value = serde_json::to_value(what).map_err(|why| {
        let failed = kvx_core::Error::new(kvx_core::ErrorKind::Internal, "objects", "not as JSON");
        error::raise(failed.with_source(why))
    })?;
    object(py, &value)
}

fn object<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(it) => it.into_pyobject(py)?.to_owned().into_any(),
        Value::String(it) => it.into_pyobject(py)?.into_any(),
        Value::Number(it) => match (it.as_u64(), it.as_i64()) {
            (Some(it), _) => it.into_pyobject(py)?.into_any(),
            (None, Some(it)) => it.into_pyobject(py)?.into_any(),
            _ => it.as_f64().into_pyobject(py)?.into_any(),
        },
        Value::Array(items) => {
            let list = PyList::empty(py);
            for item in items {
                list.append(object(py, item)?)?;
            }
            list.into_any()
        }
        Value::Object(fields) => {
            let dict = PyDict::new(py);
            for (name, field) in fields {
                dict.set_item(name, object(py, field)?)?;
            }
            dict.into_any()
        }
    })
}

/// What serde reads out of Python's own objects. `operation` goes into the error.
///
/// # Errors
///
/// `TypeError`: there is something in it that JSON cannot say. An error of kvx: it says something else than is wanted.
pub(crate) fn read<T: DeserializeOwned>(
    object: &Bound<'_, PyAny>,
    operation: &'static str,
) -> PyResult<T> {
    let text: String = object.py().import("json")?.call_method1("dumps", (object,))?.extract()?;
    serde_json::from_str(&text)
        .map_err(|why| error::raise(kvx_core::Error::config(operation, why.to_string())))
}
