//! A side in a process of its own: the test's own program, started again, told what to do over a socket.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child as Process, Command as Program, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::clause::{Breach, Verdict};
use super::command::{Answer, Command, Refusal};
use super::host::Host;
use super::namespace::Namespace;
use super::subject::{Fault, Ground, Subject};

/// Set in the environment of a process that is to be a peer.
const PEER: &str = "KVX_TESTS_PEER";

/// Most bytes of one message.
const MAX_BYTES: u32 = 1 << 28;

/// What the peer is told first.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    ground: Ground,
    side: String,
    patience: Duration,
}

/// A peer's process.
pub(crate) struct Child {
    process: Mutex<Process>,
    stream: Mutex<UnixStream>,
}

impl Child {
    /// Starts a process in which `side` is opened on a stage of its own.
    pub(crate) fn start(
        ground: &Ground,
        side: &str,
        patience: Duration,
        namespace: Option<&Namespace>,
    ) -> Verdict<Self> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            Breach::new(format!("the kit cannot start {side}'s process: {what}: {error}"))
        };
        let (mine, theirs) = UnixStream::pair().map_err(|error| failed("socket", &error))?;
        let own = std::env::current_exe().map_err(|error| failed("own program", &error))?;
        let mut program = match namespace {
            None => Program::new(own),
            Some(namespace) => namespace.program(&own),
        };
        program.env(PEER, "1").stdin(Stdio::from(OwnedFd::from(theirs)));
        let process = program.spawn().map_err(|error| failed("start", &error))?;
        // The longest of the peer's own waits is that of `close`.
        let limit = patience * 2 + kvx_core::backend::SEVER_BOUND + Duration::from_secs(5);
        mine.set_read_timeout(Some(limit)).map_err(|error| failed("socket", &error))?;
        mine.set_write_timeout(Some(limit)).map_err(|error| failed("socket", &error))?;
        let child = Self { process: Mutex::new(process), stream: Mutex::new(mine) };
        let hello = Hello { ground: ground.clone(), side: side.to_owned(), patience };
        match child.ask::<_, Answer>(side, "open", &hello)? {
            Ok(_) => Ok(child),
            Err(refusal) => Err(Breach::refused(side, "open", refusal)),
        }
    }

    pub(crate) fn execute(
        &self,
        side: &str,
        operation: &'static str,
        command: &Command,
    ) -> Verdict<Result<Answer, Refusal>> {
        self.ask(side, operation, command)
    }

    fn ask<Q: Serialize, A: DeserializeOwned>(
        &self,
        side: &str,
        operation: &str,
        question: &Q,
    ) -> Verdict<Result<A, Refusal>> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let answered = send(&mut stream, question).and_then(|()| receive(&mut stream));
        answered.map_err(|error| {
            Breach::new(format!("{side}'s process did not answer `{operation}`: {error}"))
        })
    }

    /// Kills, stops or resumes the process.
    pub(crate) fn inflict(&self, fault: Fault) -> Verdict {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        let signal = match fault {
            Fault::Kill => Signal::KILL,
            Fault::Stop => Signal::STOP,
            Fault::Resume => Signal::CONT,
        };
        kill_process(Pid::from_child(&process), signal)
            .map_err(|error| Breach::new(format!("the kit cannot {fault} the peer: {error}")))?;
        if fault == Fault::Kill {
            let _ = process.wait();
        }
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let process = self.process.get_mut().unwrap_or_else(PoisonError::into_inner);
        // It may be gone already; what matters is that it is gone now.
        let _ = process.kill();
        let _ = process.wait();
    }
}

/// Is the peer, if this process was started to be one.
pub(crate) fn serve_if_asked(subject: &'static dyn Subject) -> Option<ExitCode> {
    std::env::var_os(PEER)?;
    Some(match serve(subject) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the peer's process ends: {error}");
            ExitCode::FAILURE
        }
    })
}

fn serve(subject: &'static dyn Subject) -> std::io::Result<()> {
    let mut stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let Hello { ground, side, patience } = receive(&mut stream)?;
    let opened = subject.stage(&ground).and_then(|stage| {
        let backend = stage.open(&side)?;
        Ok((stage, Host::new(backend, patience, ground.allocated)))
    });
    let (_stage, host) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            return send(&mut stream, &Err::<Answer, _>(Refusal::from(error)));
        }
    };
    send(&mut stream, &Ok::<_, Refusal>(Answer::Nothing))?;
    loop {
        let command = match receive(&mut stream) {
            Ok(command) => command,
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        send(&mut stream, &host.execute(command).map_err(Refusal::from))?;
    }
}

fn send<T: Serialize>(stream: &mut UnixStream, message: &T) -> std::io::Result<()> {
    let bytes = rmp_serde::to_vec(message).map_err(std::io::Error::other)?;
    let count = u32::try_from(bytes.len()).ok().filter(|count| *count <= MAX_BYTES);
    let count = count.ok_or_else(|| std::io::Error::other("the message is too long"))?;
    let mut frame = count.to_le_bytes().to_vec();
    frame.extend(bytes);
    stream.write_all(&frame)
}

fn receive<T: DeserializeOwned>(stream: &mut UnixStream) -> std::io::Result<T> {
    let mut count = [0; 4];
    stream.read_exact(&mut count)?;
    let count = u32::from_le_bytes(count);
    if count > MAX_BYTES {
        return Err(std::io::Error::other("the message is too long"));
    }
    let mut bytes = vec![0; count as usize];
    stream.read_exact(&mut bytes)?;
    rmp_serde::from_slice(&bytes).map_err(std::io::Error::other)
}
