//! The options, read and checked once.

use std::net::{IpAddr, Ipv4Addr};

use kvx_core::config::BackendConfig;
use kvx_core::{Error, Result};

use crate::NAME;

/// How the backend is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The address of this host at which peers reach it. The port is any free one.
    pub address: IpAddr,
}

impl Default for Config {
    fn default() -> Self {
        Self { address: IpAddr::V4(Ipv4Addr::LOCALHOST) }
    }
}

impl Config {
    /// The options that there are.
    pub const OPTIONS: &[&str] = &["address"];

    /// Reads the options.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](kvx_core::ErrorKind::Config): an option that there is not, or a value that cannot be used.
    pub fn read(options: &BackendConfig) -> Result<Self> {
        options.refuse_unknown(Self::OPTIONS).map_err(|error| error.with_backend(NAME))?;
        let address = options.value("address").map_err(|error| error.with_backend(NAME))?;
        let config = Self { address: address.unwrap_or(Self::default().address) };
        // Peers are told this address, so it must be one that can be dialled.
        if config.address.is_unspecified() || config.address.is_multicast() {
            return Err(Error::config("open", "no peer can dial this address")
                .with_backend(NAME)
                .with_context("address", config.address)
                .with_remedy("give the address of one of this host's interfaces"));
        }
        Ok(config)
    }
}
