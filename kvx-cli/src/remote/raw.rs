//! The least that a notification between two processes takes here: two counters (`eventfd`), and nothing else.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use kvx_core::{Error, ErrorKind, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::PATIENCE;
use super::line::LOOK;

/// One side's two counters.
#[derive(Debug)]
pub(crate) struct Counters {
    /// Where this side is woken.
    here: OwnedFd,
    /// Where it wakes the other.
    there: OwnedFd,
}

impl Counters {
    /// Two, of which the process at the other end of `stream` is given both, beside one byte.
    pub(crate) fn give(stream: &UnixStream) -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let counter = || eventfd(0, flags).map_err(failed);
        let own = Self { here: counter()?, there: counter()? };
        let both = [own.there.as_fd(), own.here.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&both));
        let parts = [io::IoSlice::new(&[0])];
        // One byte has room where nothing else is under way.
        sendmsg(stream, &parts, &mut control, SendFlags::NOSIGNAL).map_err(failed)?;
        Ok(own)
    }

    /// Those that the process at the other end gives.
    pub(super) fn take(stream: &UnixStream) -> Result<Self> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut parts = [io::IoSliceMut::new(&mut byte)];
        recvmsg(stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).map_err(failed)?;
        let mut given = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                given.extend(descriptors);
            }
        }
        let [here, there] = <[OwnedFd; 2]>::try_from(given)
            .map_err(|_| Error::peer("remote", "two counters were to come"))?;
        Ok(Self { here, there })
    }

    /// There and back, so many times: how long each took. Looks now and then whether anybody is there to answer.
    pub(crate) fn ping(
        &self,
        times: u32,
        mut look: impl FnMut() -> Result<()>,
    ) -> Result<Vec<Duration>> {
        let mut all = Vec::new();
        for _ in 0..times {
            let begun = Instant::now();
            self.wake()?;
            self.sleep(&mut look)?;
            all.push(begun.elapsed());
        }
        Ok(all)
    }

    /// Answers, so many times. This process ends with the one that asks.
    pub(super) fn pong(&self, times: u32) -> Result<()> {
        (0..times).try_for_each(|_| self.sleep(|| Ok(())).and_then(|()| self.wake()))
    }

    fn wake(&self) -> Result<()> {
        rustix::io::write(&self.there, &1_u64.to_ne_bytes()).map(drop).map_err(failed)
    }

    fn sleep(&self, mut look: impl FnMut() -> Result<()>) -> Result<()> {
        let begun = Instant::now();
        let pause = Timespec::try_from(LOOK).ok();
        let mut ready = [PollFd::new(&self.here, PollFlags::IN)];
        loop {
            match poll(&mut ready, pause.as_ref()) {
                Ok(0) => look()?,
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed(error)),
            }
            if begun.elapsed() > PATIENCE {
                return Err(Error::peer("remote", "the other process does not answer")
                    .with_context("seconds", PATIENCE.as_secs()));
            }
        }
        rustix::io::read(&self.here, &mut [0; 8]).map(drop).map_err(failed)
    }
}

fn failed(error: rustix::io::Errno) -> Error {
    Error::new(ErrorKind::Resources, "remote", "counters cannot be used between two processes")
        .with_source(io::Error::from(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_side_wakes_the_other() {
        let (one, other) = UnixStream::pair().unwrap();
        let here = Counters::give(&one).unwrap();
        let answers = std::thread::spawn(move || Counters::take(&other).unwrap().pong(50));
        assert_eq!(here.ping(50, || Ok(())).unwrap().len(), 50);
        answers.join().unwrap().unwrap();
    }

    #[test]
    fn whoever_waits_for_an_answer_looks_whether_one_can_come() {
        let (one, _other) = UnixStream::pair().unwrap();
        let here = Counters::give(&one).unwrap();
        let mut looks = 0;
        let gone = || {
            looks += 1;
            if looks < 3 { Ok(()) } else { Err(Error::peer("test", "gone")) }
        };
        assert!(here.ping(1, gone).unwrap_err().to_string().contains("gone"));
        assert_eq!(looks, 3);
    }

    #[test]
    fn a_byte_without_counters_is_refused() {
        let (one, other) = UnixStream::pair().unwrap();
        io::Write::write_all(&mut &one, &[0]).unwrap();
        assert!(Counters::take(&other).unwrap_err().to_string().contains("two counters"));
    }
}
