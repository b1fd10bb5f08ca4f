//! `kvx serve`: one engine of a pair, in a process of its own: on two hosts, or on one.
//!
//! The producer listens for requests that the consumer makes up: it fills blocks with tags, leases them and answers with the
//! ticket; the consumer fetches it through the whole connector and compares every element with its tag. The ranks of an engine
//! are threads of its process.

mod consumer;
mod door;
mod message;
mod producer;
mod report;
mod turn;

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use kvx_connector::control::{Key, Security};
use kvx_connector::engine::EngineGlance;
use kvx_core::card::{Address, EngineName, Host};
use kvx_core::facts::Facts;
use kvx_core::id::Incarnation;
use kvx_core::layout::{NamedLayout, RankLayout};
use kvx_core::{Error, ErrorKind, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::{RoleArg, ServeArgs, dtype};
use crate::engine::live::{Live, Setup};
use crate::engine::pool::{Lease, Pool};
use crate::engine::ranks::Piece;
use crate::engine::tags::Prompt;
use crate::fabric::{self, Every};
use crate::failure::Failure;
use crate::metrics;
use crate::model;
use crate::output::{self, Output};
use crate::shape::Shape;

/// For how long a lease holds without a heartbeat.
const TTL: Duration = Duration::from_secs(30);

/// This process's engine: its ranks, its blocks, and who it is.
struct Side {
    live: Live,
    pool: Pool,
    ranks: usize,
    name: EngineName,
    security: Security,
    model: String,
    shape: Shape,
    /// What shows it to others, where that was asked for.
    _shown: Option<metrics::Guard>,
}

/// Runs `kvx serve`; gives the exit code.
///
/// # Errors
///
/// Those of the options, the key, the shape and the backends; that the address is taken, or nobody answers there.
pub(crate) fn run(args: &ServeArgs, out: &mut Output) -> Result<u8, Failure> {
    args.check()?;
    let shape = shape(args)?;
    let key = match args.key_of_group {
        true => Key::from_file_of_group(&args.key)?,
        false => Key::from_file(&args.key)?,
    };
    let runtime = fabric::runtime()?;
    match args.role {
        RoleArg::Producer => {
            let door = listened(args.listen.as_deref().unwrap_or_default())?;
            let ranks = match &args.ranks {
                Some(text) => listened(text)?,
                None => door.clone().with_port(0),
            };
            let side = Side::start(args, shape, key, ranks, &runtime)?;
            runtime.block_on(producer::run(args, side, door, out))
        }
        RoleArg::Consumer => {
            let door = address("--connect", args.connect.as_deref().unwrap_or_default())?;
            let ranks = match &args.listen {
                Some(text) => listened(text)?,
                None => own_address(&door, args.patience())?,
            };
            let side = Side::start(args, shape, key, ranks, &runtime)?;
            runtime.block_on(consumer::run(args, side, door, out))
        }
    }
}

fn shape(args: &ServeArgs) -> Result<Shape> {
    let mut shape =
        Shape::new(1, NamedLayout::FlashAttentionNhd, 16)?.changed_by("--shape", &args.shape)?;
    if let Some(tp) = args.tp {
        if args.shape.split(',').any(|part| part.trim_start().starts_with("tp=")) {
            return Err(
                Error::config("--tp", "--shape has tp=, too").with_remedy("give one of the two")
            );
        }
        shape = shape.changed_by("--tp", &format!("tp={tp}"))?;
    }
    match shape.grid.dp {
        1 => Ok(shape),
        dp => Err(Error::config("--shape", format!("dp={dp}: a process runs one replica"))
            .with_remedy("start a process for each replica")),
    }
}

impl Side {
    fn start(
        args: &ServeArgs,
        shape: Shape,
        key: Key,
        listen: Address,
        runtime: &tokio::runtime::Runtime,
    ) -> Result<Self> {
        let mut model = model::load(&args.model, dtype(args.dtype.as_deref())?)?;
        if let Some(layers) = args.layers {
            if layers > model.num_layers() {
                return Err(Error::config("--layers", format!("{} has fewer", model.name()))
                    .with_context("layers", model.num_layers()));
            }
            model = model.with_layers(layers)?;
        }
        let layouts = layouts(args, &shape, &model)?;
        let role = match args.role {
            RoleArg::Producer => "producer",
            RoleArg::Consumer => "consumer",
        };
        // Two of one name take each other for their next lives.
        let life = Incarnation::random()?.to_string();
        let own = || format!("{role}-{}", life.get(..6).unwrap_or_default());
        let name = EngineName::new(args.name.clone().unwrap_or_else(own))
            .map_err(|error| error.with_context("option", "--name"))?;
        let every = Every::find(args.backend.as_deref())?;
        output::note(format!(
            "{name}: {} of {}, {shape}, {}; backends: {}",
            crate::size::of_many(u64::from(shape.grid.tp * shape.grid.pp), "rank"),
            model.name(),
            crate::size::of_many(model.num_layers().into(), "layer"),
            every.names()
        ));
        let security = Security::with_key(key);
        let setup = Setup {
            name: name.clone(),
            listen,
            security: security.clone(),
            facts: shape.model(&model).facts()?.with(Facts::MODEL, model.name())?,
            integrity: !args.no_integrity,
            ttl: TTL,
            deadline: Duration::from_secs(args.deadline),
        };
        let (pool, ranks) = (Pool::new(&layouts), layouts.len());
        // What the ranks count is fixed on it when they start.
        let shown = args.metrics.as_deref().map(metrics::serve).transpose()?;
        let live = Live::start(&setup, vec![layouts], || every.open(runtime))?;
        if let Some(shown) = &shown {
            let glances = live.glances();
            shown.show(move || glances.iter().map(EngineGlance::status).collect());
            let at = shown.address();
            output::note(format!(
                "{name}: metrics at http://{at}/metrics; kvx top {at} shows more"
            ));
        }
        let model = model.name().to_owned();
        Ok(Self { live, pool, ranks, name, security, model, shape, _shown: shown })
    }

    /// Whether a request of so many tokens fits into an empty pool.
    fn room(&self, tokens: u64) -> Result<()> {
        let checked = self.pool.check("--pool-tokens", tokens);
        checked.map_err(|error| error.with_remedy(format!("give {} more --pool-tokens", self.name)))
    }

    /// A request's cache on each rank.
    fn pieces(&self, prompt: &Prompt, lease: &Lease) -> Vec<Piece> {
        let piece =
            |rank| Piece { rank, prompt: prompt.clone(), tables: lease.tables.clone(), from: 0 };
        (0..self.ranks).map(piece).collect()
    }
}

fn layouts(
    args: &ServeArgs,
    shape: &Shape,
    model: &kvx_core::layout::ModelGeometry,
) -> Result<Vec<RankLayout>> {
    // Every request may leave its last block half empty, and block 0 is never used.
    let blocks =
        args.pool_tokens.div_ceil(shape.block_tokens.into()) + u64::from(args.in_flight) + 1;
    let blocks = shape.blocks.map_or(blocks, u64::from);
    let blocks = u32::try_from(blocks)
        .map_err(|_| Error::config("--pool-tokens", "more blocks than can be numbered"))?;
    let layouts = shape.ranks(model, blocks, Some(blocks.min(256)), 0)?;
    let bytes: u64 = layouts.iter().flat_map(RankLayout::regions).map(|region| region.bytes).sum();
    let free = crate::memory::free().unwrap_or(u64::MAX);
    if bytes > free {
        return Err(Error::new(ErrorKind::Resources, "serve", "the pool does not fit into memory")
            .with_context("needed", crate::size::bytes(bytes))
            .with_context("free", crate::size::bytes(free))
            .with_remedy(crate::memory::remedy(free, "", "give fewer --pool-tokens or --layers")));
    }
    Ok(layouts)
}

fn address(option: &'static str, text: &str) -> Result<Address> {
    text.parse().map_err(|error: Error| error.with_context("option", option))
}

/// Where this process listens: others are told that address, so it must be one by which they can reach it.
pub(crate) fn listened(text: &str) -> Result<Address> {
    let address = address("--listen", text)?;
    let anywhere = match address.host() {
        Host::V4(ip) => ip.is_unspecified(),
        Host::V6(ip) => ip.is_unspecified(),
        _ => false,
    };
    if anywhere {
        return Err(Error::config("--listen", format!("nobody can be told to dial {address}"))
            .with_remedy("give the name or address by which the other engine reaches this host"));
    }
    Ok(address)
}

/// The address by which this host reaches another one, with any port. A name that is not known yet is waited for.
fn own_address(other: &Address, patience: Duration) -> Result<Address> {
    let text = other.to_string();
    let until = Instant::now() + patience;
    loop {
        // Nothing is sent: the system only looks up the way.
        let found = ["0.0.0.0:0", "[::]:0"].into_iter().find_map(|from| {
            let socket = UdpSocket::bind(from).ok()?;
            socket.connect(text.as_str()).ok()?;
            Some(socket.local_addr().ok()?.ip())
        });
        match found {
            Some(ip) => return Ok(Address::new(ip, 0)),
            None if Instant::now() < until => std::thread::sleep(Duration::from_millis(200)),
            None => {
                return Err(Error::peer(
                    "serve",
                    format!("there is no way from this host to {other}"),
                )
                .with_remedy(
                    "check the name and the network, or say where this engine listens: --listen",
                ));
            }
        }
    }
}

/// What asks this process to end.
struct Ends {
    interrupt: Signal,
    terminate: Signal,
}

impl Ends {
    fn new() -> Result<Self> {
        let of = |kind| {
            signal(kind).map_err(|source| {
                Error::new(ErrorKind::Resources, "serve", "signals cannot be waited for")
                    .with_source(source)
            })
        };
        Ok(Self {
            interrupt: of(SignalKind::interrupt())?,
            terminate: of(SignalKind::terminate())?,
        })
    }

    /// Waits until it is asked: by which signal.
    async fn asked(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "interrupted",
            _ = self.terminate.recv() => "terminated",
        }
    }
}
