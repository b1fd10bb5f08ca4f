//! Tests of the port over a scripted backend.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use super::{Port, PortStats, RegionSet, Transfer, TransferReport};
use crate::capability::Capabilities;
use crate::handshake::HandshakeBytes;
use crate::id::{PeerId, RegionId};
use crate::memory::Region;
use crate::transfer::{Mode, Segment};

mod close;
mod drive;
mod fake;
mod notify;
mod peers;
mod progress;
mod regions;
mod settle;
mod split;
mod threads;

use fake::{Fake, Say, capabilities, key};

/// A port with one local region, one peer, and one region of that peer.
struct Setup {
    fake: Arc<Fake>,
    port: Port,
    peer: PeerId,
    id: RegionId,
    set: RegionSet,
}

const BYTES: u64 = 4096;

impl Setup {
    fn new() -> Self {
        Self::with(|_| ())
    }

    /// With capabilities changed.
    fn with(change: impl FnOnce(&mut Capabilities)) -> Self {
        let mut capabilities = capabilities();
        change(&mut capabilities);
        let fake = Fake::new(capabilities);
        let port = Port::new(Arc::clone(&fake) as _).unwrap();
        let peer = meet(&port, 1);
        let id = port.register(&Region::host(BYTES).unwrap()).unwrap();
        let set = port.region_set(&[id]).unwrap();
        port.add_regions(peer, &[(key(BYTES), BYTES)]).unwrap();
        Self { fake, port, peer, id, set }
    }

    /// Batches of one segment each, so that `count` segments are `count` batches.
    fn one_by_one(max_in_flight: u32) -> Self {
        Self::with(|capabilities| {
            capabilities.limits.max_batch_segments = 1;
            capabilities.limits.max_in_flight = max_in_flight;
        })
    }

    fn write(&self, segments: &[Segment], notify: Option<&[u8]>) -> Transfer {
        self.port.transfer(self.peer, Mode::Write, &self.set, segments, notify).unwrap()
    }

    fn settle_all(&self) {
        while !self.fake.held().is_empty() {
            self.fake.held().into_iter().for_each(|id| self.fake.done(id));
            while self.port.poll() > 0 {}
        }
    }
}

/// A handshake as the acceptor with the peer of that number.
fn meet(port: &Port, number: u8) -> PeerId {
    port.accept(&HandshakeBytes::new(vec![number, 0]).unwrap()).unwrap().0
}

/// The `i`-th of many segments of 16 bytes.
fn segment(i: u64) -> Segment {
    Segment {
        local_region: 0,
        remote_region: 0,
        local_offset: i * 16,
        remote_offset: i * 16,
        bytes: 16,
    }
}

fn segments(count: u64) -> Vec<Segment> {
    (0..count).map(segment).collect()
}

/// The plainest executor there is.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let mut future = std::pin::pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

const fn assert_send_sync<T: Send + Sync>() {}
const fn assert_send<T: Send>(_: &T) {}

#[test]
fn everything_goes_to_any_thread() {
    assert_send_sync::<Port>();
    assert_send_sync::<Transfer>();
    assert_send_sync::<RegionSet>();
    assert_send_sync::<PortStats>();
    assert_send_sync::<TransferReport>();
    let setup = Setup::new();
    assert_send(&setup.port.notified());
    assert_send(&setup.port.peer_down());
    assert_send(&setup.port.disconnect(setup.peer));
    assert_send(&setup.port.close());
    assert_send(&setup.port.connect(setup.peer));
    assert_send(&setup.port.drive());
}

#[test]
fn contradicting_capabilities_are_refused() {
    let mut bad = capabilities();
    bad.limits.max_in_flight = 0;
    let error = Port::new(Fake::new(bad)).unwrap_err().to_string();
    assert!(error.contains("max_in_flight") && error.contains("fake"), "{error}");
}
