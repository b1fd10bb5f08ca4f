//! Why attempts fail.

use kvx_core::{Error, ErrorKind};

/// Why an attempt failed, and what follows.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: Error,
    /// It does not change by itself.
    pub(super) permanent: bool,
    /// The cards may be older than the engine.
    pub(super) stale: bool,
}

impl Failure {
    pub(super) const fn permanent(error: Error) -> Self {
        Self { error, permanent: true, stale: false }
    }

    pub(super) const fn passing(error: Error) -> Self {
        Self { error, permanent: false, stale: false }
    }

    pub(super) const fn stale(error: Error) -> Self {
        Self { error, permanent: false, stale: true }
    }

    /// Of a backend's step, or of an address that was not reached. What the fabric or the network did passes, whatever is advised: the peer may come
    /// back.
    pub(super) fn of(error: Error) -> Self {
        let permanent = Self::is_permanent(&error);
        Self { error, permanent, stale: false }
    }

    /// Whether what it says does not change by itself.
    pub(super) fn is_permanent(error: &Error) -> bool {
        matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Config)
    }

    /// Whether it says that a limit that can be raised has left nothing, here or at the peer. That passes where it is a matter of
    /// load, and not where the limit is too low for what is wanted.
    pub(super) fn is_starved(error: &Error) -> bool {
        error.kind() == ErrorKind::Resources && error.remedy().is_some()
    }
}
