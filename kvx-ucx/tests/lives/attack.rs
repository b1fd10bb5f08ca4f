//! Attacks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use kvx_core::backend::{Event, Events, Outcome, SEVER_BOUND, Submit, TransferBackend as _};
use kvx_core::handshake::{Handshake as _, HandshakeBytes};
use kvx_core::id::TransferId;
use kvx_core::memory::{KeyBlob, MemoryRegistry as _, Region};
use kvx_core::port::Port;
use kvx_core::transfer::{Mode, PostedSegment, Segment};

use crate::count::Left;
use crate::pair::{Dice, Pair, Way, alone, block, open, open_with, times, wait};

fn ways() -> [Way; 2] {
    [Way::Tcp, Way::Cma]
}

/// Every byte changed, every length.
pub(crate) fn whatever_is_damaged_is_refused() {
    let (one, other) = (open(), open());
    let offer = one.offer().unwrap();
    let refuse = |bytes: Vec<u8>, what: &str| {
        if let Ok(bytes) = HandshakeBytes::new(bytes) {
            for result in [other.accept(&bytes).map(drop), other.complete(&bytes).map(drop), other.finish(&bytes).map(drop)] {
                let error = result.expect_err(what);
                assert_eq!(error.kind(), kvx_core::ErrorKind::Peer, "{what}: {error}");
            }
        }
    };
    let all = |bytes: &[u8], refuse: &dyn Fn(Vec<u8>, &str)| {
        for at in 0..bytes.len() {
            for change in [1, 0x80, 0xff] {
                let mut wrong = bytes.to_vec();
                wrong[at] ^= change;
                refuse(wrong, &format!("byte {at} changed by {change}"));
            }
            refuse(bytes[..at].to_vec(), &format!("{at} bytes"));
            refuse(bytes[at + 1..].to_vec(), &format!("from {at}"));
            let mut more = bytes.to_vec();
            more.insert(at, 0);
            refuse(more, &format!("one more at {at}"));
        }
        for more in [1, 7, 8, 100, 1000] {
            let mut wrong = bytes.to_vec();
            wrong.resize(bytes.len() + more, 0);
            refuse(wrong, "longer");
        }
    };
    all(offer.as_bytes(), &refuse);
    let (at_other, reply) = other.accept(&offer).unwrap();
    all(reply.as_bytes(), &|bytes, what| {
        if let Ok(bytes) = HandshakeBytes::new(bytes) {
            one.complete(&bytes).map(drop).expect_err(what);
        }
    });
    let (at_one, completion) = one.complete(&reply).unwrap();
    all(completion.as_bytes(), &refuse);
    assert_eq!(other.finish(&completion).unwrap(), at_other);
    let memory = Region::host(1 << 20).unwrap();
    let blob = other.key_blob(other.register(&memory).unwrap()).unwrap();
    all(blob.as_bytes(), &|bytes, what| {
        if let Ok(bytes) = KeyBlob::new(bytes) {
            let error = one.import_key(at_one, &bytes).expect_err(what);
            assert_eq!(error.kind(), kvx_core::ErrorKind::Peer, "{what}: {error}");
        }
    });
    let remote = one.import_key(at_one, &blob).unwrap();
    let local = one.register(&memory).unwrap();
    let segment = PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 4096 };
    crate::pair::transfer(&one, at_one, TransferId(1), Mode::Read, &[segment]);
}

