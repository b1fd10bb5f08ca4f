//! Another program, compared round by round.

use std::io::{self, BufRead, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvx_core::{Error, ErrorKind, Result};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::args::GUARD_COMMAND;
use crate::output;
use crate::own;

/// Most bytes of a line.
const LINE: usize = 4096;
/// How long a program is waited for without a word.
const SILENT: Duration = Duration::from_secs(5);
/// What a program is told that does not do what is asked.
const REMEDY: &str =
    "for each line of input print one positive number on a line of its own, and flush it: GB/s";

/// The program, in a process group of its own: stopped between its turns.
#[derive(Debug)]
pub(crate) struct Peer {
    child: Child,
    guard: Child,
    group: Pid,
    turns: ChildStdin,
    /// Its lines, until it ends.
    figures: Receiver<io::Result<String>>,
    /// What it has printed of a line that has not ended.
    begun: Arc<Mutex<Vec<u8>>>,
    /// Longest time for a turn.
    patience: Duration,
    /// People have been told that it takes its time.
    told: bool,
}

impl Peer {
    /// Starts it, and what ends it where this process is killed.
    pub(crate) fn start(command: &str, patience: Duration) -> Result<Self> {
        Self::guarded(command, patience, &own::program()?)
    }

    fn guarded(command: &str, patience: Duration, own: &Path) -> Result<Self> {
        let mut child = Command::new("sh")
            .args(["-c", command])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(not_started)?;
        let guard = Command::new(own)
            .args([GUARD_COMMAND, &child.id().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn();
        let guard = guard.map_err(|source| {
            let _killed = child.kill();
            let _reaped = child.wait();
            not_started(source)
        })?;
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        match (group, child.stdin.take(), child.stdout.take()) {
            (Some(group), Some(turns), Some(figures)) => {
                let begun = Arc::default();
                let figures = lines(figures, Arc::clone(&begun))?;
                Ok(Self { child, guard, group, turns, figures, begun, patience, told: false })
            }
            _ => Err(Error::new(ErrorKind::Internal, "--peer-command", "a program without pipes")),
        }
    }

    /// What it prints next, waited for as long as it may take.
    fn answer(&mut self) -> std::result::Result<io::Result<String>, RecvTimeoutError> {
        let begun = Instant::now();
        let first = self.figures.recv_timeout(SILENT.min(self.patience));
        if !matches!(first, Err(RecvTimeoutError::Timeout)) || self.patience <= SILENT {
            return first;
        }
        if !std::mem::replace(&mut self.told, true) {
            let (so_far, most) = (SILENT.as_secs(), self.patience.as_secs());
            output::note(format!(
                "--peer-command has printed nothing for {so_far} s; it is given {most} s a turn (--peer-seconds)"
            ));
        }
        self.figures.recv_timeout(self.patience.saturating_sub(begun.elapsed()))
    }

    /// Its turn: its rate, in GB/s.
    pub(crate) fn round(&mut self) -> Result<f64> {
        if let Ok(line) = self.figures.try_recv() {
            let line = line.unwrap_or_default();
            return Err(Error::peer(
                "--peer-command",
                "the program printed a line before its turn",
            )
            .with_context("line", kvx_core::wire::printable(line.trim()))
            .with_remedy(REMEDY));
        }
        self.signal(Signal::CONT);
        // A program that has ended may have left a line.
        let turn = self.turns.write_all(b"\n").and_then(|()| self.turns.flush());
        let answered = self.answer();
        self.signal(Signal::STOP);
        let mut ended = |error: Error| match self.child.try_wait() {
            Ok(Some(status)) => error.with_context("status", status),
            _ => error,
        };
        let error = |text: &str| Error::peer("--peer-command", text.to_owned());
        match answered {
            Ok(Ok(line)) => match line.trim().parse::<f64>() {
                Ok(gbps) if gbps.is_finite() && gbps > 0.0 => Ok(gbps),
                _ => Err(error("the program printed no rate")
                    .with_context("line", kvx_core::wire::printable(line.trim()))
                    .with_remedy(REMEDY)),
            },
            Ok(Err(source)) => Err(error("what the program prints is no text")
                .with_source(source)
                .with_remedy(REMEDY)),
            Err(RecvTimeoutError::Timeout) => Err(self.late()),
            Err(RecvTimeoutError::Disconnected) => Err(ended(match turn {
                Ok(()) => error("the program has ended"),
                Err(source) => error("the program has ended").with_source(source),
            })
            .with_remedy("run the command by itself, with a line per round on its standard input")),
        }
    }

    /// Its turn is over, and there is no line.
    fn late(&self) -> Error {
        let begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        let text = match begun.is_empty() {
            true => "the program printed nothing in its turn",
            false => "the program did not end the line that it printed in its turn",
        };
        let error = Error::peer("--peer-command", text)
            .with_context("seconds", self.patience.as_secs_f64());
        match begun.is_empty() {
            true => error
                .with_remedy(format!("{REMEDY}; where a turn takes longer, give --peer-seconds")),
            false => error
                .with_context("line", kvx_core::wire::printable(&String::from_utf8_lossy(&begun)))
                .with_remedy(REMEDY),
        }
    }

    fn signal(&self, signal: Signal) {
        // A group that has ended needs none.
        let _ended = kill_process_group(self.group, signal);
    }
}

/// Reads lines, one ahead at most, so that a turn can be waited for in time. What has come of a line is in `begun`.
fn lines(from: ChildStdout, begun: Arc<Mutex<Vec<u8>>>) -> Result<Receiver<io::Result<String>>> {
    let (sender, receiver) = sync_channel(1);
    let mut from = BufReader::new(from);
    let read = move || {
        loop {
            let line = match line(&mut from, &begun) {
                Ok(line) if line.is_empty() => return,
                Ok(line) => String::from_utf8(line).map_err(io::Error::other),
                Err(error) => Err(error),
            };
            let failed = line.is_err();
            if sender.send(line).is_err() || failed {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("kvx-peer-lines".to_owned()).spawn(read);
    thread.map(|_| receiver).map_err(|source| {
        Error::new(ErrorKind::Resources, "--peer-command", "no thread to read from the program")
            .with_source(source)
    })
}

/// A line, or what there is of it where the output ends, or where it gets too long; nothing at the end.
fn line(from: &mut impl BufRead, begun: &Mutex<Vec<u8>>) -> io::Result<Vec<u8>> {
    loop {
        let come = match from.fill_buf() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            come => come?,
        };
        let mut begun = begun.lock().unwrap_or_else(PoisonError::into_inner);
        let come = &come[..come.len().min(LINE - begun.len())];
        let end = come.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
        let taken = end.unwrap_or(come.len());
        begun.extend_from_slice(&come[..taken]);
        from.consume(taken);
        if end.is_some() || taken == 0 || begun.len() == LINE {
            return Ok(std::mem::take(&mut *begun));
        }
    }
}

fn not_started(source: io::Error) -> Error {
    Error::new(ErrorKind::Resources, "--peer-command", "the program cannot be started")
        .with_source(source)
}

/// The life of the guard: waits until whoever started it is gone, which standard input tells, and ends a program's group, whose
/// processes may be stopped. It is in another group than either, so that what ends or stops those leaves it.
pub(crate) fn guard(group: u32) -> Result<()> {
    let waited = io::copy(&mut io::stdin().lock(), &mut io::sink());
    if let Some(group) =
        i32::try_from(group).ok().filter(|group| *group > 1).and_then(Pid::from_raw)
    {
        // It may have ended by itself.
        let _gone = kill_process_group(group, Signal::KILL);
    }
    waited.map(drop).map_err(not_started)
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Before the group is gone, whose number may then be somebody else's.
        let _killed = self.guard.kill();
        let _reaped = self.guard.wait();
        self.signal(Signal::KILL);
        let _reaped = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Its guard is any program: that of these tests is not `kvx`.
    fn start(command: &str, patience: Duration) -> Peer {
        Peer::guarded(command, patience, Path::new("true")).unwrap()
    }

    #[test]
    fn a_program_answers_each_turn() {
        let mut peer = start("while read x; do echo 2.5; done", PATIENCE);
        for _ in 0..3 {
            assert!((peer.round().unwrap() - 2.5).abs() < 1e-12);
        }
    }

    /// Its rates would be taken for those of other rounds.
    #[test]
    fn more_than_a_line_per_turn_is_refused() {
        let mut peer = start("while read x; do printf '1\\n2\\n'; done", PATIENCE);
        peer.round().unwrap();
        // The second line is read beside this thread.
        let refused = (0..200).find_map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            peer.round().err()
        });
        let error = refused.expect("it is noticed").to_string();
        assert!(error.contains("before its turn"), "{error}");
    }

    #[test]
    fn what_is_no_rate_is_refused() {
        for (command, says) in [
            ("while read x; do echo fast; done", "fast"),
            ("while read x; do echo -1; done", "-1"),
            ("exit 3", "ended"),
            ("while read x; do printf '\\377\\n'; done", "no text"),
            // A line without an end.
            ("yes | tr -d '\\n'", "yyyy"),
        ] {
            let error = start(command, PATIENCE).round().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Peer);
            let error = error.to_string();
            assert!(error.contains(says), "{command}: {error}");
        }
    }

    /// The end of its output is the end of its last line.
    #[test]
    fn a_last_line_needs_no_end() {
        let mut peer = start("read x; printf 2.5", PATIENCE);
        assert!((peer.round().unwrap() - 2.5).abs() < 1e-12);
        let mut peer = start("while read x; do printf 2.5; done", Duration::from_secs(2));
        let error = peer.round().unwrap_err().to_string();
        assert!(error.contains("did not end the line") && error.contains("line=2.5"), "{error}");
    }

    #[test]
    fn a_program_that_says_nothing_is_not_waited_for_for_ever() {
        let mut peer = start("read x; exec sleep 1000", Duration::from_millis(50));
        let error = peer.round().unwrap_err();
        assert!(error.to_string().contains("nothing in its turn"), "{error}");
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("GB/s")), "{error}");
    }
}
