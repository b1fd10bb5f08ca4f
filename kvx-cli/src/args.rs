//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kvx_core::layout::{Dtype, LayerKind, ModelGeometry, NamedLayout};
use kvx_core::transfer::Mode;
use kvx_core::{Error, Result};

use crate::failure::EXIT_CODES;
use crate::help;
use crate::model;
use crate::shape::Shape;

/// Moves KV caches between inference engines, exactly, whatever their layouts.
#[derive(Debug, Parser)]
#[command(name = "kvx", version, after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// Print one JSON document instead of text; an error also goes to standard error, as a line
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The command with which the program starts itself.
pub(crate) const ENGINE_COMMAND: &str = "engine-process";

/// The command with which the program guards another one.
pub(crate) const GUARD_COMMAND: &str = "guard-process";

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Move the caches of a trace's requests between two engines, and check every element
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Demo(DemoArgs),
    /// Say what moving a request between two shapes of engine costs, and draw why
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Plan(PlanArgs),
    /// Measure a backend between two processes, beside what this machine can do at most
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Bench(BenchArgs),
    /// Run one engine of a pair: two hosts that move requests through the whole connector
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Serve(ServeArgs),
    /// Say what of this host is not as kvx needs it, and what to do; of backends, the one that KVX_BACKEND names, or all
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Doctor(DoctorArgs),
    /// Make a key for the control channels of a deployment
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Key(KeyArgs),
    /// An engine for another kvx process
    #[command(name = ENGINE_COMMAND, hide = true)]
    Engine,
    /// Ends a group of processes once the one that started it is gone
    #[command(name = GUARD_COMMAND, hide = true)]
    Guard {
        /// The group.
        group: u32,
    },
    /// Show what an engine does, live: peers, leases, transfers
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Top(TopArgs),
    /// List backends: which can be used here, what the others lack, and what each can do
    #[command(after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
    Backends(BackendsArgs),
}

/// Options of `kvx top`.
#[derive(Args, Clone, Debug)]
pub(crate) struct TopArgs {
    /// Address that was given to --metrics of the kvx to be watched; a port alone is one on this host
    #[arg(value_name = "[HOST:]PORT")]
    pub(crate) address: String,
    /// Show it once, without rates, and end; so does --json
    #[arg(long)]
    pub(crate) once: bool,
    /// Seconds from one look to the next
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) seconds: u64,
}

/// Options of `kvx backends`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BackendsArgs {
    /// Only this one, with its options
    #[arg(value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// List each one's options, too
    #[arg(long)]
    pub(crate) options: bool,
}

/// Options of `kvx doctor`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorArgs {
    /// Also: whether an engine could listen there; may be given several times
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Vec<String>,
    /// Also: whether this file is a key that nobody else can read; may be given several times
    #[arg(long, value_name = "FILE")]
    pub(crate) key: Vec<PathBuf>,
    /// Look at the /proc, /sys and /dev below this directory, and at nothing else
    #[arg(long, value_name = "DIRECTORY", conflicts_with_all = ["listen", "key"])]
    pub(crate) root: Option<PathBuf>,
}

/// Options of `kvx key`.
#[derive(Args, Clone, Debug)]
pub(crate) struct KeyArgs {
    /// The file to make: it is never overwritten
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
}

