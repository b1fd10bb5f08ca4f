//! Many threads at once.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;
use crate::error::ErrorKind;

/// Known failure 93 (sglang PR#28897): polling while peers come and go. Eight threads post, poll, wait and take
/// notifications while peers are met and severed and a fabric thread settles in its own order.
#[test]
fn posting_polling_and_severing_at_once() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 100;
    let setup = Setup::with(|capabilities| {
        capabilities.limits.max_batch_segments = 2;
        capabilities.limits.max_in_flight = 3;
    });
    let over = AtomicBool::new(false);
    let (done, failed, told) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        // The fabric: completes in an order of its own, says full now and then, and echoes notifications.
        scope.spawn(|| {
            let mut round = 0_usize;
            while !over.load(Ordering::SeqCst) {
                round += 1;
                if round.is_multiple_of(7) {
                    setup.fake.script([Say::Full, Say::Inline, Say::Done, Say::Hold]);
                }
                let held = setup.fake.held();
                if held.is_empty() {
                    std::thread::yield_now();
                    continue;
                }
                let id = held[round * 31 % held.len()];
                // It may have been ended with its peer just now.
                if setup.fake.lock().in_flight.remove(&id).is_some() {
                    let outcome = crate::backend::Outcome::done();
                    setup.fake.event(crate::backend::Event::Settled { id, outcome });
                    setup.fake.notify(setup.peer, b"echo");
                }
            }
        });
        // Two that only poll, one of which takes notifications.
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                setup.port.poll();
                std::thread::yield_now();
            }
        });
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                setup.port.poll();
                while setup.port.next_notification().is_some() {
                    told.fetch_add(1, Ordering::SeqCst);
                }
                std::thread::yield_now();
            }
        });
        // One that meets and severs peers under transfers of theirs.
        scope.spawn(|| {
            for generation in 0..30 {
                let bytes = HandshakeBytes::new(vec![50, generation]).unwrap();
                let peer = setup.port.finish(&bytes).unwrap();
                setup.port.add_regions(peer, &[(key(BYTES), BYTES)]).unwrap();
                let transfer = setup
                    .port
                    .transfer(peer, Mode::Read, &setup.set, &segments(9), Some(b"n"))
                    .unwrap();
                setup.port.sever(peer).unwrap();
                if let Err(error) = block_on(transfer) {
                    let known = [ErrorKind::Closed, ErrorKind::Fabric, ErrorKind::Misuse];
                    assert!(known.contains(&error.kind()), "{error}");
                }
                while setup.port.peers().contains(&peer) {
                    setup.port.poll();
                }
            }
        });
        let workers: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    for round in 0..ROUNDS {
                        let transfer = setup.write(&segments(round % 9), Some(b"n"));
                        if round.is_multiple_of(11) {
                            transfer.cancel();
                        }
                        match block_on(transfer) {
                            Ok(_) => done.fetch_add(1, Ordering::SeqCst),
                            Err(error) => {
                                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
                                failed.fetch_add(1, Ordering::SeqCst)
                            }
                        };
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
        over.store(true, Ordering::SeqCst);
    });
    let (done, failed) = (done.into_inner(), failed.into_inner());
    assert_eq!(done + failed, THREADS * ROUNDS, "every transfer ended");
    let stats = setup.port.peer_stats(setup.peer).unwrap();
    assert_eq!((stats.done, stats.failed), (done, failed));
    assert_eq!((stats.in_flight, stats.unsettled), (0, 0));
    assert!(told.into_inner() > 0);
    while setup.port.stats().unsettled > 0 {
        setup.settle_all();
        setup.port.poll();
    }
    // One notification per transfer that was done, and none for one that was cancelled before its last batch.
    let posts = setup.fake.posts();
    let sent = posts.iter().filter(|p| p.peer == setup.peer && p.notify.is_some()).count() as u64;
    assert!((done..=done + failed).contains(&sent), "{sent} for {done}");
    setup.port.deregister(setup.id).unwrap();
}
