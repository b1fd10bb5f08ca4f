//! The process that is started: does what it is told.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use kvx_core::memory::Region;
use kvx_core::port::Port;
use kvx_core::transfer::Mode;
use kvx_core::{Error, ErrorKind, Result};
use rustix::time::{ClockId, clock_gettime};

use super::PATIENCE;
use super::copies::Prepared;
use super::message::{Answer, Ask, OpenedRank, Publish, receive, send};
use super::pinned::Pinned;
use crate::engine::live::Live;
use crate::engine::memories::Memories;
use crate::engine::rank::Rank;
use crate::engine::ranks::{Awaited, Ranks};
use crate::fabric::Fabric;

/// Pause between two looks for notifications.
const PAUSE: Duration = Duration::from_micros(50);

/// Does what comes over standard input, which is a socket, until that ends.
///
/// # Errors
///
/// When the socket fails. What is asked and fails is answered.
pub(crate) fn serve() -> Result<()> {
    end_with_starter()?;
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(|source| {
        Error::new(ErrorKind::Resources, "remote", "no socket to be told over").with_source(source)
    })?;
    let mut stream = UnixStream::from(stdin);
    let mut engine = None;
    while let Some(ask) = receive::<Ask>(&mut stream)? {
        // What it is about comes after it.
        if let Ask::Raw { times, cpu } = ask {
            let answer = raw(&stream, times, cpu).unwrap_or_else(Answer::from);
            send(&mut stream, &answer)?;
            continue;
        }
        // What takes place while it listens is timed: it says when it has begun to.
        if let Ask::Listen(counts) = ask {
            let begun = || send(&mut &stream, &Answer::Done);
            let answer = listen(engine.as_mut(), &counts, begun).unwrap_or_else(Answer::from);
            send(&mut stream, &answer)?;
            continue;
        }
        let ends = matches!(ask, Ask::Close);
        send(&mut stream, &execute(&mut engine, ask).unwrap_or_else(Answer::from))?;
        if ends {
            break;
        }
    }
    Ok(())
}

/// Lets the kernel end this process with the one that started it, even while this one is stopped and reads nothing.
fn end_with_starter() -> Result<()> {
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).map_err(
        |source| {
            Error::new(ErrorKind::Resources, "remote", "this process cannot be tied to its starter")
                .with_source(io::Error::from(source))
        },
    )?;
    // A starter that is gone already has closed the socket, which is heard as soon as it is read.
    Ok(())
}

/// Answers over two counters.
#[cfg(target_os = "linux")]
fn raw(stream: &UnixStream, times: u32, cpu: Option<u32>) -> Result<Answer> {
    let _pinned = Pinned::to(cpu);
    let counters = super::raw::Counters::take(stream)?;
    kvx_core::thread::runs_briefly();
    counters.pong(times)?;
    Ok(Answer::Done)
}

#[cfg(not(target_os = "linux"))]
fn raw(_: &UnixStream, _: u32, _: Option<u32>) -> Result<Answer> {
    Err(Error::unsupported("remote", "there is no eventfd"))
}

/// Takes notifications, asleep in between, and says when it has begun to. Of an error before that it says nothing else.
fn listen(
    engine: Option<&mut Engine>,
    counts: &[u64],
    mut begun: impl FnMut() -> Result<()>,
) -> Result<Answer> {
    let engine = engine.ok_or_else(|| Error::misuse("remote", "the engine is not open"))?;
    let ports: Vec<Port> = engine.ranks()?.ports().cloned().collect();
    engine.fabric.runtime.block_on(async {
        let drivers: Vec<_> = ports.iter().map(|port| tokio::spawn(port.drive())).collect();
        // They look at their ports once before they sleep.
        tokio::task::yield_now().await;
        begun()?;
        for (port, count) in ports.iter().zip(counts) {
            for _ in 0..*count {
                let heard = tokio::time::timeout(PATIENCE, port.notified()).await;
                heard.map_err(|_| late("a notification"))??;
            }
        }
        for driver in drivers {
            driver.abort();
        }
        Ok(Answer::Done)
    })
}

/// The engine, once it is opened.
struct Engine {
    fabric: Fabric,
    kind: Kind,
    /// Copies past the backend.
    copies: Prepared,
    /// All of it is kept on one processor.
    _pinned: Option<Pinned>,
}

