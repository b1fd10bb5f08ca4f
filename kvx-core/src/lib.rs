#![doc = include_str!("../README.md")]

pub mod backend;
pub mod capability;
pub mod card;
pub mod config;
pub mod error;
pub mod facts;
pub mod handshake;
pub mod id;
pub mod layout;
pub mod limits;
pub mod memory;
pub mod plan;
pub mod port;
pub mod registry;
pub mod slots;
pub mod thread;
pub mod transfer;
pub mod wire;

pub use error::{Error, ErrorKind, Result, Retry, limit_remedy};
