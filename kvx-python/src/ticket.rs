//! What the consumer of a request's cache is given, and block tables.

use kvx_connector::protocol::Access;
use kvx_connector::ticket::{Parts, Table, Ticket, TransferParams};
use kvx_core::Error;
use kvx_core::layout::GroupKind;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMapping, PyString};
use serde_json::Value;

use crate::number::Whole;
use crate::{error, objects};

/// Where a request's cache lies on the engine that has it, and under which lease. It goes to the other engine by any way: as bytes,
/// or as ``kv_transfer_params`` of a request.
#[pyclass(frozen, name = "Ticket", module = "kvx")]
pub(crate) struct PyTicket {
    pub(crate) ticket: Ticket,
}

#[pymethods]
impl PyTicket {
    /// The ticket that these bytes hold.
    #[staticmethod]
    fn from_bytes(data: &[u8]) -> PyResult<Self> {
        Ticket::from_bytes(data).map(|ticket| Self { ticket }).map_err(error::raise)
    }

    /// The ticket as bytes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.ticket.to_bytes().map_err(error::raise)?))
    }

    /// The ticket in a request's ``kv_transfer_params``.
    #[staticmethod]
    fn from_params(params: &Bound<'_, PyMapping>) -> PyResult<Self> {
        let plain = params.py().get_type::<PyDict>().call1((params,))?;
        let params: Value = objects::read(&plain, "kv_transfer_params")?;
        let read = TransferParams::from_json(&params).map_err(error::raise)?;
        read.ticket.map(|ticket| Self { ticket }).ok_or_else(|| {
            error::raise(Error::peer("kv_transfer_params", "kvx: is not there").with_remedy(
                "let the router hand on all of the prefill's kv_transfer_params, and use kvx on both sides",
            ))
        })
    }

    /// The ticket as ``kv_transfer_params``. ``request`` is this side's own id of the request, for whoever reads logs.
    #[pyo3(signature = (request = ""))]
    fn to_params<'py>(&self, py: Python<'py>, request: &str) -> PyResult<Bound<'py, PyAny>> {
        objects::of(py, &self.ticket.to_params(request).map_err(error::raise)?)
    }

    /// The transfer's name on both sides.
    #[getter]
    fn key(&self) -> &str {
        self.ticket.key.as_str()
    }

    /// The engine that gave it out.
    #[getter]
    fn engine(&self) -> &str {
        self.ticket.engine.as_str()
    }

    /// Where that engine serves its cards.
    #[getter]
    fn address(&self) -> String {
        self.ticket.cards.to_string()
    }

    /// What the lease allows: ``read`` or ``write``.
    #[getter]
    const fn access(&self) -> &'static str {
        match self.ticket.access {
            Access::Read => "read",
            Access::Write => "write",
        }
    }

    /// The lease's name.
    #[getter]
    fn lease(&self) -> String {
        self.ticket.lease.to_string()
    }

    /// How long the lease runs unless it is extended, in seconds.
    #[getter]
    fn ttl(&self) -> f64 {
        self.ticket.ttl.as_secs_f64()
    }

    /// How many tokens' cache is there.
    #[getter]
    const fn tokens(&self) -> u64 {
        self.ticket.tokens
    }

    /// Whether all of it is there already.
    #[getter]
    fn whole(&self) -> bool {
        self.ticket.parts == Parts::Whole
    }

    /// The blocks of each cache group: ``(block_tokens, first, ids)``.
    #[getter]
    fn groups(&self) -> Vec<(u32, u64, Vec<u32>)> {
        let group = |group: &kvx_connector::ticket::TicketGroup| {
            (group.block_tokens, group.table.first, group.table.ids.clone())
        };
        self.ticket.groups.iter().map(group).collect()
    }

    /// Whether each cache group holds a state rather than tokens.
    #[getter]
    fn states(&self) -> Vec<bool> {
        self.ticket.groups.iter().map(|group| group.kind == GroupKind::State).collect()
    }

    fn __repr__(&self) -> String {
        let Ticket { key, engine, tokens, .. } = &self.ticket;
        format!("Ticket({:?}, {tokens} tokens, from {engine})", key.as_str())
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.ticket == other.ticket
    }

    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        let bytes = slf.get().to_bytes(slf.py())?;
        Ok((slf.getattr("from_bytes")?, (bytes,)))
    }
}

/// Block tables, one for each cache group: each the ids of its blocks, or `(first, ids)` where it begins with another logical block
/// than the request's first.
pub(crate) struct Tables(pub(crate) Vec<Table>);

impl<'a, 'py> FromPyObject<'a, 'py> for Tables {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let mut tables = Vec::new();
        for (number, table) in object.try_iter().map_err(|_| not_tables())?.enumerate() {
            tables.push(self::table(&table?).map_err(|why| named(object.py(), number, &why))?);
        }
        Ok(Self(tables))
    }
}

fn table(object: &Bound<'_, PyAny>) -> PyResult<Table> {
    if object.is_instance_of::<PyString>() {
        return Err(not_tables());
    }
    if let Ok(table) = object.getattr("ids") {
        let Whole(first) = object.getattr("first")?.extract::<Whole<u64>>()?;
        return Ok(Table { first, ids: ids(&table)? });
    }
    Ok(Table { first: 0, ids: ids(object)? })
}

fn ids(object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    // Quick where they are a list of numbers, as they nearly always are.
    if let Ok(ids) = object.extract::<Vec<u32>>() {
        return Ok(ids);
    }
    let mut ids = Vec::new();
    for id in object.try_iter().map_err(|_| not_tables())? {
        let Whole(id) = id?.extract::<Whole<u32>>()?;
        ids.push(id);
    }
    Ok(ids)
}

fn not_tables() -> PyErr {
    PyTypeError::new_err("blocks must be a list for each cache group, of block ids")
}

/// The same error, of a cache group.
fn named(py: Python<'_>, number: usize, why: &PyErr) -> PyErr {
    let text = format!("blocks of cache group {number}: {}", why.value(py));
    if why.is_instance_of::<PyValueError>(py) {
        PyValueError::new_err(text)
    } else {
        PyTypeError::new_err(text)
    }
}