/// What its ranks have.
enum Kind {
    /// A port each.
    Ports(Ranks),
    /// The whole connector.
    Live(Box<Live>),
}

fn execute(engine: &mut Option<Engine>, ask: Ask) -> Result<Answer> {
    match (ask, engine) {
        (Ask::Cpu, engine) => {
            // What was copied past the backend is not its work.
            let others = engine.as_ref().map_or(0, |engine| engine.copies.spent());
            Ok(Answer::Number(processor_time().saturating_sub(others)))
        }
        (Ask::Open { backend, layouts, memory }, engine @ None) => {
            let fabric = Fabric::choose(Some(&backend), 0)?;
            let ranks = layouts.into_iter().map(|layout| Rank::new(layout, fabric.port()?, memory));
            let ranks = Ranks::new(ranks.collect::<Result<_>>()?);
            let answer = describe(&ranks);
            let (kind, copies) = (Kind::Ports(ranks), Prepared::default());
            *engine = Some(Engine { fabric, kind, copies, _pinned: None });
            Ok(answer)
        }
        (Ask::OpenLive { backend, replicas, setup, cpu }, engine @ None) => {
            // Threads that are started from here on stay where this one is.
            let pinned = Pinned::to(cpu);
            let fabric = Fabric::choose(Some(&backend), 0)?;
            let live = Live::start(&setup.setup()?, replicas, || fabric.open())?;
            let (kind, copies) = (Kind::Live(Box::new(live)), Prepared::default());
            *engine = Some(Engine { fabric, kind, copies, _pinned: pinned });
            Ok(Answer::Opened { ranks: Vec::new(), pid: std::process::id() })
        }
        (ask, Some(engine)) => engine.execute(ask),
        (_, None) => Err(Error::misuse("remote", "the engine is not open")),
    }
}

fn describe(ranks: &Ranks) -> Answer {
    let address = |region: &Region| region.address().as_ptr().addr() as u64;
    let ranks = ranks.list().iter().map(|rank| OpenedRank {
        keys: rank.keys().to_vec(),
        addresses: rank.regions.iter().map(address).collect(),
    });
    Answer::Opened { ranks: ranks.collect(), pid: std::process::id() }
}

impl Engine {
    const fn memories(&mut self) -> &mut Memories {
        match &mut self.kind {
            Kind::Ports(ranks) => &mut ranks.memories,
            Kind::Live(live) => &mut live.memories,
        }
    }

    fn ranks(&mut self) -> Result<&mut Ranks> {
        match &mut self.kind {
            Kind::Ports(ranks) => Ok(ranks),
            Kind::Live(_) => Err(Error::misuse("remote", "its ranks have no ports of their own")),
        }
    }

    fn live(&mut self) -> Result<(&Fabric, &mut Live)> {
        match &mut self.kind {
            Kind::Live(live) => Ok((&self.fabric, live)),
            Kind::Ports(_) => Err(Error::misuse("remote", "its ranks have no connector")),
        }
    }

