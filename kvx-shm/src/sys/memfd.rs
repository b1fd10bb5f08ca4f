//! Memory that has a descriptor: made here, or received from a peer.
//!
//! What is made here is mapped for writing once, and then sealed so that it keeps its size and nobody can map it for
//! writing any more, whoever has the descriptor: this process alone writes it. What is received is mapped only if it is
//! sealed in that way. So a peer can neither take memory away from under a reader (no `SIGBUS`), nor be written by one.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use kvx_core::limits::{self, Wanted};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Seals without which a descriptor is not mapped.
const SEALS: SealFlags =
    SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// Size of a huge page that is asked for by size.
pub(crate) const HUGE: usize = 2 << 20;

/// Bytes of address space, given back when dropped.
#[derive(Debug)]
struct Mapping {
    address: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: it is an address and a size, and gives out nothing but these.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, bytes: usize, access: ProtFlags) -> io::Result<Self> {
        // SAFETY: the kernel chooses a place where nothing is mapped, so no memory in use is touched.
        let address =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, fd, 0) }?;
        let address = NonNull::new(address).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { address, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and whoever uses the memory keeps this value alive meanwhile.
        let _ = unsafe { rustix::mm::munmap(self.address.as_ptr(), self.bytes) };
    }
}

/// What kind of pages back the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pages {
    /// Of the ordinary size.
    Normal,
    /// The kernel is asked to use huge ones as far as it can.
    Transparent,
    /// From the pool of huge pages, or not at all.
    Huge,
}

/// Memory of this process, for peers to read.
#[derive(Debug)]
pub(crate) struct Own {
    fd: OwnedFd,
    mapping: Mapping,
}

