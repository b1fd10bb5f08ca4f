//! A control channel in memory: sessions in order, until they break.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use kvx_connector::protocol::peers::{Remote, SessionId};
use kvx_connector::rank::{Channel, ChannelEvent};
use kvx_core::card::{Address, EngineName};
use kvx_core::{Error, ErrorKind, Retry};
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

/// A process on the net: one life of one rank.
pub(crate) type ProcessId = usize;

struct Process {
    remote: Remote,
    address: String,
    alive: bool,
    inbox: VecDeque<ChannelEvent>,
}

/// One end of a session.
struct End {
    process: ProcessId,
    other: u64,
    /// When the last message that was sent by it arrives: the next does not overtake it.
    last: Duration,
}

enum Happening {
    Dialled { from: ProcessId, address: Address },
    Message { to: u64, bytes: Vec<u8> },
    Down { end: u64 },
}

/// All processes and sessions.
pub(crate) struct Net {
    rng: ChaCha8Rng,
    now: Duration,
    processes: Vec<Process>,
    ends: BTreeMap<u64, End>,
    next_end: u64,
    queue: BTreeMap<(Duration, u64), Happening>,
    next: u64,
    /// Whether bad things happen.
    pub(crate) foul: bool,
    /// What was sent lately, where somebody wants to know.
    pub(crate) tap: Option<Vec<Vec<u8>>>,
}

/// Most messages that a tap keeps.
const TAPPED: usize = 1024;

impl Net {
    pub(crate) fn new(rng: ChaCha8Rng) -> Rc<RefCell<Self>> {
        Rc::new(RefCell::new(Self {
            rng,
            now: Duration::ZERO,
            processes: Vec::new(),
            ends: BTreeMap::new(),
            next_end: 1,
            queue: BTreeMap::new(),
            next: 0,
            foul: true,
            tap: None,
        }))
    }

    pub(crate) fn enter(&mut self, remote: Remote, address: &Address) -> ProcessId {
        let (address, inbox) = (address.to_string(), VecDeque::new());
        self.processes.push(Process { remote, address, alive: true, inbox });
        self.processes.len() - 1
    }

    fn delay(&mut self) -> Duration {
        let micros = match self.rng.random_range(0..20) {
            0 if self.foul => self.rng.random_range(1_000..300_000),
            _ => self.rng.random_range(10..1_500),
        };
        Duration::from_micros(micros)
    }

    /// Says what happens, where that was asked for.
    fn note(&self, what: impl FnOnce() -> String) {
        if std::env::var_os("KVX_SAY").is_some() {
            eprintln!("{:?} net: {}", self.now, what());
        }
    }

    fn later(&mut self, at: Duration, what: Happening) {
        self.next += 1;
        self.queue.insert((at, self.next), what);
    }

    /// Lets everything happen until `now`.
    pub(crate) fn advance(&mut self, now: Duration) {
        while let Some(entry) = self.queue.first_entry() {
            if entry.key().0 > now {
                break;
            }
            self.now = entry.key().0.max(self.now);
            match entry.remove() {
                Happening::Dialled { from, address } => self.dialled(from, address),
                Happening::Message { to, bytes } => {
                    self.note(|| {
                        format!(
                            "{to} gets {} of kind {}: {}",
                            bytes.len(),
                            bytes[0],
                            String::from_utf8_lossy(&bytes[1..])
                                .chars()
                                .filter(char::is_ascii_graphic)
                                .take(60)
                                .collect::<String>()
                        )
                    });
                    if let Some(end) = self.ends.get(&to) {
                        let event = ChannelEvent::Message { session: SessionId(to), bytes };
                        self.processes[end.process].inbox.push_back(event);
                    }
                }
                Happening::Down { end } => {
                    self.note(|| format!("{end} is down"));
                    if let Some(gone) = self.ends.remove(&end) {
                        let error =
                            Some(Error::peer("session", "it broke").with_retry(Retry::Reconnect));
                        let event = ChannelEvent::Down { session: SessionId(end), error };
                        self.processes[gone.process].inbox.push_back(event);
                    }
                }
            }
        }
        self.now = now;
    }

