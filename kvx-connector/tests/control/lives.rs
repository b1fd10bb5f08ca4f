//! Peers that are killed, stopped and started again: other processes.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvx_core::card::Address;
use kvx_core::{ErrorKind, Retry};
use rustix::process::{Pid, Signal, kill_process};

use crate::kit::{Side, config, key, start};

const CHILD: &str = "KVX_TEST_CONTROL_AT";

/// The child of the tests below: listens, and does nothing else until it is killed.
#[test]
fn child() {
    let Ok(address) = std::env::var(CHILD) else { return };
    let side = start("prefill", key());
    println!("listens at {}", side.listen(&address));
    // Ends with the one who started it.
    let _ = std::io::stdin().read_line(&mut String::new());
}

struct Other {
    process: Child,
    address: Address,
}

impl Other {
    fn start(at: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "lives::child", "--nocapture"])
            .env(CHILD, at)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let address = lines
            .map_while(Result::ok)
            .find_map(|line| Some(line.split_once("listens at ")?.1.parse().unwrap()))
            .unwrap();
        Self { process, address }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_peer_that_is_killed_and_started_again_is_another_life() {
    let mut decode = start("decode", key());
    let other = Other::start("127.0.0.1:0");
    let address = other.address.clone();
    let session = decode.control.dial(&address, None).unwrap();
    let (_, first) = decode.up();
    let begun = Instant::now();
    drop(other);
    let why = decode.down(session);
    assert_eq!((why.kind(), why.retry()), (ErrorKind::Peer, Retry::Reconnect));
    assert!(begun.elapsed() < Duration::from_secs(10));
    // Nobody is there now, and no session comes back by itself.
    let nobody = decode.control.dial(&address, None).unwrap();
    assert_eq!(decode.down(nobody).retry(), Retry::Backoff);

    let _again = Other::start(&address.to_string());
    decode.nothing_for(Duration::from_millis(50));
    let another = decode.control.dial(&address, Some(first.engine.clone())).unwrap();
    let (up, second) = decode.up();
    assert_eq!(up, another);
    assert_eq!(first.engine, second.engine);
    assert_ne!(first.incarnation, second.incarnation);
}

#[test]
fn a_peer_that_stands_still_misses_pings_and_is_down() {
    let mut quick = config("decode", key());
    quick.limits.ping_after = Duration::from_millis(300);
    let mut decode = Side::new(quick);
    let other = Other::start("127.0.0.1:0");
    let session = decode.control.dial(&other.address, None).unwrap();
    decode.up();
    // Pings are answered, whoever polls.
    let begun = Instant::now();
    while decode.control.sessions()[0].round_trip.is_none() {
        assert!(begun.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(decode.control.stats().up, 1);
    let missed_before = decode.control.stats().missed_pings;

    other.signal(Signal::STOP);
    let begun = Instant::now();
    let mut seen = 0;
    while decode.control.stats().up == 1 {
        assert!(begun.elapsed() < Duration::from_secs(30));
        seen = decode.control.sessions().first().map_or(seen, |it| seen.max(it.missed_pings));
        std::thread::sleep(Duration::from_millis(10));
    }
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(800), "{took:?}");
    assert!(seen > 0, "it is seen before it is down");
    let why = decode.down(session);
    assert!(why.to_string().contains("missed 3 pings"), "{why}");
    assert_eq!(why.retry(), Retry::Reconnect);
    let stats = decode.control.stats();
    assert_eq!(stats.silent, 1);
    assert!(stats.missed_pings >= missed_before + 3);
    other.signal(Signal::CONT);
}
