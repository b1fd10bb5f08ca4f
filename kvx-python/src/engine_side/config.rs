//! The two configurations, as Python writes them: JSON.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kvx_connector::control::{Key, Security};
use kvx_connector::scheduler::{OnFailure, SchedulerConfig, SchedulerGroup};
use kvx_core::facts::Facts;
use kvx_core::id::Incarnation;
use kvx_core::layout::{CacheGroup, Grid, RankLayout};
use kvx_core::{Error, Result};
use serde::Deserialize;

/// Reads one of them; `operation` is who wants it.
pub(super) fn read<'de, T: Deserialize<'de>>(operation: &'static str, json: &'de str) -> Result<T> {
    serde_json::from_str(json)
        .map_err(|error| Error::config(operation, format!("its configuration: {error}")))
}

/// A life of an engine, from the bytes that its processes share.
pub(super) fn life(bytes: &[u8]) -> Result<Incarnation> {
    let bytes: [u8; 16] = bytes.try_into().map_err(|_| {
        Error::misuse("life", "a life of an engine is 16 random bytes")
            .with_context("bytes", bytes.len())
    })?;
    Ok(Incarnation::from_bytes(bytes))
}

/// An engine's scheduler.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SchedulerForm {
    engine: String,
    cards: String,
    /// Tensor parallel ranks, pipeline stages.
    grid: (u32, u32),
    groups: Vec<GroupForm>,
    produces: bool,
    consumes: bool,
    recompute: bool,
    lease_s: f64,
    hard_s: f64,
    deadline_s: f64,
    retries: u32,
    backoff_s: f64,
    host_buffer: bool,
    pool_blocks: Option<u64>,
    max_requests: usize,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupForm {
    group: CacheGroup,
    local_only: bool,
}

impl SchedulerForm {
    pub(super) fn config(self) -> Result<SchedulerConfig> {
        let grid = Grid::new(self.grid.0, self.grid.1, 1)?;
        let mut config =
            SchedulerConfig::new(self.engine.parse()?, self.cards.parse()?, grid, Vec::new());
        let group = |it: GroupForm| SchedulerGroup { group: it.group, local_only: it.local_only };
        config.groups = self.groups.into_iter().map(group).collect();
        config.produces = self.produces;
        config.consumes = self.consumes;
        config.on_failure = if self.recompute { OnFailure::Recompute } else { OnFailure::Fail };
        config.lease = seconds("lease_s", self.lease_s)?;
        config.hard = seconds("hard_s", self.hard_s)?;
        config.deadline = seconds("deadline_s", self.deadline_s)?;
        config.retries = self.retries;
        config.backoff = seconds("backoff_s", self.backoff_s)?;
        config.host_buffer = self.host_buffer;
        config.pool_blocks = self.pool_blocks;
        config.max_requests = self.max_requests;
        Ok(config)
    }
}

/// A rank's worker.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WorkerForm {
    pub(super) engine: String,
    pub(super) listen: String,
    keys: Vec<PathBuf>,
    /// Whether the group of a key's file may read it.
    key_of_group: bool,
    facts: BTreeMap<String, String>,
    pub(super) layout: RankLayout,
    pub(super) backend: Option<String>,
    pub(super) digests: bool,
}

impl WorkerForm {
    /// The keys: the first is this side's, the others are accepted as well.
    pub(super) fn security(&self) -> Result<Security> {
        let mut keys = self.keys.iter().map(|path| match self.key_of_group {
            true => Key::from_file_of_group(path),
            false => Key::from_file(path),
        });
        let first = keys.next().ok_or_else(|| {
            Error::config("worker", "no key file is named").with_remedy(
                "make one with `kvx key FILE`, and give it to all engines of the deployment",
            )
        })??;
        keys.try_fold(Security::with_key(first), |security, key| Ok(security.accepting(key?)))
    }

    pub(super) fn facts(&self) -> Result<Facts> {
        self.facts.iter().try_fold(Facts::new(), |facts, (name, value)| facts.with(name, value))
    }
}

fn seconds(field: &'static str, value: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(value).map_err(|error| {
        Error::config("scheduler", format!("{field}: {error}")).with_context("value", value)
    })
}
