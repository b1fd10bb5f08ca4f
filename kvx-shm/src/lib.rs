#![doc = include_str!("../README.md")]
#![deny(clippy::undocumented_unsafe_blocks, unsafe_code)]

macro_rules! linux {
    ($($item:item)*) => {$(
        #[cfg(all(target_os = "linux", target_pointer_width = "64"))]
        $item
    )*};
}

linux! {
    mod backend;
    mod bytes;
    mod chunks;
    mod config;
    mod crew;
    mod dial;
    mod door;
    mod ending;
    mod engine;
    mod error;
    mod greet;
    mod handshake;
    mod hear;
    mod host;
    mod link;
    mod mail;
    mod memory;
    mod message;
    mod poll;
    mod post;
    mod probe;
    mod progress;
    mod record;
    mod route;
    mod segment;
    mod state;
    mod strides;
    #[expect(unsafe_code, reason = "here is all of it")]
    mod sys;
    mod turning;
    mod work;

    pub use backend::ShmBackend;
    pub use config::{Cpus, Options, Tracer, Users};
    pub use segment::{HugePages, Placement, SharedMemory};
    pub use sys::limit;

    use config::Open;
    use host::apart;
    use probe::probe;
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
mod elsewhere;
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
use elsewhere::{Open, apart, probe};

kvx_core::register_backend! {
    name: "shm",
    about: "Shared memory of one host: engines in any processes of it",
    rank: Some(10),
    probe: probe,
    opener: Open,
    apart: Some(apart),
}
