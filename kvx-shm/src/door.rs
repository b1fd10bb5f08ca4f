//! Doors: where peers wake this side's program, past its threads.
//!
//! Peers of the same user share one counter, which is the very descriptor that the program sleeps on: nothing wakes it with
//! less work. Whoever has a counter can also fill it up and have its writers wait, so no side adds to one of another user's.
//! An engine that lets other users in listens at a socket per connection instead, to which a peer sends without ever waiting.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, epoll};
use rustix::fs::OFlags;

use crate::sys::socket;

/// What this side's program sleeps on.
#[derive(Debug)]
pub(crate) enum Porch {
    /// Peers of this user add to it, and so does this side where there are events.
    Counter(OwnedFd),
    /// Readable while one of the connections' doors is, or the counter `signal`, to which this side adds.
    Doors { ready: OwnedFd, signal: OwnedFd },
}

impl Porch {
    /// For peers of this user only, or for others too.
    pub(crate) fn new(same_user: bool) -> io::Result<Self> {
        let counter = counter()?;
        if same_user {
            return Ok(Self::Counter(counter));
        }
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&ready, &counter, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Self::Doors { ready, signal: counter })
    }

    /// Readable when there is something to poll for.
    pub(crate) fn ready(&self) -> BorrowedFd<'_> {
        match self {
            Self::Counter(counter) => counter.as_fd(),
            Self::Doors { ready, .. } => ready.as_fd(),
        }
    }

    /// Makes it readable.
    pub(crate) fn signal(&self) {
        let (Self::Counter(counter) | Self::Doors { signal: counter, .. }) = self;
        add(counter);
    }

    /// Makes it unreadable, but for knocks at doors of their own.
    pub(crate) fn clear(&self) {
        let (Self::Counter(counter) | Self::Doors { signal: counter, .. }) = self;
        clear(counter);
    }

    /// Whether one [`clear`](Self::clear) heeds the knocks of all peers.
    pub(crate) const fn is_common(&self) -> bool {
        matches!(self, Self::Counter(_))
    }

    /// A door for one more connection.
    pub(crate) fn door(&self) -> io::Result<Door> {
        match self {
            Self::Counter(counter) => Ok(Door { own: None, given: counter.try_clone()? }),
            Self::Doors { .. } => {
                let (own, given) = socket::door()?;
                Ok(Door { own: Some(own), given })
            }
        }
    }

    /// The connection is made: what is heard at its door is heard here.
    pub(crate) fn listen_at(&self, door: &OwnedFd) -> io::Result<()> {
        match self {
            Self::Counter(_) => Ok(()),
            Self::Doors { ready, .. } => {
                Ok(epoll::add(ready, door, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?)
            }
        }
    }

    /// Nobody heeds this door any more.
    pub(crate) fn listen_no_more(&self, door: &OwnedFd) {
        if let Self::Doors { ready, .. } = self {
            // It may never have been listened at.
            let _ = epoll::delete(ready, door);
        }
    }
}

/// One connection's door.
#[derive(Debug)]
pub(crate) struct Door {
    /// Where this side listens, unless all connections have one door.
    pub(crate) own: Option<OwnedFd>,
    /// With what the peer knocks.
    pub(crate) given: OwnedFd,
}

/// With what this side knocks at a peer's door.
#[derive(Debug)]
pub(crate) enum Knocker {
    Counter(OwnedFd),
    Socket(OwnedFd),
}

impl Knocker {
    /// What a peer has given for it.
    ///
    /// # Errors
    ///
    /// It is none that may be used, in words.
    pub(crate) fn new(given: OwnedFd, same_user: bool) -> Result<Self, String> {
        if !is_counter(&given).map_err(|error| format!("its door cannot be looked at: {error}"))? {
            return Ok(Self::Socket(given));
        }
        let flags = rustix::fs::fcntl_getfl(&given).map_err(|error| error.to_string())?;
        if !same_user {
            return Err("its door is a counter, and it runs as another user".into());
        }
        if !flags.contains(OFlags::NONBLOCK) {
            return Err("its door is a counter for which one may have to wait".into());
        }
        Ok(Self::Counter(given))
    }

    /// Wakes the peer's program. Never waits.
    pub(crate) fn knock(&self) {
        match self {
            Self::Counter(counter) => add(counter),
            Self::Socket(door) => socket::knock(door),
        }
    }
}

fn counter() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn add(counter: &OwnedFd) {
    // It can fail only where the counter is full, and then it is readable.
    let _ = rustix::io::write(counter, &1_u64.to_ne_bytes());
}

fn clear(counter: &OwnedFd) {
    // It may be clear already.
    let _ = rustix::io::read(counter, &mut [0; 8]);
}

/// Whether a descriptor is what `eventfd` makes: of anything else writing might wait, or end this process.
fn is_counter(given: &OwnedFd) -> io::Result<bool> {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", given.as_raw_fd()))?;
    Ok(name.as_os_str() == "anon_inode:[eventfd]")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(fd: BorrowedFd<'_>) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec};
        let mut ready = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        matches!(rustix::event::poll(&mut ready, Some(&Timespec::default())), Ok(1..))
    }

    #[test]
    fn a_program_is_woken_by_events_and_by_knocks() {
        for same_user in [true, false] {
            let porch = Porch::new(same_user).unwrap();
            assert_eq!(porch.is_common(), same_user);
            let Door { own, given } = porch.door().unwrap();
            assert_eq!(own.is_none(), same_user);
            if let Some(own) = &own {
                porch.listen_at(own).unwrap();
            }
            assert!(!is_readable(porch.ready()));
            porch.signal();
            assert!(is_readable(porch.ready()));
            porch.clear();
            assert!(!is_readable(porch.ready()));
            let knocker = Knocker::new(given, same_user).unwrap();
            knocker.knock();
            knocker.knock();
            assert!(is_readable(porch.ready()));
            match &own {
                None => porch.clear(),
                Some(own) => socket::heed(own),
            }
            assert!(!is_readable(porch.ready()));
            knocker.knock();
            assert!(is_readable(porch.ready()));
            if let Some(own) = &own {
                porch.listen_no_more(own);
                assert!(!is_readable(porch.ready()));
            }
        }
    }

    #[test]
    fn a_counter_that_may_be_waited_for_is_refused() {
        let theirs = counter().unwrap();
        let why = Knocker::new(theirs.try_clone().unwrap(), false).unwrap_err();
        assert!(why.contains("another user"), "{why}");
        let waits = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let why = Knocker::new(waits, true).unwrap_err();
        assert!(why.contains("wait"), "{why}");
        // A full one is not waited for.
        rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        Knocker::new(theirs, true).unwrap().knock();
    }

    /// What is no counter is never written to: of a pipe without a reader that would be a signal.
    #[test]
    fn what_is_no_counter_is_knocked_at_as_a_socket() {
        let (read, write) = io::pipe().unwrap();
        drop(read);
        let knocker = Knocker::new(write.into(), true).unwrap();
        assert!(matches!(knocker, Knocker::Socket(_)));
        knocker.knock();
    }
}
