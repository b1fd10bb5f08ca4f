//! On which node of the machine memory is.

use std::io;
use std::ptr::NonNull;

/// Takes the pages of a range from one node, and from no other.
///
/// # Errors
///
/// What the kernel said: there may be no such node, or no support for nodes.
pub(crate) fn bind(address: NonNull<u8>, bytes: usize, node: u32) -> io::Result<()> {
    const WORDS: usize = 16;
    let mut mask = [0_u64; WORDS];
    let word = mask.get_mut(node as usize / 64).ok_or(io::ErrorKind::InvalidInput)?;
    *word |= 1 << (node % 64);
    // SAFETY: the range is a mapping that the caller has just made; the mask is as long as is said. Nothing is moved, no
    // content changes.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            address.as_ptr(),
            bytes,
            libc::MPOL_BIND,
            mask.as_ptr(),
            WORDS * 64 + 1,
            0,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets the calling thread run on these processors only.
///
/// # Errors
///
/// What the kernel said.
pub(crate) fn pin(cpus: &[usize]) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    for cpu in cpus {
        if *cpu >= rustix::thread::CpuSet::MAX_CPU {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        set.set(*cpu);
    }
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// The first of these processors on which this process may not run, if the system says.
pub(crate) fn not_allowed(cpus: &[usize]) -> Option<usize> {
    let allowed = rustix::thread::sched_getaffinity(None).ok()?;
    cpus.iter()
        .copied()
        .find(|cpu| *cpu >= rustix::thread::CpuSet::MAX_CPU || !allowed.is_set(*cpu))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_that_there_are_not_are_found() {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap();
        assert_eq!(not_allowed(&[]), None);
        assert_eq!(not_allowed(&[first]), None);
        assert_eq!(not_allowed(&[first, 1023, first]), Some(1023));
        assert_eq!(not_allowed(&[1 << 20]), Some(1 << 20));
    }
}
