//! A peer in a process of its own, which can be killed: the test itself, started again.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};

use kvx_core::backend::Events;
use kvx_core::backend::TransferBackend as _;
use kvx_core::handshake::{Handshake as _, HandshakeBytes};
use kvx_core::id::{PeerId, RemoteRegionId};
use kvx_core::memory::{KeyBlob, MemoryRegistry as _};
use kvx_shm::{SharedMemory, ShmBackend};

use crate::pair::open;

const PEER: &str = "KVX_SHM_PEER";
/// Tells what the peer says from what its test runner prints.
const MARK: &str = "kvx:";

fn line(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{MARK}{digits}\n")
}

/// The next line of bytes: whatever comes before it is somebody else's.
fn next(from: &mut impl std::io::BufRead) -> Vec<u8> {
    let mut text = String::new();
    loop {
        text.clear();
        assert!(from.read_line(&mut text).unwrap() > 0, "the other side has ended");
        if let Some((_, digits)) = text.trim_end().split_once(MARK) {
            let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
            return (0..digits.len()).step_by(2).map(byte).collect();
        }
    }
}

/// Is the peer, if this process was started to be one. Then it ends by being killed, or with whoever started it.
pub(crate) fn serve_if_asked() -> bool {
    if std::env::var_os(PEER).is_none() {
        return false;
    }
    let backend = open();
    let memory = SharedMemory::region(1 << 20).unwrap();
    let region = backend.register(&memory).unwrap();
    let mut input = std::io::stdin().lock();
    let say = |bytes: &[u8]| {
        let mut output = std::io::stdout().lock();
        output.write_all(line(bytes).as_bytes()).unwrap();
        output.flush().unwrap();
    };
    say(backend.key_blob(region).unwrap().as_bytes());
    let (_, reply) = backend.accept(&HandshakeBytes::new(next(&mut input)).unwrap()).unwrap();
    say(reply.as_bytes());
    backend.finish(&HandshakeBytes::new(next(&mut input)).unwrap()).unwrap();
    // It has nothing to do but be there: its threads carry out what is asked of it.
    let mut rest = String::new();
    while input.read_line(&mut rest).unwrap() > 0 {
        backend.poll(&mut Events::with_limit(8));
    }
    true
}

pub(crate) struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts a test of this program again, to be a peer.
    pub(crate) fn start(test: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(PEER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// Meets it, and imports the key of its memory.
    pub(crate) fn meet(&mut self, one: &ShmBackend) -> (PeerId, RemoteRegionId) {
        let blob = KeyBlob::new(next(&mut self.output)).unwrap();
        self.say(one.offer().unwrap().as_bytes());
        let reply = HandshakeBytes::new(next(&mut self.output)).unwrap();
        let (peer, completion) = one.complete(&reply).unwrap();
        self.say(completion.as_bytes());
        (peer, one.import_key(peer, &blob).unwrap())
    }

    fn say(&mut self, bytes: &[u8]) {
        let input = self.child.stdin.as_mut().unwrap();
        input.write_all(line(bytes).as_bytes()).unwrap();
    }

    /// Lets it stand still.
    pub(crate) fn stop(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
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