/// Options of `kvx serve`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ServeArgs {
    /// The engine that fills caches, or the one that needs them
    #[arg(long, value_enum)]
    pub(crate) role: RoleArg,
    /// Where the producer listens for requests [the consumer: where its ranks listen; default: as it reaches the producer]
    #[arg(long, value_name = "HOST:PORT", required_if_eq("role", "producer"))]
    pub(crate) listen: Option<String>,
    /// Where the producer's ranks listen: the first at this port, the others at any [default: the host of --listen, any port]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) ranks: Option<String>,
    /// Where the producer listens for requests
    #[arg(long, value_name = "HOST:PORT", required_if_eq("role", "consumer"))]
    pub(crate) connect: Option<String>,
    /// The deployment's key: kvx key makes one
    #[arg(long, value_name = "FILE")]
    pub(crate) key: PathBuf,
    /// The group of the key's file may read it, too: so does Kubernetes mount secrets
    #[arg(long)]
    pub(crate) key_of_group: bool,
    /// The engine's name, which no other engine may have [default: its role and six random digits]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// A preset's name, or the path of a Hugging Face config.json: the same on both sides
    #[arg(long, value_name = "NAME|FILE", default_value = "llama-3.1-8b", long_help = help::model())]
    pub(crate) model: String,
    /// Element type of keys, values and latents [default: the model's]
    #[arg(long)]
    pub(crate) dtype: Option<String>,
    /// Only the first layers of the model: the same on both sides
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) layers: Option<u32>,
    /// Shape of this engine [default: tp=1,layout=nhd,block=16]
    #[arg(long, value_name = "SHAPE", default_value = "", hide_default_value = true, long_help = help::shape(
        "Shape of this engine [default: tp=1,layout=nhd,block=16]",
    ))]
    pub(crate) shape: String,
    /// Tensor parallel ranks: as tp= in --shape
    #[arg(long, value_name = "N")]
    pub(crate) tp: Option<u32>,
    /// Backend to use, with its options [default: all there are; the best that both sides have is chosen]
    #[arg(long, value_name = "NAME[,OPTION=VALUE]", long_help = help::BACKEND)]
    pub(crate) backend: Option<String>,
    /// Tokens that fit into this engine's pool at the same time
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub(crate) pool_tokens: u64,
    /// Serve metrics for Prometheus, and the status for kvx top, at this address; a port alone is on loopback
    #[arg(long, value_name = "[HOST:]PORT")]
    pub(crate) metrics: Option<String>,
    /// The producer: end once the first consumer has gone
    #[arg(long)]
    pub(crate) once: bool,
    /// The consumer: requests to fetch [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) requests: Option<u32>,
    /// The consumer: tokens of each request [default: 1024]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 24), conflicts_with = "trace")]
    pub(crate) tokens: Option<u64>,
    /// The consumer: lengths of requests from a trace, as for kvx demo
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Requests that are fetched at the same time: the producer keeps a block of its pool for each
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) in_flight: u16,
    /// The consumer: seed of the tags [default: 0]
    #[arg(long, value_name = "SEED")]
    pub(crate) seed: Option<u64>,
    /// Do not compare digests before a request is confirmed
    #[arg(long)]
    pub(crate) no_integrity: bool,
    /// Seconds that a request may take
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) deadline: u64,
    /// The consumer: seconds to wait for a producer that is not there yet [default: 10]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) wait: Option<u64>,
}

impl ServeArgs {
    /// Refuses what the other role alone looks at.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](kvx_core::ErrorKind::Config), naming the option.
    pub(crate) fn check(&self) -> Result<()> {
        let given = [
            (RoleArg::Consumer, "--requests", self.requests.is_some()),
            (RoleArg::Consumer, "--tokens", self.tokens.is_some()),
            (RoleArg::Consumer, "--trace", self.trace.is_some()),
            (RoleArg::Consumer, "--seed", self.seed.is_some()),
            (RoleArg::Consumer, "--wait", self.wait.is_some()),
            (RoleArg::Consumer, "--connect", self.connect.is_some()),
            (RoleArg::Producer, "--ranks", self.ranks.is_some()),
            (RoleArg::Producer, "--once", self.once),
        ];
        for (role, option, is_given) in given {
            if is_given && role != self.role {
                let role = role.to_possible_value();
                let role = role.as_ref().map_or("other", |value| value.get_name());
                return Err(Error::config(option, format!("only the {role} looks at it"))
                    .with_remedy(format!("give it to the {role}, and leave it out here")));
            }
        }
        Ok(())
    }

    /// How long a producer that is not there yet is waited for.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_secs(self.wait.unwrap_or(10))
    }
}

/// Which of the two engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RoleArg {
    /// Fills caches and leases them
    Producer,
    /// Fetches them and checks every element
    Consumer,
}

