//! The errors of this fabric, each made in one place.

use std::{fmt, io};

use kvx_core::limits::{self, Wanted};
use kvx_core::{Error, ErrorKind, Retry};

/// The name under which the backend is registered.
pub(crate) const BACKEND: &str = "shm";

/// A handle that is stale, or that was never given out.
pub(crate) fn stale(
    operation: &'static str,
    what: &'static str,
    handle: impl fmt::Display,
) -> Error {
    Error::misuse(operation, format!("stale or unknown {what}"))
        .with_backend(BACKEND)
        .with_context("handle", handle)
}

/// The caller broke a rule.
pub(crate) fn misuse(operation: &'static str, message: &'static str) -> Error {
    Error::misuse(operation, message).with_backend(BACKEND)
}

/// A limit was passed.
pub(crate) fn over(
    operation: &'static str,
    message: &'static str,
    value: impl fmt::Display,
    limit: impl fmt::Display,
) -> Error {
    misuse(operation, message).with_context("value", value).with_context("limit", limit)
}

/// This side was closed.
pub(crate) fn closed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Closed, operation, "the backend is closed").with_backend(BACKEND)
}

/// The connection is over, or the peer is gone.
pub(crate) fn down(operation: &'static str, reason: impl Into<String>) -> Error {
    Error::peer(operation, reason.into()).with_backend(BACKEND).with_retry(Retry::Reconnect)
}

/// A peer's bytes make no sense.
pub(crate) fn malformed(operation: &'static str, message: impl Into<String>) -> Error {
    Error::peer(operation, message.into()).with_backend(BACKEND)
}

/// The peer did not do what was asked, or cannot be asked.
pub(crate) fn refused(operation: &'static str, reason: impl Into<String>) -> Error {
    Error::peer(operation, reason.into()).with_backend(BACKEND)
}

/// The operating system refused a descriptor, or a message. The largest thing with one is a connection's ring.
pub(crate) fn system(operation: &'static str, what: &'static str, error: io::Error) -> Error {
    denied(operation, what, error, Wanted::Shared(crate::link::RING as u64))
}

/// The operating system refused what was wanted of it.
pub(crate) fn denied(
    operation: &'static str,
    what: &'static str,
    error: io::Error,
    wanted: Wanted,
) -> Error {
    let told = Error::new(ErrorKind::Resources, operation, what)
        .with_backend(BACKEND)
        .with_native(error.raw_os_error().unwrap_or(0).into());
    limits::explain(told, error, wanted)
}
