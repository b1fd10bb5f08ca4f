//! One side in a process of its own, of another user or in another namespace: the test itself, started again, which does
//! what it is told line by line.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use kvx_core::handshake::HandshakeBytes;
use kvx_core::id::PeerId;
use kvx_core::memory::{KeyBlob, Region};
use kvx_core::port::{Port, RegionSet};
use kvx_core::transfer::{Mode, Segment};
use kvx_core::{Error, Result};
use kvx_shm::{Options, SharedMemory, ShmBackend};

/// The options of the party that this process is to be.
const PARTY: &str = "KVX_SHM_PARTY";
/// It is not dumpable: nobody without a capability may read its memory.
const HIDDEN: &str = "KVX_SHM_HIDDEN";
/// Tells what a party says from what its test runner prints.
const MARK: &str = "kvx:";
const BYTES: u64 = 1 << 20;

/// The kinds of memory of each party, by number.
pub(crate) const SHARED: u32 = 0;
pub(crate) const BORROWED: u32 = 1;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(digits: &str) -> Vec<u8> {
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}

/// How a party is started: by which program, if any, and with what.
#[derive(Clone, Copy, Default)]
pub(crate) struct Start<'a> {
    /// A program that starts another one: `unshare --net`.
    pub(crate) by: &'a str,
    /// Options of its backend.
    pub(crate) options: &'a str,
    pub(crate) hidden: bool,
}

/// A copy of this program that every user may start.
pub(crate) struct Program(PathBuf);

