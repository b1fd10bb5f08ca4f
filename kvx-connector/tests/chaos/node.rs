//! An engine whose ranks may be tuned: with short times, a fault of the protocol, a backend that waits, and an address that is
//! not its own.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvx_connector::Policy;
use kvx_connector::control::{Control, ControlConfig, Key, Limits, RemoteIdentity, Security};
use kvx_connector::protocol::user::Prove;
use kvx_connector::protocol::{Access, Attempt, LeaseName, Part, RequestNumber, TransferKey};
use kvx_connector::rank::{FetchOptions, FetchOrder, GrantOrder, Kept, RankSetup};
use kvx_connector::ticket::{Parts, Table, Ticket, TicketGroup};
use kvx_connector::worker::{Fetching, Granted, Worker};
use kvx_core::backend::TransferBackend;
use kvx_core::card::{Address, EngineName};
use kvx_core::config::BackendConfig;
use kvx_core::id::Incarnation;
use kvx_core::layout::NamedLayout;
use kvx_core::memory::Region;

use crate::cache::{Cache, layouts, model};

/// What an engine is like.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    pub(crate) name: EngineName,
    pub(crate) key: Key,
    pub(crate) layout: NamedLayout,
    pub(crate) tp: u32,
    pub(crate) blocks: u32,
    pub(crate) backend: String,
    pub(crate) options: Vec<(String, String)>,
    /// Where others reach its ranks; where they listen, if there is none.
    pub(crate) advertised: Vec<Address>,
    /// Where they listen.
    pub(crate) listen: Address,
    /// Bounds of the control channel.
    pub(crate) limits: Limits,
}

impl Recipe {
    pub(crate) fn new(name: &str, key: &Key, layout: NamedLayout, tp: u32, blocks: u32) -> Self {
        Self {
            name: EngineName::new(name).unwrap(),
            key: key.clone(),
            layout,
            tp,
            blocks,
            backend: "shm".to_owned(),
            options: Vec::new(),
            advertised: Vec::new(),
            listen: "127.0.0.1:0".parse().unwrap(),
            limits: Limits::default(),
        }
    }
}

pub(crate) struct Node {
    pub(crate) workers: Vec<Worker>,
    pub(crate) cache: Cache,
    /// Where its ranks listen.
    pub(crate) listens: Vec<Address>,
    pub(crate) life: Incarnation,
    name: EngineName,
    cards: Address,
    tp: u32,
}

impl Node {
    /// Starts an engine. `wrap` is given each rank's backend, `tune` each rank's setup.
    pub(crate) async fn start(
        recipe: &Recipe,
        wrap: impl Fn(Arc<dyn TransferBackend>) -> Arc<dyn TransferBackend>,
        tune: impl Fn(&mut RankSetup),
    ) -> Self {
        let life = Incarnation::random().unwrap();
        let layouts = layouts(recipe.layout, recipe.tp, recipe.blocks);
        let options = recipe.options.iter();
        let options = options
            .fold(BackendConfig::new(), |all, (name, value)| all.with(name.clone(), value.clone()));
        let (mut workers, mut regions, mut listens) = (Vec::new(), Vec::new(), Vec::new());
        for (index, layout) in layouts.iter().enumerate() {
            let registration = kvx_core::registry::find(&recipe.backend).unwrap();
            let backend = wrap(registration.opener.open(&options).await.unwrap());
            let memory: Vec<Region> =
                layout.regions().iter().map(|spec| backend.allocate(spec.bytes).unwrap()).collect();
            regions.push(memory.clone());
            let incarnation = Incarnation::random().unwrap();
            let identity = RemoteIdentity {
                engine: recipe.name.clone(),
                incarnation,
                rank: Some(*layout.coords()),
            };
            let mut config = ControlConfig::new(identity, Security::with_key(recipe.key.clone()));
            config.limits = recipe.limits;
            let control = Control::start(config).unwrap();
            let listens_at = control.listen(&recipe.listen).unwrap();
            let advertised = recipe.advertised.get(index).unwrap_or(&listens_at).clone();
            listens.push(listens_at);
            let policy = Policy::default().with_name(Some(&recipe.backend));
            let mut setup = RankSetup::new(
                (recipe.name.clone(), incarnation, life),
                advertised,
                model().facts().unwrap(),
                (layout.clone(), memory),
                vec![backend],
                Box::new(policy),
                u64::from_le_bytes(incarnation.as_bytes()[..8].try_into().unwrap()),
            )
            .with_replica(layouts.clone());
            tune(&mut setup);
            workers.push(Worker::start(setup, control).unwrap());
        }
        workers[0].serve(workers.iter().map(Worker::card).collect()).unwrap();
        let cards = workers[0].address();
        let cache = Cache { layouts, regions };
        let (name, tp) = (recipe.name.clone(), recipe.tp);
        Self { workers, cache, listens, life, name, cards, tp }
    }

    /// Leases blocks.
    pub(crate) fn publish(
        &self,
        number: u64,
        tokens: u64,
        table: &Table,
        (ttl, hard): (Duration, Duration),
    ) -> (Ticket, Vec<Granted>) {
        let lease = LeaseName { owner: self.life, number, epoch: 0 };
        let key = TransferKey::new(format!("{}-{number}", self.life)).unwrap();
        let group = &self.cache.layouts[0].groups()[0];
        let (kind, block_tokens) = (group.kind, group.block_tokens);
        let ticket = Ticket {
            key,
            engine: self.name.clone(),
            cards: self.cards.clone(),
            replica: 0,
            tp: self.tp,
            lease,
            access: Access::Read,
            ttl,
            tokens,
            parts: Parts::Whole,
            groups: vec![TicketGroup { kind, block_tokens, table: table.clone() }],
        };
        let order = GrantOrder {
            lease,
            key: ticket.key.clone(),
            access: Access::Read,
            tables: vec![table.clone()],
            fingerprint: Some(ticket.fingerprint()),
            ttl,
            hard,
            parts: vec![whole(tokens)],
            total: Some(1),
            stages: 0,
            kept: Kept::default(),
        };
        let granted = self.workers.iter().map(|worker| worker.grant(order.clone())).collect();
        (ticket, granted)
    }

    /// Reads what a ticket leases, at all ranks.
    pub(crate) fn fetch(
        &self,
        number: u64,
        ticket: &Ticket,
        range: Range<u64>,
        table: &Table,
        deadline: Duration,
    ) -> Vec<Fetching> {
        let order = FetchOrder {
            request: RequestNumber(number),
            key: ticket.key.clone(),
            engine: ticket.engine.clone(),
            address: ticket.cards.clone(),
            replica: ticket.replica,
            lease: ticket.lease,
            access: Access::Read,
            attempt: Attempt { user: self.life, number },
            tokens: ticket.tokens,
            range,
            theirs: ticket.groups.iter().map(|group| group.table.clone()).collect(),
            ours: vec![table.clone()],
            parts: vec![whole(ticket.tokens)],
            total: Some(1),
            deadline,
            begin: true,
            prove: Prove::Whole,
            digests: false,
            stages: (0, 0),
            options: FetchOptions {
                fingerprint: Some(ticket.fingerprint()),
                ..FetchOptions::default()
            },
        };
        self.workers.iter().map(|worker| worker.fetch(order.clone()).unwrap()).collect()
    }
}

fn whole(tokens: u64) -> Part {
    Part { number: 0, group: None, layers: 0..u32::MAX, tokens: 0..tokens }
}
