//! Tests of the scheduler's side, and what they share.

mod consumer;
mod model;
mod producer;
mod reports;
mod trace;
mod wire;

use std::time::Duration;

use kvx_core::id::Incarnation;
use kvx_core::layout::{CacheGroup, Grid, GroupKind};
use kvx_core::plan::BlockTable;
use serde_json::{Map, Value, json};

use super::*;
use crate::protocol::{Fingerprint, LeaseName, Reason};

const NOW: Duration = Duration::from_secs(100);

fn attention(block_tokens: u32) -> CacheGroup {
    CacheGroup {
        kind: GroupKind::Attention,
        block_tokens,
        kernel_block_tokens: block_tokens,
        blocks: 10_000,
        null_block: Some(0),
    }
}

fn state() -> CacheGroup {
    CacheGroup { kind: GroupKind::State, ..attention(1) }
}

fn config(engine: &str, groups: &[CacheGroup]) -> SchedulerConfig {
    let cards = "10.0.0.1:5600".parse().unwrap();
    let grid = Grid::new(2, 1, 1).unwrap();
    SchedulerConfig::new(engine.parse().unwrap(), cards, grid, groups.iter().copied())
}

fn connector(config: SchedulerConfig) -> SchedulerConnector {
    let byte = config.engine.as_str().bytes().fold(0, u8::wrapping_add);
    SchedulerConnector::with_incarnation(config, Incarnation::from_bytes([byte; 16])).unwrap()
}

fn producer(groups: &[CacheGroup]) -> SchedulerConnector {
    connector(config("prefill-0", groups))
}

fn consumer(groups: &[CacheGroup]) -> SchedulerConnector {
    connector(config("decode-0", groups))
}

fn id(name: &str) -> RequestId {
    RequestId::new(name).unwrap()
}

fn tables<'a>(ids: &'a [&'a [u32]]) -> Vec<BlockTable<'a>> {
    ids.iter().map(|ids| BlockTable::new(ids)).collect()
}

/// What a router sends to the producer.
fn for_decode() -> Value {
    json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null})
}

/// A request of an engine in a test.
#[derive(Clone, Debug)]
struct Ask {
    id: RequestId,
    prompt: u64,
    params: Value,
}

impl Ask {
    fn new(name: &str, prompt: u64, params: Value) -> Self {
        Self { id: id(name), prompt, params }
    }

    fn from(name: &str, prompt: u64, params: Option<Map<String, Value>>) -> Self {
        Self::new(name, prompt, params.map_or(Value::Null, Value::Object))
    }

    fn request(&self) -> Request<'_> {
        Request { id: &self.id, prompt_tokens: self.prompt, params: Some(&self.params) }
    }
}

impl SchedulerConnector {
    fn step(&mut self) -> StepMetadata {
        self.build_step(&[], NOW).unwrap()
    }

    fn finish(&mut self, ask: &Ask, status: FinishStatus, tokens: u64, ids: &[&[u32]]) -> Finished {
        let blocks = tables(ids);
        self.request_finished(&ask.request(), &Finishing { status, tokens, blocks: &blocks })
            .unwrap()
    }

    /// A request is computed, finishes for another engine, and its lease is granted.
    fn publish(&mut self, ask: &Ask, ids: &[&[u32]]) -> (Finished, StepMetadata) {
        self.on_new_request(&ask.request()).unwrap();
        assert_eq!(self.matched_tokens(&ask.request(), 0).unwrap(), Matched::NONE);
        self.after_alloc(&ask.id, &tables(ids), 0).unwrap();
        let finished = self.finish(ask, FinishStatus::LengthCapped, ask.prompt, ids);
        (finished, self.step())
    }

    /// How many tokens come, and the step after the engine gave blocks for them.
    fn load(&mut self, ask: &Ask, computed: u64, ids: &[&[u32]]) -> (u64, StepMetadata) {
        let tokens = self.matched_tokens(&ask.request(), computed).unwrap().tokens().unwrap();
        self.after_alloc(&ask.id, &tables(ids), tokens).unwrap();
        (tokens, self.step())
    }

    fn lease_ended(&mut self, rank: u16, lease: LeaseName, why: Reason) -> Updates {
        let mut report = WorkerReport::new(self.incarnation(), 1);
        report.ended.push(LeaseEnd { lease, why });
        self.update(rank, &report, NOW).unwrap()
    }

    fn load_end(&mut self, rank: u16, end: LoadEnd) -> Updates {
        let mut report = WorkerReport::new(self.incarnation(), 1);
        report.loads.push(end);
        self.update(rank, &report, NOW).unwrap()
    }

    fn loaded(&mut self, rank: u16, attempt: u64) -> Updates {
        self.load_end(rank, LoadEnd::new(attempt, LoadOutcome::Loaded, ""))
    }

    #[track_caller]
    fn assert_idle(&self) {
        assert!(self.tables().is_empty(), "{:?}", self.tables());
    }
}

/// A ticket's parameters of a producer with these groups, for a prompt in these blocks.
fn ticket_for(groups: &[CacheGroup], prompt: u64, ids: &[&[u32]]) -> Option<Map<String, Value>> {
    producer(groups).publish(&Ask::new("p", prompt, for_decode()), ids).0.params
}
