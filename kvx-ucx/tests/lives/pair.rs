//! Two backends of this process that have met.

use std::cell::Cell;
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

pub(crate) fn times(short: u64) -> u64 {
    if std::env::var("KVX_LONG").is_ok_and(|value| value == "1") { short * 10 } else { short }
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
