//! A peer in a process of its own: the test's own program, started again.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};

use kvx_core::backend::{Events, TransferBackend as _};
use kvx_core::handshake::{Handshake as _, HandshakeBytes};
use kvx_core::id::{PeerId, RemoteRegionId, TransferId};
use kvx_core::memory::{KeyBlob, MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_core::{Error, Result};
use kvx_ucx::UcxBackend;

use crate::pair::{block, open_with};

/// Set, to the options, in the environment of a process that is to be a peer.
const PEER: &str = "KVX_UCX_PEER";

fn line(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{digits}\n")
}

fn say(bytes: &[u8]) {
    let mut output = std::io::stdout().lock();
    output.write_all(line(bytes).as_bytes()).unwrap();
    output.flush().unwrap();
}

fn next(from: &mut impl std::io::BufRead) -> Vec<u8> {
    next_if_any(from).expect("the other side has not ended")
}

fn next_if_any(from: &mut impl std::io::BufRead) -> Option<Vec<u8>> {
    let mut text = String::new();
    if from.read_line(&mut text).unwrap() == 0 {
        return None;
    }
    let digits = text.trim_end();
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    Some((0..digits.len()).step_by(2).map(byte).collect())
}

/// What the answer of a peer begins with that refuses an offer.
const REFUSED: &str = "refused: ";

/// Set in the environment of a peer that is to act: `read` or `write`.
const ACTS: &str = "KVX_UCX_ACTS";

/// Is the peer, if this process was started to be one. Then it ends by being killed, or with whoever started it.
pub(crate) fn serve_if_asked() -> Option<ExitCode> {
    let options = std::env::var(PEER).ok()?;
    let backend = open_with(&options).unwrap();
    match std::env::var(ACTS).as_deref() {
        Ok("read") => act(&backend, Mode::Read),
        Ok("write") => act(&backend, Mode::Write),
        _ => {}
    }
    let memory = Region::host(1 << 20).unwrap();
    let region = backend.register(&memory).unwrap();
    let mut input = std::io::stdin().lock();
    say(backend.key_blob(region).unwrap().as_bytes());
    // It has nothing to do but be there, as its thread does what is asked of it; and to meet again whoever asks for that.
    while !input.fill_buf().unwrap().is_empty() {
        backend.poll(&mut Events::with_limit(64));
        match backend.accept(&HandshakeBytes::new(next(&mut input)).unwrap()) {
            Ok((_, reply)) => say(reply.as_bytes()),
            Err(error) => {
                let remedy = error.remedy().unwrap_or_default();
                say(format!("{REFUSED}{error}\n{remedy}").as_bytes());
                continue;
            }
        }
        let finished = backend.finish(&HandshakeBytes::new(next(&mut input)).unwrap());
        say(finished.map_err(|error| error.to_string()).err().unwrap_or_default().as_bytes());
    }
    Some(ExitCode::SUCCESS)
}

/// Meets another peer by what whoever started it carries between the two, and then reads or writes without end.
fn act(backend: &UcxBackend, mode: Mode) -> ! {
    const BLOCK: u64 = 4096;
    let memory = Region::host(1 << 20).unwrap();
    let local = backend.register(&memory).unwrap();
    let mut input = std::io::stdin().lock();
    say(backend.offer().unwrap().as_bytes());
    let reply = HandshakeBytes::new(next(&mut input)).unwrap();
    let (peer, completion) = backend.complete(&reply).unwrap();
    say(completion.as_bytes());
    let remote = backend.import_key(peer, &KeyBlob::new(next(&mut input)).unwrap()).unwrap();
    let segments: Vec<_> = (0..256)
        .map(|index| PostedSegment {
            local,
            remote,
            local_offset: index * BLOCK,
            remote_offset: index * BLOCK,
            bytes: BLOCK,
        })
        .collect();
    let (mut id, mut events) = (0, Events::with_limit(64));
    if let Err(error) = block(backend.connect(peer)) {
        eprintln!("{error}");
        std::process::exit(1);
    }
    loop {
        match backend.submit(TransferId(id), peer, mode, &segments, None) {
            Ok(said) if said.is_posted() => id += 1,
            Ok(_) => {}
            // It is over.
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(1)),
        }
        if id == 8 {
            say(b"at work");
        }
        backend.poll(&mut events);
        events.drain().for_each(drop);
    }
}

/// This program, to be started in a network namespace.
fn in_namespace(namespace: &str) -> Command {
    let mut program = Command::new("ip");
    program.args(["netns", "exec", namespace]).arg(std::env::current_exe().unwrap());
    program
}

pub(crate) struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
    blob: Option<KeyBlob>,
}

