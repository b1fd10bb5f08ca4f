//! The process that was started, as its starter sees it.

use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::pin::pin;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvx_connector::ticket::Ticket;
use kvx_core::id::PeerId;
use kvx_core::layout::RankLayout;
use kvx_core::limits::{self, Wanted};
use kvx_core::port::{Port, Transfer, TransferReport};
use kvx_core::{Error, ErrorKind, Result};

use super::PATIENCE;
use super::line::{LOOK, Line, Looks, STANDSTILL};
#[cfg(all(feature = "shm", target_os = "linux", target_pointer_width = "64"))]
use super::message::Copies;
use super::message::{Answer, Ask, Memory, OpenedRank, Publish, receive, send};
use super::vigil::{Vigil, gone};
use crate::args::ENGINE_COMMAND;
use crate::engine::live::{LocalSetup, Traffic};
use crate::engine::rank::Rank;
use crate::engine::ranks::{Awaited, Bystanders, Piece};
use crate::engine::watch::Changed;
use crate::engine::work::{Checked, Sample};
use crate::fabric::Fabric;
use crate::own;
use tokio::runtime::Runtime;

/// A process that was killed a moment ago may not have been reported yet: for how long, at most.
const REPORTED: Duration = Duration::from_millis(100);

/// An engine in a process of its own. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    vigil: Vigil,
    stream: UnixStream,
    looks: Looks,
    pub(crate) ranks: Vec<OpenedRank>,
    pub(crate) pid: u32,
}

impl Process {
    /// Starts it and makes its ranks.
    ///
    /// # Errors
    ///
    /// When it cannot be started, or cannot open the backend.
    pub(crate) fn start(backend: &str, layouts: Vec<RankLayout>, memory: Memory) -> Result<Self> {
        Self::start_with(&Ask::Open { backend: backend.to_owned(), layouts, memory })
    }

