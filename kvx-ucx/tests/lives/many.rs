//! Many of everything.

use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, Outcome, Submit, TransferBackend as _};
use kvx_core::id::TransferId;
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};

use crate::count::{Left, processor_time};
use crate::pair::{Pair, Way, alone, is_1_13, open, times, wait};

const BLOCK: u64 = 512;
const BLOCKS: u64 = 64;

/// Known failure 107: host memory that a library's cache of registrations keeps.
pub(crate) fn transfers_leave_nothing_behind() {
    let count = times(10_000);
    let pair = Pair::new();
    let [mine, theirs] = [0, 1].map(|_| Region::host(BLOCK * BLOCKS).unwrap());
    let (local, remote) = pair.lane(&mine, &theirs);
    let mut events = Events::with_limit(64);
    let (mut posted, mut settled, mut heard, mut before) = (0, 0, 0, None);
    while settled < count {
        if posted < count {
            let offset = posted % BLOCKS * BLOCK;
            let segment = PostedSegment {
                local,
                remote,
                local_offset: offset,
                remote_offset: offset,
                bytes: BLOCK,
            };
            let mode = if posted % 3 == 0 { Mode::Write } else { Mode::Read };
            let note = posted.to_le_bytes();
            let note = (posted % 5 == 0).then_some(&note[..]);
            let id = TransferId(posted);
            let said = pair.one.submit(id, pair.at_one, mode, &[segment], note).unwrap();
            posted += u64::from(said.is_posted());
            settled += u64::from(matches!(said, Submit::Done { .. }));
        }
        pair.one.poll(&mut events);
        for event in events.drain() {
            match event {
                Event::Settled { outcome: Outcome::Done { .. }, .. } => settled += 1,
                other => panic!("{other:?}"),
            }
        }
        pair.other.poll(&mut events);
        heard += events.drain().filter(|e| matches!(e, Event::Notified { .. })).count() as u64;
        if settled > count / 10 && before.is_none() {
            before = Some(Left::count());
        }
    }
    wait("all notifications", || {
        pair.other.poll(&mut events);
        heard += events.drain().filter(|e| matches!(e, Event::Notified { .. })).count() as u64;
        heard == count.div_ceil(5)
    });
    before.unwrap().is_all_that_is_left(&format!("{count} transfers"));
}

/// Whatever is moved, and by whichever way, kvx's own messages carry notifications, their acknowledgements and lists of ranges only.
pub(crate) fn no_data_travels_in_messages() {
    // UCX 1.13 has CMA there, too.
    alone("no_data_travels_in_messages", Way::Cma.variables(), || {
        no_data_in_messages(&Pair::new());
        for way in [Way::Tcp, Way::Cma, Way::SharedMemory] {
            let listed = no_data_in_messages(&Pair::over(way));
            // Over TCP, a list for each transfer, and a range for each mebibyte that was begun; but only 1.13 has none of TCP's writes.
            let ranges = 1 + 1 + SIZE.div_ceil(1 << 20);
            match way {
                Way::Tcp | Way::Cma if is_1_13() => assert_eq!(listed, 24 * ranges * 2),
                Way::Tcp => assert_eq!(listed, 24 * ranges),
                Way::Cma => assert_eq!(listed, 0),
                Way::SharedMemory => {}
            }
        }
    });
}

const SIZE: u64 = 4 << 20;

/// Bytes of lists that were sent.
fn no_data_in_messages(pair: &Pair) -> u64 {
    let [mine, theirs] = [0, 1].map(|_| Region::host(SIZE).unwrap());
    let (local, remote) = pair.lane(&mine, &theirs);
    for (id, bytes) in [(1, 1), (2, 4096), (3, SIZE)] {
        let segment = PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes };
        for (mode, id) in [(Mode::Read, id), (Mode::Write, id + 10)] {
            pair.transfer(TransferId(id), mode, &[segment]);
        }
    }
    let mut events = Events::with_limit(8);
    let posted = pair.one.submit(TransferId(99), pair.at_one, Mode::Read, &[], Some(&[7; 100]));
    if posted.unwrap() == Submit::Submitted {
        wait("the notification to be taken", || {
            pair.one.poll(&mut events);
            events.drain().count() > 0
        });
    }
    let (one, other) = (pair.one.counters(), pair.other.counters());
    assert!(one.list_bytes < 1000, "{one:?}");
    assert_eq!((one.notification_bytes, one.message_bytes), (100, 100 + one.list_bytes), "{one:?}");
    // One acknowledgement, of eight bytes.
    assert_eq!(
        (other.notification_bytes, other.list_bytes, other.message_bytes),
        (0, 0, 8),
        "{other:?}"
    );
    one.list_bytes
}

