//! A peer in a process of its own: the test's own program, started again.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};

use kvx_core::backend::{Events, TransferBackend as _};
use kvx_core::handshake::{Handshake as _, HandshakeBytes};
use kvx_core::id::{PeerId, RemoteRegionId};
use kvx_core::memory::{KeyBlob, MemoryRegistry as _, Region};
use kvx_core::{Error, Result};
use kvx_ucx::UcxBackend;

use crate::pair::open_with;

/// Set, to the options, in the environment of a process that is to be a peer.
const PEER: &str = "KVX_UCX_PEER";

fn line(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{digits}\n")
}

fn next(from: &mut impl std::io::BufRead) -> Vec<u8> {
    let mut text = String::new();
    assert!(from.read_line(&mut text).unwrap() > 0, "the other side has ended");
    let digits = text.trim_end();
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}

/// Is the peer, if this process was started to be one. Then it ends by being killed, or with whoever started it.
pub(crate) fn serve_if_asked() -> Option<ExitCode> {
    let options = std::env::var(PEER).ok()?;
    let backend = open_with(&options).unwrap();
    let memory = Region::host(1 << 20).unwrap();
    let region = backend.register(&memory).unwrap();
    let mut input = std::io::stdin().lock();
    let say = |bytes: &[u8]| {
        let mut output = std::io::stdout().lock();
        output.write_all(line(bytes).as_bytes()).unwrap();
        output.flush().unwrap();
    };
    say(backend.key_blob(region).unwrap().as_bytes());
    // It has nothing to do but be there, as its thread does what is asked of it; and to meet again whoever asks for that.
    while !input.fill_buf().unwrap().is_empty() {
        backend.poll(&mut Events::with_limit(64));
        let (_, reply) = backend.accept(&HandshakeBytes::new(next(&mut input)).unwrap()).unwrap();
        say(reply.as_bytes());
        let finished = backend.finish(&HandshakeBytes::new(next(&mut input)).unwrap());
        say(finished.map_err(|error| error.to_string()).err().unwrap_or_default().as_bytes());
    }
    Some(ExitCode::SUCCESS)
}

pub(crate) struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
    blob: Option<KeyBlob>,
}

impl Process {
    pub(crate) fn start(options: &str) -> Self {
        Self::start_by(Command::new(std::env::current_exe().unwrap()), options)
    }

    /// Starts a peer with these variables.
    pub(crate) fn start_with(variables: &[(&str, &str)], options: &str) -> Self {
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.envs(variables.iter().copied());
        Self::start_by(program, options)
    }

    /// Starts a peer in a network namespace.
    pub(crate) fn start_in(namespace: &str, options: &str) -> Self {
        let mut program = Command::new("ip");
        program.args(["netns", "exec", namespace]).arg(std::env::current_exe().unwrap());
        Self::start_by(program, options)
    }

    fn start_by(mut program: Command, options: &str) -> Self {
        let program = program.env(PEER, options).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = program.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output, blob: None }
    }

    /// Meets it, also once more, and imports the key of its memory.
    pub(crate) fn meet(&mut self, one: &UcxBackend) -> Result<(PeerId, RemoteRegionId)> {
        let reply = self.ask(one)?;
        let (peer, completion) = one.complete(&reply)?;
        self.tell(&completion);
        self.finished()?;
        Ok((peer, self.key(one, peer)?))
    }

    /// The first half of a handshake: its reply to an offer.
    pub(crate) fn ask(&mut self, one: &UcxBackend) -> Result<HandshakeBytes> {
        if self.blob.is_none() {
            self.blob = Some(KeyBlob::new(next(&mut self.output))?);
        }
        self.say(one.offer()?.as_bytes());
        HandshakeBytes::new(next(&mut self.output))
    }

    pub(crate) fn tell(&mut self, completion: &HandshakeBytes) {
        self.say(completion.as_bytes());
    }

    /// Whether it finished the handshake.
    pub(crate) fn finished(&mut self) -> Result<()> {
        match next(&mut self.output).as_slice() {
            [] => Ok(()),
            why => Err(Error::peer("finish", String::from_utf8_lossy(why).into_owned())),
        }
    }

    pub(crate) fn key(&self, one: &UcxBackend, peer: PeerId) -> Result<RemoteRegionId> {
        one.import_key(peer, self.blob.as_ref().unwrap())
    }

    fn say(&mut self, bytes: &[u8]) {
        let input = self.child.stdin.as_mut().unwrap();
        input.write_all(line(bytes).as_bytes()).unwrap();
    }

    /// Lets it stand still.
    pub(crate) fn stop(&self) {
        self.signal(rustix::process::Signal::STOP);
    }

    /// Lets it go on.
    pub(crate) fn resume(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be gone already; what matters is that it is gone now.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
