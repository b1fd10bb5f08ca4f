//! An engine in one process: all ranks of a replica.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvx_connector::control::Security;
use kvx_connector::engine::{Engine, EngineSetup, RankParts};
use kvx_connector::protocol::{Reason, TransferKey};
use kvx_connector::rank::RankEvent;
use kvx_connector::worker::Worker;
use kvx_core::facts::Facts;
use kvx_core::{Error, ErrorKind};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::backends::{PyBackend, policy_of};
use crate::fetch::PyFetch;
use crate::key::PyKey;
use crate::layouts::PyLayout;
use crate::lease::{PyLease, reason};
use crate::memory::PyRegion;
use crate::number::{Whole, seconds};
use crate::process::{Own, drop_detached};
use crate::ticket::{PyTicket, Tables};
use crate::{error, objects};

/// All ranks of one replica, each with a thread of its own. `kvx.Engine` is in front of it.
#[pyclass(frozen, name = "Engine", module = "kvx._kvx")]
pub(crate) struct PyEngine {
    shared: Own<Arc<Shared>>,
}

/// What fetches and leases of an engine look at, too.
pub(crate) struct Shared {
    engine: Mutex<Option<Arc<Engine>>>,
    /// Ranks and requests that ended in quarantine and are out of it, and that nobody has asked for since.
    quiet: Mutex<BTreeSet<(usize, u64)>>,
}

impl Shared {
    /// The engine, while it is open.
    pub(crate) fn engine(&self) -> Option<Arc<Engine>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn open(&self, operation: &'static str) -> PyResult<Arc<Engine>> {
        self.engine().ok_or_else(|| {
            error::raise(Error::new(ErrorKind::Closed, operation, "the engine is closed"))
        })
    }

    /// Which of these ranks and requests are still in quarantine.
    pub(crate) fn still_kept(&self, kept: &mut Vec<(usize, u64)>) {
        let Some(engine) = self.engine() else { return };
        let mut quiet = self.quiet.lock().unwrap_or_else(PoisonError::into_inner);
        for (rank, worker) in engine.workers().iter().enumerate() {
            for event in worker.take_events() {
                if let RankEvent::Unquarantined { request } = event {
                    quiet.insert((rank, request.0));
                }
            }
        }
        kept.retain(|one| !quiet.remove(one));
    }
}