    fn execute(&mut self, ask: Ask) -> Result<Answer> {
        match ask {
            Ask::Accept { rank, number, offer } => {
                let rank = self.ranks()?.get_mut(rank)?;
                let (peer, reply) = rank.port.accept(&offer)?;
                rank.meets(number, peer);
                Ok(Answer::Reply(reply))
            }
            Ask::Finish { rank, number, completion } => {
                let rank = self.ranks()?.get_mut(rank)?;
                let peer = rank.port.finish(&completion)?;
                rank.meets(number, peer);
                Ok(Answer::Done)
            }
            Ask::Connect { rank, number } => {
                let rank = self.ranks()?.get_mut(rank)?;
                let (peer, port) = (rank.peer(number)?, rank.port.clone());
                let connected = async { tokio::time::timeout(PATIENCE, port.connect(peer)).await };
                self.fabric.runtime.block_on(connected).map_err(|_| late("connect"))??;
                Ok(Answer::Done)
            }
            Ask::Fill(pieces) => {
                self.memories().fill(&pieces)?;
                Ok(Answer::Done)
            }
            Ask::Check(pieces) => self.memories().check(&pieces).map(Answer::Checked),
            Ask::Watch(bystanders) => self.memories().watch(&bystanders).map(Answer::Number),
            Ask::Changed => self.memories().changed().map(Answer::Changed),
            Ask::Flip { rank, sample } => {
                self.memories().flip(rank, &sample)?;
                Ok(Answer::Done)
            }
            Ask::Expect(awaited) => self.hear(awaited),
            Ask::Strays => Ok(Answer::Number(match &self.kind {
                Kind::Ports(ranks) => ranks.strays() as u64,
                Kind::Live(live) => live.left(),
            })),
            Ask::Publish(publish) => {
                let ticket = self.live()?.1.publish_for(publish)?;
                Ok(Answer::Ticket(ticket.to_bytes()?))
            }
            Ask::PublishMany(first, times) => {
                let live = self.live()?.1;
                let tickets = (0..u64::from(times)).map(|index| {
                    let request = first.request + index;
                    live.publish_for(Publish { request, ..first.clone() })?.to_bytes()
                });
                Ok(Answer::Tickets(tickets.collect::<Result<_>>()?))
            }
            Ask::Over(requests) => {
                let (fabric, live) = self.live()?;
                let over = fabric.runtime.block_on(async {
                    tokio::time::timeout(PATIENCE, live.all_done(&requests)).await
                });
                over.map_err(|_| late("the end of a lease"))?.map(Answer::Number)
            }
            Ask::Traffic => Ok(Answer::Traffic(self.live()?.1.traffic())),
            Ask::PrepareCopies(copies) => {
                let regions = self.ranks()?.get_mut(copies.rank)?.regions.clone();
                self.copies.add(&regions, copies)?;
                Ok(Answer::Done)
            }
            Ask::Copy => self.copies.run().map(Answer::Number),
            Ask::Echo { rank, number, times, spin, cpu } => {
                let _pinned = Pinned::to(cpu);
                self.echo(rank, number, times, spin)
            }
            Ask::Close => {
                match &self.kind {
                    Kind::Ports(ranks) => self.fabric.close(ranks.ports())?,
                    // Its ranks say goodbye when they are dropped.
                    Kind::Live(live) => live.withdraw_all(),
                }
                Ok(Answer::Done)
            }
            Ask::Open { .. }
            | Ask::OpenLive { .. }
            | Ask::Cpu
            | Ask::Listen(_)
            | Ask::Raw { .. } => Err(Error::misuse("remote", "not to be asked of an open engine")),
        }
    }

    fn hear(&mut self, mut missing: Vec<Awaited>) -> Result<Answer> {
        let begun = Instant::now();
        while !missing.is_empty() {
            if self.ranks()?.hear(&mut missing)? > 0 {
                continue;
            }
            if begun.elapsed() > PATIENCE {
                return Err(late("a notification").with_context("missing", missing.len()));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(Answer::Done)
    }

    fn echo(&mut self, rank: usize, number: usize, times: u32, spin: bool) -> Result<Answer> {
        let rank = self.ranks()?.get_mut(rank)?;
        let (peer, port, set) = (rank.peer(number)?, rank.port.clone(), rank.set.clone());
        if spin {
            for _ in 0..times {
                let (_, bytes) = super::process::spin_notified(&port, || Ok(()))?;
                let reply = port.transfer(peer, Mode::Read, &set, &[], Some(&bytes))?;
                drop(reply);
            }
            return Ok(Answer::Done);
        }
        kvx_core::thread::runs_briefly();
        self.fabric.runtime.block_on(async {
            let driver = tokio::spawn(port.drive());
            for _ in 0..times {
                let heard = tokio::time::timeout(PATIENCE, port.notified()).await;
                let (_, bytes) = heard.map_err(|_| late("a notification"))??;
                drop(port.transfer(peer, Mode::Read, &set, &[], Some(&bytes))?);
            }
            driver.abort();
            Ok(Answer::Done)
        })
    }
}

fn late(what: &str) -> Error {
    Error::new(ErrorKind::Fabric, "remote", format!("{what} did not come in time"))
        .with_context("seconds", PATIENCE.as_secs())
}

/// Processor time of all threads of this process, in nanoseconds.
pub(crate) fn processor_time() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let whole = u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000;
    whole + u64::try_from(time.tv_nsec).unwrap_or(0)
}
