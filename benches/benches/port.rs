//! What the port costs: posting a transfer and polling it, over a fabric that does nothing but copy.
//!
//! The argument is the number of segments of a transfer; the column of items is segments per second, so the time of one
//! segment in a large transfer is what the port and the loopback take for it. `backend` is the same without the port: the
//! difference is the port's own.

use std::sync::Arc;

use divan::counter::ItemsCount;
use divan::{AllocProfiler, Bencher, black_box};
use kvx_core::backend::{Events, Submit, TransferBackend};
use kvx_core::handshake::Handshake as _;
use kvx_core::id::{PeerId, RegionId, RemoteRegionId, TransferId};
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::port::{Port, RegionSet};
use kvx_core::transfer::{Mode, PostedSegment, Segment};
use kvx_mock::{Loopback, LoopbackBackend};

#[global_allocator]
static ALLOC: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

const COUNTS: [u64; 3] = [1, 64, 1024];
/// From one segment to the next, so that none is merged with another.
const STRIDE: u64 = 8192;

/// Two ports that have met. The reader's region set reaches the owner's memory.
struct Ports {
    reader: Port,
    _owner: Port,
    peer: PeerId,
    local: RegionSet,
}

impl Ports {
    fn new(bytes: u64) -> kvx_core::Result<Self> {
        let loopback = Loopback::new()?;
        let (reader, owner) =
            (Port::new(loopback.backend("reader")?)?, Port::new(loopback.backend("owner")?)?);
        let (_, reply) = owner.accept(&reader.offer()?)?;
        let (peer, completion) = reader.complete(&reply)?;
        owner.finish(&completion)?;
        let local = reader.region_set(&[reader.register(&Region::host(bytes)?)?])?;
        let key = owner.key_blob(owner.register(&Region::host(bytes)?)?)?;
        reader.add_regions(peer, &[(key, bytes)])?;
        Ok(Self { reader, _owner: owner, peer, local })
    }

    fn read(&self, segments: &[Segment]) -> u64 {
        let transfer = self.reader.transfer(self.peer, Mode::Read, &self.local, segments, None);
        let mut transfer = transfer.expect("the segments are in range");
        loop {
            self.reader.poll();
            if let Some(report) = transfer.try_result() {
                return report.expect("it is done").segments;
            }
        }
    }
}

fn through_port(bencher: Bencher<'_, '_>, count: u64, bytes: u64) {
    let ports = Ports::new(count * STRIDE).expect("loopback opens");
    let segments: Vec<Segment> = (0..count)
        .map(|i| Segment {
            local_region: 0,
            remote_region: 0,
            local_offset: i * STRIDE,
            remote_offset: (count - 1 - i) * STRIDE,
            bytes,
        })
        .collect();
    bencher
        .counter(ItemsCount::new(count))
        .bench_local(|| black_box(ports.read(black_box(&segments))));
}

/// Segments of 8 bytes, through the port: nearly all of it is the port's and the loopback's own time.
#[divan::bench(args = COUNTS)]
fn port(bencher: Bencher<'_, '_>, count: u64) {
    through_port(bencher, count, 8);
}

/// Segments of 4 KiB, through the port.
#[divan::bench(args = COUNTS)]
fn port_4_kib(bencher: Bencher<'_, '_>, count: u64) {
    through_port(bencher, count, 4096);
}

/// Two backends that have met, without ports.
struct Backends {
    reader: Arc<LoopbackBackend>,
    _owner: Arc<LoopbackBackend>,
    peer: PeerId,
    local: RegionId,
    remote: RemoteRegionId,
}

impl Backends {
    fn new(bytes: u64) -> kvx_core::Result<Self> {
        let loopback = Loopback::new()?;
        let (reader, owner) = (loopback.backend("reader")?, loopback.backend("owner")?);
        let (_, reply) = owner.accept(&reader.offer()?)?;
        let (peer, completion) = reader.complete(&reply)?;
        owner.finish(&completion)?;
        let local = reader.register(&Region::host(bytes)?)?;
        let key = owner.key_blob(owner.register(&Region::host(bytes)?)?)?;
        let remote = reader.import_key(peer, &key)?;
        Ok(Self { reader, _owner: owner, peer, local, remote })
    }
}

/// Segments of 8 bytes, straight to the backend.
#[divan::bench(args = COUNTS)]
fn backend(bencher: Bencher<'_, '_>, count: u64) {
    let backends = Backends::new(count * STRIDE).expect("loopback opens");
    let Backends { reader, peer, local, remote, .. } = &backends;
    let segments: Vec<PostedSegment> = (0..count)
        .map(|i| PostedSegment {
            local: *local,
            remote: *remote,
            local_offset: i * STRIDE,
            remote_offset: (count - 1 - i) * STRIDE,
            bytes: 8,
        })
        .collect();
    let mut events = Events::with_limit(16);
    bencher.counter(ItemsCount::new(count)).bench_local(|| {
        let submitted = reader.submit(TransferId(1), *peer, Mode::Read, black_box(&segments), None);
        assert!(matches!(submitted, Ok(Submit::Submitted)));
        reader.poll(&mut events);
        assert_eq!(events.drain().count(), 1);
    });
}
