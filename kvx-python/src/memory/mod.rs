//! Memory that caches lie in.

use kvx_core::Error;
use kvx_core::memory::{MemoryKind, Region};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error;
use crate::number::Whole;

pub(crate) mod lent;

/// Memory that may be registered with a backend: allocated by kvx, or lent by whoever owns it.
///
/// Memory that is lent is not copied, and its owner is kept alive for as long as kvx may touch it. Nobody may take it away meanwhile
/// by other means, such as ``resize``.
#[pyclass(frozen, name = "Region", module = "kvx")]
pub(crate) struct PyRegion {
    pub(crate) region: Region,
}

impl PyRegion {
    pub(crate) const fn new(region: Region) -> Self {
        Self { region }
    }

    fn address(&self) -> usize {
        self.region.address().as_ptr().addr()
    }

    /// # Errors
    ///
    /// It is not the host's.
    fn of_host(&self, operation: &'static str) -> PyResult<()> {
        if self.region.kind() == MemoryKind::Host {
            return Ok(());
        }
        Err(error::raise(
            Error::unsupported(operation, "the processor cannot reach this memory")
                .with_context("memory", self.region.kind()),
        ))
    }
}

#[pymethods]
impl PyRegion {
    /// Zeroed memory of the host, from the first byte of a page on. ``Backend.allocate`` is faster for some backends.
    #[staticmethod]
    fn host(py: Python<'_>, nbytes: Whole<u64>) -> PyResult<Self> {
        py.detach(|| Region::host(nbytes.0)).map(Self::new).map_err(error::raise)
    }

    /// The memory of ``obj``, which is not copied: anything with DLPack, the buffer protocol, ``__array_interface__`` or
    /// ``__cuda_array_interface__``, such as tensors of PyTorch and arrays of NumPy.
    ///
    /// It must be writable, and one run of bytes without gaps, in whatever order of axes. ``device`` says which CUDA device it is on,
    /// where the object does not.
    #[staticmethod]
    #[pyo3(signature = (obj, *, device = None))]
    fn of(
        py: Python<'_>,
        obj: &Bound<'_, PyAny>,
        device: Option<Whole<u32>>,
    ) -> PyResult<Py<PyAny>> {
        let find = py.import("kvx._memory")?.getattr("region_of")?;
        Ok(find.call1((obj, device.map(|device| device.0)))?.unbind())
    }

    /// Memory at an address, which ``owner`` keeps there. Whoever calls this vouches for it: use ``of`` where that will do.
    ///
    /// ``nbytes`` bytes from ``address`` on must be memory that can be read and written for as long as ``owner`` lives: the
    /// host's, or that of the CUDA device ``device``.
    #[staticmethod]
    #[pyo3(signature = (address, nbytes, owner, *, device = None))]
    fn at_address(
        address: Whole<usize>,
        nbytes: Whole<u64>,
        owner: Py<PyAny>,
        device: Option<Whole<u32>>,
    ) -> PyResult<Self> {
        let kind = device.map_or(MemoryKind::Host, |device| MemoryKind::Cuda(device.0));
        // SAFETY: whoever calls this vouches for it; Python code has no Rust references to the memory.
        let region = unsafe { lent::region(address.0, nbytes.0, kind, owner) };
        let region =
            region.ok_or_else(|| PyValueError::new_err("there is no memory at address 0"))?;
        region.map(Self::new).map_err(error::raise)
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.region.bytes()
    }

    /// What memory it is: ``host``, or ``cuda:0`` and the like.
    #[getter]
    fn memory(&self) -> String {
        self.region.kind().to_string()
    }

    /// The address of its first byte.
    #[getter(address)]
    fn py_address(&self) -> usize {
        self.address()
    }

    /// Its bytes, not copied; they stay there for as long as the view does. What is written while kvx reads or writes the same
    /// bytes is seen in part or not at all.
    fn view<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        this.of_host("region.view")?;
        let view = slf.py().import("kvx._memory")?.getattr("view_of")?;
        view.call1((slf, this.address(), this.region.bytes()))
    }

    /// A copy of ``nbytes`` bytes from ``offset`` on.
    fn read<'py>(
        &self,
        py: Python<'py>,
        offset: Whole<u64>,
        nbytes: Whole<usize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        // Checked first, so that no more is allocated than there is.
        let end = offset.0.checked_add(nbytes.0 as u64);
        if end.is_none_or(|end| end > self.region.bytes()) {
            return Err(error::raise(
                Error::misuse("region.read", "outside the region")
                    .with_context("offset", offset.0)
                    .with_context("bytes", nbytes.0)
                    .with_context("region", self.region.bytes()),
            ));
        }
        let mut bytes = vec![0; nbytes.0];
        py.detach(|| self.region.read_at(offset.0, &mut bytes)).map_err(error::raise)?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Copies ``data`` to ``offset``.
    fn write(&self, offset: Whole<u64>, data: &[u8]) -> PyResult<()> {
        self.region.write_at(offset.0, data).map_err(error::raise)
    }

    /// How NumPy sees it: bytes, not copied.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.of_host("region.array").map_err(|why| {
            // What an object does not have, it has no attribute for.
            pyo3::exceptions::PyAttributeError::new_err(why.to_string())
        })?;
        let shown = PyDict::new(py);
        shown.set_item("shape", (self.region.bytes(),))?;
        shown.set_item("typestr", "|u1")?;
        shown.set_item("data", (self.address(), false))?;
        shown.set_item("version", 3)?;
        Ok(shown)
    }

    fn __len__(&self) -> usize {
        // A region has no more bytes than there are addresses.
        usize::try_from(self.region.bytes()).unwrap_or(usize::MAX)
    }

    fn __repr__(&self) -> String {
        format!("Region({} bytes, {})", self.region.bytes(), self.region.kind())
    }
}
