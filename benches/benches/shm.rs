//! What moving costs within one host, beside what the machine can do: the same blocks by `memcpy`, and by `process_vm_readv`.
//!
//! Blocks of 32 KiB, scattered over a quarter of a gibibyte on each side: Llama 3.1 8B, a block and a layer. The column of bytes is per
//! second. Both engines are in this process, which makes no difference to how bytes are moved; between processes `kvx bench`
//! measures.

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    divan::main();
}

#[cfg(target_os = "linux")]
mod shm {
    use std::os::fd::BorrowedFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use divan::Bencher;
    use divan::counter::BytesCount;
    use kvx_core::backend::{Event, Events, Submit, TransferBackend as _};
    use kvx_core::handshake::Handshake as _;
    use kvx_core::id::{PeerId, TransferId};
    use kvx_core::memory::{MemoryRegistry as _, Region};
    use kvx_core::transfer::{Mode, PostedSegment};
    use kvx_shm::{Options, SharedMemory, ShmBackend};
    use rustix::event::{PollFd, PollFlags, poll};

    const SIZE: usize = 32 << 10;
    const BLOCK: u64 = SIZE as u64;
    const BLOCKS: u64 = 8 << 10;
    const MOVED: u64 = 2048;

    /// Which blocks go where: a permutation of each side's, as block tables are.
    fn table() -> Vec<(u64, u64)> {
        (0..MOVED).map(|at| (at * 4_099 % BLOCKS, at * 6_151 % BLOCKS)).collect()
    }

    fn memory(shared: bool) -> Region {
        let region = if shared {
            SharedMemory::region(BLOCKS * BLOCK).expect("there is memory")
        } else {
            Region::host(BLOCKS * BLOCK).expect("there is memory")
        };
        let page = [1; 4096];
        for at in (0..region.bytes()).step_by(page.len()) {
            region.write_at(at, &page).expect("inside the region");
        }
        region
    }

    struct Pair {
        one: Arc<ShmBackend>,
        other: Arc<ShmBackend>,
        at_one: PeerId,
    }

    fn pair(options: &Options) -> Pair {
        let open = || ShmBackend::open(options).expect("it can be opened");
        let (one, other) = (open(), open());
        let offer = one.offer().expect("an offer");
        let (_, reply) = other.accept(&offer).expect("a reply");
        let (at_one, completion) = one.complete(&reply).expect("a completion");
        other.finish(&completion).expect("the end of the handshake");
        Pair { one, other, at_one }
    }

    fn sleep_on(descriptor: Option<BorrowedFd<'_>>) {
        let descriptor = descriptor.expect("a descriptor");
        let mut ready = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
        poll(&mut ready, None).expect("polling works");
    }

    /// Sleeps until so many transfers have settled.
    fn settle(backend: &ShmBackend, mut left: usize) {
        let mut events = Events::with_limit(64);
        while left > 0 {
            sleep_on(backend.event_fd());
            backend.poll(&mut events);
            for event in events.drain() {
                if let Event::Settled { outcome, .. } = event {
                    assert!(outcome.is_done(), "{outcome:?}");
                    left -= 1;
                }
            }
        }
    }

    fn moved(bencher: Bencher<'_, '_>, shared: bool, mode: Mode) {
        let pair = pair(&Options::default());
        let (mine, theirs) = (memory(shared), memory(shared));
        let local = pair.one.register(&mine).expect("a registration");
        let remote = pair.other.register(&theirs).expect("a registration");
        let blob = pair.other.key_blob(remote).expect("a key");
        let remote = pair.one.import_key(pair.at_one, &blob).expect("an import");
        let segments: Vec<_> = table()
            .into_iter()
            .map(|(from, to)| PostedSegment {
                local,
                remote,
                local_offset: to * BLOCK,
                remote_offset: from * BLOCK,
                bytes: BLOCK,
            })
            .collect();
        let mut next = 0;
        let mut run = || {
            let mut count = 0;
            for batch in segments.chunks(512) {
                next += 1;
                let posted = pair.one.submit(TransferId(next), pair.at_one, mode, batch, None);
                assert_eq!(posted.expect("it is posted"), Submit::Submitted);
                count += 1;
            }
            settle(&pair.one, count);
        };
        run();
        bencher.counter(BytesCount::new(MOVED * BLOCK)).bench_local(run);
    }