    fn dialled(&mut self, from: ProcessId, address: Address) {
        let text = address.to_string();
        let broken = self.foul && self.rng.random_ratio(1, 10);
        let there = self.processes.iter().position(|one| one.alive && one.address == text);
        let Some(to) = there.filter(|_| !broken && self.processes[from].alive) else {
            let error =
                Error::new(ErrorKind::Peer, "dial", "nobody is there").with_retry(Retry::Backoff);
            self.processes[from].inbox.push_back(ChannelEvent::DialFailed { address, error });
            return;
        };
        let (here, other) = (self.next_end, self.next_end + 1);
        self.next_end += 2;
        let now = self.now;
        self.ends.insert(here, End { process: from, other, last: now });
        self.ends.insert(other, End { process: to, other: here, last: now });
        self.note(|| format!("process {from} by {here} to process {to} by {other}"));
        let up = |net: &Self, session, remote: ProcessId, dialled| ChannelEvent::Up {
            session: SessionId(session),
            remote: net.processes[remote].remote.clone(),
            dialled,
        };
        let (mine, theirs) = (up(self, here, to, Some(address)), up(self, other, from, None));
        self.processes[from].inbox.push_back(mine);
        self.processes[to].inbox.push_back(theirs);
    }

    fn tapped(&mut self, bytes: &[u8]) {
        let Some(tap) = &mut self.tap else { return };
        if tap.len() < TAPPED {
            tap.push(bytes.to_vec());
        } else {
            tap[self.rng.random_range(0..TAPPED)] = bytes.to_vec();
        }
    }

    /// Some session breaks, if there is one.
    pub(crate) fn break_one(&mut self) {
        let ends: Vec<u64> = self.ends.keys().copied().collect();
        if !ends.is_empty() {
            let end = ends[self.rng.random_range(0..ends.len())];
            let other = self.ends[&end].other;
            for end in [end, other] {
                let at = self.now + self.delay();
                self.later(at, Happening::Down { end });
            }
        }
    }

    /// A process is gone. Those who spoke with it hear of it sooner or later.
    pub(crate) fn kill(&mut self, process: ProcessId) {
        self.processes[process].alive = false;
        self.processes[process].inbox.clear();
        let ends: Vec<u64> =
            self.ends.iter().filter(|(_, end)| end.process == process).map(|(id, _)| *id).collect();
        for end in ends {
            if let Some(gone) = self.ends.remove(&end) {
                let late = Duration::from_millis(self.rng.random_range(0..2_000));
                let at = self.now + late;
                self.later(at, Happening::Down { end: gone.other });
            }
        }
    }
}

/// One process's view of the net.
pub(crate) struct SimChannel {
    pub(crate) net: Rc<RefCell<Net>>,
    pub(crate) process: ProcessId,
}

impl fmt::Debug for SimChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimChannel({})", self.process)
    }
}

impl Channel for SimChannel {
    fn dial(&mut self, address: &Address, _expected: Option<&EngineName>) {
        let mut net = self.net.borrow_mut();
        let at = net.now + net.delay();
        net.later(at, Happening::Dialled { from: self.process, address: address.clone() });
    }

    fn send(&mut self, session: SessionId, bytes: &[u8]) -> bool {
        let mut net = self.net.borrow_mut();
        // A full queue.
        if net.foul && net.rng.random_ratio(1, 50) {
            return false;
        }
        let delay = net.delay();
        let now = net.now;
        net.tapped(bytes);
        let Some(end) = net.ends.get_mut(&session.0) else { return false };
        end.last = end.last.max(now + delay);
        let (at, to) = (end.last, end.other);
        net.later(at, Happening::Message { to, bytes: bytes.to_vec() });
        true
    }

    fn close(&mut self, session: SessionId) {
        let mut net = self.net.borrow_mut();
        if let Some(gone) = net.ends.remove(&session.0) {
            let at = gone.last.max(net.now) + net.delay();
            net.later(at, Happening::Down { end: gone.other });
        }
    }

    fn poll(&mut self, events: &mut Vec<ChannelEvent>) {
        let mut net = self.net.borrow_mut();
        events.extend(net.processes[self.process].inbox.drain(..));
    }
}
