//! The errors of this fabric, each made in one place.

use std::fmt;

use kvx_core::{Error, ErrorKind, Retry};

use crate::sys::{Failure, Library, Missing, Status};

/// The name under which the backend is registered.
pub(crate) const BACKEND: &str = "ucx";

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

/// The operating system refused.
pub(crate) fn system(operation: &'static str, what: &'static str, error: std::io::Error) -> Error {
    Error::new(ErrorKind::Resources, operation, what)
        .with_backend(BACKEND)
        .with_native(error.raw_os_error().unwrap_or(0).into())
        .with_source(error)
}

/// There is no library.
pub(crate) fn missing(operation: &'static str, missing: &Missing) -> Error {
    let kind = match missing {
        Missing::Other { .. } => ErrorKind::Config,
        _ => ErrorKind::Unsupported,
    };
    Error::new(kind, operation, missing.to_string())
        .with_backend(BACKEND)
        .with_remedy(missing.remedy())
}

/// A call of UCX's failed for other reasons than a peer.
pub(crate) fn failed(
    operation: &'static str,
    what: &'static str,
    library: &Library,
    status: Status,
) -> Error {
    let kind = match status {
        Status::NO_MEMORY | Status::NO_RESOURCE => ErrorKind::Resources,
        _ => ErrorKind::Fabric,
    };
    Error::new(kind, operation, what)
        .with_backend(BACKEND)
        .with_native(status.0.into())
        .with_context("ucx", library.words(status.0))
}

/// A call failed while the backend was opened.
pub(crate) fn refused(library: &Library, failure: &Failure) -> Error {
    let kind = match failure.status {
        Status::NO_MEMORY | Status::NO_RESOURCE | Status::BUSY => ErrorKind::Resources,
        _ => ErrorKind::Unsupported,
    };
    let error = Error::new(kind, "open", format!("{} failed", failure.call))
        .with_backend(BACKEND)
        .with_native(failure.status.0.into())
        .with_context("version", library.version_text())
        .with_context("ucx", library.words(failure.status.0));
    failure.said.iter().fold(error, |error, line| error.with_context("said", line))
}

/// A transfer failed.
pub(crate) fn transfer(library: &Library, status: Status) -> Error {
    let kind = if status.is_peers() { ErrorKind::Peer } else { ErrorKind::Fabric };
    let error = Error::new(kind, "transfer", library.words(status.0))
        .with_backend(BACKEND)
        .with_native(status.0.into());
    if kind == ErrorKind::Peer { error.with_retry(Retry::Reconnect) } else { error }
}
