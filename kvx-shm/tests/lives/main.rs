//! Many transfers, connections and deaths leave nothing behind: no descriptor, mapping, thread or memory.
//!
//! With `KVX_LONG=1` ten times as many.

#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

#[cfg(test)]
mod count;
#[cfg(test)]
mod pair;
#[cfg(test)]
mod peer;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, Outcome, Submit, TransferBackend as _};
use kvx_core::handshake::Handshake as _;
use kvx_core::id::TransferId;
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_shm::SharedMemory;

use count::Left;
use pair::{Pair, open, open_with, wait};
use peer::Process;

/// What is left is counted for the whole process, so one test runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn times(short: u64) -> u64 {
    if std::env::var("KVX_LONG").is_ok_and(|value| value == "1") { short * 10 } else { short }
}

const BLOCK: u64 = 512;
const BLOCKS: u64 = 64;

#[test]
fn transfers_leave_nothing_behind() {
    let _alone = alone();
    let count = times(100_000);
    let pair = Pair::new();
    for shared in [true, false] {
        let memory = |_| {
            if shared {
                SharedMemory::region(BLOCK * BLOCKS).unwrap()
            } else {
                Region::host(BLOCK * BLOCKS).unwrap()
            }
        };
        let [mine, theirs] = [0, 1].map(memory);
        let (local, remote) = pair.lane(&mine, &theirs);
        let mut events = Events::with_limit(64);
        let (mut posted, mut settled, mut heard, mut before) = (0, 0, 0, None);
        let half = count / 2;
        while settled < half {
            if posted < half {
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
                let submit = pair.one.submit(id, pair.at_one, mode, &[segment], note).unwrap();
                posted += u64::from(submit.is_posted());
                settled += u64::from(matches!(submit, Submit::Done { .. }));
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
            if settled > half / 10 && before.is_none() {
                before = Some(Left::count());
            }
        }
        wait("all notifications", || {
            pair.other.poll(&mut events);
            heard += events.drain().filter(|e| matches!(e, Event::Notified { .. })).count() as u64;
            heard == half.div_ceil(5)
        });
        before.unwrap().is_all_that_is_left(&format!("{half} transfers, shared: {shared}"));
    }
}

#[test]
fn connections_leave_nothing_behind() {
    let _alone = alone();
    let count = times(1000);
    let (one, other) = (open(), open());
    let memory = SharedMemory::region(1 << 20).unwrap();
    let borrowed = Region::host(4096).unwrap();
    let mut before = None;
    for round in 0..count {
        if round == count / 10 {
            before = Some(Left::at_rest());
        }
        let pair = Pair::meet(&one, &other);
        let memory = if round % 2 == 0 { &memory } else { &borrowed };
        let (local, remote) = pair.lane(memory, memory);
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
    before.unwrap().is_all_that_is_left(&format!("{count} connections"));
}

/// The peer is killed in the midst of transfers. All of them settle, and nothing of it is left.
#[test]
fn killed_peers_leave_nothing_behind() {
    const TEST: &str = "killed_peers_leave_nothing_behind";
    if peer::serve_if_asked() {
        return;
    }
    let _alone = alone();
    let count = times(100);
    let one = open();
    let memory = SharedMemory::region(1 << 20).unwrap();
    let local = one.register(&memory).unwrap();
    let mut before = None;
    let mut events = Events::with_limit(64);
    for round in 0..count {
        if round == count / 10 {
            before = Some(Left::at_rest());
        }
        let mut process = Process::start(TEST);
        let (peer, remote) = process.meet(&one);
        let (mut posted, mut settled, mut down) = (0, 0, false);
        for index in 0..20_u64 {
            let segment = PostedSegment {
                local,
                remote,
                local_offset: 0,
                remote_offset: 0,
                bytes: 1 << (index % 21),
            };
            let mode = if index % 2 == 0 { Mode::Read } else { Mode::Write };
            let id = TransferId(round * 100 + index);
            match one.submit(id, peer, mode, &[segment], Some(b"note")) {
                Ok(Submit::Submitted) => posted += 1,
                Ok(Submit::Done { .. } | Submit::Full) => {}
                Err(error) => panic!("{error}"),
            }
            if index == round % 20 {
                process.kill();
                break;
            }
        }
        let begin = Instant::now();
        wait("a killed peer to be down", || {
            one.poll(&mut events);
            for event in events.drain() {
                match event {
                    Event::Settled { .. } => settled += 1,
                    Event::PeerDown { error, .. } => {
                        assert!(error.is_some() && settled == posted, "{settled} of {posted}");
                        down = true;
                    }
                    _ => {}
                }
            }
            down
        });
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    }
    before.unwrap().is_all_that_is_left(&format!("{count} killed peers"));
}

/// The peer is killed while several threads read from it, together. What it had does not count, and nothing of it is left.
#[test]
fn peers_killed_while_several_threads_read_leave_nothing_behind() {
    const TEST: &str = "peers_killed_while_several_threads_read_leave_nothing_behind";
    const MEMORY: u64 = 1 << 20;
    const TIMES: u64 = 16;
    if peer::serve_if_asked() {
        return;
    }
    let _alone = alone();
    let count = times(30);
    let one = open_with("copy_threads=3,inline_bytes=0,together_bytes=0");
    let memory = SharedMemory::region(MEMORY * TIMES).unwrap();
    let local = one.register(&memory).unwrap();
    let mut before = None;
    let mut events = Events::with_limit(64);
    for round in 0..count {
        if round == count / 10 {
            before = Some(Left::at_rest());
        }
        let mut process = Process::start(TEST);
        let (peer, remote) = process.meet(&one);
        // All of the peer's memory, many times.
        let segments: Vec<_> = (0..TIMES)
            .map(|at| PostedSegment {
                local,
                remote,
                local_offset: at * MEMORY,
                remote_offset: 0,
                bytes: MEMORY,
            })
            .collect();
        for index in 0..4 {
            let posted =
                one.submit(TransferId(round * 4 + index), peer, Mode::Read, &segments, None);
            assert_eq!(posted.unwrap(), Submit::Submitted);
        }
        std::thread::sleep(Duration::from_micros(round * 97 % 3000));
        process.kill();
        let mut settled = 0;
        wait("a killed peer to be down", || {
            one.poll(&mut events);
            let mut down = false;
            for event in events.drain() {
                match event {
                    Event::Settled { .. } => settled += 1,
                    Event::PeerDown { error, .. } => {
                        assert!(error.is_some() && settled == 4, "{settled} of 4");
                        down = true;
                    }
                    other => panic!("{other:?}"),
                }
            }
            down
        });
        // Nobody writes any more.
        memory.write_at(0, &[9; 4096]).unwrap();
        std::thread::sleep(Duration::from_micros(200));
        let mut seen = [0; 4096];
        memory.read_at(0, &mut seen).unwrap();
        assert_eq!(seen, [9; 4096]);
    }
    before.unwrap().is_all_that_is_left(&format!("{count} killed peers"));
}

/// What the other tests count finds one descriptor, mapping or thread too many, and memory beyond what an allocator keeps.
#[test]
fn one_too_many_of_anything_is_found() {
    let _alone = alone();
    let before = Left::at_rest();
    assert!(before.covers(&Left::count()));
    let descriptor = std::fs::File::open("/dev/null").unwrap();
    assert!(!before.covers(&Left::count()), "a descriptor");
    drop(descriptor);
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || wait.recv().is_err());
    assert!(!before.covers(&Left::count()), "a thread");
    drop(go);
    thread.join().unwrap();
    let memory = SharedMemory::new(4096).unwrap();
    assert_eq!(Left::count().mappings, before.mappings + 1);
    drop(memory);
    let pages = std::hint::black_box(vec![1_u8; 32 << 20]);
    assert!(!before.covers(&Left::count()), "memory");
    drop(pages);
    before.is_all_that_is_left("all of them");
}

/// A backend whose peers are alive but silent uses no processor, and one that is dropped leaves no thread.
#[test]
fn an_idle_pair_sleeps_and_a_dropped_one_is_gone() {
    let _alone = alone();
    let before = Left::at_rest();
    let pair = Pair::new();
    let begin = count::processor_time();
    std::thread::sleep(Duration::from_millis(500));
    let used = count::processor_time() - begin;
    assert!(used < Duration::from_millis(5), "{used:?} of 500 ms");
    assert_ne!(pair.one.incarnation(), pair.other.incarnation());
    drop(pair);
    before.is_all_that_is_left("a pair that was dropped");
}

/// A peer whose memory is gone, or was never what it said, costs a transfer and nothing else.
#[test]
fn memory_that_is_gone_is_an_error() {
    let _alone = alone();
    let pair = Pair::new();
    let mine = SharedMemory::region(1 << 20).unwrap();
    // Large enough that the allocator gives the pages back.
    let theirs = Region::host(64 << 20).unwrap();
    let (local, remote) = pair.lane(&mine, &theirs);
    let segment =
        PostedSegment { local, remote, local_offset: 0, remote_offset: 4096, bytes: 1 << 20 };
    pair.transfer(TransferId(1), Mode::Read, &[segment]);
    pair.other.deregister(pair.theirs.get()).unwrap();
    drop(theirs);
    for (id, mode) in [(2, Mode::Read), (3, Mode::Write)] {
        let posted = pair.one.submit(TransferId(id), pair.at_one, mode, &[segment], None);
        assert_eq!(posted.unwrap(), Submit::Submitted);
        let mut events = Events::with_limit(8);
        wait("a transfer to settle", || {
            pair.one.poll(&mut events);
            events.drain().any(|event| match event {
                Event::Settled { outcome: Outcome::Failed(error), .. } => {
                    assert_eq!(error.kind(), kvx_core::ErrorKind::Peer, "{error}");
                    true
                }
                other => panic!("{other:?}"),
            })
        });
    }
    // The connection is as good as before.
    let again = Region::host(4096).unwrap();
    let (_, remote) = pair.lane(&mine, &again);
    let segment = PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 4096 };
    pair.transfer(TransferId(4), Mode::Write, &[segment]);
}

