//! An engine's ranks with the whole connector: leases, peers, a control channel.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv4Addr;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvx_connector::Policy;
use kvx_connector::control::{Key, Security};
use kvx_connector::engine::{Engine, EngineGlance, EngineSetup, Fetch, RankParts};
use kvx_connector::protocol::{LeaseName, Reason, TransferKey};
use kvx_connector::ticket::{Table, Ticket};
use kvx_connector::worker::Granted;
use kvx_core::backend::TransferBackend;
use kvx_core::card::{Address, EngineName};
use kvx_core::facts::Facts;
use kvx_core::id::Incarnation;
use kvx_core::layout::RankLayout;
use kvx_core::memory::Region;
use kvx_core::transfer::Mode;
use kvx_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::memories::{Memories, RankMemory};
use crate::remote::Publish;

/// For how long a lease of a demonstration holds without a heartbeat: a process may be stopped for a while.
const LOCAL_TTL: Duration = Duration::from_secs(60);
/// Within which time a transfer of a demonstration ends.
const LOCAL_DEADLINE: Duration = Duration::from_secs(110);

/// What the replicas of an engine have in common.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) name: EngineName,
    /// Where the first replica's first rank listens; all others take any port of that host.
    pub(crate) listen: Address,
    pub(crate) security: Security,
    pub(crate) facts: Facts,
    /// Digests are compared before what was read is confirmed.
    pub(crate) integrity: bool,
    /// For how long a lease holds without a heartbeat.
    pub(crate) ttl: Duration,
    /// Within which time a transfer ends.
    pub(crate) deadline: Duration,
}

/// An engine of a demonstration on this host: it can be told to another process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LocalSetup {
    pub(crate) name: String,
    pub(crate) secret: Secret,
    pub(crate) facts: Facts,
    pub(crate) integrity: bool,
}

/// The bytes of a key that lasts as long as its two processes. Never printed.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Secret([u8; 32]);

impl Secret {
    /// A new one, from the operating system's random number generator.
    pub(crate) fn draw() -> Result<Self> {
        let mut bytes = [0; 32];
        for half in bytes.chunks_exact_mut(16) {
            half.copy_from_slice(Incarnation::random()?.as_bytes());
        }
        Ok(Self(bytes))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl LocalSetup {
    pub(crate) fn setup(&self) -> Result<Setup> {
        Ok(Setup {
            name: EngineName::new(self.name.clone())?,
            listen: Address::new(Ipv4Addr::LOCALHOST.into(), 0),
            security: Security::with_key(Key::from_bytes(self.secret.0)),
            facts: self.facts.clone(),
            integrity: self.integrity,
            ttl: LOCAL_TTL,
            deadline: LOCAL_DEADLINE,
        })
    }
}

/// The backends of one rank, and which of them for whom. The first one's memory is used.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) backends: Vec<Arc<dyn TransferBackend>>,
    pub(crate) policy: Policy,
}

/// All ranks of an engine in this process, with the whole connector: one of its engines for each replica.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) memories: Memories,
    engines: Vec<Engine>,
    /// Leases that are not known to be over, by the request's number.
    leases: BTreeMap<u64, Leased>,
}

/// A lease: the ranks at which it is not known to be over, and why it ended at the others.
#[derive(Debug)]
struct Leased {
    replica: usize,
    name: LeaseName,
    ranks: Vec<Granted>,
    reasons: Vec<Reason>,
}

/// What went how, over all ranks.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Traffic {
    /// Messages about leases that went with the data.
    pub(crate) by_fabric: u64,
    /// Messages about leases that went by the control channel.
    pub(crate) by_channel: u64,
    /// Digests compared, by how that came out.
    pub(crate) digests_equal: u64,
    pub(crate) digests_differing: u64,
    /// Leases that are not freed, and requests that are not over.
    pub(crate) leases: u64,
    pub(crate) requests: u64,
}

