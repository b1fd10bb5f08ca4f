#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod backend;
mod config;
mod engine;
mod error;
mod handshake;
mod memory;
mod net;
mod poll;
mod post;
mod preset;
mod probe;
mod slots;
mod trace;

pub use backend::MockBackend;
pub use net::Fabric;
pub use preset::Preset;
pub use trace::{Entry, How, What};

kvx_core::register_backend! {
    name: error::BACKEND,
    about: "A seeded, deterministic fabric in memory: connects engines of one process, for tests and demonstrations",
    rank: None,
    probe: probe::probe,
    opener: config::Open,
}