impl Own {
    /// Zeroed memory of at least `bytes` bytes, in whole pages. `before_use` may still change where the pages will be.
    pub(crate) fn new(
        name: &str,
        bytes: usize,
        pages: Pages,
        before_use: impl FnOnce(NonNull<u8>, usize) -> io::Result<()>,
    ) -> io::Result<Self> {
        let size = if pages == Pages::Huge { HUGE } else { rustix::param::page_size() };
        let bytes = bytes.checked_next_multiple_of(size).ok_or(io::ErrorKind::OutOfMemory)?;
        // The kernel would not only refuse, but end the process (SIGXFSZ).
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        if limit.is_some_and(|limit| limit < bytes as u64) {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        let fd = create(name, pages)?;
        rustix::fs::ftruncate(&fd, bytes as u64)?;
        let mapping = Mapping::new(fd.as_fd(), bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        before_use(mapping.address.cast(), bytes)?;
        match pages {
            Pages::Normal => {}
            Pages::Transparent => {
                // SAFETY: this advice changes no content, and the range is the mapping. That it is not followed is no
                // failure.
                let _ = unsafe {
                    rustix::mm::madvise(mapping.address.as_ptr(), bytes, Advice::LinuxHugepage)
                };
            }
            // All of them now: taken from a pool that is too small later on, they would end the process.
            Pages::Huge => rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes as u64)?,
        }
        rustix::fs::fcntl_add_seals(&fd, SEALS)?;
        Ok(Self { fd, mapping })
    }

    pub(crate) const fn address(&self) -> NonNull<u8> {
        self.mapping.address.cast()
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.mapping.bytes
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn create(name: &str, pages: Pages) -> io::Result<OwnedFd> {
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    if pages == Pages::Huge {
        flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    }
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Older than Linux 6.3.
        Err(rustix::io::Errno::INVAL) => Ok(rustix::fs::memfd_create(name, flags)?),
        made => Ok(made?),
    }
}

/// Seals as the manual (`man 2 fcntl`) has them.
fn words(seals: SealFlags) -> String {
    let names: Vec<String> = seals.iter_names().map(|(name, _)| format!("F_SEAL_{name}")).collect();
    names.join(", ")
}

/// Memory of a peer, for this process to read.
#[derive(Debug)]
pub(crate) struct Foreign {
    mapping: Mapping,
}

impl Foreign {
    /// Maps all of what a peer sent.
    ///
    /// # Errors
    ///
    /// Why it cannot be relied on, in words.
    pub(crate) fn map(fd: &OwnedFd) -> Result<Self, String> {
        let seals = rustix::fs::fcntl_get_seals(fd)
            .map_err(|error| format!("the descriptor is not that of sealed memory ({error})"))?;
        if !seals.contains(SEALS) {
            return Err(format!(
                "the memory is not sealed as it must be: it lacks {}",
                words(SEALS.difference(seals))
            ));
        }
        let about = rustix::fs::fstat(fd).map_err(|error| error.to_string())?;
        let bytes = usize::try_from(about.st_size)
            .ok()
            .filter(|bytes| *bytes > 0 && isize::try_from(*bytes).is_ok())
            .ok_or_else(|| format!("the memory has {} bytes", about.st_size))?;
        // Huge pages that are not there yet might not be had when they are touched.
        let there = u64::try_from(about.st_blocks).unwrap_or(0).saturating_mul(512);
        if about.st_blksize >= 2 << 20 && there < bytes as u64 {
            return Err(format!("only {there} of {bytes} bytes of huge pages are there"));
        }
        let mapping = Mapping::new(fd.as_fd(), bytes, ProtFlags::READ)
            .map_err(|error| {
                let remedy = limits::remedy(&error, Wanted::Shared(bytes as u64));
                let remedy = remedy.map_or_else(String::new, |remedy| format!("; {remedy}"));
                format!("{bytes} bytes cannot be mapped: {error}{remedy}")
            })?;
        Ok(Self { mapping })
    }

    pub(crate) const fn address(&self) -> NonNull<u8> {
        self.mapping.address.cast()
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.mapping.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(bytes: usize) -> Own {
        Own::new("kvx-test", bytes, Pages::Normal, |_, _| Ok(())).unwrap()
    }

    #[test]
    fn what_is_made_here_can_be_mapped_and_only_read() {
        let own = own(5000);
        assert_eq!(own.bytes() % 4096, 0);
        let fd = own.fd().try_clone_to_owned().unwrap();
        let foreign = Foreign::map(&fd).unwrap();
        assert_eq!(foreign.bytes(), own.bytes());
        // SAFETY: the first byte of memory that nobody else uses.
        unsafe { own.address().write_volatile(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { foreign.address().read_volatile() }, 7);
        assert!(Mapping::new(own.fd(), 4096, ProtFlags::READ | ProtFlags::WRITE).is_err());
        assert!(rustix::fs::ftruncate(own.fd(), 0).is_err());
        assert!(rustix::fs::ftruncate(own.fd(), 1 << 20).is_err());
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert!(rustix::fs::fallocate(own.fd(), punch, 0, 4096).is_err());
    }

    #[test]
    fn what_is_not_sealed_is_refused() {
        let open = create("kvx-test", Pages::Normal).unwrap();
        rustix::fs::ftruncate(&open, 4096).unwrap();
        let error = Foreign::map(&open).unwrap_err();
        // Memory that was made to be sealed, and is not.
        assert!(error.contains("it lacks F_SEAL_SEAL, F_SEAL_SHRINK"), "{error}");
        for missing in SEALS.iter() {
            let fd = create("kvx-test", Pages::Normal).unwrap();
            rustix::fs::ftruncate(&fd, 4096).unwrap();
            rustix::fs::fcntl_add_seals(&fd, SEALS.difference(missing)).unwrap();
            assert!(Foreign::map(&fd).is_err(), "{missing:?}");
        }
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Foreign::map(&socket.into()).is_err());
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(Foreign::map(&file.into()).is_err());
        let empty = create("kvx-test", Pages::Normal).unwrap();
        rustix::fs::fcntl_add_seals(&empty, SEALS).unwrap();
        assert!(Foreign::map(&empty).unwrap_err().contains("0 bytes"));
    }
}
