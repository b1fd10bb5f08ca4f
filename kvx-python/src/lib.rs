//! The native half of the Python package `kvx`: the module `kvx._kvx`. What people use is written in `python/kvx`, and says there
//! what it is for.

use pyo3::prelude::*;

mod backends;
mod engine_side;
mod error;
mod objects;

/// Where kvx is written in Rust. Use the package `kvx`, not this.
#[pymodule]
mod _kvx {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::backends::backends;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        crate::error::prepare(module.py())?;
        crate::engine_side::register(module)
    }
}
