use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::time::Duration;

use kvx_core::ErrorKind;

use super::sums::Sums;
use super::{fetch, view};
use crate::fabric;
use crate::metrics::Page;

/// A page of two ranks, as a process may have it.
fn page() -> Page {
    let rank = |rank: u32, more: &str| {
        format!(
            r#"{{"engine": "decode", "rank": {rank}, "up_ms": 61000, "peers_known": 2, "peers_connected": 1,
                "peers": [{{"engine": "prefill", "state": "connected", "for_ms": 5, "backend": "shm", "transport": "mapped"}}],
                "requests": {{"active": 1, "oldest": [{{"key": "r\u001b[31m", "engine": "prefill", "state": "active", "age_ms": 2500}}]}},
                "quarantine": {{"request_blocks": 3}},
                "counters": {{"kvx_requests_ready_total": 10, "kvx_requests_failed_total{{reason=\"stale\"}}": 2,
                    "kvx_requests_failed_total{{reason=\"deadline\"}}": 0{more},
                    "kvx_transfer_bytes_total{{backend=\"shm\",transport=\"mapped\",mode=\"read\"}}": 1048576}}}}"#
        )
    };
    let more = r#", "kvx_requests_asked_total{mode=\"read\"}": 12"#;
    let ranks = [rank(0, more), rank(1, "")].join(",");
    let text = format!(
        r#"{{"version": "0.1.0", "engines": [{{"engine": "decode", "address": "localhost:1", "ranks": [{ranks}]}}]}}"#
    );
    serde_json::from_str(&text).unwrap()
}

#[test]
fn sums_are_of_all_ranks() {
    let sums = Sums::of(&page());
    assert_eq!((sums.ranks, sums.ready, sums.failed, sums.asked), (2, 20, 4, 12));
    assert_eq!((sums.bytes, sums.quarantined_blocks, sums.requests), (2 << 20, 6, 2));
    assert_eq!(sums.failures, [("stale".into(), 4)].into());
    assert_eq!(sums.transports, [("shm/mapped/read".into(), 2 << 20)].into());
}

#[test]
fn a_frame_has_rates_since_the_last_and_no_control_characters() {
    let page = page();
    let sums = Sums::of(&page);
    let mut before = sums.clone();
    before.ready -= 10;
    before.bytes -= 1 << 20;
    let first = view::frame("127.0.0.1:1", &page, &sums, None);
    assert!(first.contains("up 1 min: 2 ranks, 2 connected peers"), "{first}");
    assert!(first.contains("requests failed: 4 stale"), "{first}");
    assert!(first.contains("r?[31m") && first.contains("2 MiB by shm/mapped/read"), "{first}");
    assert!(!first.chars().any(|letter| letter.is_control() && letter != '\n'), "{first:?}");
    let next = view::frame("x", &page, &sums, Some((&before, Duration::from_secs(2))));
    let row = |name: &str| next.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
    assert!(row("requests ready").trim_end().ends_with(" 5"), "{next}");
    assert!(row("moved").contains("512 KiB"), "{next}");
}

/// What answers at the address with `answer`, then closes.
fn asked(answer: &'static str) -> kvx_core::Result<Page> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 1024];
        let count = stream.read(&mut request).unwrap();
        assert!(request[..count].starts_with(b"GET /status HTTP/1.1\r\n"));
        stream.write_all(answer.as_bytes()).unwrap();
    });
    let got = fabric::runtime().unwrap().block_on(fetch::status(&address));
    thread.join().unwrap();
    got
}

#[test]
fn what_is_not_kvx_is_said_to_be_that() {
    for answer in
        ["", "SSH-2.0-x\r\n", "HTTP/1.1 200 OK\r\n\r\n<html>", "HTTP/1.1 404 No\r\n\r\nno\u{1b}"]
    {
        let error = asked(answer).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Peer, "{error}");
        assert!(error.to_string().contains("--metrics"), "{error}");
        assert!(!error.to_string().contains('\u{1b}'), "{error:?}");
    }
    let page = asked("HTTP/1.1 200 OK\r\n\r\n{\"version\": \"1\", \"engines\": []}").unwrap();
    assert_eq!((page.version.as_str(), page.engines.len()), ("1", 0));
}

#[test]
fn an_address_where_nobody_listens_is_named() {
    let runtime = fabric::runtime().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let error = runtime.block_on(fetch::status(&address)).unwrap_err();
    assert!(error.to_string().contains(&address), "{error}");
    let error = runtime.block_on(fetch::status("no address")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
}