impl Live {
    /// Starts all ranks of these replicas.
    ///
    /// # Errors
    ///
    /// Those of `open`, which is called once for each rank, of the memory, and of [`Engine::start`].
    pub(crate) fn start(
        setup: &Setup,
        replicas: Vec<Vec<RankLayout>>,
        mut open: impl FnMut() -> Result<Opened>,
    ) -> Result<Self> {
        let (mut memories, mut engines) = (Vec::new(), Vec::new());
        for layouts in replicas {
            let mut ranks = Vec::new();
            for layout in layouts {
                let Opened { backends, policy } = open()?;
                let first = backends.first().ok_or_else(|| {
                    Error::config("engine", "there is no backend to open")
                        .with_remedy("kvx backends says what each lacks")
                })?;
                let regions = layout.regions().iter().map(|spec| first.allocate(spec.bytes));
                let regions: Vec<Region> = regions.collect::<Result<_>>()?;
                memories.push(RankMemory { layout: layout.clone(), regions: regions.clone() });
                ranks.push(RankParts { layout, regions, backends, choosing: Box::new(policy) });
            }
            let listen = match engines.is_empty() {
                true => setup.listen.clone(),
                false => setup.listen.clone().with_port(0),
            };
            let (name, facts) = (setup.name.clone(), setup.facts.clone());
            let mut engine = EngineSetup::new(name, listen, setup.security.clone(), facts, ranks);
            (engine.ttl, engine.deadline) = (setup.ttl, setup.deadline);
            engine.digests = setup.integrity;
            engines.push(Engine::start(engine)?);
        }
        Ok(Self { memories: Memories::new(memories), engines, leases: BTreeMap::new() })
    }

    /// What looks at its engines, from any thread.
    pub(crate) fn glances(&self) -> Vec<EngineGlance> {
        self.engines.iter().map(Engine::glance).collect()
    }

    fn engine(&self, replica: usize) -> Result<&Engine> {
        self.engines.get(replica).ok_or_else(|| {
            Error::misuse("engine", "there is no such replica").with_context("replica", replica)
        })
    }

    /// Where the cards of the first replica are served.
    pub(crate) fn address(&self) -> Option<&Address> {
        self.engines.first().map(Engine::address)
    }

    /// Leases a request's blocks, to be read or to be written. [`over`](Self::over) must be awaited before they change.
    ///
    /// # Errors
    ///
    /// Those of [`Engine::publish`].
    pub(crate) fn publish(
        &mut self,
        replica: usize,
        (request, key): (u64, TransferKey),
        tokens: u64,
        tables: &[Vec<u32>],
        mode: Mode,
    ) -> Result<Ticket> {
        let engine = self.engine(replica)?;
        let tables = as_tables(tables);
        let published = match mode {
            Mode::Read => engine.publish(key, tokens, &tables)?,
            Mode::Write => engine.invite(key, tokens, &tables)?,
        };
        let (ticket, ranks) = published.into_parts();
        let leased = Leased { replica, name: ticket.lease, ranks, reasons: Vec::new() };
        self.leases.insert(request, leased);
        Ok(ticket)
    }

    /// As [`publish`](Self::publish), under a name that follows from the request's number.
    ///
    /// # Errors
    ///
    /// As for [`publish`](Self::publish).
    pub(crate) fn publish_for(&mut self, order: Publish) -> Result<Ticket> {
        let Publish { replica, request, tokens, tables, mode } = order;
        let key = TransferKey::new(format!("request-{request}"))?;
        self.publish(replica, (request, key), tokens, &tables, mode)
    }

    /// Waits until the leases of these requests are over: at how many ranks, each counted for each request.
    ///
    /// # Errors
    ///
    /// Some lease ended otherwise than as done; a rank is gone.
    pub(crate) async fn all_done(&mut self, requests: &[u64]) -> Result<u64> {
        let mut done = 0;
        for request in requests {
            let reasons = self.over(*request).await?;
            if let Some(why) = reasons.iter().find(|why| **why != Reason::Done) {
                return Err(Error::peer(
                    "lease",
                    format!("it ended otherwise than as done: {why}"),
                )
                .with_context("request", request));
            }
            done += reasons.len() as u64;
        }
        Ok(done)
    }

