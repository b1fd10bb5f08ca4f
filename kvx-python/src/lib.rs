//! The native half of the Python package `kvx`: the module `kvx._kvx`. What people use is written in `python/kvx`, and says there
//! what it is for.

use pyo3::prelude::*;

mod backends;
mod engine;
mod engine_side;
mod error;
mod fetch;
mod interpreter;
mod key;
mod layouts;
mod lease;
mod log;
mod memory;
mod metrics;
mod number;
mod objects;
mod process;
mod ticket;
mod waiting;

/// Where kvx is written in Rust. Use the package `kvx`, not this.
#[pymodule]
mod _kvx {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::backends::{PyBackend, backends, open_backend};
    #[pymodule_export]
    use crate::engine::PyEngine;
    #[pymodule_export]
    use crate::fetch::PyFetch;
    #[pymodule_export]
    use crate::key::PyKey;
    #[pymodule_export]
    use crate::layouts::{PyLayout, PyModel};
    #[pymodule_export]
    use crate::lease::PyLease;
    #[pymodule_export]
    use crate::log::{log_close, log_forked, log_open, log_take};
    #[pymodule_export]
    use crate::memory::PyRegion;
    #[pymodule_export]
    use crate::metrics::{metrics, record_metrics};
    #[pymodule_export]
    use crate::ticket::PyTicket;
    #[pymodule_export]
    use crate::waiting::PyBell;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::interpreter::claim(module.py())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        crate::error::prepare(module.py())?;
        crate::engine_side::register(module)
    }
}
