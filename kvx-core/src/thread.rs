//! How a thread shares its processor with others.
//!
//! A thread that is woken for a notification has little to do, and somebody waits for it; a thread that copies has much to do,
//! and microseconds matter to nobody. Linux (since 6.12) lets each ask for time slices of its own length: a thread that wakes
//! with a shorter slice than that of the thread that runs takes the processor at once, instead of waiting for up to a tick of
//! the timer (1 to 10 ms). Both get as much processor time as before, and neither needs privileges.
//!
//! ```
//! let thread = std::thread::Builder::new().name("driver".into()).spawn(|| {
//!     kvx_core::thread::runs_briefly();
//!     // ... waits for notifications
//! });
//! # thread.unwrap().join().unwrap();
//! ```

use std::io;
use std::time::Duration;

/// The shortest slice that Linux grants.
pub const BRIEF: Duration = Duration::from_micros(100);

/// The longest slice that Linux grants.
pub const LONG: Duration = Duration::from_millis(100);

/// The calling thread mostly sleeps, and should run as soon as it is woken: it asks for [`BRIEF`] slices. Threads that it
/// starts do not inherit that. Returns whether the system has granted it.
pub fn runs_briefly() -> bool {
    granted(slice(BRIEF))
}

/// The calling thread is busy for long, and gives way to those that are woken: it asks for [`LONG`] slices. Threads that it
/// starts do not inherit that. Returns whether the system has granted it.
pub fn runs_long() -> bool {
    granted(slice(LONG))
}

/// The calling thread is as nice as this at least (0 to 19; more is 19): beside threads of less niceness it gets less of a processor, each
/// step about a fifth less, and they need not wait for it. It stays so; without privileges nobody takes niceness back. Threads that it starts
/// inherit it. Returns whether the system has granted it.
pub fn gives_way(niceness: u8) -> bool {
    niceness == 0 || granted(nice(niceness.min(19).into()))
}

fn granted(result: io::Result<()>) -> bool {
    // An older kernel takes the call, and does nothing; other systems have none. Nothing but speed depends on it.
    result.inspect_err(|error| tracing::debug!(%error, "the thread keeps its time slices")).is_ok()
}

/// Asks for slices of this length.
#[cfg(target_os = "linux")]
fn slice(length: Duration) -> io::Result<()> {
    changed(|attributes| {
        attributes.sched_flags |= 1; // SCHED_FLAG_RESET_ON_FORK
        attributes.sched_runtime = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
    })
}

/// Asks for this niceness, where it is more than there is.
#[cfg(target_os = "linux")]
fn nice(niceness: i32) -> io::Result<()> {
    changed(|attributes| attributes.sched_nice = attributes.sched_nice.max(niceness))
}

/// Asks for what the calling thread has, with a change. Left alone: real-time threads, which have neither slices of this kind nor niceness.
#[cfg(target_os = "linux")]
fn changed(change: impl FnOnce(&mut libc::sched_attr)) -> io::Result<()> {
    let mut attributes = attributes()?;
    let policy = i32::try_from(attributes.sched_policy).unwrap_or(-1);
    if policy != libc::SCHED_OTHER && policy != libc::SCHED_BATCH {
        return Err(io::ErrorKind::Unsupported.into());
    }
    change(&mut attributes);
    // SAFETY: the kernel reads as many bytes as the first field says, all of them inside the struct.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The calling thread's.
#[cfg(target_os = "linux")]
fn attributes() -> io::Result<libc::sched_attr> {
    let bytes = size_of::<libc::sched_attr>();
    let size = u32::try_from(bytes).map_err(io::Error::other)?;
    let mut attributes = libc::sched_attr {
        size,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel writes at most `size` bytes, which is what the struct has.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    if result == 0 { Ok(attributes) } else { Err(io::Error::last_os_error()) }
}

#[cfg(not(target_os = "linux"))]
fn slice(_length: Duration) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn nice(_niceness: i32) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gives_way_and_keeps_its_slices() {
        let (before, after, again) = std::thread::spawn(|| {
            assert!(runs_long());
            let before = attributes().unwrap();
            assert!(gives_way(0) && gives_way(7));
            let after = attributes().unwrap();
            assert!(gives_way(3), "as nice as that it is");
            (before, after, attributes().unwrap())
        })
        .join()
        .unwrap();
        assert_eq!(after.sched_nice, before.sched_nice.max(7));
        assert_eq!(again.sched_nice, after.sched_nice);
        assert_eq!(after.sched_runtime, before.sched_runtime);
    }

    #[test]
    fn a_thread_keeps_all_but_its_slices() {
        let in_thread = |change: fn() -> bool| {
            std::thread::spawn(move || {
                let before = attributes().unwrap();
                assert!(change(), "an ordinary thread may ask");
                let inherited = std::thread::spawn(|| attributes().unwrap()).join().unwrap();
                (before, attributes().unwrap(), inherited)
            })
            .join()
            .unwrap()
        };
        for change in [runs_briefly as fn() -> bool, runs_long] {
            let (before, after, inherited) = in_thread(change);
            assert_eq!(
                (before.sched_policy, before.sched_nice),
                (after.sched_policy, after.sched_nice)
            );
            assert_eq!(inherited.sched_runtime, before.sched_runtime);
        }
        // Where the kernel tells of slices at all (since 6.12), the two differ as they should.
        let (before, brief, _) = in_thread(runs_briefly);
        let (_, long, _) = in_thread(runs_long);
        if before.sched_runtime != 0 {
            assert_eq!(u128::from(brief.sched_runtime), BRIEF.as_nanos());
            assert_eq!(u128::from(long.sched_runtime), LONG.as_nanos());
        } else {
            eprintln!("this kernel tells nothing of slices");
        }
    }
}