/// A model and two shapes of engine.
#[derive(Args, Clone, Debug)]
pub(crate) struct EngineArgs {
    /// A preset's name, or the path of a Hugging Face config.json
    #[arg(long, value_name = "NAME|FILE", default_value = "llama-3.1-8b", long_help = help::model())]
    pub(crate) model: String,
    /// Element type of keys, values and latents [default: the model's]
    #[arg(long)]
    pub(crate) dtype: Option<String>,
    /// Shape of the engine that filled the cache [default: tp=2,layout=hnd,block=16]
    #[arg(long, value_name = "SHAPE", default_value = "", hide_default_value = true, long_help = help::shape(
        "Shape of the engine that filled the cache [default: tp=2,layout=hnd,block=16]",
    ))]
    pub(crate) producer: String,
    /// Shape of the engine that needs it, with the same keys [default: tp=4,layout=nhd,block=32]
    #[arg(long, value_name = "SHAPE", default_value = "", hide_default_value = true)]
    pub(crate) consumer: String,
    /// Who starts transfers: the consumer reads, or the producer writes
    #[arg(long, value_enum, default_value_t = ModeArg::Read)]
    pub(crate) mode: ModeArg,
}

/// A model and two shapes of engine, read and checked.
#[derive(Clone, Debug)]
pub(crate) struct Engines {
    /// The model.
    pub(crate) model: ModelGeometry,
    /// Shape of the engine that filled the cache.
    pub(crate) producer: Shape,
    /// Shape of the engine that needs it.
    pub(crate) consumer: Shape,
    /// Who starts transfers.
    pub(crate) mode: Mode,
}

impl EngineArgs {
    /// Reads the model and the shapes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](kvx_core::ErrorKind::Config), naming the option, for whatever cannot be read.
    pub(crate) fn read(&self) -> Result<Engines> {
        Ok(Engines {
            model: model::load(&self.model, dtype(self.dtype.as_deref())?)?,
            producer: Shape::new(2, NamedLayout::FlashAttentionHnd, 16)?
                .changed_by("--producer", &self.producer)?,
            consumer: Shape::new(4, NamedLayout::FlashAttentionNhd, 32)?
                .changed_by("--consumer", &self.consumer)?,
            mode: self.mode.into(),
        })
    }
}

pub(crate) fn dtype(text: Option<&str>) -> Result<Option<Dtype>> {
    let parse =
        |text: &str| text.parse().map_err(|error: Error| error.with_context("option", "--dtype"));
    text.map(parse).transpose()
}

/// Who starts transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    /// The consumer reads
    Read,
    /// The producer writes
    Write,
}

impl From<ModeArg> for Mode {
    fn from(mode: ModeArg) -> Self {
        match mode {
            ModeArg::Read => Self::Read,
            ModeArg::Write => Self::Write,
        }
    }
}

/// Options of `kvx demo`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DemoArgs {
    /// The model and the two shapes.
    #[command(flatten)]
    pub(crate) engines: EngineArgs,
    /// Backend to use, with its options, for example mock,preset=efa [default: the best there is]
    #[arg(long, value_name = "NAME[,OPTION=VALUE]", long_help = help::BACKEND)]
    pub(crate) backend: Option<String>,
    /// Requests to move
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) requests: u32,
    /// Trace to replay: JSON lines with timestamp, input_length, output_length, hash_ids [default: one made from the seed]
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Replay by the trace's timestamps, this many times faster [default: without waiting]
    #[arg(long, value_name = "TIMES")]
    pub(crate) speed: Option<f64>,
    /// Seed of the tags, of a generated trace, and of the mock
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Requests whose caches are moved at the same time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) in_flight: u16,
    /// Cut prompts to this many tokens
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_tokens: Option<u64>,
    /// Memory for both engines' pools and lists of segments, for example 2G [default: half of what is free, at most 4G]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// Size that the caches of all requests together should have: the model is scaled down to that
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    pub(crate) volume: String,
    /// Do not scale the model down
    #[arg(long, conflicts_with = "volume")]
    pub(crate) full_size: bool,
    /// Through a port of each rank alone: no leases, no control channel, no digests
    #[arg(long)]
    pub(crate) bare: bool,
    /// Do not compare digests before a request is confirmed. They never are where the producer writes
    #[arg(long, conflicts_with = "bare")]
    pub(crate) no_integrity: bool,
    /// Do damage on purpose, to see that the check finds it
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) corrupt: Option<Damage>,
}

/// Damage done on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Damage {
    /// Flip one bit of the consumer's memory after a transfer
    Byte,
    /// Take one segment from one element before where it should be taken from; as --bare
    Segment,
}

