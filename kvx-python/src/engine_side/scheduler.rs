//! The scheduler's side.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvx_connector::scheduler::{
    FinishStatus, Finishing, Matched, Request, RequestId, Scheduled, SchedulerConnector,
    WorkerReport,
};
use kvx_core::plan::BlockTable;
use kvx_core::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::Value;

use super::config::{self, SchedulerForm};
use super::updates::StepUpdates;
use crate::error::raise;

/// A request that is computed in a step: its id, tokens computed before, tokens computed now, blocks that it got, by group.
type Computed = (String, u64, u64, Vec<Vec<u32>>);

/// What an engine's scheduler calls. It never touches memory or a socket: what the workers are to do is bytes, and so is what they report.
#[pyclass(frozen, module = "kvx._kvx")]
#[derive(Debug)]
pub(crate) struct SchedulerSide {
    inner: Mutex<SchedulerConnector>,
    begun: Instant,
}

#[pymethods]
impl SchedulerSide {
    /// The connector of a scheduler that has just started: its configuration as JSON, and the engine's life, 16 random bytes that all of
    /// its processes share.
    #[new]
    fn new(config: &str, life: &[u8]) -> PyResult<Self> {
        let made = config::read::<SchedulerForm>("scheduler", config).and_then(|form| {
            SchedulerConnector::with_incarnation(form.config()?, config::life(life)?)
        });
        Ok(Self { inner: Mutex::new(made.map_err(raise)?), begun: Instant::now() })
    }

    /// A request has come.
    #[pyo3(signature = (id, prompt_tokens, params=None))]
    fn on_new_request(
        &self,
        py: Python<'_>,
        id: &str,
        prompt_tokens: u64,
        params: Option<&str>,
    ) -> PyResult<()> {
        self.shown(py, id, prompt_tokens, params, |inner, request| inner.on_new_request(&request))
    }

    /// How many tokens come from outside, beyond the `computed` that the engine has (none: ask again later), and whether they come while the
    /// request waits.
    #[pyo3(signature = (id, prompt_tokens, params, computed))]
    fn matched_tokens(
        &self,
        py: Python<'_>,
        id: &str,
        prompt_tokens: u64,
        params: Option<&str>,
        computed: u64,
    ) -> PyResult<(Option<u64>, bool)> {
        let matched = self.shown(py, id, prompt_tokens, params, |inner, request| {
            inner.matched_tokens(&request, computed)
        })?;
        Ok(match matched {
            Matched::Tokens { tokens, asynchronous } => (Some(tokens), asynchronous && tokens > 0),
            Matched::AskLater => (None, false),
        })
    }

    /// The engine has given a request blocks, all that it has, by group; `external` tokens of them are to come from outside.
    fn after_alloc(
        &self,
        py: Python<'_>,
        id: &str,
        tables: Vec<Vec<u32>>,
        external: u64,
    ) -> PyResult<()> {
        self.with(py, |inner| {
            let tables: Vec<BlockTable<'_>> = tables.iter().map(|it| BlockTable::new(it)).collect();
            inner.after_alloc(&RequestId::new(id)?, &tables, external)
        })
    }

