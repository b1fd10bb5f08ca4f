//! An engine of the tests' own: a scheduler and its ranks' workers, which know of each other only by bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_connector::Policy;
use kvx_connector::control::{Key, Security};
use kvx_connector::protocol::LeaseName;
use kvx_connector::scheduler::{
    FinishStatus, Finished, Finishing, LoadFailed, Request, RequestId, Scheduled, SchedulerConfig,
    SchedulerConnector, StepMetadata, Updates, WorkerReport,
};
use kvx_connector::ticket::Table;
use kvx_connector::worker::{WorkerConnector, WorkerSetup};
use kvx_core::backend::TransferBackend;
use kvx_core::config::BackendConfig;
use kvx_core::id::Incarnation;
use kvx_core::layout::{
    Dtype, Grid, GroupKind, LayoutBuilder, ModelGeometry, NamedLayout, RankLayout,
};
use kvx_core::memory::Region;
use kvx_core::plan::BlockTable;
use serde_json::{Value, json};

use crate::bytes;
use crate::host::{Faults, HostCopies};

/// How long anything may take. Far more than it does.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What an engine is like.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) model: ModelGeometry,
    pub(crate) layout: NamedLayout,
    pub(crate) grid: (u32, u32),
    pub(crate) block: u32,
    pub(crate) blocks: u32,
    /// Whether caches go through a buffer of the host.
    pub(crate) host: bool,
    /// What goes wrong with its copies.
    pub(crate) faults: Arc<Faults>,
    pub(crate) digests: bool,
    pub(crate) group_by_window: bool,
}

pub(crate) fn model() -> ModelGeometry {
    ModelGeometry::llama_like(4, 4, 8, Dtype::Bf16).unwrap()
}

impl Shape {
    pub(crate) fn new(tp: u32, pp: u32, block: u32) -> Self {
        Self {
            model: model(),
            layout: NamedLayout::FlashAttentionHnd,
            grid: (tp, pp),
            block,
            blocks: 64,
            host: false,
            faults: Arc::default(),
            digests: false,
            group_by_window: false,
        }
    }

    pub(crate) fn layouts(&self) -> Vec<RankLayout> {
        LayoutBuilder::new(&self.model, self.layout)
            .block_tokens(self.block)
            .blocks(self.blocks)
            .window_blocks(self.blocks)
            .state_blocks(self.blocks)
            .group_by_window(self.group_by_window)
            .null_block(Some(0))
            .build_replica(Grid::new(self.grid.0, self.grid.1, 1).unwrap(), 0)
            .unwrap()
    }
}

/// One rank's worker, and its memory.
pub(crate) struct Seat {
    pub(crate) worker: WorkerConnector,
    pub(crate) layout: RankLayout,
    /// Where the engine computes: not what peers see, where caches go through a buffer of the host.
    pub(crate) device: Vec<Region>,
}

/// Opens a backend, without a runtime of one's own.
pub(crate) fn open(name: &str) -> Arc<dyn TransferBackend> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let opener = kvx_core::registry::find(name).unwrap().opener;
    runtime.block_on(opener.open(&BackendConfig::new())).unwrap()
}

/// Starts the worker of one rank.
pub(crate) fn seat(
    name: &str,
    life: Incarnation,
    layout: &RankLayout,
    shape: &Shape,
    key: &Key,
) -> Seat {
    let backend = open("shm");
    let memory = || -> Vec<Region> {
        layout.regions().iter().map(|spec| backend.allocate(spec.bytes).unwrap()).collect()
    };
    let regions = memory();
    let device = if shape.host { memory() } else { regions.clone() };
    let mut setup = WorkerSetup::new(
        (name.parse().unwrap(), life),
        ("127.0.0.1:0".parse().unwrap(), Security::with_key(key.clone())),
        shape.model.facts().unwrap(),
        (layout.clone(), regions.clone()),
        (vec![backend], Box::new(Policy::default().with_name(Some("shm")))),
    )
    .with_digests(shape.digests);
    if shape.host {
        let (layout, device) = (layout.clone(), device.clone());
        let faults = Arc::clone(&shape.faults);
        let copies = HostCopies { layout, device, host: regions, faults };
        setup = setup.with_copies(Box::new(copies));
    }
    let worker = WorkerConnector::register_caches(setup).unwrap();
    Seat { worker, layout: layout.clone(), device }
}