#[pymethods]
impl PyEngine {
    /// Starts it.
    #[new]
    #[pyo3(signature = (
        name, *, facts, ranks, keys, plaintext, listen, ttl, hard, deadline, digests, transports
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "by name, and none has a default: kvx.Engine is in front of it"
    )]
    #[expect(clippy::type_complexity, reason = "what a rank is, in Python's terms")]
    fn new(
        py: Python<'_>,
        name: &str,
        facts: Vec<(String, String)>,
        ranks: Vec<(Py<PyLayout>, Vec<Py<PyRegion>>, Vec<Py<PyBackend>>)>,
        keys: Vec<Py<PyKey>>,
        plaintext: Option<&str>,
        listen: &str,
        ttl: f64,
        hard: f64,
        deadline: f64,
        digests: bool,
        transports: Option<Vec<String>>,
    ) -> PyResult<Self> {
        let stated = facts
            .into_iter()
            .try_fold(Facts::new(), |facts, (name, value)| facts.with(&name, value));
        let mut parts = Vec::new();
        for (layout, regions, backends) in &ranks {
            let opened: Vec<&PyBackend> = backends.iter().map(Py::get).collect();
            let policy = policy_of(&opened, transports.clone()).map_err(error::raise)?;
            parts.push(RankParts {
                layout: layout.get().layout.clone(),
                regions: regions.iter().map(|region| region.get().region.clone()).collect(),
                backends: opened
                    .iter()
                    .map(|one| one.get("engine").map(Arc::clone))
                    .collect::<PyResult<_>>()?,
                choosing: Box::new(policy),
            });
        }
        let mut setup = EngineSetup::new(
            name.parse().map_err(error::raise)?,
            listen.parse().map_err(error::raise)?,
            security(&keys, plaintext)?,
            stated.map_err(error::raise)?,
            parts,
        );
        setup.ttl = seconds("ttl", ttl)?;
        setup.hard = seconds("hard", hard)?;
        setup.deadline = seconds("deadline", deadline)?;
        setup.digests = digests;
        let engine = py.detach(|| Engine::start(setup)).map_err(error::raise)?;
        let shared = Shared { engine: Mutex::new(Some(Arc::new(engine))), quiet: Mutex::default() };
        Ok(Self { shared: Own::new(Arc::new(shared)) })
    }

    /// Where its cards are served.
    #[getter]
    fn address(&self) -> PyResult<String> {
        Ok(self.open("engine")?.address().to_string())
    }

    /// Leases blocks to be read (`write`: to be written).
    fn publish(
        &self,
        py: Python<'_>,
        key: &str,
        tokens: Whole<u64>,
        blocks: Tables,
        write: bool,
    ) -> PyResult<PyLease> {
        let engine = self.open(if write { "invite" } else { "publish" })?;
        let key = TransferKey::new(key).map_err(error::raise)?;
        let (ticket, granted) = py
            .detach(|| {
                let published = match write {
                    false => engine.publish(key, tokens.0, &blocks.0),
                    true => engine.invite(key, tokens.0, &blocks.0),
                };
                published.map(kvx_connector::engine::Published::into_parts)
            })
            .map_err(error::raise)?;
        Ok(PyLease::new(ticket, granted, Arc::clone(self.shared.get("publish")?)))
    }

    /// Reads what a ticket leases (`write`: writes into it).
    fn fetch(
        &self,
        py: Python<'_>,
        ticket: &PyTicket,
        start: Whole<u64>,
        end: Whole<u64>,
        blocks: Tables,
        write: bool,
    ) -> PyResult<PyFetch> {
        let engine = self.open(if write { "store" } else { "fetch" })?;
        let range = start.0..end.0;
        let fetch = py
            .detach(|| match write {
                false => engine.fetch(&ticket.ticket, range, &blocks.0),
                true => engine.store(&ticket.ticket, range, &blocks.0),
            })
            .map_err(error::raise)?;
        Ok(PyFetch::new(fetch, Arc::clone(self.shared.get("fetch")?)))
    }

    /// What there is now at all ranks.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let engine = self.open("status")?;
        let status = py.detach(|| engine.status());
        objects::of(py, &status)
    }

    /// Leases that are not over, and fetches that are not over or whose blocks are kept: the sums of all ranks.
    fn open_counts(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        let engine = self.open("status")?;
        Ok(py.detach(|| {
            engine
                .workers()
                .iter()
                .map(Worker::open)
                .fold((0, 0), |(leases, fetches), (l, f)| (leases + l, fetches + f))
        }))
    }

    /// Ends it: its peers are told, its threads have ended when this returns. Once is enough.
    fn close(&self) -> PyResult<()> {
        let shared = self.shared.get("close")?;
        let engine = shared.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop_detached(engine);
        Ok(())
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        Ok(self.shared.get("engine")?.engine().is_none())
    }
}

impl PyEngine {
    fn open(&self, operation: &'static str) -> PyResult<Arc<Engine>> {
        self.shared.get(operation)?.open(operation)
    }
}

fn security(keys: &[Py<PyKey>], plaintext: Option<&str>) -> PyResult<Security> {
    let mut keys = keys.iter().map(|key| key.get().key.clone());
    match (keys.next(), plaintext) {
        (Some(first), None) => Ok(keys.fold(Security::with_key(first), Security::accepting)),
        (None, Some("loopback")) => Ok(Security::plaintext_on_loopback()),
        (None, Some("anywhere")) => Ok(Security::plaintext_on_loopback().and_beyond_loopback()),
        (None, None) => Err(PyValueError::new_err(
            "an engine needs a key: all engines of a deployment have the same",
        )),
        (Some(_), Some(_)) => Err(PyValueError::new_err(
            "there is a key, so nothing is said in plaintext: drop one of the two",
        )),
        (None, Some(other)) => Err(PyValueError::new_err(format!(
            "plaintext={other:?}; there is \"loopback\" and \"anywhere\""
        ))),
    }
}

/// Why an engine takes its blocks back.
pub(crate) fn withdrawal(why: &str) -> PyResult<Reason> {
    [Reason::Aborted, Reason::Preempted, Reason::Failed]
        .into_iter()
        .find(|one| reason(*one) == why)
        .ok_or_else(|| {
            PyValueError::new_err(format!(
                "why={why:?}; there is \"aborted\", \"preempted\" and \"failed\""
            ))
        })
}

/// `None`, or a time in seconds.
pub(crate) fn timeout(timeout: Option<f64>) -> PyResult<Option<Duration>> {
    timeout.map(|time| seconds("timeout", time)).transpose()
}
