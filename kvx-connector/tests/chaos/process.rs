//! A process with an engine, as the supervisor sees it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::child::{ENGINE, MARK};
use crate::words::{Order, Said, Setup};

/// Which process, and its how-manieth life.
pub(crate) type Who = (usize, u32);

pub(crate) struct Process {
    child: Child,
    orders: Option<Sender<String>>,
    threads: Vec<JoinHandle<()>>,
    /// Since when it stands still.
    stopped: Option<Instant>,
}

impl Process {
    pub(crate) fn start(setup: &Setup, who: Who, reports: Sender<(Who, Said)>) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child::engine", "--nocapture", "--test-threads=1"])
            .env(ENGINE, serde_json::to_string(setup).unwrap())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (orders, lines) = channel::<String>();
        // A process that stands still does not read: whoever writes to it must not be the one who wakes it.
        let writer = std::thread::spawn(move || {
            for line in lines {
                if writeln!(input, "{line}").is_err() {
                    return;
                }
            }
        });
        let reader = std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // A test's name may stand before it.
                let Some((_, said)) = line.split_once(MARK) else { continue };
                // The last line of one that is killed may be half a line.
                let Ok(said) = serde_json::from_str(said) else { continue };
                if reports.send((who, said)).is_err() {
                    return;
                }
            }
        });
        Self { child, orders: Some(orders), threads: vec![writer, reader], stopped: None }
    }

    pub(crate) fn tell(&self, order: &Order) {
        let line = serde_json::to_string(order).unwrap();
        // It may be dead.
        let _dead = self.orders.as_ref().map(|orders| orders.send(line));
    }

    /// Lets it stand still.
    pub(crate) fn stop(&mut self) {
        self.stopped.get_or_insert_with(Instant::now);
        self.signal(Signal::STOP);
    }

    /// Lets it go on. Returns for how long it stood still.
    pub(crate) fn go_on(&mut self) -> Duration {
        self.signal(Signal::CONT);
        self.stopped.take().map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn kill(&mut self) {
        let _gone = self.child.kill();
        self.child.wait().unwrap();
        self.join();
    }

    /// How it ended, if it has, by itself.
    pub(crate) fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Whether it has ended by itself, in time and in order.
    pub(crate) fn ends_within(&mut self, time: Duration) -> bool {
        let until = Instant::now() + time;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().unwrap() {
                self.join();
                return status.success();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        false
    }

    fn join(&mut self) {
        self.orders = None;
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
