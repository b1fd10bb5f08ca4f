use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use kvx_connector::observe::EngineStatus;

use super::{Page, serve};

/// Sends bytes and reads until the other side closes.
fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn get(address: SocketAddr, path: &str) -> String {
    ask(address, &format!("GET {path} HTTP/1.1\r\nHost: kvx\r\n\r\n"))
}

#[test]
fn a_port_alone_is_on_loopback_and_both_pages_are_served() {
    let guard = serve("0").unwrap();
    let at = guard.address();
    assert!(at.ip().is_loopback() && at.port() != 0);
    assert!(get(at, "/metrics").starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(get(at, "/status").starts_with("HTTP/1.1 503 "));
    guard.show(|| vec![EngineStatus::new("prefill", "localhost:7", Vec::new())]);
    let status = get(at, "/status?pretty");
    assert!(status.starts_with("HTTP/1.1 200 OK\r\n"), "{status}");
    let (_, body) = status.split_once("\r\n\r\n").unwrap();
    let page: Page = serde_json::from_str(body).unwrap();
    assert_eq!(page.engines[0].engine, "prefill");
    assert!(get(at, "/").contains("/metrics"));
}

#[test]
fn what_is_no_request_is_refused() {
    let guard = serve("127.0.0.1:0").unwrap();
    let at = guard.address();
    assert!(get(at, "/secrets").starts_with("HTTP/1.1 404 "));
    assert!(ask(at, "POST /status HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
    assert!(ask(at, "\r\n\r\n").starts_with("HTTP/1.1 400 "));
    assert!(ask(at, "GET /metrics\r\n\r\n").starts_with("HTTP/1.1 400 "));
    let head = ask(at, "HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"));
}

#[test]
fn a_request_without_end_is_hung_up_on() {
    let guard = serve("0").unwrap();
    let mut stream = TcpStream::connect(guard.address()).unwrap();
    // It may be hung up on before all is written.
    let _cut = stream.write_all(&[b'a'; 64 << 10]);
    let mut answer = Vec::new();
    let _cut = stream.read_to_end(&mut answer);
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 431 "));
}

#[test]
fn silent_connections_keep_nobody_out() {
    let guard = serve("0").unwrap();
    let silent: Vec<TcpStream> =
        (0..100).map(|_| TcpStream::connect(guard.address()).unwrap()).collect();
    let begun = Instant::now();
    assert!(get(guard.address(), "/").starts_with("HTTP/1.1 200 "));
    // Far less than a silent one is waited for.
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    drop(silent);
}

#[test]
fn dropping_it_stops_it() {
    let guard = serve("0").unwrap();
    let at = guard.address();
    let silent = TcpStream::connect(at).unwrap();
    drop(guard);
    assert!(TcpStream::connect(at).is_err());
    drop(silent);
}

#[test]
fn an_address_that_is_none_is_named_with_what_to_give() {
    for wrong in ["", "nowhere", "127.0.0.1", "127.0.0.1:99999", "192.0.2.1:0"] {
        let error = serve(wrong).unwrap_err();
        assert_eq!(error.kind(), kvx_core::ErrorKind::Config, "{wrong}: {error}");
        assert!(error.to_string().contains("PORT alone"), "{wrong}: {error}");
    }
    let taken = serve("0").unwrap();
    let error = serve(&taken.address().to_string()).unwrap_err();
    assert!(error.to_string().contains("cannot listen at"), "{error}");
}
