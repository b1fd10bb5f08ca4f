//! What wakes an event loop.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use kvx_core::{Error, ErrorKind};
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use crate::error;

/// A descriptor that can be read once something that was waited for is over, and the numbers of what is over.
pub(crate) struct Bell {
    over: Mutex<Vec<u64>>,
    descriptor: OwnedFd,
}

impl Bell {
    /// Number `number` is over.
    pub(super) fn ring(&self, number: u64) {
        self.over.lock().unwrap_or_else(PoisonError::into_inner).push(number);
        // A full counter can be read, too.
        let _rung = rustix::io::write(&self.descriptor, &1_u64.to_ne_bytes());
    }
}

/// What an event loop of asyncio reads to learn what is over.
#[pyclass(frozen, name = "Bell", module = "kvx._kvx")]
pub(crate) struct PyBell {
    pub(crate) bell: Arc<Bell>,
}

#[pymethods]
impl PyBell {
    #[new]
    fn new() -> PyResult<Self> {
        let descriptor =
            eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(|source| {
                error::raise(
                    Error::new(ErrorKind::Resources, "bell", "no descriptor for the event loop")
                        .with_source(source),
                )
            })?;
        Ok(Self { bell: Arc::new(Bell { over: Mutex::default(), descriptor }) })
    }

    /// The descriptor.
    fn fileno(&self) -> i32 {
        self.bell.descriptor.as_raw_fd()
    }

    /// The numbers of what is over since this was last asked.
    fn take(&self) -> Vec<u64> {
        let mut count = [0; 8];
        // Nothing to be read is as good.
        let _rung = rustix::io::read(&self.bell.descriptor, &mut count);
        std::mem::take(&mut *self.bell.over.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
