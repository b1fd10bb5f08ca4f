//! What a process shows of itself: `--metrics`, `kvx top`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{command, json, kvx};
use crate::serve::{Producer, SMALL, consumer, key};

/// A producer that has served three requests, and shows itself.
fn shown(name: &str) -> (Producer, std::path::PathBuf) {
    let key = key(name);
    let producer = Producer::start(&key, &format!("{SMALL} --tp 2 --name {name} --metrics 0"));
    let arguments = format!("{SMALL} --requests 3 --tokens 100");
    let report = json(&consumer(&producer.address, &key, &arguments), 0);
    assert_eq!(report["good"], 3, "{report}");
    (producer, key)
}

fn page(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    page
}

#[test]
fn a_process_shows_its_metrics_and_its_status() {
    let (producer, key) = shown("shown");
    let at = &producer.metrics;
    assert!(at.starts_with("127.0.0.1:"), "a port alone is on loopback: {at}");
    let metrics = page(at, "/metrics");
    for line in [
        "# TYPE kvx_leases_granted_total counter",
        "kvx_leases_granted_total{engine=\"shown\",replica=\"0\",rank=\"1\"} 3",
        "kvx_leases_ended_total{engine=\"shown\",replica=\"0\",rank=\"0\",reason=\"done\"} 3",
        "# TYPE kvx_lease_held_seconds histogram",
        "kvx_lease_held_seconds_count{engine=\"shown\",replica=\"0\",rank=\"0\"} 3",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
    }
    let secret = std::fs::read_to_string(&key).unwrap();
    let secret = secret.trim().rsplit(':').next().unwrap();
    let status = page(at, "/status");
    assert!(secret.len() > 20 && !status.contains(secret) && !metrics.contains(secret));

    let top = json(&format!("top {at}"), 0);
    assert_eq!(top["totals"]["ranks"], 2, "{top}");
    assert_eq!((&top["totals"]["granted"], &top["totals"]["freed"]), (&6.into(), &6.into()));
    assert_eq!(top["totals"]["leases"], 0, "{top}");
    assert_eq!(top["totals"]["ends"]["done"], 6, "{top}");
    assert_eq!(top["engines"][0]["ranks"][1]["rank"], 1, "{top}");
    let once = kvx(&format!("top --once {at}"));
    assert_eq!((once.code, once.stderr.as_str()), (0, ""), "{once:?}");
    for words in ["2 ranks", "leases granted", "shown 0.1", "leases ended: 6 done"] {
        assert!(once.stdout.contains(words), "{words}: {}", once.stdout);
    }
    let port = at.rsplit(':').next().unwrap();
    assert_eq!(kvx(&format!("top --once {port}")).code, 0, "a port alone is one on this host");
    std::fs::remove_file(key).unwrap();
}

/// Waits until a process has ended by itself.
fn ended(child: &mut Child) -> Option<i32> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "it does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn top_goes_on_until_it_is_interrupted_or_nobody_reads() {
    let (producer, key) = shown("watched");
    let start = || {
        let mut program = command(&format!("top {}", producer.metrics));
        let mut top = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(top.stdout.take().unwrap()).lines();
        let frames = lines.by_ref().map(Result::unwrap).filter(|line| line.starts_with("kvx "));
        assert_eq!(frames.take(2).count(), 2);
        (top, lines)
    };
    let (mut top, lines) = start();
    let number = top.id().to_string();
    assert!(Command::new("kill").args(["-INT", &number]).status().unwrap().success());
    assert_eq!(ended(&mut top), Some(0));
    drop(lines);
    let (mut top, lines) = start();
    drop(lines);
    assert_eq!(ended(&mut top), Some(0));
    std::fs::remove_file(key).unwrap();
}

#[test]
fn what_cannot_be_watched_or_shown_is_said() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap();
    let key = key("unshown");
    let serve = format!("serve --role producer --listen 127.0.0.1:0 --key {}", key.display());
    for (arguments, code, says) in [
        (format!("{serve} {SMALL} --metrics {taken}"), 2, "cannot listen at"),
        (format!("{serve} {SMALL} --metrics nowhere"), 2, "PORT alone"),
        ("top nowhere".into(), 2, "is no address"),
        ("top --seconds 0 1".into(), 2, "give 1 to 3600"),
    ] {
        let run = kvx(&arguments);
        assert_eq!(run.code, code, "{arguments}: {run:?}");
        assert!(run.stderr.contains(says), "{arguments}: {run:?}");
    }
    drop(listener);
    let nobody = kvx(&format!("top {taken}"));
    assert!(nobody.code == 1 && nobody.stderr.contains("--metrics"), "{nobody:?}");
    std::fs::remove_file(key).unwrap();
}
