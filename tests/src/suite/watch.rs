//! Which call a run is in, so that one that hangs can be named.

use std::sync::{Mutex, PoisonError};

/// The call that a run is in.
#[derive(Debug, Default)]
pub(crate) struct Watch(Mutex<Option<String>>);

impl Watch {
    pub(crate) fn enters(&self, side: &str, operation: &str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(format!("`{operation}` of {side}"));
    }

    pub(crate) fn leaves(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Where it is.
    pub(crate) fn place(&self) -> String {
        let inside = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        inside.unwrap_or_else(|| "the script, between two calls".to_owned())
    }
}
