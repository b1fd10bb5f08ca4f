//! Moves a KV cache between two engines in two processes, over a backend that kvx knows nothing of, and checks it.
//!
//! `two-engines [BACKEND]`: without a name, `KVX_BACKEND` and the backends' ranks decide. `KVX_BACKEND_OPTIONS` goes to the
//! backend that `KVX_BACKEND` names. This process is the decode engine; it starts the prefill engine, and talks to it through pipes.

use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use kvx_connector::{Policy, choose};
use kvx_core::layout::NamedLayout;
use kvx_core::plan::{BlockTable, Pairing, PeerPlan, Request, SegmentList};
use kvx_core::transfer::Mode;
use kvx_core::{Error, ErrorKind, Result};

mod engine;
mod pipe;

use engine::Engine;
use pipe::{Pipe, Published};

/// Tells a process that it is the prefill engine.
const PREFILL: &str = "--prefill";
/// Tokens of the request.
const TOKENS: u32 = 200;
/// The longest that any one step may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two looks whether a process has ended.
const PAUSE: Duration = Duration::from_millis(5);

const USAGE: &str = "\
Moves a KV cache between two engines in two processes, and checks it

usage: two-engines [BACKEND]

BACKEND is a backend's name. Without it KVX_BACKEND names one; without that, too, it is the best that can be used here.
KVX_BACKEND_OPTIONS (option=value,...) goes to the backend that KVX_BACKEND names.";

fn main() -> ExitCode {
    // Names the backend, so that the linker keeps it: that is all an application does to have it.
    let _ = std::hint::black_box(&vendor_backend::REGISTRATION);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let ended = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [PREFILL, name] => prefill(name),
        [PREFILL] => Err(Error::config("two-engines", "which backend is missing")),
        ["-h" | "--help"] => {
            usage();
            Ok(())
        }
        [] => decode(None),
        [name] if !name.starts_with('-') => decode(Some(name)),
        _ => Err(Error::config("two-engines", "its only argument is a backend's name")
            .with_context("arguments", format!("{arguments:?}"))
            .with_remedy("two-engines --help")),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("two-engines: {error}");
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stdout, reason = "it was asked for")]
fn usage() {
    println!("{USAGE}");
}

/// The engine that has filled the cache: publishes it, and keeps it until it hears that it was read.
fn prefill(name: &str) -> Result<()> {
    let choice = choose(&Policy::from_env()?.with_name(Some(name)), None)?;
    let engine = Engine::open(&choice, NamedLayout::FlashAttentionHnd, 16)?;
    let blocks: Vec<u32> = (0..TOKENS.div_ceil(16)).map(|block| 60 - 3 * block).collect();
    engine.fill(&blocks, TOKENS)?;

    let mut decode = Pipe::of_this_process()?;
    decode.send(&Published {
        layout: engine.layout.clone(),
        offer: engine.port.offer()?,
        keys: engine.keys()?,
        blocks,
    })?;
    let (peer, completion) = engine.port.complete(&decode.receive()?)?;
    decode.send(&completion)?;
    engine.connect(peer)?;

    let heard = engine.port.wait_notified(PATIENCE)?;
    if heard != Some((peer, b"read".to_vec())) {
        return Err(Error::new(ErrorKind::Fabric, "prefill", "it was not told that it was read"));
    }
    engine.close()
}

/// The engine that needs the cache.
#[expect(clippy::print_stdout, reason = "it is what this program is for")]
fn decode(name: Option<&str>) -> Result<()> {
    let choice = choose(&Policy::from_env()?.with_name(name), None)?;
    println!("backend {choice}");
    let engine = Engine::open(&choice, NamedLayout::FlashInferNhd, 32)?;
    let blocks: Vec<u32> = (0..TOKENS.div_ceil(32)).map(|block| 5 + 2 * block).collect();
    let started = Prefill::start(choice.registration.name)?;
    let mut prefill = Pipe::of_child(&started.0)?;

    // They meet: what carries the bytes is the program's business.
    let theirs: Published = prefill.receive()?;
    let (peer, reply) = engine.port.accept(&theirs.offer)?;
    prefill.send(&reply)?;
    engine.port.finish(&prefill.receive()?)?;
    engine.connect(peer)?;
    println!("transport {}", engine.port.peer_info(peer)?.transport);
    let sizes = theirs.layout.regions().iter().map(|region| region.bytes);
    let regions: Vec<_> = theirs.keys.into_iter().zip(sizes).collect();
    engine.port.add_regions(peer, &regions)?;

    // What lies where on both sides: a list of segments.
    let (producers, consumers) = ([theirs.layout], [engine.layout.clone()]);
    let pairing = Pairing::new(&producers, &consumers, 0)?;
    let pair =
        pairing.pair(0, 0).ok_or_else(|| Error::peer("decode", "the ranks share nothing"))?;
    let plan = PeerPlan::compile(&producers[0], &consumers[0], pair)?;
    let (from, to) = ([BlockTable::new(&theirs.blocks)], [BlockTable::new(&blocks)]);
    let mut segments = SegmentList::new();
    let limits = &engine.port.capabilities().limits;
    plan.segments(&Request::whole(TOKENS.into(), &from, &to), Mode::Read, limits, &mut segments)?;

    // One call moves them, and tells the other side when all is here.
    let mut transfer =
        engine.port.transfer(peer, Mode::Read, &engine.set, segments.as_slice(), Some(b"read"))?;
    let report = transfer.wait(PATIENCE).ok_or_else(|| {
        Error::new(ErrorKind::Fabric, "decode", "the transfer did not settle in time")
    })??;
    println!("moved {} bytes in {} segments", report.bytes, report.segments);
    let elements = engine.check(&blocks, TOKENS)?;
    println!("checked {elements} elements: each is the producer's, and nothing else was written");
    engine.close()?;
    started.ended()
}

/// The prefill engine's process: it does not outlive this one.
struct Prefill(Child);

impl Prefill {
    fn start(backend: &str) -> Result<Self> {
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::Resources, "prefill", "its process cannot be started")
                .with_source(error)
        };
        let own = std::env::current_exe().map_err(failed)?;
        let mut program = Command::new(own);
        program.args([PREFILL, backend]).stdin(Stdio::piped()).stdout(Stdio::piped());
        program.spawn().map(Self).map_err(failed)
    }

    fn ended(mut self) -> Result<()> {
        let failed = |why| Error::new(ErrorKind::Fabric, "prefill", why);
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            match self.0.try_wait() {
                Ok(None) => std::thread::sleep(PAUSE),
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => {
                    return Err(failed("its process failed").with_context("status", status));
                }
                Err(error) => return Err(failed("its process is lost").with_source(error)),
            }
        }
        Err(failed("its process did not end in time").with_context("seconds", PATIENCE.as_secs()))
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        // It is gone already, or must go now.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
