//! Asking a process for its status.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::time::Duration;

use kvx_core::{Error, Result};
use tokio::net::TcpStream;

use crate::metrics::Page;

/// How long it may take, from the call to the last byte.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of an answer.
const MOST: usize = 64 << 20;

/// The status of the process that shows it at an address.
///
/// # Errors
///
/// Nobody answers there in time, or something else than kvx.
pub(super) async fn status(address: &str) -> Result<Page> {
    let failed = |what: String| {
        Error::peer("top", what)
            .with_context("address", address)
            .with_remedy("give the address that was given to --metrics of the kvx to be watched")
    };
    let found: Vec<SocketAddr> = address
        .to_socket_addrs()
        .map_err(|error| {
            Error::config("top", format!("{address:?} is no address: {error}"))
                .with_remedy("give HOST:PORT, or PORT alone for one on this host")
        })?
        .collect();
    let answer = tokio::time::timeout(PATIENCE, ask(&found, address)).await;
    let answer = answer
        .map_err(|_| failed(format!("no answer within {} s", PATIENCE.as_secs())))?
        .map_err(|error| failed(format!("cannot be asked: {error}")))?;
    let text = String::from_utf8_lossy(&answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return Err(failed("what answers is not kvx".into()));
    };
    let line = head.lines().next().unwrap_or_default();
    if !line.contains(" 200 ") {
        let said = plain(body.lines().next().unwrap_or(line));
        return Err(failed(format!("it shows no status: {said}")));
    }
    serde_json::from_str(body).map_err(|error| failed(format!("what answers is not kvx: {error}")))
}

async fn ask(addresses: &[SocketAddr], host: &str) -> io::Result<Vec<u8>> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(stream) => return talk(&stream, host).await,
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn talk(stream: &TcpStream, host: &str) -> io::Result<Vec<u8>> {
    let request = format!("GET /status HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let mut left = request.as_bytes();
    while !left.is_empty() {
        stream.writable().await?;
        match stream.try_write(left) {
            Ok(count) => left = &left[count..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    let mut answer = Vec::new();
    let mut piece = vec![0; 64 << 10];
    loop {
        stream.readable().await?;
        match stream.try_read(&mut piece) {
            Ok(0) => return Ok(answer),
            Ok(count) => answer.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if answer.len() > MOST {
            return Err(io::Error::other("the answer is too long"));
        }
    }
}

/// Text of others as a terminal may be given it.
pub(super) fn plain(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}
