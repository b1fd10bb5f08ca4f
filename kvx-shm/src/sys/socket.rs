//! Unix sockets: how two engines find each other, and what passes descriptors.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Bytes of every message.
pub(crate) const FRAME: usize = 96;

/// Most descriptors that wait for the message to which they belong.
const MOST_DESCRIPTORS: usize = 64;

fn stream() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Listens under a name that no file stands for: it is gone with the socket.
pub(crate) fn listen(name: &[u8]) -> io::Result<OwnedFd> {
    let socket = stream()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    rustix::net::listen(&socket, 256)?;
    Ok(socket)
}

/// Connects to whoever listens under a name.
pub(crate) fn dial(name: &[u8]) -> io::Result<OwnedFd> {
    let socket = stream()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(socket)
}

/// A connection that waits to be taken, if there is one.
pub(crate) fn accept(listener: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    match rustix::net::accept_with(listener, flags) {
        Ok(socket) => Ok(Some(socket)),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::CONNABORTED) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The two ends of a door: the one that is listened at, and the one that is given away to knock with.
pub(crate) fn door() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Makes the other end of a door readable. Never blocks, whatever the descriptor is: a peer has chosen it.
pub(crate) fn knock(door: &OwnedFd) {
    // Where there is no room it is readable; where it is no door, or is gone, nobody is there to hear.
    let _ = rustix::net::send(door, &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

/// Makes an end of a door that is listened at unreadable again, up to a bound that honest peers stay below.
pub(crate) fn heed(door: &OwnedFd) {
    let mut knocks = [0; 64];
    let _ = rustix::net::recv(door, &mut knocks, RecvFlags::DONTWAIT);
}

/// Ends a connection in both directions, so that the peer sees it at once.
pub(crate) fn shut(socket: &OwnedFd) {
    // It may be over already.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

/// Sends a message, with descriptors, at once or not at all. `false` when there is no room for it now.
pub(crate) fn send(
    socket: &OwnedFd,
    frame: &[u8; FRAME],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<bool> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match rustix::net::sendmsg(socket, &[IoSlice::new(frame)], &mut control, flags) {
        Ok(FRAME) => Ok(true),
        // A message of this size is one piece for the kernel.
        Ok(count) => Err(io::Error::other(format!("{count} of {FRAME} bytes were sent"))),
        // The last: as many of this user's descriptors are on their way as one process may have. They arrive.
        Err(
            rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS | rustix::io::Errno::TOOMANYREFS,
        ) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// What has been received and not been looked at.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    bytes: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
    /// Descriptors came that this process could not take.
    cut: bool,
}

/// How far [`Inbox::fill`] came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filled {
    /// All that was there has been read.
    Empty,
    /// There may be more.
    More,
    /// The other side has ended the connection.
    Over,
}

impl Inbox {
    /// Receives what is there, up to a bound: a call ends with the first message that carries descriptors, so less than was
    /// asked for does not mean that nothing is left.
    ///
    /// # Errors
    ///
    /// The connection is broken, or too many descriptors came.
    pub(crate) fn fill(&mut self, socket: &OwnedFd) -> io::Result<Filled> {
        let mut chunk = [0; FRAME * 32];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut parts = [IoSliceMut::new(&mut chunk)];
        let received = match rustix::net::recvmsg(socket, &mut parts, &mut control, flags) {
            Ok(received) => received,
            Err(rustix::io::Errno::AGAIN) => return Ok(Filled::Empty),
            Err(rustix::io::Errno::INTR) => return Ok(Filled::More),
            Err(error) => return Err(error.into()),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        self.cut |= received.flags.contains(rustix::net::ReturnFlags::CTRUNC);
        if self.descriptors.len() > MOST_DESCRIPTORS {
            return Err(io::Error::other("more descriptors than messages"));
        }
        if received.bytes == 0 {
            return Ok(Filled::Over);
        }
        self.bytes.extend_from_slice(&chunk[..received.bytes]);
        Ok(Filled::More)
    }

    /// The next whole message.
    pub(crate) fn next(&mut self) -> Option<[u8; FRAME]> {
        let frame = *self.bytes.first_chunk::<FRAME>()?;
        self.bytes.drain(..FRAME);
        Some(frame)
    }

    /// The next descriptor: the messages that bring some take them in turn.
    pub(crate) fn descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop_front()
    }

    /// Why a descriptor is missing that should have come, where that is this process's own doing.
    pub(crate) fn cut(&self) -> Option<io::Error> {
        self.cut.then(|| io::Error::from_raw_os_error(libc::EMFILE))
    }
}

/// Who is at the other end: process and user, as this process's namespaces number them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    /// 0 where this process cannot see that one.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
}

impl Peer {
    pub(crate) fn is_of_this_user(self) -> bool {
        self.uid == rustix::process::geteuid().as_raw()
    }
}

pub(crate) fn peer(socket: &OwnedFd) -> io::Result<Peer> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    option(socket, libc::SO_PEERCRED, &mut found)?;
    Ok(Peer { pid: found.pid, uid: found.uid })
}

/// A descriptor of the process at the other end. None where this process cannot see it.
pub(crate) fn peer_process(socket: &OwnedFd, pid: i32) -> io::Result<Option<OwnedFd>> {
    let mut descriptor = -1;
    match option(socket, libc::SO_PEERPIDFD, &mut descriptor) {
        // SAFETY: the kernel has just made it for this process, and nobody else knows of it.
        Ok(()) if descriptor >= 0 => return Ok(Some(unsafe { OwnedFd::from_raw_fd(descriptor) })),
        // Older than Linux 6.5, or out of sight: the number tells.
        _ => {}
    }
    let Some(pid) = rustix::process::Pid::from_raw(pid) else { return Ok(None) };
    Ok(Some(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?))
}

/// Tries whether the process at the other end of a socket can be told to be gone: tried on this one.
pub(crate) fn sees_processes() -> io::Result<()> {
    let (here, _there) = std::os::unix::net::UnixStream::pair()?;
    let here = here.into();
    peer_process(&here, peer(&here)?.pid).map(drop)
}

fn option<T: Copy>(socket: &OwnedFd, name: libc::c_int, out: &mut T) -> io::Result<()> {
    let mut bytes = libc::socklen_t::try_from(size_of::<T>()).map_err(io::Error::other)?;
    // SAFETY: the kernel writes at most `bytes` bytes at `out`, and both callers' types are plain numbers.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            std::ptr::from_mut(out).cast(),
            &raw mut bytes,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether a process is gone, by its descriptor.
pub(crate) fn is_gone(process: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let mut ready = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
    matches!(rustix::event::poll(&mut ready, Some(&Timespec::default())), Ok(1..))
}

/// Whether the other side of a connection has ended it.
pub(crate) fn is_over(socket: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let mut ready = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::RDHUP)];
    let over = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    matches!(rustix::event::poll(&mut ready, Some(&Timespec::default())), Ok(1..))
        && ready[0].revents().intersects(over)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_descriptors_arrive_in_order() {
        let name = format!("kvx-shm-test-{}", std::process::id());
        let listener = listen(name.as_bytes()).unwrap();
        assert!(accept(&listener).unwrap().is_none());
        let here = dial(name.as_bytes()).unwrap();
        let there = accept(&listener).unwrap().unwrap();
        let who = peer(&there).unwrap();
        assert_eq!(who.pid, std::process::id().cast_signed());
        assert_eq!(who.uid, rustix::process::geteuid().as_raw());
        let process = peer_process(&there, who.pid).unwrap().unwrap();
        assert!(!is_gone(&process) && !is_over(&there));
        for round in 0..10_u8 {
            let one = [process.as_fd()];
            let carried = if round % 3 == 0 { &one[..] } else { &[] };
            assert!(send(&here, &[round; FRAME], carried).unwrap());
        }
        let (mut inbox, mut seen, mut descriptors) = (Inbox::default(), 0, 0);
        // All that was sent is there, so it ends with nothing more, and not before.
        while inbox.fill(&there).unwrap() == Filled::More {
            while let Some(frame) = inbox.next() {
                assert_eq!(frame, [seen; FRAME]);
                seen += 1;
            }
            while inbox.descriptor().is_some() {
                descriptors += 1;
            }
        }
        assert_eq!((seen, descriptors), (10, 4));
        assert_eq!(inbox.fill(&there).unwrap(), Filled::Empty);
        shut(&here);
        assert!(is_over(&there));
        assert_eq!(inbox.fill(&there).unwrap(), Filled::Over);
        drop(listener);
        assert!(dial(name.as_bytes()).is_err());
    }

    /// The kernel ends a call at each message that carries descriptors, however much more there is.
    #[test]
    fn nothing_is_left_where_nothing_is_said_to_be_left() {
        let name = format!("kvx-shm-many-{}", std::process::id());
        let listener = listen(name.as_bytes()).unwrap();
        let here = dial(name.as_bytes()).unwrap();
        let there = accept(&listener).unwrap().unwrap();
        for round in 0..40_u8 {
            assert!(send(&here, &[round; FRAME], &[here.as_fd()]).unwrap());
        }
        let (mut inbox, mut seen) = (Inbox::default(), 0);
        while inbox.fill(&there).unwrap() != Filled::Empty {
            while inbox.next().is_some() {
                assert!(inbox.descriptor().is_some());
                seen += 1;
            }
        }
        assert_eq!(seen, 40);
    }

    #[test]
    fn a_door_is_readable_from_a_knock_until_it_is_heeded() {
        let (here, there) = door().unwrap();
        assert!(!is_readable(&here));
        knock(&there);
        knock(&there);
        assert!(is_readable(&here));
        heed(&here);
        assert!(!is_readable(&here));
        // More knocks than there is room for block nobody.
        for _ in 0..100_000 {
            knock(&there);
        }
        assert!(is_readable(&here));
        // Nor does what is no door.
        let (_read, write) = io::pipe().unwrap();
        let write = OwnedFd::from(write);
        knock(&write);
        heed(&write);
        drop(here);
        knock(&there);
    }

    fn is_readable(door: &OwnedFd) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec};
        let mut ready = [PollFd::from_borrowed_fd(door.as_fd(), PollFlags::IN)];
        matches!(rustix::event::poll(&mut ready, Some(&Timespec::default())), Ok(1..))
    }

    #[test]
    fn too_many_descriptors_end_it() {
        let name = format!("kvx-shm-flood-{}", std::process::id());
        let listener = listen(name.as_bytes()).unwrap();
        let here = dial(name.as_bytes()).unwrap();
        let there = accept(&listener).unwrap().unwrap();
        let mut inbox = Inbox::default();
        let two = [here.as_fd(), here.as_fd()];
        let flooded = (0..1000).any(|_| {
            let _ = send(&here, &[0; FRAME], &two);
            inbox.fill(&there).is_err()
        });
        assert!(flooded);
    }
}