    #[divan::bench(sample_count = 31, sample_size = 1, args = [Mode::Read, Mode::Write])]
    fn shared(bencher: Bencher<'_, '_>, mode: Mode) {
        moved(bencher, true, mode);
    }

    #[divan::bench(sample_count = 31, sample_size = 1, args = [Mode::Read, Mode::Write])]
    fn borrowed(bencher: Bencher<'_, '_>, mode: Mode) {
        moved(bencher, false, mode);
    }

    /// The limit of shared memory: the same blocks, copied by this thread.
    #[divan::bench(sample_count = 31, sample_size = 1)]
    fn memcpy(bencher: Bencher<'_, '_>) {
        let (mine, theirs) = (memory(true), memory(true));
        bencher.counter(BytesCount::new(MOVED * BLOCK)).bench_local(|| {
            for (from, to) in table() {
                let (from, to) = (at(&theirs, from), at(&mine, to));
                // SAFETY: whole blocks inside two regions, to which there are no references.
                unsafe { from.copy_to_nonoverlapping(to, SIZE) };
            }
        });
    }

    /// The limit of borrowed memory: the same vectors, read by this thread.
    #[divan::bench(sample_count = 31, sample_size = 1, args = [64, 1024])]
    fn process_vm_readv(bencher: Bencher<'_, '_>, vectors: usize) {
        let (mine, theirs) = (memory(false), memory(false));
        let process = std::process::id().cast_signed();
        let vector = |base| libc::iovec { iov_base: base, iov_len: SIZE };
        bencher.counter(BytesCount::new(MOVED * BLOCK)).bench_local(|| {
            for part in table().chunks(vectors) {
                let remote: Vec<_> =
                    part.iter().map(|(from, _)| vector(at(&theirs, *from).cast())).collect();
                let local: Vec<_> =
                    part.iter().map(|(_, to)| vector(at(&mine, *to).cast())).collect();
                let count = part.len() as libc::c_ulong;
                let (to, from) = (local.as_ptr(), remote.as_ptr());
                // SAFETY: whole blocks inside two regions, to which there are no references.
                let done = unsafe { libc::process_vm_readv(process, to, count, from, count, 0) };
                assert_eq!(usize::try_from(done), Ok(part.len() * SIZE));
            }
        });
    }

    fn at(region: &Region, block: u64) -> *mut u8 {
        region.address().as_ptr().wrapping_add(usize::try_from(block).expect("few blocks") * SIZE)
    }

    /// There and back again: both sides sleep in between, or both poll without sleeping.
    #[divan::bench(sample_count = 1000, sample_size = 1, args = ["asleep", "spinning"])]
    fn notified_and_answered(bencher: Bencher<'_, '_>, how: &str) {
        let mut options = Options::default();
        options.spin_us = if how == "asleep" { 0 } else { 1000 };
        let rest = |backend: &ShmBackend| {
            if how == "asleep" {
                sleep_on(backend.event_fd());
            }
        };
        let Pair { one, other, at_one } = pair(&options);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let echo = scope.spawn(|| {
                let (mut events, mut next) = (Events::with_limit(64), 0);
                while !stop.load(Relaxed) {
                    rest(&other);
                    other.poll(&mut events);
                    for event in events.drain() {
                        if let Event::Notified { peer, payload } = event {
                            next += 1;
                            let (id, note) = (TransferId(next), Some(&payload[..]));
                            let posted = other.submit(id, peer, Mode::Write, &[], note);
                            assert!(posted.expect("it is taken").is_posted());
                        }
                    }
                }
            });
            let (mut events, mut next) = (Events::with_limit(64), 0);
            let mut once = || {
                next += 1;
                let posted = one.submit(TransferId(next), at_one, Mode::Write, &[], Some(b"there"));
                let posted = posted.expect("it is taken");
                assert!(posted.is_posted());
                let (mut settled, mut heard) = (matches!(posted, Submit::Done { .. }), false);
                while !(settled && heard) {
                    rest(&one);
                    one.poll(&mut events);
                    for event in events.drain() {
                        settled |= matches!(event, Event::Settled { .. });
                        heard |= matches!(event, Event::Notified { .. });
                    }
                }
            };
            once();
            bencher.bench_local(&mut once);
            stop.store(true, Relaxed);
            if how == "asleep" {
                // To wake it.
                once();
            }
            echo.join().expect("the other side is well");
        });
    }
}
