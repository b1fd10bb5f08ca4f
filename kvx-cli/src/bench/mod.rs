//! `kvx bench`: what a backend does between two processes, beside what this machine can do at most.
//!
//! This process is the engine that starts transfers; the other engine is a process of its own. In every round the same
//! request is moved once by the backend, once by each of the limits, and once by the other program where one is named; who
//! begins changes from round to round. Ratios are taken round by round, so that whatever disturbs the machine disturbs all.

mod busy;
mod connector;
mod connector_report;
#[cfg(all(feature = "shm", target_os = "linux", target_pointer_width = "64"))]
mod limits;
#[cfg(not(all(feature = "shm", target_os = "linux", target_pointer_width = "64")))]
#[path = "no_limits.rs"]
mod limits;
mod peer;
mod report;
mod rig;
mod room;
mod small;
mod stats;

use std::time::Duration;

use kvx_core::{Error, Result};

use crate::args::{BenchArgs, RegionArg};
use crate::fabric::Fabric;
use crate::failure::{self, Failure};
use crate::output::{self, Output};
use limits::Limits;
pub(crate) use peer::guard;

use peer::Peer;
use report::{Measured, Report};
use rig::Rig;

/// Rounds before those that count.
const WARM_UP: u32 = 3;

/// Runs `kvx bench`; gives the exit code.
///
/// # Errors
///
/// Those of the options, the shapes and the fabric; and when the result cannot be written.
pub(crate) fn run(args: &BenchArgs, out: &mut Output) -> Result<u8, Failure> {
    let engines = args.read()?;
    if let Some(path) = &args.svg {
        report::refuse_place(path)?;
    }
    let fabric = Fabric::choose(args.backend.as_deref(), 0)?;
    if fabric.is_in_process() {
        // Nobody named the mock: why nothing else can be used is what there is to say.
        if let Some(why) = fabric.fallback {
            return Err(why.into());
        }
        return Err(Error::unsupported("bench", "the mock connects engines of one process only")
            .with_remedy("name a backend that connects processes: kvx backends")
            .into());
    }
    if args.connector {
        return connector::run(args, &fabric, out);
    }
    let mut rig = Rig::new(&fabric, engines, args)?;
    out.line(format!("backend   {}, transport {}", fabric.about(), rig.transport()?))?;
    out.line(format!("request   {}", rig.about()))?;
    let mut limits = Limits::new(&mut rig)?;
    let mut peer = args
        .peer_command
        .as_deref()
        .map(|command| Peer::start(command, Duration::from_secs(args.peer_seconds)))
        .transpose()?;

    for round in 0..WARM_UP {
        rig.round()?;
        limits.round(&mut rig.process, round);
        if let Some(peer) = &mut peer {
            peer.round()?;
        }
    }
    let wrong = rig.check()?;
    rig.begin_counting(args.rounds)?;
    let mut measured = Measured::default();
    for round in 0..args.rounds {
        // Who begins changes, so that nobody always finds the caches as the same other left them.
        for turn in 0..3 {
            match (round + turn) % 3 {
                0 => measured.rounds.push(rig.round()?),
                1 => measured.limits.push(limits.round(&mut rig.process, round)),
                _ => {
                    if let Some(peer) = &mut peer {
                        measured.peer.push(peer.round()?);
                    }
                }
            }
        }
    }
    measured.cpu = rig.end_counting()?;
    drop(peer);
    let wrong = wrong + rig.check()?;
    measured.one_block = small::one_block(&mut rig, args.small)?;
    measured.notify = small::notify(&mut rig, args.small)?;
    let sweep = args.svg.as_ref().map(|_| small::sweep(&mut rig)).transpose()?;
    // What was measured is not lost where the picture cannot be written.
    let drawn = match (&args.svg, &sweep) {
        (Some(path), Some(sweep)) => report::draw(path, sweep),
        _ => Ok(()),
    };
    let report = Report::new(args, &rig, &fabric, measured, sweep, wrong)?;
    rig.close()?;
    report.print(out)?;
    out.document(&report)?;
    if let Err(error) = drawn {
        output::note(format!("error: {}", failure::line(&error)));
        return Ok(failure::exit_code(&error));
    }
    Ok(if wrong == 0 { failure::OK } else { failure::FAILED })
}

/// Where memory is from.
impl From<RegionArg> for crate::remote::Memory {
    fn from(region: RegionArg) -> Self {
        match region {
            RegionArg::Shared => Self::Backend,
            RegionArg::Borrowed => Self::Heap,
        }
    }
}
