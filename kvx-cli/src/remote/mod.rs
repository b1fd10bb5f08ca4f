//! An engine in a process of its own: the same program, started again, that does what it is told over a socket.
//!
//! The engine that is started is always the *target* of transfers. It ends when the socket does, so it outlives neither the
//! process that started it nor that process's interest in it.

mod child;
#[cfg(all(feature = "shm", target_os = "linux", target_pointer_width = "64"))]
mod copies;
#[cfg(not(all(feature = "shm", target_os = "linux", target_pointer_width = "64")))]
#[path = "no_copies.rs"]
mod copies;
mod line;
mod message;
pub(crate) mod pinned;
mod process;
#[cfg(target_os = "linux")]
mod raw;
mod vigil;

pub(crate) use child::{processor_time, serve};
#[cfg(all(feature = "shm", target_os = "linux", target_pointer_width = "64"))]
pub(crate) use message::{Copies, Taken};
pub(crate) use message::{Memory, Publish};
pub(crate) use process::{Process, because};

use std::time::Duration;

/// Longest time for what the other process does at a word, and for two ranks to connect.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
