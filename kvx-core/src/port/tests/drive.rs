//! Waiting without blocking, with a driver and without.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::super::{EVENTS_PER_POLL, KEPT_NOTIFICATIONS};
use super::*;
use crate::error::ErrorKind;

const LONG: Duration = Duration::from_secs(60);

fn with_descriptor() -> Setup {
    Setup::with(|capabilities| {
        capabilities.event_fd = true;
        capabilities.limits.max_batch_segments = 1;
        capabilities.limits.max_in_flight = 2;
    })
}

/// Lets every task that can run do so.
async fn breathe() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_driver_sleeps_on_the_descriptor_and_wakes_everybody() {
    let setup = with_descriptor();
    let driver = tokio::spawn(setup.port.drive());
    breathe().await;
    let transfer = tokio::spawn(setup.write(&segments(3), Some(b"n")));
    let (one, two) = (setup.port.clone(), setup.port.clone());
    let notified = tokio::spawn(async move { one.notified().await });
    let down = tokio::spawn(async move { two.peer_down().await });
    sleep(Duration::from_millis(20)).await;
    let polls = setup.fake.lock().polls;
    sleep(Duration::from_millis(50)).await;
    assert_eq!(setup.fake.lock().polls, polls, "nothing happens, nothing is polled");

    setup.fake.notify(setup.peer, b"hello");
    assert_eq!(timeout(LONG, notified).await.unwrap().unwrap().unwrap().1, b"hello");
    while !transfer.is_finished() {
        setup.fake.held().into_iter().for_each(|id| setup.fake.done(id));
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(transfer.await.unwrap().unwrap().batches, 3);
    setup.fake.kill(setup.peer);
    assert_eq!(timeout(LONG, down).await.unwrap().unwrap().unwrap().0, setup.peer);
    setup.port.close().await.unwrap();
    timeout(LONG, driver).await.unwrap().unwrap().unwrap();
}

/// Events that come at any moment between polling and sleeping wake the driver all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wake_up_is_lost() {
    let setup = with_descriptor();
    let driver = tokio::spawn(setup.port.drive());
    let fake = Arc::clone(&setup.fake);
    let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stop = Arc::clone(&over);
    let fabric = std::thread::spawn(move || {
        let mut round = 0_u32;
        while !stop.load(std::sync::atomic::Ordering::SeqCst) {
            let held = fake.held();
            if let Some(id) = held.first() {
                // A different moment each time.
                (0..round % 200).for_each(|_| std::hint::spin_loop());
                fake.done(*id);
                round += 1;
            }
        }
    });
    for _ in 0..500 {
        let transfer = setup.write(&segments(2), Some(b"n"));
        timeout(LONG, transfer).await.expect("a wake-up was lost").unwrap();
    }
    over.store(true, std::sync::atomic::Ordering::SeqCst);
    fabric.join().unwrap();
    driver.abort();
}

#[tokio::test]
async fn a_driver_without_a_descriptor_polls() {
    let setup = Setup::one_by_one(2);
    let driver = tokio::spawn(setup.port.drive());
    breathe().await;
    // It sleeps meanwhile, and hears of the transfer at once.
    sleep(Duration::from_millis(3)).await;
    let transfer = tokio::spawn(setup.write(&segments(3), Some(b"n")));
    while !transfer.is_finished() {
        setup.fake.held().into_iter().for_each(|id| setup.fake.done(id));
        tokio::task::yield_now().await;
    }
    transfer.await.unwrap().unwrap();
    setup.fake.notify(setup.peer, b"idle");
    assert_eq!(timeout(LONG, setup.port.notified()).await.unwrap().unwrap().1, b"idle");
    setup.port.close().await.unwrap();
    timeout(LONG, driver).await.unwrap().unwrap().unwrap();
}

/// A full queue with nothing in flight: no event will come, so the driver comes back by itself.
#[tokio::test]
async fn a_driver_tries_again_what_only_time_helps() {
    for setup in [with_descriptor(), Setup::new()] {
        let _driver = tokio::spawn(setup.port.drive());
        sleep(Duration::from_millis(5)).await;
        setup.fake.script([Say::Full; 5]);
        setup.fake.always(Say::Inline);
        timeout(LONG, setup.write(&segments(1), None)).await.expect("forgotten").unwrap();
        assert_eq!(setup.port.stats().full, 5);
    }
}