    /// What the workers are told in this step, as bytes; nothing, if there is nothing to say.
    fn build_step<'py>(
        &self,
        py: Python<'py>,
        scheduled: Vec<Computed>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let now = self.begun.elapsed();
        let bytes = self.with(py, |inner| {
            let ids: Vec<RequestId> =
                scheduled.iter().map(|it| RequestId::new(&*it.0)).collect::<Result<_>>()?;
            let appended: Vec<Vec<&[u32]>> =
                scheduled.iter().map(|it| it.3.iter().map(Vec::as_slice).collect()).collect();
            let computed = scheduled.iter().zip(&ids).zip(&appended);
            let computed: Vec<Scheduled<'_>> = computed
                .map(|((it, request), appended)| Scheduled {
                    request,
                    computed: it.1,
                    tokens: it.2,
                    appended,
                })
                .collect();
            inner.build_step(&computed, now)?.encode()
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// A request has finished: whether its blocks must be held, and what goes to the consumer, as JSON. `status` is `length`, `stopped`,
    /// `aborted` or `failed`.
    #[pyo3(signature = (id, prompt_tokens, params, status, tokens, tables))]
    #[expect(clippy::too_many_arguments, reason = "what the engine says at a request's end")]
    fn request_finished(
        &self,
        py: Python<'_>,
        id: &str,
        prompt_tokens: u64,
        params: Option<&str>,
        status: &str,
        tokens: u64,
        tables: Vec<Vec<u32>>,
    ) -> PyResult<(bool, Option<String>)> {
        let status = finish_status(status).map_err(raise)?;
        let finished = self.shown(py, id, prompt_tokens, params, |inner, request| {
            let tables: Vec<BlockTable<'_>> = tables.iter().map(|it| BlockTable::new(it)).collect();
            inner.request_finished(&request, &Finishing { status, tokens, blocks: &tables })
        })?;
        Ok((finished.hold, finished.params.map(|params| Value::from(params).to_string())))
    }

    /// The engine takes a request's blocks and will compute it later: whether they must be held all the same.
    fn preempted(&self, py: Python<'_>, id: &str) -> PyResult<bool> {
        self.with(py, |inner| Ok(inner.preempted(&RequestId::new(id)?)))
    }

    /// Takes what the worker of `rank` has reported.
    fn update(&self, py: Python<'_>, rank: u16, report: &[u8]) -> PyResult<StepUpdates> {
        let now = self.begun.elapsed();
        let updates =
            self.with(py, |inner| inner.update(rank, &WorkerReport::decode(report)?, now))?;
        StepUpdates::new(py, updates)
    }

    /// Takes a rank's card; whether all ranks' cards are there now.
    fn set_handshake_metadata(&self, py: Python<'_>, rank: u16, card: Vec<u8>) -> PyResult<bool> {
        self.with(py, |inner| inner.set_handshake_metadata(rank, card))
    }

    /// The ranks' cards, in order.
    fn cards<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let cards: Vec<Vec<u8>> =
            self.with(py, |inner| Ok(inner.cards().values().cloned().collect()))?;
        Ok(cards.iter().map(|card| PyBytes::new(py, card)).collect())
    }

    /// Whether the next step has something to tell the workers.
    fn has_pending(&self, py: Python<'_>) -> PyResult<bool> {
        let now = self.begun.elapsed();
        self.with(py, |inner| Ok(inner.has_pending(now)))
    }

    /// In how many seconds there will be something to tell the workers though nothing else happens.
    fn next_wake(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        let now = self.begun.elapsed();
        let left = |at: Duration| at.saturating_sub(now).as_secs_f64();
        self.with(py, |inner| Ok(inner.next_wake().map(left)))
    }

    /// What is in its tables now, by name: all are 0 once everything is over.
    fn tables(&self, py: Python<'_>) -> PyResult<BTreeMap<&'static str, usize>> {
        let tables = self.with(py, |inner| Ok(inner.tables()))?;
        Ok([
            ("requests", tables.requests),
            ("leases", tables.leases),
            ("loads", tables.loads),
            ("messages", tables.messages),
            ("quarantines", tables.quarantines),
        ]
        .into())
    }

    /// What has been counted since it was made, by name.
    fn stats(&self, py: Python<'_>) -> PyResult<BTreeMap<&'static str, u64>> {
        let stats = self.with(py, |inner| Ok(*inner.stats()))?;
        Ok([
            ("granted", stats.granted),
            ("sent", stats.sent),
            ("expired", stats.expired),
            ("withdrawn", stats.withdrawn),
            ("unpublished", stats.unpublished),
            ("loads", stats.loads),
            ("retries", stats.retries),
            ("received", stats.received),
            ("failed", stats.failed),
            ("aborted", stats.aborted),
            ("released", stats.released),
            ("bad_tickets", stats.bad_tickets),
            ("used_tickets", stats.used_tickets),
            ("stray_reports", stats.stray_reports),
        ]
        .into())
    }

    /// How many of a prompt's tokens a producer should compute, for consumers with the same policy.
    fn tokens_to_produce(&self, py: Python<'_>, prompt_tokens: u64) -> PyResult<u64> {
        self.with(py, |inner| Ok(inner.config().tokens_to_produce(prompt_tokens)))
    }
}

impl SchedulerSide {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut SchedulerConnector) -> Result<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| act(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner)))
            .map_err(raise)
    }

    /// Shows the connector a request.
    fn shown<T: Send>(
        &self,
        py: Python<'_>,
        id: &str,
        prompt_tokens: u64,
        params: Option<&str>,
        act: impl FnOnce(&mut SchedulerConnector, Request<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.with(py, |inner| {
            let id = RequestId::new(id)?;
            let params: Option<Value> = params.map(json).transpose()?;
            act(inner, Request { id: &id, prompt_tokens, params: params.as_ref() })
        })
    }
}

fn json(params: &str) -> Result<Value> {
    serde_json::from_str(params)
        .map_err(|error| Error::misuse("scheduler", format!("kv_transfer_params: {error}")))
}

fn finish_status(name: &str) -> Result<FinishStatus> {
    match name {
        "length" => Ok(FinishStatus::LengthCapped),
        "stopped" => Ok(FinishStatus::Stopped),
        "aborted" => Ok(FinishStatus::Aborted),
        "failed" => Ok(FinishStatus::Failed),
        _ => Err(Error::misuse("scheduler", "no request ends so")
            .with_context("status", name)
            .with_remedy("it is length, stopped, aborted or failed")),
    }
}
