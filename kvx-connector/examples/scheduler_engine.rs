//! Engines with a scheduler of their own: one reads a prompt, the other has its cache loaded by the ticket. What the scheduler and
//! the workers of an engine tell each other is bytes; here one process has both, and a function call carries them.
//!
//! `cargo run -p kvx-connector --features shm --example scheduler_engine`
#![expect(clippy::print_stdout, reason = "it is what this program is for")]

use std::time::{Duration, Instant};

use kvx_connector::Policy;
use kvx_connector::control::{Key, Security};
use kvx_connector::scheduler::{
    FinishStatus, Finishing, Request, RequestId, SchedulerConfig, SchedulerConnector, Updates,
    WorkerReport,
};
use kvx_connector::worker::{WorkerConnector, WorkerSetup};
use kvx_core::config::BackendConfig;
use kvx_core::id::Incarnation;
use kvx_core::layout::{Dtype, Grid, LayoutBuilder, ModelGeometry, NamedLayout};
use kvx_core::plan::BlockTable;
use kvx_core::{Error, Result};
use serde_json::{Value, json};

const TOKENS: u64 = 100;

struct Engine {
    scheduler: SchedulerConnector,
    workers: Vec<WorkerConnector>,
    begun: Instant,
}

impl Engine {
    async fn start(name: &str, key: &Key, tp: u32, block: u32) -> Result<Self> {
        let model = ModelGeometry::llama_like(4, 8, 64, Dtype::Bf16)?;
        let layout = NamedLayout::FlashAttentionHnd;
        let builder = LayoutBuilder::new(&model, layout).block_tokens(block).blocks(64);
        let layouts = builder.build_replica(Grid::new(tp, 1, 1)?, 0)?;
        // Whoever starts the engine's processes draws its life, and tells all of them.
        let life = Incarnation::random()?;
        let mut workers = Vec::new();
        for layout in &layouts {
            let policy = Policy::default().with_name(Some("shm"));
            let choice = kvx_connector::choose(&policy, None)?;
            let backend = kvx_connector::open(&choice, &BackendConfig::new()).await?;
            let specs = layout.regions().iter();
            let regions =
                specs.map(|spec| backend.allocate(spec.bytes)).collect::<Result<Vec<_>>>()?;
            workers.push(WorkerConnector::register_caches(WorkerSetup::new(
                (name.parse()?, life),
                ("127.0.0.1:0".parse()?, Security::with_key(key.clone())),
                model.facts()?,
                (layout.clone(), regions),
                (vec![backend], Box::new(policy)),
            ))?);
        }
        // The first worker serves the cards of all.
        let (cards, groups) = (workers[0].address(), layouts[0].groups().to_vec());
        let config = SchedulerConfig::new(name.parse()?, cards, Grid::new(tp, 1, 1)?, groups);
        let mut scheduler = SchedulerConnector::with_incarnation(config, life)?;
        for (rank, worker) in (0..).zip(&workers) {
            scheduler.set_handshake_metadata(rank, worker.handshake_metadata())?;
        }
        let cards: Vec<Vec<u8>> = scheduler.cards().values().cloned().collect();
        workers.iter().try_for_each(|worker| worker.serve_cards(&cards))?;
        Ok(Self { scheduler, workers, begun: Instant::now() })
    }

    /// One step: bytes to every worker, bytes back from each. The model's forward pass would be where the workers save.
    fn step(&mut self) -> Result<Vec<Updates>> {
        let now = self.begun.elapsed();
        let step = self.scheduler.build_step(&[], now)?.encode()?;
        let mut updates = Vec::new();
        for (rank, worker) in (0..).zip(&self.workers) {
            worker.start_load(&step)?;
            worker.wait_for_save();
            let report = WorkerReport::decode(&worker.take_report().encode()?)?;
            updates.push(self.scheduler.update(rank, &report, now)?);
        }
        Ok(updates)
    }

    /// Steps until the workers' reports come to something.
    fn run(&mut self, over: impl Fn(&Updates) -> bool) -> Result<()> {
        while !self.step()?.iter().any(&over) {
            self.workers[0].wait_for_report(Duration::from_millis(5));
        }
        Ok(())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let key = Key::generate()?;
    let mut prefill = Engine::start("prefill", &key, 2, 16).await?;
    let mut decode = Engine::start("decode", &key, 1, 32).await?;

    // The router asks the first engine to read the prompt for another.
    let (id, params) = (RequestId::new("p-1")?, json!({"do_remote_decode": true}));
    let request = Request { id: &id, prompt_tokens: TOKENS, params: Some(&params) };
    let ids: Vec<u32> = (0..7).collect();
    let blocks = [BlockTable::new(&ids)];
    prefill.scheduler.on_new_request(&request)?;
    prefill.scheduler.after_alloc(&id, &blocks, 0)?;
    prefill.step()?;
    let finishing =
        Finishing { status: FinishStatus::LengthCapped, tokens: TOKENS, blocks: &blocks };
    let finished = prefill.scheduler.request_finished(&request, &finishing)?;
    println!("p-1 is read; its blocks are held: {}", finished.hold);
    let ticket: Value = finished.params.unwrap_or_default().into();

    // The router sends what came back to the second.
    let id = RequestId::new("d-9")?;
    let request = Request { id: &id, prompt_tokens: TOKENS, params: Some(&ticket) };
    decode.scheduler.on_new_request(&request)?;
    let tokens = decode.scheduler.matched_tokens(&request, 0)?.tokens();
    let tokens = tokens.ok_or_else(|| Error::misuse("example", "it has to wait"))?;
    let ids = [9, 3, 5, 1];
    decode.scheduler.after_alloc(&id, &[BlockTable::new(&ids)], tokens)?;
    decode.step()?;
    prefill.step()?;
    decode.run(|updates| !(updates.received.is_empty() && updates.failed.is_empty()))?;
    let stats = decode.scheduler.stats();
    println!(
        "d-9: {tokens} tokens were to come; received {}, failed {}",
        stats.received, stats.failed
    );
    prefill.run(|updates| !updates.sent.is_empty())?;
    println!("the blocks of p-1 may be used again");
    for (rank, stats) in decode.scheduler.rank_stats() {
        println!("rank {rank} read {} bytes in {} us", stats.bytes, stats.transfer_us);
    }
    Ok(())
}