    /// Begins to move a request that another engine has leased.
    ///
    /// # Errors
    ///
    /// Those of [`Engine::fetch`].
    pub(crate) fn fetch(
        &self,
        replica: usize,
        ticket: &Ticket,
        range: Range<u64>,
        tables: &[Vec<u32>],
        mode: Mode,
    ) -> Result<Fetch> {
        let tables = as_tables(tables);
        match mode {
            Mode::Read => self.engine(replica)?.fetch(ticket, range, &tables),
            Mode::Write => self.engine(replica)?.store(ticket, range, &tables),
        }
    }

    /// Waits until a request's lease is over at all ranks: why it ended at each.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`](kvx_core::ErrorKind::Closed): a rank is gone.
    pub(crate) async fn over(&mut self, request: u64) -> Result<Vec<Reason>> {
        let Some(leased) = self.leases.get_mut(&request) else { return Ok(Vec::new()) };
        // One by one, so that whoever gives up waiting has lost none.
        while let Some(last) = leased.ranks.last_mut() {
            leased.reasons.push(last.await?);
            leased.ranks.pop();
        }
        Ok(self.leases.remove(&request).map(|leased| leased.reasons).unwrap_or_default())
    }

    /// The requests whose leases are over at all ranks, with why it ended at each. They are forgotten.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`](kvx_core::ErrorKind::Closed): a rank is gone.
    pub(crate) fn ended(&mut self) -> Result<Vec<(u64, Vec<Reason>)>> {
        let mut ended = Vec::new();
        for (request, leased) in &mut self.leases {
            if leased.is_over()? {
                ended.push((*request, std::mem::take(&mut leased.reasons)));
            }
        }
        ended.iter().for_each(|(request, _)| drop(self.leases.remove(request)));
        Ok(ended)
    }

    /// Takes a request's lease back, if it is not over.
    pub(crate) fn withdraw(&self, request: u64) {
        if let Some(leased) = self.leases.get(&request)
            && let Ok(engine) = self.engine(leased.replica)
        {
            engine.withdraw(leased.name, Reason::Aborted);
        }
    }

    /// Takes all leases back that are not over.
    pub(crate) fn withdraw_all(&self) {
        self.leases.keys().for_each(|request| self.withdraw(*request));
    }

    /// The backends and transports to peers, and why they were chosen: each once.
    pub(crate) fn choices(&self) -> Vec<String> {
        let workers = self.engines.iter().flat_map(Engine::workers);
        let peers = workers.flat_map(kvx_connector::worker::Worker::peers);
        let mut all: Vec<String> = peers
            .filter_map(|peer| {
                let backend = peer.backend?;
                let transport = peer.transport.map(|one| format!("/{one}")).unwrap_or_default();
                let reason = peer.reason.map(|why| format!(": {why}")).unwrap_or_default();
                Some(format!("{backend}{transport}{reason}"))
            })
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Leases that are not freed, and requests that are not over.
    pub(crate) fn left(&self) -> u64 {
        let traffic = self.traffic();
        traffic.leases + traffic.requests
    }

    /// What went how so far.
    pub(crate) fn traffic(&self) -> Traffic {
        let mut all = Traffic::default();
        for worker in self.engines.iter().flat_map(Engine::workers) {
            let (counts, (leases, requests)) = (worker.counts(), worker.open());
            all.by_fabric += counts.by_fabric;
            all.by_channel += counts.by_channel;
            all.digests_equal += counts.digests_equal;
            all.digests_differing += counts.digests_differing;
            all.leases += leases as u64;
            all.requests += requests as u64;
        }
        all
    }
}

impl Leased {
    fn is_over(&mut self) -> Result<bool> {
        while let Some(last) = self.ranks.last_mut() {
            let Some(reason) = last.try_ended()? else { return Ok(false) };
            self.reasons.push(reason);
            self.ranks.pop();
        }
        Ok(true)
    }
}

fn as_tables(tables: &[Vec<u32>]) -> Vec<Table> {
    tables.iter().map(|ids| Table { first: 0, ids: ids.clone() }).collect()
}
