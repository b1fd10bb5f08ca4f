#![doc = include_str!("../README.md")]
#![deny(clippy::undocumented_unsafe_blocks)]

macro_rules! linux {
    ($($item:item)*) => {$(
        #[cfg(all(target_os = "linux", target_pointer_width = "64"))]
        $item
    )*};
}

linux! {
    mod ask;
    mod backend;
    mod config;
    mod contact;
    mod core;
    mod door;
    mod error;
    mod flight;
    mod guard;
    mod handshake;
    mod lanes;
    pub mod limit;
    mod memory;
    mod message;
    mod nonsense;
    mod opening;
    mod parting;
    mod peer;
    mod poll;
    mod post;
    mod probe;
    mod progress;
    mod reach;
    mod require;
    mod serve;
    mod shared;
    mod sys;
    mod tags;

    pub use backend::UcxBackend;
    pub use config::{Names, Options};
    pub use shared::Counters;

    use config::Open;
    use probe::probe;
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
mod elsewhere;
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
use elsewhere::{Open, probe};

kvx_core::register_backend! {
    name: "ucx",
    about: "UCX: InfiniBand, RoCE, TCP and shared memory, through libucp",
    // Below shared memory, which only reaches this host and needs nothing; a fabric of its own card goes before both.
    rank: Some(5),
    probe: probe,
    opener: Open,
}