/// A region is deregistered, on either side, while transfers use it.
pub(crate) fn regions_go_while_transfers_use_them() {
    alone("regions_go_while_transfers_use_them", Way::Cma.variables(), || {
        for way in ways() {
            let pair = Pair::over(way);
            let mut dice = Dice::new(&format!("deregistering over {way}"));
            let mut before = None;
            let (mut done, mut failed) = (0, 0);
            for round in 0..times(40) {
                if round == times(20) {
                    before = Some(Left::at_rest());
                }
                let [mine, theirs] = [0, 1].map(|_| Region::host(4 << 20).unwrap());
                let (local, remote) = pair.lane(&mine, &theirs);
                drop(mine);
                let mut posted = 0;
                for index in 0..8 {
                    let segment = PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 4 << 20 };
                    let mode = if (index + round) % 2 == 0 { Mode::Read } else { Mode::Write };
                    let said = pair.one.submit(TransferId(index), pair.at_one, mode, &[segment], Some(b"note")).unwrap();
                    assert_eq!(said, Submit::Submitted);
                    posted += 1;
                }
                std::thread::sleep(Duration::from_micros(dice.below(3000)));
                let ours = dice.below(2) == 0;
                if ours {
                    pair.one.deregister(local).unwrap();
                    pair.one.release_key(pair.at_one, remote).unwrap();
                } else {
                    pair.other.deregister(pair.theirs.get()).unwrap();
                }
                let (mut events, mut settled, begin) = (Events::with_limit(64), 0, Instant::now());
                while settled < posted {
                    assert!(begin.elapsed() < Duration::from_secs(5), "{way}, round {round}: {settled} of {posted}");
                    pair.one.poll(&mut events);
                    for event in events.drain() {
                        match event {
                            Event::Settled { outcome: Outcome::Done { .. }, .. } => done += 1,
                            Event::Settled { outcome: Outcome::Failed(error), .. } if !ours => {
                                assert!(error.message().contains("no such region"), "{error}");
                                failed += 1;
                            }
                            other => panic!("{way}, round {round}: {other:?}"),
                        }
                        settled += 1;
                    }
                    pair.other.poll(&mut events);
                    for event in events.drain() {
                        assert!(matches!(event, Event::Notified { .. }), "{event:?}");
                    }
                }
                drop(theirs);
                if ours {
                    pair.other.deregister(pair.theirs.get()).unwrap();
                } else {
                    pair.one.deregister(local).unwrap();
                    pair.one.release_key(pair.at_one, remote).unwrap();
                }
            }
            eprintln!("{way}: {done} done, {failed} refused");
            before.unwrap().is_all_that_is_left("regions that went");
        }
    });
}

