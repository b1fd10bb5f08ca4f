//! Notices the end of a process that was started, whatever its starter is busy with.
//!
//! Whoever waits for the process looks after it, and says why it waits no longer. But there is work that this process does alone,
//! for seconds, as filling memory. So a thread waits for the process's end. When that comes, the vigil is either *over*, and nothing
//! more is done; or it is given [`GRACE`] to become so, and then the thread says what happened and ends the program.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kvx_core::limits::{self, Wanted};
use kvx_core::{Error, ErrorKind, Result};
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus, waitid};

use crate::failure;

/// Time for the rest of the program to find out by itself, and to say more.
const GRACE: Duration = Duration::from_millis(400);

/// What is known, by both threads.
#[derive(Debug, Default)]
struct Known {
    over: bool,
    ended: Option<ExitStatus>,
}

#[derive(Debug, Default)]
struct Shared {
    known: Mutex<Known>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something is so, but not for longer than this.
    fn wait(&self, limit: Duration, is_so: impl Fn(&Known) -> bool) -> MutexGuard<'_, Known> {
        let waited = self.changed.wait_timeout_while(self.lock(), limit, |known| !is_so(known));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The thread, and what it knows.
#[derive(Debug)]
pub(super) struct Vigil {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Vigil {
    /// # Errors
    ///
    /// When there cannot be one thread more.
    pub(super) fn begin(child: &Child) -> Result<Self> {
        let (shared, pid) = (Arc::<Shared>::default(), Pid::from_child(child));
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("kvx-vigil".into());
        let thread = thread.spawn(move || keep(&theirs, pid)).map_err(|refused| {
            let what = "no thread to look after another process";
            limits::explain(
                Error::new(ErrorKind::Resources, "remote", what),
                refused,
                Wanted::Thread,
            )
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The end of the process is expected from now on, or known: the program goes on.
    pub(super) fn is_over(&self) {
        self.shared.lock().over = true;
        self.shared.changed.notify_all();
    }

    pub(super) fn was_over(&self) -> bool {
        self.shared.lock().over
    }

    /// How the process ended, if it has, or does within this time.
    pub(super) fn ended(&self, limit: Duration) -> Option<ExitStatus> {
        self.shared.wait(limit, |known| known.ended.is_some()).ended
    }
}

impl Drop for Vigil {
    /// The process must have been ended.
    fn drop(&mut self) {
        self.is_over();
        if let Some(thread) = self.thread.take() {
            // It has nothing to say.
            let _panicked = thread.join();
        }
    }
}

fn keep(shared: &Shared, pid: Pid) {
    // It stays to be waited for by whoever has it.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let ended = loop {
        match waitid(WaitId::Pid(pid), options) {
            Err(rustix::io::Errno::INTR) | Ok(None) => {}
            // It was waited for first.
            Err(_) => return,
            Ok(Some(status)) => break in_std(&status),
        }
    };
    shared.lock().ended = Some(ended);
    shared.changed.notify_all();
    if !shared.wait(GRACE, |known| known.over).over {
        failure::end(&gone(ended));
    }
}

/// As the kernel says it, where waiting does not take the process away.
fn in_std(status: &WaitIdStatus) -> ExitStatus {
    let signal = status.terminating_signal();
    ExitStatus::from_raw(match signal {
        Some(signal) => signal | if status.dumped() { 0x80 } else { 0 },
        None => status.exit_status().unwrap_or_default() << 8,
    })
}

/// What is said of a process that has ended though nobody told it to.
pub(super) fn gone(status: ExitStatus) -> Error {
    Error::peer("remote", "the other engine's process is gone").with_context("status", status)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    /// The vigil is over, so that the end of the process is not that of the tests.
    #[test]
    fn how_a_process_ended_is_known_and_it_can_still_be_waited_for() {
        for (script, must) in [("exit 0", "0"), ("exit 7", "7"), ("kill -9 $$", "9 (SIGKILL)")] {
            let mut child = Command::new("sh")
                .args(["-c", &format!("read line; {script}")])
                .stdin(Stdio::piped())
                .spawn()
                .unwrap();
            let vigil = Vigil::begin(&child).unwrap();
            vigil.is_over();
            assert_eq!(vigil.ended(Duration::from_millis(20)), None);
            drop(child.stdin.take());
            let ended = vigil.ended(Duration::from_secs(20)).unwrap();
            assert!(ended.to_string().ends_with(must), "{ended}");
            assert_eq!(child.wait().unwrap(), ended);
            drop(vigil);
        }
    }

    #[test]
    fn a_process_that_was_waited_for_first_ends_the_thread() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let vigil = Vigil::begin(&child).unwrap();
        vigil.is_over();
        child.kill().unwrap();
        child.wait().unwrap();
        drop(vigil);
    }
}
