//! Blocks under a lease.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvx_connector::protocol::Reason;
use kvx_connector::ticket::Ticket;
use kvx_connector::worker::Granted;
use kvx_core::Result;
use pyo3::prelude::*;

use crate::engine::{Shared, timeout, withdrawal};
use crate::error;
use crate::process::Own;
use crate::ticket::PyTicket;
use crate::waiting::{PyBell, Waiting};

/// A lease: `kvx.Lease` is in front of it.
#[pyclass(frozen, name = "Lease", module = "kvx._kvx")]
pub(crate) struct PyLease {
    ticket: Ticket,
    inside: Own<Inside>,
}

struct Inside {
    waiting: Arc<Waiting<Result<Vec<Reason>>>>,
    engine: Arc<Shared>,
}

impl PyLease {
    pub(crate) fn new(ticket: Ticket, granted: Vec<Granted>, engine: Arc<Shared>) -> Self {
        let waiting = Waiting::new(async move {
            let mut reasons = BTreeSet::new();
            for one in granted {
                reasons.insert(one.await?);
            }
            if reasons.len() > 1 {
                reasons.remove(&Reason::Done);
            }
            Ok(reasons.into_iter().collect())
        });
        Self { ticket, inside: Own::new(Inside { waiting, engine }) }
    }

    fn waiting(&self) -> PyResult<&Arc<Waiting<Result<Vec<Reason>>>>> {
        Ok(&self.inside.get("lease")?.waiting)
    }
}

#[pymethods]
impl PyLease {
    /// What the other engine is given.
    #[getter]
    fn ticket(&self) -> PyTicket {
        PyTicket { ticket: self.ticket.clone() }
    }

    /// Takes the blocks back.
    fn withdraw(&self, py: Python<'_>, why: &str) -> PyResult<()> {
        let why = withdrawal(why)?;
        if let Some(engine) = self.inside.get("withdraw")?.engine.engine() {
            py.detach(|| engine.withdraw(self.ticket.lease, why));
        }
        Ok(())
    }

    /// Whether it is over.
    fn done(&self) -> PyResult<bool> {
        Ok(self.waiting()?.outcome().is_some())
    }

    /// Waits until it is over, for at most `timeout` seconds. Whether it is.
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let timeout: Option<Duration> = self::timeout(timeout)?;
        let waiting = self.waiting()?;
        loop {
            let over = waiting.wait(py, timeout)?.is_some();
            if over || timeout.is_some() {
                return Ok(over);
            }
        }
    }

    /// Rings `bell` with `number` when it is over.
    fn tell(&self, bell: &PyBell, number: u64) -> PyResult<()> {
        self.waiting()?.tell(&bell.bell, number);
        Ok(())
    }

    /// Why it ended; `None` while it has not.
    fn outcome(&self, py: Python<'_>) -> PyResult<Option<Vec<String>>> {
        match self.waiting()?.outcome().as_deref() {
            None => Ok(None),
            Some(Ok(reasons)) => Ok(Some(reasons.iter().map(|why| reason(*why)).collect())),
            Some(Err(why)) => Err(error::raised(py, why)),
        }
    }
}

/// A reason in a word: `other_life` and the like.
pub(crate) fn reason(why: Reason) -> String {
    let mut word = String::new();
    for letter in format!("{why:?}").chars() {
        if letter.is_ascii_uppercase() && !word.is_empty() {
            word.push('_');
        }
        word.push(letter.to_ascii_lowercase());
    }
    word
}
