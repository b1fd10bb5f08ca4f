//! Errors, each with the name of this backend.

use kvx_core::{Error, ErrorKind, Retry};

use crate::NAME;

/// The operating system refused something that there was too little of, or that is not here.
pub(crate) fn resources(
    operation: &'static str,
    what: &'static str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> Error {
    let error = Error::new(ErrorKind::Resources, operation, what);
    error.with_backend(NAME).with_source(source)
}

/// A handle that was never given out, or is not valid any more.
pub(crate) fn stale(operation: &'static str, handle: impl std::fmt::Display) -> Error {
    Error::misuse(operation, "a stale or unknown handle")
        .with_backend(NAME)
        .with_context("handle", handle)
}

/// The connection to a peer is over, or cannot be had.
pub(crate) fn gone(operation: &'static str, why: &'static str) -> Error {
    Error::peer(operation, why).with_backend(NAME).with_retry(Retry::Reconnect)
}

/// The backend was closed.
pub(crate) fn closed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Closed, operation, "the backend is closed").with_backend(NAME)
}
