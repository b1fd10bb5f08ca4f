//! Bytes that go from one engine to another: MessagePack with named fields, every count bounded.
//!
//! What comes from a peer never panics, hangs or allocates without a bound. So a length that is announced is never believed:
//! it is refused where it is over its limit, and below that nothing is allocated before the items are really there.
//!
//! Named fields are how two versions talk: a reader passes over fields that it does not know, and a field that is added
//! later has a default.

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize as _, Serialize};

use crate::{Error, ErrorKind, Result};

mod bounded;
#[cfg(test)]
mod tests;

pub use bounded::{Text, bytes, list, map, serialize_bytes};

/// How deep values may nest. Nothing of kvx nests half as deep; the rest is for what later versions add.
pub const MAX_DEPTH: usize = 16;

/// `value` as MessagePack with named fields.
///
/// # Errors
///
/// [`ErrorKind::Internal`] when it cannot be expressed.
pub fn to_bytes<T: Serialize + ?Sized>(operation: &'static str, value: &T) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(128);
    append(operation, value, &mut bytes)?;
    Ok(bytes)
}

/// Puts `value` after what is in `bytes`, as [`to_bytes`] expresses it.
///
/// # Errors
///
/// Those of [`to_bytes`]; what is in `bytes` then means nothing.
pub fn append<T: Serialize + ?Sized>(
    operation: &'static str,
    value: &T,
    bytes: &mut Vec<u8>,
) -> Result<()> {
    rmp_serde::encode::write_named(bytes, value).map_err(|error| {
        Error::new(ErrorKind::Internal, operation, "cannot be expressed as MessagePack")
            .with_source(error)
    })
}

/// The value that `encoded` holds, all of it. `what` names it in errors (`"the body"`).
///
/// Only as bounded as `T` is: use [`Text`], [`list`], [`map`] and [`bytes`] for what may be long.
///
/// # Errors
///
/// [`ErrorKind::Peer`]: malformed, cut short, nested deeper than [`MAX_DEPTH`], over a limit, or more bytes than one value.
pub fn from_bytes<T: DeserializeOwned>(
    operation: &'static str,
    what: &'static str,
    encoded: &[u8],
) -> Result<T> {
    // Of a slice, so that texts are looked at where they are.
    let mut deserializer = rmp_serde::Deserializer::from_read_ref(encoded);
    deserializer.set_max_depth(MAX_DEPTH);
    let value = T::deserialize(&mut deserializer).map_err(|error| {
        let reason = printable(&error.to_string());
        Error::peer(operation, format!("{what} is malformed: {reason}"))
            .with_context("bytes", encoded.len())
    })?;
    // Nothing follows where there is not even the first byte of another value.
    match IgnoredAny::deserialize(&mut deserializer) {
        Err(rmp_serde::decode::Error::InvalidMarkerRead(_)) => Ok(value),
        _ => Err(Error::peer(operation, format!("{what} is followed by other bytes"))
            .with_context("bytes", encoded.len())),
    }
}

/// A peer's text as it may be put in a message or a log: control characters escaped, and cut where it is long.
#[must_use]
pub fn printable(text: &str) -> String {
    const MAX_CHARS: usize = 256;
    let mut out = String::new();
    for (count, char) in text.chars().enumerate() {
        if count == MAX_CHARS {
            out.push_str("...");
            break;
        }
        // XML has no way to write the last two.
        if char.is_control() || matches!(char, '\u{fffe}' | '\u{ffff}') {
            out.extend(char.escape_default());
        } else {
            out.push(char);
        }
    }
    out
}
