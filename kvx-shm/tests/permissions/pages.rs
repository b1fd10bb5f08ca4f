//! Huge pages that were asked for are there.

use std::fs;
use std::time::Duration;

use kvx_core::memory::Region;
use kvx_core::port::Port;
use kvx_core::transfer::{Mode, Segment};
use kvx_shm::{HugePages, Options, Placement, SharedMemory, ShmBackend};

const POOL: &str = "/proc/sys/vm/nr_hugepages";
const BYTES: u64 = 4 << 20;

/// The pool of huge pages, larger by some, until this is dropped.
struct Pool(u64);

impl Pool {
    fn size() -> u64 {
        fs::read_to_string(POOL).unwrap().trim().parse().unwrap()
    }

    fn larger_by(pages: u64) -> Result<Self, String> {
        let before = Self::size();
        fs::write(POOL, (before + pages).to_string()).map_err(|e| format!("{POOL}: {e}"))?;
        let pool = Self(before);
        match Self::size() {
            now if now >= before + pages => Ok(pool),
            now => Err(format!("the kernel found no {pages} huge pages: {before} became {now}")),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        fs::write(POOL, self.0.to_string()).unwrap();
    }
}

/// Of the mapping at an address, in kB.
fn page_size(address: usize) -> u64 {
    let text = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut here = false;
    for line in text.lines() {
        let first = line.split_whitespace().next().unwrap();
        if let Some((from, to)) = first.split_once('-')
            && let (Ok(from), Ok(to)) =
                (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
        {
            here = (from..to).contains(&address);
        } else if here && let Some(size) = line.strip_prefix("KernelPageSize:") {
            return size.trim().trim_end_matches(" kB").parse().unwrap();
        }
    }
    panic!("nothing is mapped at {address:#x}");
}

#[test]
fn required_huge_pages_back_the_memory_and_are_moved() {
    let normal = SharedMemory::region(BYTES).unwrap();
    assert_eq!(page_size(normal.address().addr().get()), 4);
    let placement = Placement::new().with_huge_pages(HugePages::Require);
    let pool = match Pool::larger_by(4) {
        Ok(pool) => pool,
        Err(why) => {
            eprintln!("skipped: huge pages need root and free memory: {why}");
            return;
        }
    };
    let options = Options::read(&"huge_pages=require".parse().unwrap()).unwrap();
    let [one, other] = [0, 1].map(|_| Port::new(ShmBackend::open(&options).unwrap()).unwrap());
    let memory = [&one, &other].map(|port| port.allocate(BYTES).unwrap());
    for region in &memory {
        assert_eq!(page_size(region.address().addr().get()), 2048);
    }
    // The pool is used up.
    let error = SharedMemory::placed(BYTES * 1024, &placement).unwrap_err();
    assert!(error.remedy().is_some_and(|remedy| remedy.contains("vm.nr_hugepages")), "{error}");
    let (_, reply) = other.accept(&one.offer().unwrap()).unwrap();
    let (peer, completion) = one.complete(&reply).unwrap();
    other.finish(&completion).unwrap();
    let [mine, theirs]: [Region; 2] = memory;
    theirs.write_at(BYTES - 5, b"bytes").unwrap();
    let set = one.region_set(&[one.register(&mine).unwrap()]).unwrap();
    let key = other.key_blob(other.register(&theirs).unwrap()).unwrap();
    one.add_regions(peer, &[(key, BYTES)]).unwrap();
    let segment = Segment {
        local_region: 0,
        remote_region: 0,
        local_offset: 0,
        remote_offset: BYTES - 4096,
        bytes: 4096,
    };
    let mut transfer = one.transfer(peer, Mode::Read, &set, &[segment], None).unwrap();
    let report = transfer.wait(Duration::from_secs(10)).expect("it settles").unwrap();
    assert_eq!(report.route.as_deref(), Some("mapped"));
    let mut found = [0; 5];
    mine.read_at(4096 - 5, &mut found).unwrap();
    assert_eq!(&found, b"bytes");
    // Given back before the pool shrinks again.
    drop((one, other, mine, theirs, set));
    drop(pool);
}