/// The clock is the test's: it stands still while any task can run, and goes on to the next timer when all sleep. So what is
/// counted does not depend on how busy the machine is.
#[tokio::test(start_paused = true)]
async fn a_driver_naps_while_only_time_helps() {
    for setup in [with_descriptor(), Setup::new()] {
        let _driver = tokio::spawn(setup.port.drive());
        breathe().await;
        setup.fake.always(Say::Full);
        let transfer = setup.write(&segments(1), None);
        let begun = tokio::time::Instant::now();
        breathe().await;
        let full = setup.port.stats().full;
        assert!((1..=4).contains(&full), "{full} tries while no time passed");
        sleep(Duration::from_millis(50)).await;
        let (full, passed) = (setup.port.stats().full, begun.elapsed().as_millis());
        assert!((50..60).contains(&passed), "{passed}");
        // A nap of a millisecond may take two: timers are as coarse.
        assert!((20..=5 + passed).contains(&full.into()), "{full} tries in {passed} ms");
        drop(transfer);
    }
}

#[tokio::test]
async fn a_driver_that_ends_leaves_nobody_asleep() {
    let setup = with_descriptor();
    let (first, second) = (tokio::spawn(setup.port.drive()), tokio::spawn(setup.port.drive()));
    breathe().await;
    let transfer = tokio::spawn(setup.write(&segments(1), None));
    let port = setup.port.clone();
    let notified = tokio::spawn(async move { port.notified().await });
    breathe().await;
    first.abort();
    breathe().await;
    assert!(setup.port.is_driven());
    second.abort();
    breathe().await;
    assert!(!setup.port.is_driven());
    // Now each polls for itself.
    setup.fake.done(setup.fake.held()[0]);
    setup.fake.notify(setup.peer, b"n");
    timeout(LONG, transfer).await.unwrap().unwrap().unwrap();
    timeout(LONG, notified).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_driver_ends_with_its_port_and_does_not_keep_it() {
    for setup in [with_descriptor(), Setup::new()] {
        let driver = tokio::spawn(setup.port.drive());
        sleep(Duration::from_millis(5)).await;
        let Setup { fake, port, .. } = setup;
        drop(port);
        timeout(LONG, driver).await.expect("it still sleeps").unwrap().unwrap();
        assert_eq!(Arc::strong_count(&fake), 1);
    }
}

#[tokio::test]
async fn a_driver_goes_on_when_notifications_are_taken() {
    let setup = with_descriptor();
    let many = KEPT_NOTIFICATIONS + 3 * EVENTS_PER_POLL;
    (0..many).for_each(|_| setup.fake.notify(setup.peer, b"x"));
    let transfer = setup.write(&segments(1), None);
    setup.fake.done(setup.fake.held()[0]);
    let _driver = tokio::spawn(setup.port.drive());
    while !setup.port.inner.lock().blocked {
        tokio::task::yield_now().await;
    }
    for _ in 0..many {
        timeout(LONG, setup.port.notified()).await.expect("the driver sleeps").unwrap();
    }
    timeout(LONG, transfer).await.expect("the driver sleeps").unwrap();
}

#[test]
fn a_driver_outside_a_runtime_says_so() {
    let setup = Setup::new();
    let error = block_on(setup.port.drive()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(error.to_string().contains("tokio"), "{error}");
    assert!(!setup.port.is_driven());
}

#[tokio::test]
async fn a_driver_that_was_never_polled_drives_nothing() {
    let setup = with_descriptor();
    let driver = setup.port.drive();
    setup.fake.always(Say::Inline);
    timeout(LONG, setup.write(&segments(2), Some(b"n"))).await.unwrap().unwrap();
    drop(driver);
}

#[tokio::test]
async fn many_futures_progress_without_a_driver() {
    let setup = Setup::one_by_one(2);
    let mut tasks = JoinSet::new();
    for _ in 0..20 {
        tasks.spawn(setup.write(&segments(3), Some(b"n")));
    }
    let fake = Arc::clone(&setup.fake);
    let fabric = tokio::spawn(async move {
        loop {
            // The newest first.
            fake.held().last().into_iter().for_each(|id| fake.done(*id));
            tokio::task::yield_now().await;
        }
    });
    while let Some(report) = timeout(LONG, tasks.join_next()).await.unwrap() {
        report.unwrap().unwrap();
    }
    fabric.abort();
}

#[tokio::test]
async fn a_future_that_is_given_up_takes_nothing_with_it() {
    let setup = with_descriptor();
    let _driver = tokio::spawn(setup.port.drive());
    for _ in 0..3 {
        timeout(Duration::from_millis(5), setup.port.notified()).await.unwrap_err();
        let transfer = setup.write(&segments(1), None);
        timeout(Duration::from_millis(5), transfer).await.unwrap_err();
    }
    setup.fake.notify(setup.peer, b"n");
    assert_eq!(timeout(LONG, setup.port.notified()).await.unwrap().unwrap().1, b"n");
    while setup.port.stats().unsettled > 0 {
        setup.fake.held().into_iter().for_each(|id| setup.fake.done(id));
        sleep(Duration::from_millis(1)).await;
    }
}
