//! As much of HTTP/1.1 as it takes to be asked for two pages: one request for each connection, bounded in everything.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::AbortHandle;

use super::Shown;

/// Most connections at one time. One more ends the oldest, so that silent ones keep nobody out.
const CONNECTIONS: usize = 32;
/// Most bytes of a request.
const REQUEST: usize = 8 << 10;
/// How long a connection may take, from its first byte to its last.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long nothing is accepted after that has failed.
const PAUSE: Duration = Duration::from_millis(100);

/// Prometheus's text format.
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";
const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";

/// Serves whoever connects, until it is dropped.
pub(super) async fn serve(listener: TcpListener, shown: Shown) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let mut open: VecDeque<AbortHandle> = VecDeque::with_capacity(CONNECTIONS);
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Descriptors have run out, as a rule.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        open.retain(|connection| !connection.is_finished());
        if open.len() == CONNECTIONS
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
        }
        let shown = shown.clone();
        let connection = tokio::spawn(async move {
            // Whoever takes too long, or leaves, is not answered.
            let _over = tokio::time::timeout(PATIENCE, answer(stream, &shown)).await;
        });
        open.push_back(connection.abort_handle());
    }
}

async fn answer(stream: TcpStream, shown: &Shown) -> std::io::Result<()> {
    let request = read(&stream).await?;
    let response = respond(request.as_deref(), shown);
    write(&stream, &response).await
}

/// The head of a request. `None`: it is too long, or ends too soon.
async fn read(stream: &TcpStream) -> std::io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    let mut piece = [0; 1024];
    loop {
        stream.readable().await?;
        match stream.try_read(&mut piece) {
            Ok(0) => return Ok(None),
            Ok(count) => bytes.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        }
        if bytes.windows(4).any(|four| four == b"\r\n\r\n") {
            return Ok(Some(bytes));
        }
        if bytes.len() > REQUEST {
            return Ok(None);
        }
    }
}

async fn write(stream: &TcpStream, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        match stream.try_write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn respond(request: Option<&[u8]>, shown: &Shown) -> Vec<u8> {
    let Some(request) = request else {
        return page(
            "431 Request Header Fields Too Large",
            TEXT,
            "the request is too long\n",
            true,
        );
    };
    let end = request.iter().position(|byte| *byte == b'\r').unwrap_or(request.len());
    let line = String::from_utf8_lossy(&request[..end]);
    let mut words = line.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    if !words.next().is_some_and(|version| version.starts_with("HTTP/1.")) {
        return page("400 Bad Request", TEXT, "this is HTTP/1.1\n", true);
    }
    let whole = match method {
        "GET" => true,
        "HEAD" => false,
        _ => return page("405 Method Not Allowed", TEXT, "GET is all there is\n", true),
    };
    match target.split('?').next().unwrap_or_default() {
        "/metrics" => page("200 OK", METRICS, &shown.metrics.render(), whole),
        "/status" => match shown.status() {
            Some(status) => match serde_json::to_string(&status) {
                Ok(status) => page("200 OK", JSON, &status, whole),
                Err(_) => page("500 Internal Server Error", TEXT, "it cannot be shown\n", whole),
            },
            None => page("503 Service Unavailable", TEXT, "nothing is shown yet\n", whole),
        },
        "/" => page("200 OK", TEXT, "kvx: /metrics for Prometheus, /status for kvx top\n", whole),
        _ => page("404 Not Found", TEXT, "there is /metrics and /status\n", whole),
    }
}

fn page(status: &str, kind: &str, body: &str, whole: bool) -> Vec<u8> {
    let length = body.len();
    let mut page = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    if whole {
        page.push_str(body);
    }
    page.into_bytes()
}