/// Both sides post, and either severs at any moment, or both do.
pub(crate) fn severed_at_any_moment_and_met_again() {
    alone("severed_at_any_moment_and_met_again", Way::Cma.variables(), || {
        for way in ways() {
            let open = || open_with(&way.options()).unwrap();
            let (one, other) = (open(), open());
            let memory = Region::host(1 << 20).unwrap();
            let mut dice = Dice::new(&format!("severing over {way}"));
            let mut before = None;
            let (mut slowest, mut outcomes) = (Duration::ZERO, [0_u64; 3]);
            for round in 0..times(200) {
                if round == times(100) {
                    before = Some(Left::at_rest());
                }
                let pair = Pair::meet(&one, &other);
                let here = one.register(&memory).unwrap();
                let there = other.register(&memory).unwrap();
                // Some rounds sever before there is a connection.
                let sides = [
                    (&one, pair.at_one, here, one.import_key(pair.at_one, &other.key_blob(there).unwrap()).unwrap()),
                    (&other, pair.at_other, there, other.import_key(pair.at_other, &one.key_blob(here).unwrap()).unwrap()),
                ];
                let (mut posted, mut settled, mut down) = ([0_u64; 2], [0_u64; 2], [false; 2]);
                let moment = Duration::from_micros(dice.below(4000));
                let who = dice.below(3);
                let begin = Instant::now();
                let mut severed = None::<Instant>;
                let mut made = [String::new(), String::new()];
                let mut hung = false;
                let mut events = Events::with_limit(64);
                while down != [true; 2] {
                    if severed.is_none() && begin.elapsed() >= moment {
                        severed = Some(Instant::now());
                        made = [one.peer_info(pair.at_one).map(|i| i.transport), other.peer_info(pair.at_other).map(|i| i.transport)].map(|r| r.unwrap_or_default());
                        for (side, (backend, peer, ..)) in sides.iter().enumerate() {
                            if (who == 2 || who == side as u64) && !down[side] {
                                backend.sever(*peer).unwrap();
                            }
                        }
                    }
                    for (side, (backend, peer, local, remote)) in sides.iter().enumerate() {
                        if severed.is_none() && posted[side] - settled[side] < 12 {
                            let bytes = 1 << (posted[side] % 20);
                            let segment = PostedSegment { local: *local, remote: *remote, local_offset: 0, remote_offset: 0, bytes };
                            let mode = if posted[side] % 2 == 0 { Mode::Read } else { Mode::Write };
                            let note = (posted[side] % 3 == 0).then_some(&b"note"[..]);
                            match backend.submit(TransferId(round << 20 | posted[side]), *peer, mode, &[segment], note) {
                                Ok(said) => {
                                    posted[side] += u64::from(said.is_posted());
                                    settled[side] += u64::from(matches!(said, Submit::Done { .. }));
                                }
                                Err(error) => panic!("{error}"),
                            }
                        }
                        backend.poll(&mut events);
                        for event in events.drain() {
                            match event {
                                Event::Settled { outcome, .. } => {
                                    settled[side] += 1;
                                    let which = match outcome {
                                        Outcome::Done { .. } => 0,
                                        Outcome::Cancelled => 1,
                                        _ => 2,
                                    };
                                    outcomes[which] += 1;
                                    assert!(severed.is_some() || which == 0, "{outcome:?}");
                                }
                                Event::PeerDown { peer: whose, error } => {
                                    assert_eq!(whose, *peer);
                                    assert!(severed.is_some(), "{error:?}");
                                    assert_eq!(settled[side], posted[side]);
                                    down[side] = true;
                                }
                                Event::Notified { .. } => {}
                                other => panic!("{other:?}"),
                            }
                        }
                    }
                    if let Some(severed) = severed {
                        slowest = slowest.max(severed.elapsed());
                        if severed.elapsed() > Duration::from_secs(6) && !hung {
                            hung = true;
                            let now = [one.peer_info(pair.at_one).map(|i| i.transport), other.peer_info(pair.at_other).map(|i| i.transport)];
                            eprintln!("{way} round {round} who {who} moment {moment:?}: {posted:?} {settled:?} {down:?}; at severing {made:?}, now {now:?}");
                            for (side, (backend, peer, ..)) in sides.iter().enumerate() {
                                if !down[side] { backend.sever(*peer).unwrap(); }
                            }
                        }
                        assert!(severed.elapsed() < Duration::from_secs(30), "{way}, round {round}, {who}: {posted:?} {settled:?} {down:?}");
                    }
                }
                let took = severed.unwrap().elapsed();
                if took > SEVER_BOUND { eprintln!("round {round} who {who} moment {moment:?}: {posted:?} took {took:?}"); }
                one.deregister(here).unwrap();
                other.deregister(there).unwrap();
            }
            eprintln!("{way}: within {slowest:?}; done, cancelled, failed: {outcomes:?}");
            before.unwrap().is_all_that_is_left("many that were severed");
        }
    });
}

