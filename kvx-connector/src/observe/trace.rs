//! One name for what both sides do for a request.

use std::fmt;

use twox_hash::XxHash3_128;

use crate::protocol::TransferKey;

/// Names a request in the traces of all engines that have to do with it: 128 bits, derived from its
/// [`TransferKey`], so that nothing need be sent.
///
/// It is the XXH3 hash, of 128 bits and without a seed, of the key's bytes in UTF-8; as text, 32 hexadecimal digits. This does not
/// change from version to version. It is for people and their tools: nothing in kvx depends on it, and it is no secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TraceId(u128);

impl TraceId {
    /// The number.
    #[must_use]
    pub const fn get(self) -> u128 {
        self.0
    }
}

impl From<&TransferKey> for TraceId {
    fn from(key: &TransferKey) -> Self {
        Self(XxHash3_128::oneshot(key.as_str().as_bytes()))
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TraceId({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_does_not_change_from_version_to_version() {
        let of = |text: &str| TraceId::from(&TransferKey::new(text).unwrap()).to_string();
        assert_eq!(of("r-1").len(), 32);
        assert_eq!(of("r-1"), of("r-1"));
        assert_ne!(of("r-1"), of("r-2"));
        // The reference implementation's hash of nothing.
        assert_eq!(of(""), "99aa06d3014798d86001c324468d497f");
    }
}
