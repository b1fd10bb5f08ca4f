//! The errors of this fabric, each made in one place.

use std::fmt;

use kvx_core::{Error, ErrorKind, Retry};

/// The name under which the backend is registered.
pub(crate) const BACKEND: &str = "mock";

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

/// The caller broke a rule that this backend alone can check, or that the port in front of it should have kept.
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

/// This engine was closed.
pub(crate) fn closed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Closed, operation, "the backend is closed").with_backend(BACKEND)
}

/// This engine's process was killed.
pub(crate) fn killed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Closed, operation, "the process of this engine was killed")
        .with_backend(BACKEND)
}

/// A rule said so.
pub(crate) fn ruled(operation: &'static str, kind: ErrorKind) -> Error {
    Error::new(kind, operation, "a rule of the fabric failed it").with_backend(BACKEND)
}

/// The connection is over, or the peer is gone.
pub(crate) fn down(operation: &'static str, reason: &'static str) -> Error {
    Error::peer(operation, reason).with_backend(BACKEND).with_retry(Retry::Reconnect)
}

/// A peer's bytes make no sense.
pub(crate) fn malformed(operation: &'static str, message: &'static str) -> Error {
    Error::peer(operation, message).with_backend(BACKEND)
}

/// Too many ended connections wait to be polled.
pub(crate) fn unpolled(operation: &'static str) -> Error {
    Error::new(ErrorKind::Resources, operation, "too many ended connections wait to be polled")
        .with_backend(BACKEND)
        .with_retry(Retry::Backoff)
        .with_remedy("poll this backend")
}
