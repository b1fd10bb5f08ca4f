//! Two engines of this process, what becomes of their meeting, and how many descriptors there are for it.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvx_core::backend::TransferBackend as _;
use kvx_core::config::BackendConfig;
use kvx_core::handshake::Handshake as _;
use kvx_core::id::PeerId;
use kvx_core::{Error, ErrorKind, Result};
use kvx_shm::{Options, ShmBackend};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

pub(crate) fn open() -> Arc<ShmBackend> {
    ShmBackend::open(&Options::read(&BackendConfig::new()).unwrap()).unwrap()
}

/// What has become of a peer's connection, if it is decided.
fn look(side: &ShmBackend, peer: PeerId) -> Option<Result<()>> {
    match pin!(side.connect(peer)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Err(error)) if error.kind() == ErrorKind::Misuse => None,
        Poll::Ready(decided) => Some(decided),
        Poll::Pending => None,
    }
}

/// Lets this process have no descriptors but those that it has, and so many: a limit is on their numbers.
pub(crate) fn limit(more: usize) {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let open: BTreeSet<u64> =
        open.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok()).collect();
    let current = (0..).filter(|number| !open.contains(number)).nth(more);
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
}

pub(crate) fn lift() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

fn again(error: Option<&Error>) -> Option<Result<()>> {
    error.map(|error| Err(error.again()))
}

/// Has two meet, and says what both were told.
pub(crate) fn meet(one: &ShmBackend, other: &ShmBackend) -> [Result<()>; 2] {
    let begun = Instant::now();
    let (at_other, reply) = other.accept(&one.offer().unwrap()).unwrap();
    let mut here: Option<Error> = None;
    let mut there: Option<Error> = None;
    let mut at_one = None;
    match one.complete(&reply) {
        Ok((peer, completion)) => {
            at_one = Some(peer);
            // It may be over before the last message of the handshake comes.
            there = other.finish(&completion).err();
        }
        Err(error) => here = Some(error),
    }
    loop {
        let here = again(here.as_ref()).or_else(|| look(one, at_one?));
        let there = again(there.as_ref()).or_else(|| look(other, at_other));
        match (here, there) {
            (Some(here), Some(there)) if here.is_ok() == there.is_ok() => return [here, there],
            (here, there) => assert!(
                begun.elapsed() < Duration::from_secs(4),
                "undecided, or not by both: {here:?} {there:?}"
            ),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Ends it, and waits until it has no descriptors any more.
pub(crate) fn close(side: Arc<ShmBackend>) {
    let mut closed = pin!(side.close());
    while closed.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        std::thread::sleep(Duration::from_micros(100));
    }
}