/// A request in an engine.
#[derive(Clone, Debug)]
pub(crate) struct Live {
    pub(crate) id: RequestId,
    pub(crate) prompt: u64,
    pub(crate) params: Value,
    pub(crate) tables: Vec<Table>,
    /// Whose cache it is.
    pub(crate) seed: u64,
    /// Whether all of it is in the blocks.
    pub(crate) whole: bool,
}

impl Live {
    pub(crate) fn request(&self) -> Request<'_> {
        Request { id: &self.id, prompt_tokens: self.prompt, params: Some(&self.params) }
    }
}

pub(crate) fn id(name: &str) -> RequestId {
    RequestId::new(name).unwrap()
}

pub(crate) fn for_decode() -> Value {
    json!({"do_remote_decode": true})
}

/// Leases and loads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Ends {
    leases: BTreeSet<LeaseName>,
    loads: BTreeSet<u64>,
}

/// An engine.
pub(crate) struct Engine {
    pub(crate) c: SchedulerConnector,
    pub(crate) seats: Vec<Seat>,
    pub(crate) free: Vec<BTreeSet<u32>>,
    pub(crate) live: BTreeMap<String, Live>,
    /// Blocks of requests that are gone, until the connector says that they are free.
    pub(crate) held: BTreeMap<String, Live>,
    /// What the workers were told to grant and to load, and the ends that each rank has reported.
    told: Ends,
    ends: Vec<Ends>,
    pub(crate) received: BTreeMap<String, u64>,
    pub(crate) failed: BTreeMap<String, LoadFailed>,
    pub(crate) faults: Arc<Faults>,
    begun: Instant,
}

impl Engine {
    pub(crate) fn new(
        name: &str,
        shape: &Shape,
        key: &Key,
        change: impl FnOnce(&mut SchedulerConfig),
    ) -> Self {
        let layouts = shape.layouts();
        let life = Incarnation::random().unwrap();
        let seats: Vec<Seat> =
            layouts.iter().map(|layout| seat(name, life, layout, shape, key)).collect();
        let groups = layouts[0].groups().to_vec();
        let grid = layouts[0].coords().grid;
        let cards = seats[0].worker.address();
        let mut config =
            SchedulerConfig::new(name.parse().unwrap(), cards, grid, groups.iter().copied());
        config.host_buffer = shape.host;
        config.backoff = Duration::from_millis(20);
        config.deadline = PATIENCE / 2;
        change(&mut config);
        let mut c = SchedulerConnector::with_incarnation(config, life).unwrap();
        for (rank, seat) in (0..).zip(&seats) {
            let all = c.set_handshake_metadata(rank, seat.worker.handshake_metadata()).unwrap();
            assert_eq!(all, usize::from(rank) + 1 == seats.len());
        }
        let cards: Vec<Vec<u8>> = c.cards().values().cloned().collect();
        seats.iter().for_each(|seat| seat.worker.serve_cards(&cards).unwrap());
        let free = groups.iter().map(|group| (1..group.blocks).collect()).collect();
        Self {
            c,
            ends: seats.iter().map(|_| Ends::default()).collect(),
            seats,
            free,
            live: BTreeMap::new(),
            held: BTreeMap::new(),
            told: Ends::default(),
            received: BTreeMap::new(),
            failed: BTreeMap::new(),
            faults: Arc::clone(&shape.faults),
            begun: Instant::now(),
        }
    }

    pub(crate) fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// One step in which nothing is computed.
    pub(crate) fn step(&mut self) {
        self.compute(&[]);
    }

