//! Numbers and times, as Python gives them.

use std::time::Duration;

use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;

/// A whole number that is not negative. What is out of range is a `ValueError`.
#[derive(Clone, Copy)]
pub(crate) struct Whole<T>(pub(crate) T);

impl<'a, 'py, T> FromPyObject<'a, 'py> for Whole<T>
where
    T: FromPyObject<'a, 'py, Error = PyErr>,
{
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        object.extract::<T>().map(Self).map_err(|why| {
            if why.is_instance_of::<PyOverflowError>(object.py()) {
                let bits = 8 * size_of::<T>();
                PyValueError::new_err(format!(
                    "{} is not from 0 to 2**{bits} - 1",
                    object.to_owned()
                ))
            } else {
                why
            }
        })
    }
}

/// A time in seconds.
///
/// # Errors
///
/// `ValueError`: negative, not a number, or longer than can be said.
pub(crate) fn seconds(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|why| PyValueError::new_err(format!("{name}={seconds}: {why}")))
}