impl Process {
    pub(crate) fn start(options: &str) -> Self {
        Self::start_by(Command::new(std::env::current_exe().unwrap()), options, None)
    }

    /// Starts a peer with these variables.
    pub(crate) fn start_with(variables: &[(&str, &str)], options: &str) -> Self {
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.envs(variables.iter().copied());
        Self::start_by(program, options, None)
    }

    /// Starts a peer in a network namespace.
    pub(crate) fn start_in(namespace: &str, options: &str) -> Self {
        Self::start_by(in_namespace(namespace), options, None)
    }

    fn start_by(mut program: Command, options: &str, acts: Option<Mode>) -> Self {
        match acts {
            Some(Mode::Read) => program.env(ACTS, "read"),
            Some(Mode::Write) => program.env(ACTS, "write"),
            None => &mut program,
        };
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
        self.blob();
        self.say(one.offer()?.as_bytes());
        let reply = self.hear();
        let Some(refused) = reply.strip_prefix(REFUSED.as_bytes()) else {
            return HandshakeBytes::new(reply);
        };
        let refused = String::from_utf8_lossy(refused);
        let (error, remedy) = refused.split_once('\n').unwrap_or((&refused, ""));
        let error = error.strip_prefix("accept: ").unwrap_or(error);
        Err(Error::peer("accept", error.to_owned()).with_remedy(remedy.to_owned()))
    }

    pub(crate) fn tell(&mut self, completion: &HandshakeBytes) {
        self.say(completion.as_bytes());
    }

    /// Whether it finished the handshake.
    pub(crate) fn finished(&mut self) -> Result<()> {
        match self.hear().as_slice() {
            [] => Ok(()),
            why => Err(Error::peer("finish", String::from_utf8_lossy(why).into_owned())),
        }
    }

    pub(crate) fn key(&self, one: &UcxBackend, peer: PeerId) -> Result<RemoteRegionId> {
        one.import_key(peer, self.blob.as_ref().unwrap())
    }

    /// What it says next. That it has ended instead is a failure, which says how.
    fn hear(&mut self) -> Vec<u8> {
        match next_if_any(&mut self.output) {
            Some(said) => said,
            None => panic!("a peer has ended: {}", self.child.wait().unwrap()),
        }
    }

    fn say(&mut self, bytes: &[u8]) {
        let input = self.child.stdin.as_mut().unwrap();
        input.write_all(line(bytes).as_bytes()).unwrap();
    }

    /// Starts one that reads or writes another's memory, and lets the two meet. It is at work when this returns.
    pub(crate) fn start_at(other: &mut Self, mode: Mode, options: &str) -> Self {
        let started =
            Self::start_by(Command::new(std::env::current_exe().unwrap()), options, Some(mode));
        started.at(other).expect("the two connect")
    }

    /// As [`start_at`](Self::start_at), in a network namespace.
    pub(crate) fn start_at_from(
        namespace: &str,
        other: &mut Self,
        mode: Mode,
        options: &str,
    ) -> Option<Self> {
        Self::start_by(in_namespace(namespace), options, Some(mode)).at(other)
    }

    fn at(mut self, other: &mut Self) -> Option<Self> {
        let blob = other.blob().clone();
        other.say(&self.hear());
        self.say(&other.hear());
        other.say(&self.hear());
        other.finished().ok()?;
        self.works_on(&blob).then_some(self)
    }

    /// Starts one that reads or writes this process's memory.
    pub(crate) fn start_at_this(
        one: &UcxBackend,
        blob: &KeyBlob,
        mode: Mode,
        options: &str,
    ) -> (Self, PeerId) {
        let mut started =
            Self::start_by(Command::new(std::env::current_exe().unwrap()), options, Some(mode));
        let offer = HandshakeBytes::new(started.hear()).unwrap();
        let (peer, reply) = one.accept(&offer).unwrap();
        started.say(reply.as_bytes());
        let completion = HandshakeBytes::new(started.hear()).unwrap();
        assert_eq!(one.finish(&completion).unwrap(), peer);
        assert!(started.works_on(blob), "the two connect");
        (started, peer)
    }

    fn works_on(&mut self, blob: &KeyBlob) -> bool {
        self.say(blob.as_bytes());
        next_if_any(&mut self.output).is_some_and(|said| said == b"at work")
    }

    /// The key of its memory, which is the first that it says.
    fn blob(&mut self) -> &KeyBlob {
        if self.blob.is_none() {
            let blob = KeyBlob::new(self.hear()).unwrap();
            self.blob = Some(blob);
        }
        self.blob.as_ref().unwrap()
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().unwrap()
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