/// Options of `kvx plan`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlanArgs {
    /// The model and the two shapes.
    #[command(flatten)]
    pub(crate) engines: EngineArgs,
    /// Tokens of the request
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub(crate) tokens: u64,
    /// How the request's blocks lie in both pools
    #[arg(long, value_enum, default_value_t = Order::Contiguous)]
    pub(crate) blocks: Order,
    /// Draw the two layouts of one block, and the runs between them, into this file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

/// How a request's blocks lie in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// One after the other, as in an engine that has just started
    Contiguous,
    /// No two that follow each other on one side follow each other on the other
    Permuted,
}

/// Options of `kvx bench`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    /// Backend to measure, with its options [default: the best there is]
    #[arg(long, value_name = "NAME[,OPTION=VALUE]", long_help = help::MEASURED)]
    pub(crate) backend: Option<String>,
    /// Measure what leases and confirmations cost beside a bare port, with requests that are as small as can be
    #[arg(long, conflicts_with_all = [
        "mode", "model", "dtype", "producer", "consumer", "tokens", "blocks", "rounds", "region", "svg", "peer_command",
    ])]
    pub(crate) connector: bool,
    /// Who starts transfers: the consumer reads, or the producer writes
    #[arg(long, value_enum, default_value_t = ModeArg::Read)]
    pub(crate) mode: ModeArg,
    /// A preset's name, or the path of a Hugging Face config.json
    #[arg(long, value_name = "NAME|FILE", default_value = "llama-3.1-8b", long_help = help::model())]
    pub(crate) model: String,
    /// Element type of keys, values and latents [default: the model's]
    #[arg(long)]
    pub(crate) dtype: Option<String>,
    /// Shape of the engine that filled the cache [default: tp=1,layout=nhd,block=16; block=64 for MLA]
    #[arg(long, value_name = "SHAPE", default_value = "", hide_default_value = true, long_help = help::shape(
        "Shape of the engine that filled the cache [default: tp=1,layout=nhd,block=16; block=64 for MLA]",
    ))]
    pub(crate) producer: String,
    /// Shape of the engine that needs it, with the same keys and defaults
    #[arg(long, value_name = "SHAPE", default_value = "", hide_default_value = true)]
    pub(crate) consumer: String,
    /// Tokens of the request
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub(crate) tokens: u64,
    /// How the request's blocks lie in both pools
    #[arg(long, value_enum, default_value_t = Order::Permuted)]
    pub(crate) blocks: Order,
    /// Rounds: in each, the request is moved once by each who is compared
    #[arg(long, value_name = "N", default_value_t = 31, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) rounds: u32,
    /// Whose memory is moved: what the backend allocates, or what somebody else owns
    #[arg(long, value_enum, default_value_t = RegionArg::Shared)]
    pub(crate) region: RegionArg,
    /// Single blocks, and notifications, whose time is taken
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) small: u32,
    /// Draw bandwidth against the size of segments and of requests, into this file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Another program to compare with, round by round: it is given a line per round, and prints its GB/s
    #[arg(long, value_name = "COMMAND", long_help = help::PEER_COMMAND)]
    pub(crate) peer_command: Option<String>,
    /// Most seconds that a turn of --peer-command may take: the first includes its start
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) peer_seconds: u64,
}

/// Whose memory is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RegionArg {
    /// What the backend allocates: it is fastest over that
    Shared,
    /// What somebody else owns, as a framework's tensors
    Borrowed,
}

impl BenchArgs {
    /// Reads the model and the shapes.
    ///
    /// # Errors
    ///
    /// As for [`EngineArgs::read`].
    pub(crate) fn read(&self) -> Result<Engines> {
        let model = model::load(&self.model, dtype(self.dtype.as_deref())?)?;
        let has_latents = model.layers().iter().any(|layer| matches!(layer, LayerKind::Mla(_)));
        let plain =
            Shape::new(1, NamedLayout::FlashAttentionNhd, if has_latents { 64 } else { 16 })?;
        Ok(Engines {
            model,
            producer: plain.changed_by("--producer", &self.producer)?,
            consumer: plain.changed_by("--consumer", &self.consumer)?,
            mode: self.mode.into(),
        })
    }
}