/// Known failures 69 and 70: a pair that parts meets again, as often as it likes.
pub(crate) fn connections_leave_nothing_behind() {
    let count = times(100);
    let (one, other) = (open(), open());
    let memory = Region::host(1 << 20).unwrap();
    let mut before = Left::count();
    for round in 0..count {
        // UCX keeps some things for a while, more or fewer of them: as many as there ever were after some connections.
        if (count / 4..count / 2).contains(&round) {
            before = before.most(&Left::count());
        }
        let pair = Pair::meet(&one, &other);
        let (local, remote) = pair.lane(&memory, &memory);
        let registered = [(&one, local), (&other, pair.theirs.get())];
        let segment =
            PostedSegment { local, remote, local_offset: 0, remote_offset: 2048, bytes: 2048 };
        for (id, mode) in [(1, Mode::Read), (2, Mode::Write)] {
            pair.transfer(TransferId(id), mode, &[segment]);
        }
        pair.part();
        for (side, region) in registered {
            side.deregister(region).unwrap();
        }
    }
    before.is_all_that_is_left(&format!("{count} connections"));
}

/// A backend whose peers are alive but silent uses no processor.
pub(crate) fn an_idle_pair_sleeps() {
    let pair = Pair::new();
    let [mine, theirs] = [0, 1].map(|_| Region::host(4096).unwrap());
    let (local, remote) = pair.lane(&mine, &theirs);
    let segment = PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 4096 };
    pair.transfer(TransferId(1), Mode::Read, &[segment]);
    let mut least = Duration::MAX;
    for _ in 0..5 {
        let begin = processor_time();
        std::thread::sleep(Duration::from_millis(500));
        least = least.min(processor_time().saturating_sub(begin));
    }
    assert!(least < Duration::from_millis(5), "{least:?} of 500 ms");
}

/// A program that does not poll is sent a bounded number of notifications, and hears all of them once it does.
pub(crate) fn notifications_wait_for_room() {
    let pair = Pair::new();
    let mut events = Events::with_limit(64);
    let (mut posted, mut settled, mut moved) = (0_u64, 0_u64, Instant::now());
    // Until nothing has moved for a while: there is room for no more.
    while moved.elapsed() < Duration::from_millis(300) {
        let note = posted.to_le_bytes();
        let result =
            pair.one.submit(TransferId(posted), pair.at_one, Mode::Write, &[], Some(&note));
        let said = result.unwrap();
        settled += u64::from(matches!(said, Submit::Done { .. }));
        if said.is_posted() {
            (posted, moved) = (posted + 1, Instant::now());
            assert!(posted < 20_000, "there is no bound");
        }
        pair.one.poll(&mut events);
        settled += events.drain().count() as u64;
    }
    let most = u64::from(pair.one.capabilities().limits.max_in_flight);
    assert_eq!(posted - settled, most, "as many as may be in flight wait for room");
    let mut heard = 0;
    wait("all that was posted to be heard", || {
        pair.other.poll(&mut events);
        heard += events.drain().filter(|e| matches!(e, Event::Notified { .. })).count() as u64;
        pair.one.poll(&mut events);
        settled += events.drain().count() as u64;
        heard == posted && settled == posted
    });
}

/// The loop of benchmarks moves what it says.
pub(crate) fn the_raw_loop_moves_what_it_says() {
    use kvx_core::transfer::Segment;
    use kvx_ucx::limit::Raw;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    const SIZE: usize = 1 << 20;
    let options = format!("devices={}", crate::pair::lasting_interface());
    let options = kvx_ucx::Options::read(&options.parse().unwrap()).unwrap();
    let [mine, theirs] = [0, 1].map(|_| Region::host(SIZE as u64).unwrap());
    let mut other = Raw::open(&options).unwrap();
    let key = other.register(&theirs).unwrap();
    let address = other.address().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let serving = std::thread::spawn(move || {
        while !stopped.load(SeqCst) {
            other.progress();
        }
    });
    let mut one = Raw::open(&options).unwrap();
    one.register(&mine).unwrap();
    one.connect(&address, &[key]).unwrap();
    let segments: Vec<Segment> = (0..256)
        .map(|index| Segment {
            local_region: 0,
            remote_region: 0,
            local_offset: index * 4096,
            remote_offset: (255 - index) * 4096,
            bytes: 4096,
        })
        .collect();
    let mut seen = [0; 4];
    theirs.write_at(255 * 4096, &[1, 2, 3, 4]).unwrap();
    one.run(Mode::Read, &segments, 16).unwrap();
    mine.read_at(0, &mut seen).unwrap();
    assert_eq!(seen, [1, 2, 3, 4]);
    mine.write_at(0, &[9, 8, 7, 6]).unwrap();
    one.run(Mode::Write, &segments, 16).unwrap();
    theirs.read_at(255 * 4096, &mut seen).unwrap();
    assert_eq!(seen, [9, 8, 7, 6]);
    let outside = Segment { local_offset: SIZE as u64, ..segments[0] };
    assert!(one.run(Mode::Read, &[outside], 16).is_err());
    stop.store(true, SeqCst);
    drop(one);
    serving.join().unwrap();
}
