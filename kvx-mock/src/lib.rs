#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod backend;
mod config;
mod digest;
mod ending;
mod engine;
mod error;
mod fabric;
mod fault;
mod handshake;
mod loopback;
mod memory;
mod net;
mod poll;
mod post;
mod preset;
mod probe;
pub mod rule;
pub mod rules;
mod schedule;
pub mod sim;
mod step;
mod timing;
mod trace;
mod way;

pub use backend::MockBackend;
pub use fabric::Fabric;
pub use fault::Partition;
pub use loopback::{Loopback, LoopbackBackend};
pub use preset::Preset;
pub use rule::{Chance, Kind, Operation, Party, Rule, RuleGuard, Verdict};
pub use timing::{Span, Timing};
pub use trace::{Entry, How, What};

kvx_core::register_backend! {
    name: error::BACKEND,
    about: "A seeded, deterministic fabric in memory: connects engines of one process, for tests and demonstrations",
    rank: None,
    probe: probe::probe,
    opener: config::Open,
}
