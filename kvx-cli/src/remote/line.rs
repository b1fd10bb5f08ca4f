//! The line to the process that was started: whoever waits at it notices that the process stands still.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use super::PATIENCE;

/// Pause between two looks at the process.
pub(crate) const LOOK: Duration = Duration::from_millis(100);
/// Longest time for which the process may be seen to stand still.
pub(crate) const STANDSTILL: Duration = Duration::from_secs(5);

/// What a process was seen to do.
#[derive(Debug)]
pub(crate) struct Looks {
    pid: Option<Pid>,
    last: Option<Instant>,
    stopped: u32,
}

impl Looks {
    pub(crate) fn new(child: &Child) -> Self {
        Self { pid: Some(Pid::from_child(child)), last: None, stopped: 0 }
    }

    /// Looks, unless that was done a moment ago: whether it did. Looks are counted rather than time: a time in which this process stood still
    /// itself, as all of a job does that is stopped at a terminal, says nothing.
    pub(crate) fn look(&mut self) -> bool {
        if self.last.is_some_and(|last| last.elapsed() < LOOK) {
            return false;
        }
        self.last = Some(Instant::now());
        self.stopped = if self.is_stopped() { self.stopped + 1 } else { 0 };
        true
    }

    /// Whether it has been standing still for longer than it may.
    pub(crate) fn stands_still(&self) -> bool {
        LOOK * self.stopped >= STANDSTILL
    }

    fn is_stopped(&self) -> bool {
        let Some(pid) = self.pid else { return false };
        // It stays waitable, so that every look finds it as it is.
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        matches!(waitid(WaitId::Pid(pid), options), Ok(Some(status)) if status.stopped())
    }
}

/// A socket, without blocking, and who is looked at while nothing goes through it.
pub(crate) struct Line<'a> {
    pub(crate) stream: &'a UnixStream,
    pub(crate) looks: &'a mut Looks,
}

impl Line<'_> {
    fn wait(&mut self, flags: PollFlags, begun: Instant) -> io::Result<()> {
        self.looks.look();
        if self.looks.stands_still() || begun.elapsed() > PATIENCE * 2 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let pause = Timespec::try_from(LOOK).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(self.stream, flags)], Some(&pause)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn patiently(
        &mut self,
        flags: PollFlags,
        mut once: impl FnMut(&UnixStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let begun = Instant::now();
        loop {
            match once(self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(flags, begun)?
                }
                other => return other,
            }
        }
    }
}

impl Read for Line<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.patiently(PollFlags::IN, |mut stream| stream.read(bytes))
    }
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.patiently(PollFlags::OUT, |mut stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