/// A peer that stands still holds nothing up: severing it ends, and so does revoking.
#[test]
fn a_peer_that_stands_still_is_severed_and_revoked() {
    const TEST: &str = "a_peer_that_stands_still_is_severed_and_revoked";
    if peer::serve_if_asked() {
        return;
    }
    let _alone = alone();
    for revoke in [false, true] {
        let one = open();
        let memory = SharedMemory::region(1 << 20).unwrap();
        let local = one.register(&memory).unwrap();
        let mut process = Process::start(TEST);
        let (peer, remote) = process.meet(&one);
        process.stop();
        let segment =
            PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 1 << 20 };
        let posted = one.submit(TransferId(1), peer, Mode::Write, &[segment], None).unwrap();
        assert_eq!(posted, Submit::Submitted);
        let begin = Instant::now();
        if revoke {
            one.revoke(peer).unwrap()
        } else {
            one.sever(peer).unwrap()
        }
        let mut events = Events::with_limit(8);
        let mut seen = Vec::new();
        wait("the peer to be down", || {
            one.poll(&mut events);
            seen.extend(events.drain());
            matches!(seen.last(), Some(Event::PeerDown { error: None, .. }))
        });
        assert!(matches!(seen[0], Event::Settled { outcome: Outcome::Cancelled, .. }), "{seen:?}");
        assert!(begin.elapsed() < kvx_core::backend::SEVER_BOUND, "{:?}", begin.elapsed());
    }
}

