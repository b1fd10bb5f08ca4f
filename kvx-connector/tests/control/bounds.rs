//! Queues that are full, many sessions, and what they cost.

use std::time::{Duration, Instant};

use kvx_connector::control::{ControlEvent, Sent};
use kvx_core::{ErrorKind, Retry};

use crate::kit::{Side, config, key, memory, start};

#[test]
fn a_full_queue_is_a_value_and_nobody_elses_business() {
    let mut small = config("prefill", key());
    small.limits.queue_bytes = 256 << 10;
    small.limits.inbox_bytes = 256 << 10;
    let mut prefill = Side::new(small.clone());
    small.identity = config("decode", key()).identity;
    let mut decode = Side::new(small);
    let (there, here) = prefill.joined(&mut decode);
    let mut other = start("other", key());
    let (there_too, here_too) = prefill.joined(&mut other);
    // Nobody polls at `decode`: what it does not read fills, after the sockets, the queue here.
    let message = vec![1; 64 << 10];
    let mut sent = 0_u32;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(30) {
        match prefill
            .control
            .send(there, &[&sent.to_le_bytes(), message.as_slice()].concat())
            .unwrap()
        {
            Sent::Sent => sent += 1,
            // Full for good, not only for the moment.
            Sent::Full if prefill.control.stats().full > 100 => break,
            Sent::Full => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    assert!(
        prefill.control.stats().full > 100 && sent < 2000,
        "{sent} {:?}",
        prefill.control.stats()
    );
    assert!(decode.control.stats().paused > 0);
    let info = prefill.control.sessions();
    let info = info.iter().find(|it| it.session == there).unwrap();
    assert!(info.queued_bytes <= 256 << 10 && info.queued_bytes > 0);
    prefill.ask(there_too, &mut other, here_too);
    // And all of it is there, in order, once somebody polls.
    for number in 0..sent {
        assert_eq!(decode.message(here)[..4], number.to_le_bytes());
    }
    assert_eq!(prefill.control.send(there, b"again").unwrap(), Sent::Sent);
    assert_eq!(decode.message(here), b"again");
}

/// Neither waits with reading until the other has read.
#[test]
fn two_sides_with_much_to_say_at_once_do_not_wait_for_each_other() {
    let side = |engine: &str| {
        let mut config = config(engine, key());
        config.limits.queue_bytes = 64 << 20;
        Side::new(config)
    };
    let (mut prefill, mut decode) = (side("prefill"), side("decode"));
    let (there, here) = prefill.joined(&mut decode);
    // More than the sockets take.
    let message = vec![9; 2 << 20];
    for _ in 0..20 {
        assert_eq!(prefill.control.send(there, &message).unwrap(), Sent::Sent);
        assert_eq!(decode.control.send(here, &message).unwrap(), Sent::Sent);
    }
    for _ in 0..20 {
        assert!(prefill.message(there) == message && decode.message(here) == message);
    }
}

/// One that is busy with what it receives, or whose engine does not poll, goes on to say that it is there.
#[test]
fn a_peer_whose_engine_stands_still_is_not_silent() {
    let quick = |engine: &str| {
        let mut config = config(engine, key());
        config.limits.ping_after = Duration::from_millis(200);
        config.limits.inbox_bytes = 64 << 10;
        Side::new(config)
    };
    let (mut prefill, mut decode) = (quick("prefill"), quick("decode"));
    let (there, here) = prefill.joined(&mut decode);
    // `decode` does not poll, and no longer reads: pings do not reach it.
    while prefill.control.send(there, &[5; 60 << 10]).unwrap() == Sent::Sent {}
    std::thread::sleep(Duration::from_secs(2));
    assert!(decode.control.stats().paused > 0);
    for side in [&prefill, &decode] {
        let stats = side.control.stats();
        assert_eq!((stats.up, stats.silent), (1, 0), "{stats:?}");
    }
    assert_eq!(decode.message(here).len(), 60 << 10);
}

#[test]
fn events_that_nobody_polls_are_bounded_over_all_sessions() {
    let mut few = config("prefill", key());
    few.limits.events = 50;
    let mut prefill = Side::new(few);
    let mut decode = start("decode", key());
    let (there, here) = prefill.joined(&mut decode);
    for number in 0..1500_u32 {
        assert_eq!(
            decode
                .control
                .send(here, &[&number.to_le_bytes(), [0; 2000].as_slice()].concat())
                .unwrap(),
            Sent::Sent
        );
        if number % 100 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    std::thread::sleep(Duration::from_millis(200));
    let mut events = Vec::new();
    prefill.control.poll(&mut events);
    // What one read brought comes on top of it.
    assert!((50..50 + 40).contains(&events.len()), "{}", events.len());
    prefill.events.extend(events);
    for number in 0..1500_u32 {
        assert_eq!(prefill.message(there)[..4], number.to_le_bytes());
    }
}

#[test]
fn a_message_has_a_limit_and_so_has_the_number_of_sessions() {
    let mut few = config("prefill", key());
    few.limits.sessions = 3;
    let mut prefill = Side::new(few.clone());
    let address = prefill.listen("127.0.0.1:0");
    let mut decode = start("decode", key());
    let sessions: Vec<_> = (0..3).map(|_| decode.control.dial(&address, None).unwrap()).collect();
    for _ in 0..3 {
        prefill.up();
        decode.up();
    }
    let error = decode.control.send(sessions[0], &vec![0; (2 << 20) + 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert_eq!(decode.control.send(sessions[0], &vec![0; 2 << 20]).unwrap(), Sent::Sent);
    // One that is dialled is told; it may come back.
    let fourth = decode.control.dial(&address, None).unwrap();
    let why = decode.down(fourth);
    assert!(why.to_string().contains("too many sessions"), "{why}");
    assert_eq!(why.retry(), Retry::Backoff);
    assert_eq!(prefill.control.stats().too_many, 1);
    decode.control.close(sessions[0]);
    decode.down(sessions[0]);
    prefill.event("end", |event| matches!(event, ControlEvent::Down { .. }).then_some(()));
    decode.control.dial(&address, None).unwrap();
    prefill.up();
    // One that dials is refused at once.
    let error = prefill.control.dial(&address, None).unwrap_err();
    assert_eq!((error.kind(), error.retry()), (ErrorKind::Resources, Retry::Backoff));
}

#[test]
fn a_thousand_sessions_at_once() {
    const SESSIONS: usize = 1000;
    let (mut prefill, mut decode) = (start("prefill", key()), start("decode", key()));
    let address = prefill.listen("127.0.0.1:0");
    let (before, begun) = (memory(), Instant::now());
    for _ in 0..SESSIONS {
        decode.control.dial(&address, None).unwrap();
    }
    let here: Vec<_> = (0..SESSIONS).map(|_| decode.up().0).collect();
    for _ in 0..SESSIONS {
        prefill.up();
    }
    let (took, grown) = (begun.elapsed(), memory().saturating_sub(before));
    println!(
        "{SESSIONS} sessions up in {took:?}: {:.0} a second; {:.1} KiB for both ends of each",
        SESSIONS as f64 / took.as_secs_f64(),
        grown as f64 / SESSIONS as f64
    );
    assert!(grown < 64 * SESSIONS as u64, "{grown} KiB");
    for (number, session) in here.iter().enumerate() {
        assert_eq!(decode.control.send(*session, &number.to_le_bytes()).unwrap(), Sent::Sent);
    }
    let mut heard = Vec::new();
    for _ in 0..SESSIONS {
        let (number, _) = prefill.event("message", |event| match event {
            ControlEvent::Message { bytes, .. } => {
                Some(usize::from_le_bytes(bytes[..].try_into().unwrap()))
            }
            _ => None,
        });
        heard.push(number);
    }
    heard.sort_unstable();
    assert_eq!(heard, (0..SESSIONS).collect::<Vec<_>>());
    let stats = prefill.control.stats();
    assert_eq!((stats.up, stats.half_open, stats.evicted), (SESSIONS as u64, 0, 0));
}

#[cfg(target_os = "linux")]
#[test]
fn an_idle_channel_sleeps() {
    let (mut prefill, mut decode) = (start("prefill", key()), start("decode", key()));
    for _ in 0..20 {
        prefill.joined(&mut decode);
    }
    // In clock ticks, of which there are a hundred a second.
    let spent = || {
        let mut threads = 0;
        let mut ticks = 0_u64;
        for task in std::fs::read_dir("/proc/self/task").unwrap() {
            let stat =
                std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
            let Some((name, rest)) = stat.rsplit_once(") ") else { continue };
            if name.ends_with("(kvx-control") {
                let fields: Vec<_> = rest.split(' ').collect();
                ticks += fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
                threads += 1;
            }
        }
        (threads, ticks)
    };
    std::thread::sleep(Duration::from_millis(100));
    let (threads, before) = spent();
    assert!(threads >= 2);
    std::thread::sleep(Duration::from_secs(2));
    let (_, after) = spent();
    println!("{threads} threads: {} ticks in two seconds", after - before);
    // Under one percent each; other tests of this process may run beside it.
    assert!(after - before <= 2 * threads, "{} ticks", after - before);
}
