//! Two backends of this process that have met.

use std::cell::Cell;
use std::fmt;
use std::io::Write as _;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvx_core::Result;
use kvx_core::backend::{Event, Events, Outcome, Submit, TransferBackend};
use kvx_core::handshake::Handshake as _;
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_ucx::{Options, UcxBackend};

pub(crate) struct Pair {
    pub(crate) one: Arc<UcxBackend>,
    pub(crate) other: Arc<UcxBackend>,
    pub(crate) at_one: PeerId,
    pub(crate) at_other: PeerId,
    /// The other's region of the last lane.
    pub(crate) theirs: Cell<RegionId>,
}

/// Why the test that runs could not be run.
static SKIPPED: Mutex<Option<String>> = Mutex::new(None);

pub(crate) fn skip(reason: impl Into<String>) {
    *SKIPPED.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.into());
}

pub(crate) fn skipped() -> Option<String> {
    SKIPPED.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Runs a test in a process of its own, with these variables: this program, started again.
pub(crate) fn alone(test: &str, variables: &[(&str, &str)], act: impl FnOnce()) {
    alone_by(Command::new(std::env::current_exe().unwrap()), test, variables, act);
}

/// As [`alone`], by a command that starts this program with what is added to its arguments.
pub(crate) fn alone_by(
    mut program: Command,
    test: &str,
    variables: &[(&str, &str)],
    act: impl FnOnce(),
) {
    const ALONE: &str = "KVX_UCX_ALONE";
    const MARK: &str = "kvx-skipped: ";
    if std::env::var(ALONE).is_ok_and(|asked| asked == test) {
        act();
        if let Some(reason) = skipped() {
            let mut output = std::io::stdout().lock();
            writeln!(output, "{MARK}{reason}").unwrap();
        }
        return;
    }
    program.args(["--exact", test]).env(ALONE, test).envs(variables.iter().copied());
    let output = program.stderr(std::process::Stdio::inherit()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "its process: {}\n{said}", output.status);
    assert!(said.contains("1 passed"), "no test of this name was run: {said}");
    if let Some((_, reason)) = said.lines().find_map(|line| line.split_once(MARK)) {
        skip(reason);
    }
}

/// Ways to a peer on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Tcp,
    /// For data, with TCP beside it. UCX 1.13 has it carry nothing.
    Cma,
    /// Alone.
    SharedMemory,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Cma => "CMA",
            Self::SharedMemory => "shared memory",
        })
    }
}

/// What has UCX 1.13 choose CMA, for what kvx does not use. It takes that from the environment only.
pub(crate) const CMA_1_13: (&str, &str) = ("UCX_CMA_MEMORY_INVALIDATE", "y");

impl Way {
    pub(crate) fn options(self) -> String {
        let device = lasting_interface();
        match self {
            Self::Tcp => format!("tls=tcp,devices={device}"),
            // There it is, and carries nothing.
            Self::Cma if is_1_13() => format!("tls=tcp+sm,devices={device},require=tcp"),
            Self::Cma => {
                format!("tls=tcp+sm,devices={device},ucx.CMA_MEMORY_INVALIDATE=y,require=cma")
            }
            Self::SharedMemory => "tls=sm+self,ucx.MM_ERROR_HANDLING=y".to_owned(),
        }
    }

    /// What the environment must have beside the options.
    pub(crate) fn variables(self) -> &'static [(&'static str, &'static str)] {
        if self == Self::Cma && is_1_13() { &[CMA_1_13] } else { &[] }
    }
}

pub(crate) fn is_1_13() -> bool {
    use kvx_core::registry::Probe;
    let probe = (kvx_ucx::REGISTRATION.probe)(&kvx_core::config::BackendConfig::new());
    matches!(probe, Probe::Available { detail, .. } if detail.contains("UCX 1.13."))
}

/// Numbers that the seed decides.
pub(crate) struct Dice(u64);

