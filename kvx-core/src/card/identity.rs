//! Who published a card.

use std::fmt;
use std::str::FromStr;

use crate::id::Incarnation;
use crate::layout::RankCoords;
use crate::wire::{Text, printable};
use crate::{Error, ErrorKind, Result};

use super::Address;

/// Name of an engine: what a router calls it. The same over its restarts; its ranks' incarnations are not.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineName(Text<{ Self::MAX_BYTES }>);

impl EngineName {
    /// Most bytes of a name.
    pub const MAX_BYTES: usize = 256;

    /// An engine of this name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`]: the name is empty, too long, has control characters, or is `None`, `null` or `undefined`:
    /// what some language prints where no name was set. Two engines without a name would be taken for one.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        let name = Text::new(name).map_err(|error| error.with_kind(ErrorKind::Config))?;
        let text = name.as_str().trim();
        let unset = ["none", "null", "nil", "undefined"];
        if text.is_empty() || unset.iter().any(|word| text.eq_ignore_ascii_case(word)) {
            return Err(Error::config("engine", format!("{text:?} is no engine's name"))
                .with_remedy("give each engine a name of its own"));
        }
        Ok(Self(name))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl FromStr for EngineName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

impl fmt::Display for EngineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for EngineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineName({:?})", self.as_str())
    }
}

/// Who published a card: one life of one rank of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The engine.
    pub engine: EngineName,
    /// This life of the rank.
    pub incarnation: Incarnation,
    /// Which rank of the engine.
    pub coords: RankCoords,
}

impl Identity {
    /// Whether this is the engine that was to be found at `address`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Peer`], naming both engines and the address.
    pub fn expect_engine(&self, wanted: &str, address: &Address) -> Result<()> {
        if self.engine.as_str() == wanted {
            return Ok(());
        }
        Err(Error::mismatch_between(
            "card",
            "engine",
            ("the request", printable(wanted)),
            ("the card", &self.engine),
        )
        .with_kind(ErrorKind::Peer)
        .with_context("address", address)
        .with_remedy("check the address that the engine publishes"))
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ({})", self.engine, self.coords, self.incarnation)
    }
}