/// Eight threads on one port.
pub(crate) fn eight_threads_share_a_port() {
    alone("eight_threads_share_a_port", Way::Cma.variables(), || {
        for way in ways() {
            const SIZE: u64 = 1 << 20;
            let open = || Port::new(open_with(&way.options()).unwrap()).unwrap();
            let (one, other) = (open(), open());
            let (at_other, reply) = other.accept(&one.offer().unwrap()).unwrap();
            let (at_one, completion) = one.complete(&reply).unwrap();
            assert_eq!(other.finish(&completion).unwrap(), at_other);
            let theirs = Region::host(SIZE).unwrap();
            theirs.write_at(0, &(0..SIZE).map(|at| (at % 251) as u8).collect::<Vec<_>>()).unwrap();
            let blob = other.key_blob(other.register(&theirs).unwrap()).unwrap();
            one.add_regions(at_one, &[(blob, SIZE)]).unwrap();
            let (notes, moved) = (AtomicU64::new(0), AtomicU64::new(0));
            let over = AtomicBool::new(false);
            let begin = Instant::now();
            let count = times(300);
            std::thread::scope(|scope| {
                let workers: Vec<_> = (0..8_u64)
                    .map(|thread| {
                        let (one, moved) = (&one, &moved);
                        scope.spawn(move || {
                            let mut dice = Dice::new("thread");
                            let mine = Region::host(SIZE).unwrap();
                            let id = one.register(&mine).unwrap();
                            let set = one.region_set(&[id]).unwrap();
                            for round in 0..count {
                                let offset = dice.below(SIZE - 70_000);
                                let bytes = 1 + dice.below(65_000);
                                let segment = Segment { local_region: 0, remote_region: 0, local_offset: offset, remote_offset: offset, bytes };
                                let note = (round % 7 == 0).then_some(&b"note"[..]);
                                let mut transfer = one.transfer(at_one, Mode::Read, &set, &[segment], note).unwrap();
                                let result = transfer.wait(Duration::from_secs(20)).unwrap_or_else(|| panic!("{thread} {round} does not settle"));
                                result.unwrap();
                                let mut seen = vec![0; usize::try_from(bytes).unwrap()];
                                mine.read_at(offset, &mut seen).unwrap();
                                assert!(seen.iter().zip(offset..).all(|(byte, at)| *byte == (at % 251) as u8));
                                moved.fetch_add(bytes, SeqCst);
                            }
                            one.deregister(id).unwrap();
                        })
                    })
                    .collect();
                let (other, notes, over) = (&other, &notes, &over);
                scope.spawn(move || {
                    while !over.load(SeqCst) {
                        if other.wait_notified(Duration::from_millis(50)).unwrap().is_some() {
                            notes.fetch_add(1, SeqCst);
                        }
                    }
                });
                let wanted = 8 * count.div_ceil(7);
                for worker in workers {
                    worker.join().unwrap();
                }
                wait("all notifications", || notes.load(SeqCst) == wanted);
                over.store(true, SeqCst);
            });
            eprintln!("{way}: {} MiB in {:?}", moved.load(SeqCst) >> 20, begin.elapsed());
            block(one.close()).unwrap();
            block(other.close()).unwrap();
        }
    });
}

/// Sixty peers in one process.
pub(crate) fn sixty_peers_are_bounded_and_given_back() {
    alone("sixty_peers_are_bounded_and_given_back", Way::Cma.variables(), || {
        for way in ways() {
            let open = || open_with(&way.options()).unwrap();
            let hub = open();
            let memory = Region::host(1 << 20).unwrap();
            let local = hub.register(&memory).unwrap();
            let mut marks = Vec::new();
            for wave in 0..3 {
                let before = Left::at_rest();
                let others: Vec<_> = (0..60).map(|_| open()).collect();
                let opened = Left::at_rest();
                let pairs: Vec<_> = others.iter().map(|other| Pair::meet(&hub, other)).collect();
                for (index, pair) in pairs.iter().enumerate() {
                    let theirs = pair.other.register(&memory).unwrap();
                    let remote = hub.import_key(pair.at_one, &pair.other.key_blob(theirs).unwrap()).unwrap();
                    let segment = PostedSegment { local, remote, local_offset: 0, remote_offset: 0, bytes: 1 << 20 };
                    for (id, mode) in [(1, Mode::Read), (2, Mode::Write)] {
                        pair.transfer(TransferId((index as u64) << 2 | id), mode, &[segment]);
                    }
                }
                let met = Left::at_rest();
                for pair in &pairs {
                    pair.part();
                }
                let parted = Left::count();
                drop(pairs);
                for other in &others {
                    block(other.close()).unwrap();
                }
                drop(others);
                std::thread::sleep(Duration::from_millis(200));
                let after = Left::at_rest();
                eprintln!("{way} wave {wave}: before {before:?}\n  opened {opened:?}\n  met {met:?}\n  parted {parted:?}\n  after {after:?}");
                marks.push(after);
            }
            marks[0].is_all_that_is_left("three waves of sixty peers");
        }
    });
}

