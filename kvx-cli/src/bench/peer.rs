//! Another program, compared round by round.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvx_core::{Error, ErrorKind, Result};
use rustix::process::{Pid, Signal, kill_process_group};

/// The program, in a process group of its own: stopped between its turns.
#[derive(Debug)]
pub(crate) struct Peer {
    child: Child,
    group: Pid,
    turns: ChildStdin,
    figures: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts it.
    pub(crate) fn start(command: &str) -> Result<Self> {
        let failed = |source| {
            Error::new(ErrorKind::Resources, "--peer-command", "the program cannot be started")
                .with_source(source)
        };
        let mut child = Command::new("sh")
            .args(["-c", command])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        match (group, child.stdin.take(), child.stdout.take()) {
            (Some(group), Some(turns), Some(figures)) => {
                Ok(Self { child, group, turns, figures: BufReader::new(figures) })
            }
            _ => Err(Error::new(ErrorKind::Internal, "--peer-command", "a program without pipes")),
        }
    }

    /// Its turn: its rate, in GB/s.
    pub(crate) fn round(&mut self) -> Result<f64> {
        self.signal(Signal::CONT);
        let mut line = String::new();
        let turn = self.turns.write_all(b"\n").and_then(|()| self.turns.flush());
        let answered = turn.and_then(|()| self.figures.read_line(&mut line));
        self.signal(Signal::STOP);
        let mut ended = |error: Error| match self.child.try_wait() {
            Ok(Some(status)) => error.with_context("status", status),
            _ => error,
        };
        let error = |text: &str| Error::config("--peer-command", text.to_owned());
        match answered {
            Ok(0) => Err(ended(error("the program has ended"))),
            Err(source) => Err(ended(error("the program has ended").with_source(source))),
            Ok(_) => match line.trim().parse::<f64>() {
                Ok(gbps) if gbps.is_finite() && gbps > 0.0 => Ok(gbps),
                _ => Err(error("the program printed no rate")
                    .with_context("line", kvx_core::wire::printable(line.trim()))
                    .with_remedy("print one positive number per line: GB/s")),
            },
        }
    }

    fn signal(&self, signal: Signal) {
        // A group that has ended needs none.
        let _ended = kill_process_group(self.group, signal);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        let _reaped = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_answers_each_turn() {
        let mut peer = Peer::start("while read x; do echo 2.5; done").unwrap();
        for _ in 0..3 {
            assert!((peer.round().unwrap() - 2.5).abs() < 1e-12);
        }
    }

    #[test]
    fn what_is_no_rate_is_refused() {
        for (command, says) in [
            ("while read x; do echo fast; done", "fast"),
            ("while read x; do echo -1; done", "-1"),
            ("exit 3", "ended"),
        ] {
            let error = Peer::start(command).unwrap().round().unwrap_err().to_string();
            assert!(error.contains(says), "{command}: {error}");
        }
    }
}
