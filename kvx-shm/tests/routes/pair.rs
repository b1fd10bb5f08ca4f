//! Two ports of this process that have met, each with memory of either kind.

use std::time::Duration;

use kvx_core::id::PeerId;
use kvx_core::memory::Region;
use kvx_core::port::{Port, RegionSet, TransferReport};
use kvx_core::transfer::{Mode, Segment};
use kvx_shm::{Options, SharedMemory, ShmBackend};

/// Of each region.
const BYTES: u64 = 1 << 20;

/// Makes memory.
type Make = fn() -> Region;

/// The kinds of memory, and what is said of bytes from them.
pub(crate) const KINDS: [(Make, &str); 2] = [
    (|| SharedMemory::region(BYTES).unwrap(), "mapped"),
    (|| Region::host(BYTES).unwrap(), "process_vm"),
];

/// Two ports that have met, each with a region of either kind.
pub(crate) struct Pair {
    pub(crate) one: Port,
    other: Port,
    pub(crate) peer: PeerId,
    set: RegionSet,
}

fn register(port: &Port) -> Vec<kvx_core::id::RegionId> {
    KINDS.iter().map(|(memory, _)| port.register(&memory()).unwrap()).collect()
}

impl Pair {
    pub(crate) fn new(options: &str) -> Self {
        let options = Options::read(&options.parse().unwrap()).unwrap();
        let [one, other] = [0, 1].map(|_| Port::new(ShmBackend::open(&options).unwrap()).unwrap());
        let (_, reply) = other.accept(&one.offer().unwrap()).unwrap();
        let (peer, completion) = one.complete(&reply).unwrap();
        other.finish(&completion).unwrap();
        let set = one.region_set(&register(&one)).unwrap();
        let keys: Vec<_> =
            register(&other).iter().map(|id| (other.key_blob(*id).unwrap(), BYTES)).collect();
        one.add_regions(peer, &keys).unwrap();
        Self { one, other, peer, set }
    }

    pub(crate) fn transfer(
        &self,
        mode: Mode,
        segments: &[Segment],
        note: Option<&[u8]>,
    ) -> TransferReport {
        let mut transfer = self.one.transfer(self.peer, mode, &self.set, segments, note).unwrap();
        let report = transfer.wait(Duration::from_secs(20)).expect("it settles").unwrap();
        if note.is_some() {
            self.other.wait_notified(Duration::from_secs(20)).unwrap().expect("it is heard of");
        }
        report
    }
}

/// The `at`-th of many segments between two regions, none of which continues another.
pub(crate) fn segment(local_region: usize, remote_region: usize, at: u64, bytes: u64) -> Segment {
    let [local_region, remote_region] =
        [local_region, remote_region].map(|region| u32::try_from(region).unwrap());
    let offset = at * 2 * bytes;
    Segment { local_region, remote_region, local_offset: offset, remote_offset: offset, bytes }
}
