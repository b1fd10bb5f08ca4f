//! Reading another process's memory, and what the kernel says about who may.

use std::io;
use std::ptr::NonNull;

/// Most ranges of one call.
pub(crate) const MOST: usize = 1024;

/// Ranges of a peer's memory, and as many of this side's, of the same sizes.
#[derive(Debug, Default)]
pub(crate) struct Vectors {
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
    bytes: usize,
}

// SAFETY: the addresses are used only in `read`, for which its caller vouches.
unsafe impl Send for Vectors {}

impl Vectors {
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn is_full(&self) -> bool {
        self.local.len() == MOST || self.remote.len() == MOST
    }

    /// Adds a range. Neighbours become one range, on either side.
    pub(super) fn push(&mut self, remote: u64, local: NonNull<u8>, bytes: usize) {
        let remote = usize::try_from(remote).unwrap_or(usize::MAX);
        let remote = std::ptr::without_provenance_mut::<libc::c_void>(remote);
        extend(&mut self.remote, remote, bytes);
        extend(&mut self.local, local.as_ptr().cast(), bytes);
        self.bytes += bytes;
    }

    pub(super) fn clear(&mut self) {
        self.local.clear();
        self.remote.clear();
        self.bytes = 0;
    }

    /// Reads the remote ranges of process `pid` into the local ones. Says how many bytes.
    ///
    /// # Safety
    ///
    /// The local ranges must be valid for writes, and no reference to them may exist.
    pub(super) unsafe fn read(&self, pid: i32) -> io::Result<usize> {
        let (local, remote) = (&self.local, &self.remote);
        // SAFETY: both lists are of the lengths given; the caller vouches for the local ranges, and the kernel checks the
        // remote ones.
        let count = unsafe {
            libc::process_vm_readv(
                pid,
                local.as_ptr(),
                local.len() as libc::c_ulong,
                remote.as_ptr(),
                remote.len() as libc::c_ulong,
                0,
            )
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }
}

fn extend(list: &mut Vec<libc::iovec>, base: *mut libc::c_void, len: usize) {
    if let Some(last) = list.last_mut()
        && last.iov_base.wrapping_byte_add(last.iov_len) == base
    {
        last.iov_len += len;
        return;
    }
    list.push(libc::iovec { iov_base: base, iov_len: len });
}

/// Whether eight bytes at `address` of process `pid` can be read, and are these.
///
/// # Errors
///
/// What the kernel said; or that it is another process.
pub(crate) fn can_read(pid: i32, address: u64, value: u64) -> io::Result<()> {
    let mut found = 0_u64;
    let mut vectors = Vectors::default();
    vectors.push(address, NonNull::from(&mut found).cast(), size_of::<u64>());
    // SAFETY: the local range is `found`, to which no reference is in use during the call.
    let count = unsafe { vectors.read(pid) }?;
    if count == size_of::<u64>() && std::hint::black_box(found) == value {
        return Ok(());
    }
    Err(io::Error::other("the process of that number is another one"))
}

/// Yama's `ptrace_scope`, where there is Yama.
pub(crate) fn ptrace_scope() -> Option<u32> {
    let text = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?;
    text.trim().parse().ok()
}

/// Whether this process has the capability that lifts restrictions on reading others.
pub(crate) fn has_ptrace_capability() -> bool {
    const CAP_SYS_PTRACE: u32 = 19;
    let Ok(text) = std::fs::read_to_string("/proc/self/status") else { return false };
    let effective = text.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    effective.is_some_and(|set| set & (1 << CAP_SYS_PTRACE) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_own_memory_can_be_read_in_one_call() {
        let from: Vec<u8> = (0..=255).collect();
        let mut to = vec![0_u8; 256];
        let mut vectors = Vectors::default();
        let base = NonNull::new(to.as_mut_ptr()).unwrap();
        for (at, bytes) in [(0, 10), (10, 20), (100, 30)] {
            // SAFETY: inside `to`.
            let local = unsafe { base.add(at) };
            vectors.push((from.as_ptr().addr() + at) as u64, local, bytes);
        }
        assert_eq!(vectors.local.len(), 2);
        let pid = std::process::id().cast_signed();
        // SAFETY: the ranges lie in `to`, which nobody else uses.
        assert_eq!(unsafe { vectors.read(pid) }.unwrap(), 60);
        assert_eq!(to[..30], from[..30]);
        assert_eq!(to[100..130], from[100..130]);
        assert_eq!(to[30..100], [0; 70]);
    }

    #[test]
    fn what_is_not_there_is_an_error() {
        let pid = std::process::id().cast_signed();
        let word = Box::new(0x1234_5678_9abc_def0_u64);
        let address = std::ptr::from_ref(&*word).addr() as u64;
        can_read(pid, address, *word).unwrap();
        assert!(can_read(pid, address, 1).is_err());
        assert!(can_read(pid, 8, 1).is_err());
        assert!(can_read(i32::MAX, address, *word).is_err());
    }
}
