//! Over which fabric a rank can be reached, and with which keys.

use crate::config::BackendConfig;
use crate::handshake::HandshakeBytes;
use crate::memory::KeyBlob;
use crate::wire::Text;
use crate::{ErrorKind, Result};

pub(super) type BackendName = Text<{ Offer::MAX_NAME_BYTES }>;
pub(super) type OptionName = Text<{ Offer::MAX_NAME_BYTES }>;
pub(super) type OptionValue = Text<{ Offer::MAX_VALUE_BYTES }>;

/// One backend through which a rank can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    backend: BackendName,
    handshake: HandshakeBytes,
    keys: Vec<KeyBlob>,
    options: BackendConfig,
}

impl Offer {
    /// Most bytes of a backend's or an option's name.
    pub const MAX_NAME_BYTES: usize = 64;
    /// Most bytes of an option's value.
    pub const MAX_VALUE_BYTES: usize = 512;
    /// Most options.
    pub const MAX_OPTIONS: usize = 64;
    /// Most keys: one per region of the largest layout.
    pub const MAX_KEYS: usize = 4096;

    /// The offer to be reached through `backend`: its [handshake's offer](crate::handshake::Handshake::offer), and a key to
    /// each region of the layout, in the layout's order.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`]: the backend's name is empty, too long or has control characters.
    pub fn new(
        backend: impl Into<String>,
        handshake: HandshakeBytes,
        keys: Vec<KeyBlob>,
    ) -> Result<Self> {
        let backend = Text::new(backend).map_err(|error| error.with_kind(ErrorKind::Config))?;
        Self::from_parts(backend, handshake, keys, BackendConfig::new())
    }

    /// Sets what the peer's backend has to know besides, such as a device or a path.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`]: over [`MAX_OPTIONS`](Self::MAX_OPTIONS), or a name or value is too long or has control
    /// characters.
    pub fn with_options(self, options: BackendConfig) -> Result<Self> {
        for (name, value) in options.iter() {
            OptionName::new(name).map_err(|error| error.with_kind(ErrorKind::Config))?;
            OptionValue::new(value).map_err(|error| error.with_kind(ErrorKind::Config))?;
        }
        Self::from_parts(self.backend, self.handshake, self.keys, options)
    }

    pub(super) fn from_parts(
        backend: BackendName,
        handshake: HandshakeBytes,
        keys: Vec<KeyBlob>,
        options: BackendConfig,
    ) -> Result<Self> {
        use crate::Error;
        if backend.as_str().is_empty() {
            return Err(Error::config("card", "an offer without a backend's name"));
        }
        let count = options.iter().count();
        if count > Self::MAX_OPTIONS {
            return Err(Error::config("card", "too many options")
                .with_context("backend", backend)
                .with_context("options", count)
                .with_context("limit", Self::MAX_OPTIONS));
        }
        Ok(Self { backend, handshake, keys, options })
    }

    /// Name of the backend.
    #[must_use]
    pub fn backend(&self) -> &str {
        self.backend.as_str()
    }

    /// What begins the handshake.
    #[must_use]
    pub const fn handshake(&self) -> &HandshakeBytes {
        &self.handshake
    }

    /// A key to each region of the layout, in the layout's order.
    #[must_use]
    pub fn keys(&self) -> &[KeyBlob] {
        &self.keys
    }

    /// What the peer's backend has to know besides.
    #[must_use]
    pub const fn options(&self) -> &BackendConfig {
        &self.options
    }
}