impl Dice {
    /// Of `KVX_SEED`, or of 1, or with `KVX_LONG=1` of one that is new each time. Printed.
    pub(crate) fn new(what: &str) -> Self {
        let drawn = || {
            let time = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
            u64::from(time.subsec_nanos())
        };
        let seed = kvx_tests::suite::seed().unwrap();
        let seed = seed.unwrap_or_else(|| if is_long() { drawn() } else { 1 });
        eprintln!("{what}: KVX_SEED={seed}");
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    pub(crate) const fn below(&mut self, bound: u64) -> u64 {
        // Of Vigna's SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// The interface of the default route, or else the loopback. Others come and go while tests run.
pub(crate) fn lasting_interface() -> String {
    let output = Command::new("ip").args(["-o", "route", "show", "default"]).output();
    let listed = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let listed = listed.unwrap_or_default();
    let mut words = listed.split_whitespace().skip_while(|word| *word != "dev");
    words.nth(1).unwrap_or("lo").to_owned()
}

pub(crate) fn open_with(options: &str) -> Result<Arc<UcxBackend>> {
    UcxBackend::open(&Options::read(&options.parse()?)?)
}

pub(crate) fn open() -> Arc<UcxBackend> {
    open_with(&format!("devices={}", lasting_interface())).unwrap()
}

pub(crate) fn is_long() -> bool {
    std::env::var("KVX_LONG").is_ok_and(|value| value == "1")
}

pub(crate) fn times(short: u64) -> u64 {
    if is_long() { short * 10 } else { short }
}

pub(crate) fn wait(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(20), "waited for {what}, in vain");
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// Waits for a future, in a thread that has nothing else to do.
pub(crate) fn block<F: Future>(future: F) -> F::Output {
    struct Thread(std::thread::Thread);
    impl std::task::Wake for Thread {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::task::Waker::from(Arc::new(Thread(std::thread::current())));
    let mut future = std::pin::pin!(future);
    loop {
        if let std::task::Poll::Ready(result) =
            future.as_mut().poll(&mut std::task::Context::from_waker(&waker))
        {
            return result;
        }
        std::thread::park_timeout(Duration::from_millis(50));
    }
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self::meet(&open(), &open())
    }

    pub(crate) fn over(way: Way) -> Self {
        let open = || open_with(&way.options()).unwrap();
        Self::meet(&open(), &open())
    }

    pub(crate) fn meet(one: &Arc<UcxBackend>, other: &Arc<UcxBackend>) -> Self {
        let (at_other, reply) = other.accept(&one.offer().unwrap()).unwrap();
        let (at_one, completion) = one.complete(&reply).unwrap();
        assert_eq!(other.finish(&completion).unwrap(), at_other);
        let (one, other) = (Arc::clone(one), Arc::clone(other));
        Self { one, other, at_one, at_other, theirs: Cell::new(RegionId::new(0, 0)) }
    }

    /// Registers memory on both sides.
    pub(crate) fn lane(&self, mine: &Region, theirs: &Region) -> (RegionId, RemoteRegionId) {
        let local = self.one.register(mine).unwrap();
        let remote = self.other.register(theirs).unwrap();
        self.theirs.set(remote);
        let blob = self.other.key_blob(remote).unwrap();
        (local, self.one.import_key(self.at_one, &blob).unwrap())
    }

    pub(crate) fn transfer(&self, id: TransferId, mode: Mode, segments: &[PostedSegment]) {
        transfer(&self.one, self.at_one, id, mode, segments);
    }

    /// Ends the connection. Both sides hear of it.
    pub(crate) fn part(&self) {
        self.one.sever(self.at_one).unwrap();
        let mut events = Events::with_limit(8);
        for (side, peer) in [(&self.one, self.at_one), (&self.other, self.at_other)] {
            wait("the peer to be down", || {
                side.poll(&mut events);
                events
                    .drain()
                    .any(|event| matches!(event, Event::PeerDown { peer: p, .. } if p == peer))
            });
        }
    }
}

/// Why the two do not connect.
pub(crate) fn meet_in_vain(one: &UcxBackend, other: &UcxBackend) -> kvx_core::Error {
    let reply = match other.accept(&one.offer().unwrap()) {
        Ok((_, reply)) => reply,
        Err(error) => return error,
    };
    let (peer, _) = one.complete(&reply).unwrap();
    block(one.connect(peer)).unwrap_err()
}

/// A transfer that is done before anything else happens.
pub(crate) fn transfer(
    one: &UcxBackend,
    peer: PeerId,
    id: TransferId,
    mode: Mode,
    segments: &[PostedSegment],
) {
    let posted = one.submit(id, peer, mode, segments, None).unwrap();
    if matches!(posted, Submit::Done { .. }) {
        return;
    }
    assert_eq!(posted, Submit::Submitted);
    let mut events = Events::with_limit(8);
    wait("a transfer to settle", || {
        one.poll(&mut events);
        events.drain().any(|event| match event {
            Event::Settled { outcome: Outcome::Done { .. }, .. } => true,
            other => panic!("{other:?}"),
        })
    });
}
