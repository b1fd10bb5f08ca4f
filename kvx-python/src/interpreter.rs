//! One interpreter of a process has kvx: what is static here is not shared between several.

use std::sync::atomic::{AtomicI64, Ordering};

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Of which interpreter kvx is; -1 while it is of none.
static INTERPRETER: AtomicI64 = AtomicI64::new(-1);

/// To be called when the module is made. Python refuses a second interpreter itself from 3.12 on.
///
/// # Errors
///
/// `ImportError`: another interpreter of this process has kvx.
pub(crate) fn claim(_attached: Python<'_>) -> PyResult<()> {
    // SAFETY: the thread is attached to an interpreter, as the argument proves.
    let interpreter = unsafe { ffi::PyInterpreterState_Get() };
    // SAFETY: it is the current interpreter, which is there while the thread is attached to it.
    let number = unsafe { ffi::PyInterpreterState_GetID(interpreter) };
    match INTERPRETER.compare_exchange(-1, number, Ordering::AcqRel, Ordering::Acquire) {
        Err(other) if other != number => Err(PyImportError::new_err(
            "kvx is imported in another interpreter of this process, and does not support loading in subinterpreters",
        )),
        _ => Ok(()),
    }
}