/// Four gibibytes, and a million segments.
pub(crate) fn four_gibibytes_and_a_million_segments() {
    alone("four_gibibytes_and_a_million_segments", Way::Cma.variables(), || {
        for way in ways() {
            const HUGE: u64 = 4 << 30;
            let pair = Pair::over(way);
            let mut events = Events::with_limit(256);
            {
                let [mine, theirs] = [0, 1].map(|_| Region::host(HUGE).unwrap());
                let (local, remote) = pair.lane(&mine, &theirs);
                for at in [0, 1 << 30, (2 << 30) + 5, HUGE - 1] {
                    theirs.write_at(at, &[(at % 250) as u8 + 1]).unwrap();
                }
                let segments: Vec<_> = (0..4).map(|index| PostedSegment { local, remote, local_offset: index << 30, remote_offset: index << 30, bytes: 1 << 30 }).collect();
                let begin = Instant::now();
                assert_eq!(pair.one.submit(TransferId(1), pair.at_one, Mode::Read, &segments, Some(b"all")).unwrap(), Submit::Submitted);
                let mut settled = false;
                while !settled {
                    pair.one.poll(&mut events);
                    for event in events.drain() {
                        match event {
                            Event::Settled { outcome: Outcome::Done { .. }, .. } => settled = true,
                            other => panic!("{other:?}"),
                        }
                    }
                    pair.other.poll(&mut events);
                    events.drain().for_each(drop);
                    assert!(begin.elapsed() < Duration::from_secs(60));
                }
                eprintln!("{way}: 4 GiB in {:?}", begin.elapsed());
                for at in [0, 1 << 30, (2 << 30) + 5, HUGE - 1] {
                    let mut byte = [0];
                    mine.read_at(at, &mut byte).unwrap();
                    assert_eq!(byte[0], (at % 250) as u8 + 1, "{at}");
                }
                pair.one.deregister(local).unwrap();
                pair.other.deregister(pair.theirs.get()).unwrap();
            }
            const SEGMENTS: u64 = 1_000_000;
            const BYTES: u64 = 100;
            let [mine, theirs] = [0, 1].map(|_| Region::host(SEGMENTS * BYTES).unwrap());
            let (local, remote) = pair.lane(&mine, &theirs);
            let bytes: Vec<u8> = (0..SEGMENTS * BYTES).map(|at| (at / BYTES % 251) as u8).collect();
            theirs.write_at(0, &bytes).unwrap();
            let before = Left::count();
            for mode in [Mode::Read, Mode::Write] {
                let begin = Instant::now();
                let (mut next, mut settled, mut posted) = (0, 0, 0);
                while next < SEGMENTS || settled < posted {
                    if next < SEGMENTS {
                        let count = 4096.min(SEGMENTS - next);
                        // Backwards, so that none are neighbours on both sides.
                        let segments: Vec<_> = (next..next + count).map(|index| PostedSegment {
                            local, remote, local_offset: (SEGMENTS - 1 - index) * BYTES, remote_offset: index * BYTES, bytes: BYTES,
                        }).collect();
                        let said = pair.one.submit(TransferId(next), pair.at_one, mode, &segments, None).unwrap();
                        if said.is_posted() {
                            next += count;
                            posted += 1;
                            settled += u64::from(matches!(said, Submit::Done { .. }));
                        }
                    }
                    pair.one.poll(&mut events);
                    for event in events.drain() {
                        match event {
                            Event::Settled { outcome: Outcome::Done { .. }, .. } => settled += 1,
                            other => panic!("{other:?}"),
                        }
                    }
                    assert!(begin.elapsed() < Duration::from_secs(100), "{next} {settled} {posted}");
                }
                eprintln!("{way}: a million segments, {mode:?}, in {:?}; {:?} before, {:?} now", begin.elapsed(), before.bytes, Left::count().bytes);
            }
            let mut seen = vec![0; bytes.len()];
            mine.read_at(0, &mut seen).unwrap();
            let right = seen.chunks_exact(usize::try_from(BYTES).unwrap()).zip((0..SEGMENTS).rev()).all(|(chunk, index)| chunk.iter().all(|byte| *byte == (index % 251) as u8));
            assert!(right, "{way}: what was read");
            theirs.read_at(0, &mut seen).unwrap();
            assert!(seen == bytes, "{way}: what was written back");
        }
    });
}

/// Keeps what is not used from being warned of.
pub(crate) fn _unused(_: Arc<()>) {}
