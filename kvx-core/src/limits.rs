//! Which limit a call has met that the system refused, and what to do about it.
//!
//! The system's own words ("Cannot allocate memory", "Resource temporarily unavailable") fit several limits. What this process may have,
//! and has, tells which it was.
//!
//! ```
//! use kvx_core::limits::{self, Wanted};
//!
//! let refused = std::io::Error::from_raw_os_error(24); // EMFILE
//! let remedy = limits::remedy(&refused, Wanted::Descriptor).unwrap();
//! assert!(remedy.contains("ulimit -n"));
//! ```

use std::io;

use crate::error::Error;

#[cfg(target_os = "linux")]
mod here;
#[cfg(target_os = "linux")]
mod rule;

/// What was asked of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wanted {
    /// A descriptor of anything but memory.
    Descriptor,
    /// So many bytes of memory that has a descriptor, or that is mapped from one.
    Shared(u64),
    /// So many bytes of memory that is this process's alone.
    Private(u64),
    /// A thread, or a process.
    Thread,
}

/// What to do about a refusal, in words; `None` where no limit of this process or system is known to be its cause.
#[must_use]
pub fn remedy(refused: &io::Error, wanted: Wanted) -> Option<String> {
    #[cfg(target_os = "linux")]
    return rule::remedy(refused.raw_os_error()?, wanted, &here::Limits::read());
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (refused, wanted);
        None
    }
}

/// An error that the system's refusal caused: with that as its source, and with what to do about it, where that is known.
#[must_use]
pub fn explain(error: Error, refused: io::Error, wanted: Wanted) -> Error {
    match remedy(&refused, wanted) {
        Some(remedy) => error.with_limit(remedy),
        None => error,
    }
    .with_source(refused)
}

/// As [`explain`], where an allocator had no memory, which does not say how the system refused it.
pub(crate) fn explain_memory(error: Error, bytes: u64) -> Error {
    #[cfg(target_os = "linux")]
    return explain(error, io::Error::from_raw_os_error(libc::ENOMEM), Wanted::Private(bytes));
    #[cfg(not(target_os = "linux"))]
    {
        let _ = bytes;
        error
    }
}

/// Bytes of memory that this process may still map, by its own limit (`ulimit -v`). `None` where it has none, or the system does not say.
#[must_use]
pub fn room() -> Option<u64> {
    #[cfg(target_os = "linux")]
    return here::Limits::read().room();
    #[cfg(not(target_os = "linux"))]
    None
}

/// Bytes of data and stacks that this process may still have, by its own limit (`ulimit -d`): all private memory that can be written
/// counts. `None` where it has none, or the system does not say.
#[must_use]
pub fn data_room() -> Option<u64> {
    #[cfg(target_os = "linux")]
    return here::Limits::read().data_room();
    #[cfg(not(target_os = "linux"))]
    None
}
