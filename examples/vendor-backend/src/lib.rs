//! A fabric over plain TCP, as a vendor would add one to kvx: outside the workspace, with no change to kvx.
//!
//! It is small, complete and safe against what peers send, and it is not fast. `docs/writing-a-backend.md` goes through it
//! file by file:
//!
//! | file | what is in it |
//! |---|---|
//! | `lib` | the registration |
//! | `config` | the options |
//! | `probe` | whether it can be used here, and what it can do |
//! | `backend` | the contract, each call in one place |
//! | `memory` | registered memory, and keys to it |
//! | `handshake` | how two sides meet |
//! | `post` | posting, cancelling |
//! | `poll` | events |
//! | `error` | errors |
//! | `state` | everything that changes, under one lock |
//! | `connection`, `ask`, `serve` | the threads: those of a connection, this side's requests, the peer's |
//! | `message`, `cursor` | what crosses the wire, piece by piece |
//!
//! A backend over a library in C has `sys` besides, and all of its `unsafe` there.

#![forbid(unsafe_code)]

use std::sync::Arc;

use async_trait::async_trait;
use kvx_core::Result;
use kvx_core::backend::TransferBackend;
use kvx_core::config::BackendConfig;
use kvx_core::registry::Opener;

mod ask;
mod backend;
mod config;
mod connection;
mod cursor;
mod error;
mod handshake;
mod memory;
mod message;
mod poll;
mod post;
mod probe;
mod serve;
mod state;
#[cfg(test)]
mod tests;

pub use backend::PlainTcp;
pub use config::Config;

/// The name under which it is registered.
pub const NAME: &str = "plain-tcp";

struct Open;

#[async_trait]
impl Opener for Open {
    async fn open(&self, options: &BackendConfig) -> Result<Arc<dyn TransferBackend>> {
        Ok(Arc::new(PlainTcp::open(&Config::read(options)?)?))
    }
}

kvx_core::register_backend! {
    name: NAME,
    about: "Plain TCP, without any library",
    rank: Some(1),
    probe: probe::probe,
    opener: Open,
}