/// A program that does not poll is sent a bounded number of notifications, and hears all of them once it does.
#[test]
fn notifications_wait_for_a_program_that_does_not_poll() {
    let _alone = alone();
    let pair = Pair::new();
    let mut events = Events::with_limit(64);
    let (mut posted, mut settled, mut moved) = (0_u64, 0_u64, Instant::now());
    // Until nothing has moved for a while: there is room for no more.
    while moved.elapsed() < Duration::from_millis(300) {
        let note = posted.to_le_bytes();
        let result =
            pair.one.submit(TransferId(posted), pair.at_one, Mode::Write, &[], Some(&note));
        let submit = result.unwrap();
        if submit.is_posted() {
            (posted, moved) = (posted + 1, Instant::now());
            settled += u64::from(matches!(submit, Submit::Done { .. }));
            assert!(posted < 200_000, "there is no bound");
        }
        pair.one.poll(&mut events);
        settled += events.drain().count() as u64;
    }
    assert_eq!(posted - settled, 64, "as many as may be in flight wait for room");
    let mut heard = 0;
    wait("all that was posted to be heard, in order", || {
        pair.other.poll(&mut events);
        for event in events.drain() {
            let Event::Notified { payload, .. } = event else { panic!("{event:?}") };
            assert_eq!(payload, u64::to_le_bytes(heard));
            heard += 1;
        }
        pair.one.poll(&mut events);
        settled += events.drain().count() as u64;
        heard == posted && settled == posted
    });
}