    /// Starts it, its ranks with the whole connector; all its threads on one processor where that is named.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub(crate) fn start_live(
        backend: &str,
        replicas: Vec<Vec<RankLayout>>,
        setup: LocalSetup,
        cpu: Option<u32>,
    ) -> Result<Self> {
        Self::start_with(&Ask::OpenLive { backend: backend.to_owned(), replicas, setup, cpu })
    }

    fn start_with(open: &Ask) -> Result<Self> {
        let failed = |what: &'static str| {
            move |source: std::io::Error| {
                Error::new(ErrorKind::Resources, "remote", what).with_source(source)
            }
        };
        let (mine, theirs) = UnixStream::pair().map_err(failed("no socket for another process"))?;
        let own = own::program()?;
        // Standard output is this process's result: libraries that print must not spoil it.
        let errors = std::io::stderr().as_fd().try_clone_to_owned();
        let errors = errors.map_err(failed("no standard error"))?;
        let mut child = Command::new(own)
            .arg(ENGINE_COMMAND)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(errors))
            .spawn()
            .map_err(|refused| {
                let what = "another process cannot be started";
                let error = Error::new(ErrorKind::Resources, "remote", what);
                limits::explain(error, refused, Wanted::Thread)
            })?;
        let (vigil, looks) = (vigil(&mut child)?, Looks::new(&child));
        let mut process = Self { child, vigil, stream: mine, looks, ranks: Vec::new(), pid: 0 };
        let unblocked = process.stream.set_nonblocking(true);
        unblocked.map_err(failed("a socket that blocks"))?;
        match process.ask(open)? {
            Answer::Opened { ranks, pid } => (process.ranks, process.pid) = (ranks, pid),
            other => return Err(unexpected(&other)),
        }
        Ok(process)
    }

    /// Asks, and waits for the answer.
    fn ask(&mut self, ask: &Ask) -> Result<Answer> {
        self.begin(ask)?;
        self.answer()
    }

    fn begin(&mut self, ask: &Ask) -> Result<()> {
        send(&mut self.line(), ask).map_err(|error| self.lost(error))
    }

    fn answer(&mut self) -> Result<Answer> {
        match receive(&mut self.line()) {
            Ok(Some(Answer::Failed { kind, text, remedy })) => {
                let error = Error::new(kind, "the other engine", text);
                Err(match remedy {
                    Some(remedy) => error.with_remedy(remedy),
                    None => error,
                })
            }
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(self.lost(Error::peer("remote", "it hung up"))),
            Err(error) => Err(self.lost(error)),
        }
    }

    fn done(&mut self, ask: &Ask) -> Result<()> {
        match self.ask(ask)? {
            Answer::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Waits for what was begun.
    ///
    /// # Errors
    ///
    /// What the process failed with.
    pub(crate) fn finish(&mut self) -> Result<()> {
        match self.answer()? {
            Answer::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    const fn line(&mut self) -> Line<'_> {
        Line { stream: &self.stream, looks: &mut self.looks }
    }

    /// Looks after the process, for those who wait for it in other ways than by asking.
    ///
    /// # Errors
    ///
    /// It has been standing still for [`STANDSTILL`], or has ended.
    pub(crate) fn look(&mut self) -> Result<()> {
        if !self.looks.look() {
            return Ok(());
        }
        if self.looks.stands_still() {
            return Err(self.standstill());
        }
        match self.vigil.ended(Duration::ZERO) {
            Some(status) => Err(self.gone(status)),
            None => Ok(()),
        }
    }

    /// Waits for what takes place between the two processes, and looks after the other meanwhile.
    ///
    /// # Errors
    ///
    /// Those of `work`, and those of [`look`](Self::look). Where `work` failed because the process is gone, it is said so.
    pub(crate) fn beside<T>(
        &mut self,
        runtime: &Runtime,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let done = runtime.block_on(async {
            let mut work = pin!(work);
            let mut looks = tokio::time::interval(LOOK);
            loop {
                tokio::select! {
                    biased;
                    done = &mut work => return done,
                    _ = looks.tick() => self.look()?,
                }
            }
        });
        done.map_err(|error| self.lost(error))
    }

    /// Waits for a transfer, at most [`PATIENCE`], and looks after the process meanwhile.
    ///
    /// # Errors
    ///
    /// As for [`beside`](Self::beside), and when the transfer does not settle in time, which `late` says.
    pub(crate) fn settle(
        &mut self,
        mut transfer: Transfer,
        late: impl FnOnce() -> Error,
    ) -> Result<TransferReport> {
        let begun = Instant::now();
        loop {
            if let Some(settled) = transfer.wait(LOOK) {
                return settled.map_err(|error| self.lost(error));
            }
            self.look()?;
            if begun.elapsed() > PATIENCE {
                return Err(late());
            }
        }
    }

    /// The next notification at `port`, without sleeping.
    ///
    /// # Errors
    ///
    /// As for [`spin_notified`], and those of [`look`](Self::look).
    pub(crate) fn spin_notified(&mut self, port: &Port) -> Result<(PeerId, Vec<u8>)> {
        spin_notified(port, || self.look()).map_err(|error| self.lost(error))
    }

    fn standstill(&self) -> Error {
        Error::peer("remote", "the other engine's process stands still")
            .with_context("process", self.pid)
            .with_context("seconds", STANDSTILL.as_secs())
            .with_remedy("find out who stopped it (SIGSTOP), and start again: it is ended now")
    }

    /// What became of the process, when it can no longer be spoken with; the error itself where nothing did.
    pub(crate) fn lost(&mut self, error: Error) -> Error {
        if self.looks.stands_still() {
            return self.standstill().with_source(error);
        }
        match self.vigil.ended(REPORTED) {
            Some(status) => self.gone(status).with_source(error),
            None => error,
        }
    }

    /// The program goes on, with this error.
    fn gone(&self, status: ExitStatus) -> Error {
        self.vigil.is_over();
        gone(status)
    }

    /// Lets `one`, number `number` of its engine, meet rank `rank` of the process.
    ///
    /// # Errors
    ///
    /// Those of the handshake on either side.
    pub(crate) fn meet(
        &mut self,
        fabric: &Fabric,
        (one, number): (&mut Rank, usize),
        rank: usize,
    ) -> Result<PeerId> {
        let offer = one.port.offer()?;
        let Answer::Reply(reply) = self.ask(&Ask::Accept { rank, number, offer })? else {
            return Err(Error::peer("remote", "no reply to an offer"));
        };
        let (peer, completion) = one.port.complete(&reply)?;
        self.done(&Ask::Finish { rank, number, completion })?;
        self.begin(&Ask::Connect { rank, number })?;
        let port = one.port.clone();
        let connected = self.beside(&fabric.runtime, async {
            tokio::time::timeout(PATIENCE, port.connect(peer)).await.map_err(|_| {
                Error::new(ErrorKind::Fabric, "connect", "two ranks could not connect in time")
                    .with_context("seconds", PATIENCE.as_secs())
            })?
        });
        self.finish()?;
        connected?;
        let keys = self.ranks.get(rank).map(|known| known.keys.clone()).unwrap_or_default();
        one.port.add_regions(peer, &keys)?;
        one.meets(rank, peer);
        Ok(peer)
    }

    /// Writes a request's tags into the process's memory.
    ///
    /// # Errors
    ///
    /// What the process failed with.
    pub(crate) fn fill(&mut self, pieces: Vec<Piece>) -> Result<()> {
        self.done(&Ask::Fill(pieces))
    }

    /// Compares the process's memory with requests' tags.
    ///
    /// # Errors
    ///
    /// What the process failed with.
    pub(crate) fn check(&mut self, pieces: Vec<Piece>) -> Result<Vec<Checked>> {
        let pieces_asked = pieces.len();
        match self.ask(&Ask::Check(pieces))? {
            Answer::Checked(checked) if checked.len() == pieces_asked => Ok(checked),
            other => Err(unexpected(&other)),
        }
    }

    /// Watches blocks of the process's memory: how many.
    ///
    /// # Errors
    ///
    /// What the process failed with.
    pub(crate) fn watch(&mut self, bystanders: Vec<Bystanders>) -> Result<u64> {
        self.number(&Ask::Watch(bystanders))
    }

    /// Which of the watched blocks changed.
    ///
    /// # Errors
    ///
    /// What the process failed with.
    pub(crate) fn changed(&mut self) -> Result<Vec<(usize, Changed)>> {
        match self.ask(&Ask::Changed)? {
            Answer::Changed(changed) => Ok(changed),
            other => Err(unexpected(&other)),
        }
    }

    /// Flips a bit of an element.
    ///
    /// # Errors
    ///
    /// What the process failed with.
    pub(crate) fn flip(&mut self, rank: usize, sample: Sample) -> Result<()> {
        self.done(&Ask::Flip { rank, sample })
    }

    /// Leases a request's blocks.
    ///
    /// # Errors
    ///
    /// What the process failed with.
    pub(crate) fn publish(&mut self, publish: Publish) -> Result<Ticket> {
        match self.ask(&Ask::Publish(publish))? {
            Answer::Ticket(bytes) => Ticket::from_bytes(&bytes),
            other => Err(unexpected(&other)),
        }
    }

    /// Leases the same blocks so many times, under numbers from this one on.
    ///
    /// # Errors
    ///
    /// What the process failed with.
    pub(crate) fn publish_many(&mut self, first: Publish, times: u32) -> Result<Vec<Ticket>> {
        match self.ask(&Ask::PublishMany(first, times))? {
            Answer::Tickets(all) => all.iter().map(|bytes| Ticket::from_bytes(bytes)).collect(),
            other => Err(unexpected(&other)),
        }
    }

    /// Begins to wait until leases are over; [`over`](Self::over) waits for the end.
    ///
    /// # Errors
    ///
    /// When the process is gone.
    pub(crate) fn expect_over(&mut self, requests: Vec<u64>) -> Result<()> {
        self.begin(&Ask::Over(requests))
    }

    /// Waits until they are: at how many ranks, each counted for each request.
    ///
    /// # Errors
    ///
    /// What the process failed with.
    pub(crate) fn over(&mut self) -> Result<u64> {
        match self.answer()? {
            Answer::Number(number) => Ok(number),
            other => Err(unexpected(&other)),
        }
    }

    /// What went how so far.
    ///
    /// # Errors
    ///
    /// What the process failed with.
    pub(crate) fn traffic(&mut self) -> Result<Traffic> {
        match self.ask(&Ask::Traffic)? {
            Answer::Traffic(traffic) => Ok(traffic),
            other => Err(unexpected(&other)),
        }
    }

    /// Begins to wait for notifications; [`finish`](Self::finish) waits until all have come.
    ///
    /// # Errors
    ///
    /// When the process is gone.
    pub(crate) fn expect(&mut self, awaited: Vec<Awaited>) -> Result<()> {
        self.begin(&Ask::Expect(awaited))
    }

    /// How many notifications came that nobody waited for.
    ///
    /// # Errors
    ///
    /// What the process failed with.
    pub(crate) fn strays(&mut self) -> Result<usize> {
        Ok(usize::try_from(self.number(&Ask::Strays)?).unwrap_or(usize::MAX))
    }

    fn number(&mut self, ask: &Ask) -> Result<u64> {
        match self.ask(ask)? {
            Answer::Number(number) => Ok(number),
            other => Err(unexpected(&other)),
        }
    }

    /// Has the process take notifications, this many by rank, from when this returns on; [`finish`](Self::finish) waits for them.
    ///
    /// # Errors
    ///
    /// When the process is gone.
    pub(crate) fn listen(&mut self, counts: Vec<u64>) -> Result<()> {
        self.done(&Ask::Listen(counts))
    }

    /// Begins to answer notifications; [`finish`](Self::finish) waits for the end.
    ///
    /// # Errors
    ///
    /// When the process is gone.
    pub(crate) fn echo(
        &mut self,
        rank: usize,
        number: usize,
        times: u32,
        spin: bool,
        cpu: Option<u32>,
    ) -> Result<()> {
        self.begin(&Ask::Echo { rank, number, times, spin, cpu })
    }

    /// Wakes the process and is woken by it with nothing but two counters: how long each time took.
    ///
    /// # Errors
    ///
    /// When the process is gone, or counters cannot be had.
    #[cfg(target_os = "linux")]
    pub(crate) fn raw(&mut self, times: u32, cpu: Option<u32>) -> Result<Vec<Duration>> {
        self.begin(&Ask::Raw { times, cpu })?;
        let all = super::raw::Counters::give(&self.stream)?.ping(times, || self.look())?;
        self.finish()?;
        Ok(all)
    }

    /// Has the process prepare copies past its backend, which [`copy`](Self::copy) then makes.
    ///
    /// # Errors
    ///
    /// When a segment lies outside its region, or the process is gone.
    #[cfg(all(feature = "shm", target_os = "linux", target_pointer_width = "64"))]
    pub(crate) fn prepare_copies(&mut self, copies: Copies) -> Result<()> {
        self.done(&Ask::PrepareCopies(copies))
    }

    /// Has it make them all once: how long that took there.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or the process is gone.
    #[cfg(all(feature = "shm", target_os = "linux", target_pointer_width = "64"))]
    pub(crate) fn copy(&mut self) -> Result<Duration> {
        self.number(&Ask::Copy).map(Duration::from_nanos)
    }

    /// Processor time of the process so far, in nanoseconds.
    ///
    /// # Errors
    ///
    /// When the process is gone.
    pub(crate) fn processor_time(&mut self) -> Result<u64> {
        self.number(&Ask::Cpu)
    }

    /// Closes its backends and waits until it has ended.
    ///
    /// # Errors
    ///
    /// When something did not close cleanly.
    pub(crate) fn close(mut self) -> Result<()> {
        self.vigil.is_over();
        self.done(&Ask::Close)?;
        let mut rest = Vec::new();
        let ended = self.line().read_to_end(&mut rest);
        let status = ended.and_then(|_| self.child.wait()).map_err(|source| {
            Error::peer("remote", "the other engine's process did not end").with_source(source)
        })?;
        if status.success() {
            return Ok(());
        }
        Err(match status.signal() {
            Some(_) => gone(status),
            None => Error::peer("remote", "the other engine's process failed")
                .with_context("status", status),
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Where it has ended in the midst of its work, that is why whatever failed has failed.
        if !self.vigil.was_over()
            && let Some(status) = self.vigil.ended(REPORTED)
        {
            let mut first = FIRST.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert_with(|| gone(status));
        }
        self.vigil.is_over();
        // Most often it has ended already, and both are no-ops.
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The end of a process that nobody asked for before all processes were let go of.
static FIRST: Mutex<Option<Error>> = Mutex::new(None);

/// What the program failed with, and why, where that is the end of a process that it had started.
pub(crate) fn because(error: Error) -> Error {
    let first = FIRST.lock().unwrap_or_else(PoisonError::into_inner).take();
    match first {
        Some(ended) => ended.with_source(error),
        None => error,
    }
}

/// Looks after a process, which is ended where that cannot be done.
fn vigil(child: &mut Child) -> Result<Vigil> {
    Vigil::begin(child).inspect_err(|_| {
        let _killed = child.kill();
        let _reaped = child.wait();
    })
}

fn unexpected(answer: &Answer) -> Error {
    Error::peer("remote", "the other engine's process answered something else")
        .with_context("answer", format!("{answer:?}").chars().take(80).collect::<String>())
}

/// The next notification, without sleeping. Whoever may end that looks now and then.
///
/// # Errors
///
/// When none comes in time, the port was closed, or `look` fails.
pub(crate) fn spin_notified(
    port: &Port,
    mut look: impl FnMut() -> Result<()>,
) -> Result<(PeerId, Vec<u8>)> {
    let begun = Instant::now();
    loop {
        for _ in 0..4096 {
            port.poll();
            if let Some(heard) = port.next_notification() {
                return Ok(heard);
            }
            std::hint::spin_loop();
        }
        look()?;
        if begun.elapsed() > PATIENCE {
            return Err(Error::new(ErrorKind::Fabric, "remote", "no notification came in time")
                .with_context("seconds", PATIENCE.as_secs()));
        }
    }
}