impl Program {
    pub(crate) fn new() -> Self {
        /// Tests of one process have one each.
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let (process, number) = (std::process::id(), NUMBER.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(format!("kvx-shm-permissions-{process}-{number}"));
        std::fs::copy(std::env::current_exe().unwrap(), &path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        Self(path)
    }

    /// Starts a test of this program again, to be a party; `Err` with the reason where it does not start.
    pub(crate) fn start(&self, test: &str, start: Start<'_>) -> std::result::Result<Party, String> {
        let program = self.0.to_str().unwrap();
        let mut words =
            start.by.split_whitespace().chain([program, "--exact", test, "--nocapture"]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).env(PARTY, start.options).current_dir("/");
        if start.hidden {
            command.env(HIDDEN, "1");
        }
        let spawned = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}", start.by))?;
        let mut party = Party::new(spawned);
        match party.hear() {
            Some(ready) if ready == "ready" => Ok(party),
            said => {
                let mut text = String::new();
                let mut errors = party.child.stderr.take().unwrap();
                std::io::Read::read_to_string(&mut errors, &mut text).unwrap();
                Err(format!("{}: {said:?} {text}", start.by))
            }
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A party, as the test sees it.
pub(crate) struct Party {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Party {
    fn new(mut child: Child) -> Self {
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    fn hear(&mut self) -> Option<String> {
        let mut text = String::new();
        while self.output.read_line(&mut text).unwrap() > 0 {
            if let Some((_, said)) = text.trim_end().split_once(MARK) {
                return Some(said.to_owned());
            }
            text.clear();
        }
        None
    }

    /// Has it do something: what came of it, or the error with its remedy.
    pub(crate) fn ask(&mut self, what: &str) -> std::result::Result<String, String> {
        writeln!(self.input, "{what}").unwrap();
        let said = self.hear().unwrap_or_else(|| panic!("it has ended; it was asked to {what}"));
        match said.strip_prefix("done") {
            Some(result) => Ok(result.trim_start().to_owned()),
            None => Err(said),
        }
    }

    /// The handshake with another one, and each other's keys. Connected or not is for [`ask`](Self::ask) to find out.
    pub(crate) fn meet(&mut self, other: &mut Self) -> std::result::Result<(), String> {
        let offer = self.ask("offer")?;
        let reply = other.ask(&format!("accept {offer}"))?;
        let completion = self.ask(&format!("complete {reply}"))?;
        other.ask(&format!("finish {completion}"))?;
        let keys = self.ask("keys")?;
        other.ask(&format!("import {keys}"))?;
        let keys = other.ask("keys")?;
        self.ask(&format!("import {keys}"))?;
        Ok(())
    }

    /// Moves memory of one kind into that of another: by which way.
    pub(crate) fn go(
        &mut self,
        mode: Mode,
        local: u32,
        remote: u32,
    ) -> std::result::Result<String, String> {
        self.ask(&format!("go {mode} {local} {remote}"))
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        // It may be gone already; what matters is that it is gone now. One behind `unshare` goes with its input.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a party has.
struct Here {
    port: Port,
    set: RegionSet,
    regions: Vec<Region>,
    keys: Vec<KeyBlob>,
    peer: Option<PeerId>,
}

impl Here {
    fn open(options: &str) -> Result<Self> {
        let port = Port::new(ShmBackend::open(&Options::read(&options.parse()?)?)?)?;
        let regions = vec![SharedMemory::region(BYTES)?, Region::host(BYTES)?];
        let ids = regions.iter().map(|region| port.register(region)).collect::<Result<Vec<_>>>()?;
        let keys = ids.iter().map(|id| port.key_blob(*id)).collect::<Result<_>>()?;
        Ok(Self { set: port.region_set(&ids)?, port, regions, keys, peer: None })
    }

    fn execute(&mut self, line: &str) -> Result<String> {
        let words: Vec<&str> = line.split(' ').collect();
        let bytes = |at: usize| HandshakeBytes::new(unhex(words[at]));
        let peer = || self.peer.ok_or_else(|| Error::misuse("test", "nobody was met"));
        Ok(match words[0] {
            "offer" => hex(self.port.offer()?.as_bytes()),
            "accept" => hex(self.port.accept(&bytes(1)?)?.1.as_bytes()),
            "complete" => {
                let (peer, completion) = self.port.complete(&bytes(1)?)?;
                self.peer = Some(peer);
                hex(completion.as_bytes())
            }
            "finish" => {
                self.peer = Some(self.port.finish(&bytes(1)?)?);
                String::new()
            }
            "keys" => self.keys.iter().map(|key| hex(key.as_bytes())).collect::<Vec<_>>().join(" "),
            "import" => {
                let keys = words[1..].iter().map(|key| Ok((KeyBlob::new(unhex(key))?, BYTES)));
                self.port.add_regions(peer()?, &keys.collect::<Result<Vec<_>>>()?)?;
                String::new()
            }
            "go" => {
                let number = |at: usize| words[at].parse::<u32>().unwrap();
                let segment = Segment {
                    local_region: number(2),
                    remote_region: number(3),
                    local_offset: 0,
                    remote_offset: 0,
                    bytes: BYTES,
                };
                let mode: Mode = words[1].parse()?;
                let mut transfer =
                    self.port.transfer(peer()?, mode, &self.set, &[segment], Some(b"note"))?;
                let report = transfer.wait(Duration::from_secs(10));
                let report = report.ok_or_else(|| Error::peer("test", "it hangs"))??;
                report.route.unwrap_or_default().into_owned()
            }
            "fill" => {
                for region in &self.regions {
                    region.write_at(0, &vec![words[1].parse().unwrap(); 1 << 20])?;
                }
                String::new()
            }
            // Whether a kind of memory is all of one byte.
            "holds" => {
                let mut found = vec![0; 1 << 20];
                self.regions[words[1].parse::<usize>().unwrap()].read_at(0, &mut found)?;
                let wanted: u8 = words[2].parse().unwrap();
                found.iter().all(|byte| *byte == wanted).to_string()
            }
            other => panic!("{other} is nothing to do"),
        })
    }
}

/// Is a party, if this process was started to be one, until its input ends.
pub(crate) fn serve_if_asked() -> bool {
    let Ok(options) = std::env::var(PARTY) else { return false };
    let say = |text: &str| {
        let mut output = std::io::stdout().lock();
        output.write_all(format!("{MARK}{text}\n").as_bytes()).unwrap();
        output.flush().unwrap();
    };
    if std::env::var_os(HIDDEN).is_some() {
        let hidden = rustix::process::DumpableBehavior::NotDumpable;
        rustix::process::set_dumpable_behavior(hidden).unwrap();
    }
    let mut here = match Here::open(&options) {
        Ok(here) => here,
        Err(error) => {
            say(&error.to_string());
            return true;
        }
    };
    say("ready");
    for line in std::io::stdin().lock().lines() {
        match here.execute(&line.unwrap()) {
            Ok(result) => say(&format!("done {result}")),
            Err(error) => say(&format!("{}: {error}", error.kind().as_str())),
        }
    }
    true
}
