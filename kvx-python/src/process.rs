//! What belongs to one process, and to no child that was forked from it.

use kvx_core::Error;
use pyo3::prelude::*;

use crate::error;

/// Something with threads, locks or descriptors of this process. A forked child has a copy without the threads, and with locks that
/// nobody will open: there it is neither used nor dropped.
pub(crate) struct Own<T: Send> {
    /// There until it is dropped.
    value: Option<T>,
    process: u32,
}

impl<T: Send> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: std::process::id() }
    }

    /// It, where it may be used.
    ///
    /// # Errors
    ///
    /// This is a child of the process that made it.
    pub(crate) fn get(&self, operation: &'static str) -> PyResult<&T> {
        if let Some(value) = self.value.as_ref().filter(|_| self.is_here()) {
            return Ok(value);
        }
        Err(error::raise(
            Error::misuse(operation, "it was made before this process was forked")
                .with_context("made_by", self.process)
                .with_context("process", std::process::id())
                .with_remedy(
                    "make it in the process that uses it: start processes with multiprocessing's spawn or forkserver",
                ),
        ))
    }

    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<T: Send> Drop for Own<T> {
    fn drop(&mut self) {
        let value = self.value.take();
        if self.is_here() {
            drop_detached(value);
        } else {
            std::mem::forget(value);
        }
    }
}

/// Drops what may wait for threads, without holding up those of Python.
pub(crate) fn drop_detached<T: Send>(value: T) {
    let mut value = Some(value);
    // Where Python ends, it is dropped all the same.
    let _ended = Python::try_attach(|py| {
        let value = value.take();
        py.detach(move || drop(value));
    });
    drop(value);
}