    /// One step: bytes to the workers, bytes from them.
    pub(crate) fn compute(&mut self, scheduled: &[Scheduled<'_>]) {
        let step = self.c.build_step(scheduled, self.now()).unwrap();
        self.deliver(&step);
    }

    pub(crate) fn deliver(&mut self, step: &StepMetadata) {
        let bytes = self.tells(step);
        for seat in &self.seats {
            seat.worker.start_load(&bytes).unwrap();
            seat.worker.wait_for_layer(0);
            seat.worker.save_layer(0);
            seat.worker.wait_for_save();
        }
        self.collect();
    }

    /// A step as bytes, whose ends are to be reported.
    pub(crate) fn tells(&mut self, step: &StepMetadata) -> Vec<u8> {
        self.told.leases.extend(step.grants.iter().map(|grant| grant.lease));
        self.told.loads.extend(step.loads.iter().map(|load| load.attempt));
        step.encode().unwrap()
    }

    /// Takes the workers' reports.
    pub(crate) fn collect(&mut self) {
        for rank in 0..self.seats.len() {
            let report = self.seats[rank].worker.take_report().encode().unwrap();
            let report = WorkerReport::decode(&report).unwrap();
            let ends = &mut self.ends[rank];
            for end in &report.ended {
                assert!(ends.leases.insert(end.lease), "{} ends twice at rank {rank}", end.lease);
            }
            for end in &report.loads {
                assert!(
                    ends.loads.insert(end.attempt),
                    "{} ends twice at rank {rank}",
                    end.attempt
                );
            }
            let rank = u16::try_from(rank).unwrap();
            let updates = self.c.update(rank, &report, self.now()).unwrap();
            self.act(updates);
        }
    }

    fn act(&mut self, updates: Updates) {
        for name in updates.sent.into_iter().chain(updates.drained) {
            let live = self.held.remove(name.as_str());
            let live = live.unwrap_or_else(|| panic!("{name} is freed, and was not held"));
            if live.whole {
                assert_eq!(self.wrong(&live, &(0..live.prompt)), 0, "{name} was written over");
            }
            self.put_back(&live.tables);
        }
        for received in updates.received {
            let before = self.received.insert(received.request.to_string(), received.computed);
            assert_eq!(before, None, "{} twice", received.request);
        }
        for failed in updates.failed {
            let before = self.failed.insert(failed.request.to_string(), failed);
            assert!(before.is_none(), "{before:?} twice");
        }
        assert!(updates.quarantined.is_empty() && updates.unquarantined.is_empty());
    }

    /// Blocks for so many tokens: one table per group.
    pub(crate) fn take(&mut self, tokens: u64) -> Vec<Table> {
        let groups = self.seats[0].layout.groups().to_vec();
        let table = |(group, free): (&kvx_core::layout::CacheGroup, &mut BTreeSet<u32>)| {
            let count = match group.kind {
                GroupKind::State => 1,
                _ => usize::try_from(tokens.div_ceil(group.block_tokens.into())).unwrap(),
            };
            // From the end, so that blocks are not in order.
            let mut ids = || free.pop_last().unwrap();
            Table { first: 0, ids: (0..count).map(|_| ids()).collect() }
        };
        groups.iter().zip(&mut self.free).map(table).collect()
    }

    pub(crate) fn put_back(&mut self, tables: &[Table]) {
        for ((group, table), free) in
            self.seats[0].layout.groups().iter().zip(tables).zip(&mut self.free)
        {
            for id in table.ids.iter().filter(|id| Some(**id) != group.null_block) {
                assert!(free.insert(*id), "block {id} is freed twice");
            }
        }
    }

    /// A request comes, and is computed whole, in chunks of so many tokens: what goes to the consumer.
    pub(crate) fn prefill(&mut self, name: &str, prompt: u64, chunk: u64, seed: u64) -> Value {
        let params = for_decode();
        let tables = self.take(prompt);
        let live = Live { id: id(name), prompt, params, tables, seed, whole: true };
        self.c.on_new_request(&live.request()).unwrap();
        assert_eq!(self.c.matched_tokens(&live.request(), 0).unwrap().tokens(), Some(0));
        let tables: Vec<BlockTable<'_>> = live.tables.iter().map(Table::as_plan).collect();
        self.c.after_alloc(&live.id, &tables, 0).unwrap();
        let mut computed = 0;
        while computed < prompt {
            let tokens = chunk.min(prompt - computed);
            self.write(&live, computed..computed + tokens);
            self.compute(&[Scheduled { request: &live.id, computed, tokens, appended: &[] }]);
            computed += tokens;
        }
        self.live.insert(name.into(), live);
        self.finish(name, FinishStatus::LengthCapped).params.unwrap().into()
    }

    /// What the engine computes.
    pub(crate) fn write(&self, live: &Live, tokens: std::ops::Range<u64>) {
        for seat in &self.seats {
            let range = (&tokens, live.prompt);
            bytes::write(&seat.layout, &seat.device, &live.tables, range, live.seed);
        }
    }

    /// How many rows of a request are not what they should be.
    pub(crate) fn wrong(&self, live: &Live, tokens: &std::ops::Range<u64>) -> u64 {
        let mut wrong = 0;
        for seat in &self.seats {
            let range = (tokens, live.prompt);
            let (all, bad) =
                bytes::wrong(&seat.layout, &seat.device, &live.tables, range, live.seed);
            assert!(all > 0, "nothing was looked at");
            wrong += bad;
        }
        wrong
    }

    /// A request comes whose cache is elsewhere.
    pub(crate) fn arrive(&mut self, name: &str, prompt: u64, params: &Value, seed: u64) {
        let params = params.clone();
        let tables = Vec::new();
        let live = Live { id: id(name), prompt, params, tables, seed, whole: false };
        self.c.on_new_request(&live.request()).unwrap();
        self.live.insert(name.into(), live);
    }

    /// It is given blocks, of which it has `prefix` tokens' cache already: how many tokens are to come.
    pub(crate) fn admit(&mut self, name: &str, prefix: u64) -> u64 {
        let live = &self.live[name];
        let tokens = self.c.matched_tokens(&live.request(), prefix).unwrap().tokens().unwrap();
        let (prompt, request) = (live.prompt, live.id.clone());
        let tables = self.take(prompt);
        let live = self.live.get_mut(name).unwrap();
        live.tables = tables;
        let live = live.clone();
        if prefix > 0 {
            self.write(&live, 0..prefix);
        }
        let tables: Vec<BlockTable<'_>> = live.tables.iter().map(Table::as_plan).collect();
        self.c.after_alloc(&request, &tables, tokens).unwrap();
        tokens
    }

    pub(crate) fn finish(&mut self, name: &str, status: FinishStatus) -> Finished {
        let mut live = self.live.remove(name).unwrap();
        let tokens = if live.tables.is_empty() { 0 } else { live.prompt };
        live.tables.resize(self.free.len(), Table::default());
        let tables: Vec<BlockTable<'_>> = live.tables.iter().map(Table::as_plan).collect();
        let finishing = Finishing { status, tokens, blocks: &tables };
        let finished = self.c.request_finished(&live.request(), &finishing).unwrap();
        if finished.hold {
            assert!(self.held.insert(name.into(), live).is_none());
        } else {
            self.put_back(&live.tables);
        }
        finished
    }

    /// The router gives a finished request up whose blocks are held.
    pub(crate) fn abort_held(&mut self, name: &str) {
        let (id, params) = (id(name), for_decode());
        let request = Request { id: &id, prompt_tokens: 1, params: Some(&params) };
        let finishing = Finishing { status: FinishStatus::Aborted, tokens: 0, blocks: &[] };
        assert!(self.c.request_finished(&request, &finishing).unwrap().hold);
    }

    /// A request is there: its cache is right, and it ends.
    pub(crate) fn decoded(&mut self, name: &str, computed: u64) {
        assert_eq!(self.received.remove(name), Some(computed));
        let live = self.live[name].clone();
        assert_eq!(self.wrong(&live, &(0..live.prompt)), 0, "{name}");
        assert!(!self.finish(name, FinishStatus::Stopped).hold);
    }

    /// Nothing is left anywhere.
    pub(crate) fn assert_idle(&mut self) {
        self.collect();
        assert!(self.c.tables().is_empty(), "{:?}", self.c.tables());
        assert!(self.held.is_empty() && self.live.is_empty());
        for (rank, ends) in self.ends.iter().enumerate() {
            assert_eq!(*ends, self.told, "rank {rank}: not one end of each");
        }
        for (group, free) in self.seats[0].layout.groups().iter().zip(&self.free) {
            assert_eq!(free.len(), group.blocks as usize - 1);
        }
        assert_eq!(self.c.stats().stray_reports, 0);
    }

    /// Whether every rank has let go of everything.
    pub(crate) fn is_quiet(&self) -> bool {
        self.seats.iter().all(|seat| seat.worker.open() == (0, 0))
    }
}

/// Steps both engines until something holds.
pub(crate) fn until(
    producer: &mut Engine,
    consumer: &mut Engine,
    what: &str,
    mut holds: impl FnMut(&mut Engine, &mut Engine) -> bool,
) {
    let begun = Instant::now();
    loop {
        if holds(producer, consumer) {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "not in time: {what}");
        producer.step();
        consumer.step();
        consumer.seats[0].worker.wait_for_report(Duration::from_millis(2));
    }
}

/// Both engines have let go of everything.
pub(crate) fn both_idle(producer: &mut Engine, consumer: &mut Engine) {
    until(producer, consumer, "quiet", |producer, consumer| {
        producer.is_quiet()
            && consumer.is_quiet()
            && producer.held.is_empty()
            && consumer.held.is_empty()
            && producer.c.tables().is_empty()
            && consumer.c.tables().is_empty()
    });
    producer.assert_idle();
    consumer.assert_idle();
}

/// Two engines of these shapes.
pub(crate) fn pair(from: &Shape, to: &Shape) -> (Engine, Engine) {
    let key = Key::generate().unwrap();
    (Engine::new("prefill", from, &key, |_| {}), Engine::new("decode", to, &key, |_| {}))
}
