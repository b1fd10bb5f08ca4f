//! Names of things: newtypes, so that one is never taken for another.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One life of one rank: drawn at random when its process starts, never used again.
///
/// A peer that comes back at the same address has another incarnation, so nothing that belonged to the old one is taken
/// for the new one's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation([u8; 16]);

impl Incarnation {
    /// Draws a new incarnation from the operating system's random number generator.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Resources`](crate::error::ErrorKind::Resources) when the operating system gives no random bytes.
    pub fn random() -> crate::Result<Self> {
        use rand::TryRng as _;
        let mut bytes = [0; 16];
        rand::rngs::SysRng.try_fill_bytes(&mut bytes).map_err(|source| {
            crate::Error::new(
                crate::ErrorKind::Resources,
                "incarnation",
                "the operating system gave no random bytes",
            )
            .with_source(source)
        })?;
        Ok(Self(bytes))
    }

    /// An incarnation with these 16 bytes, for tests and deterministic fabrics.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The 16 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Incarnation({self})")
    }
}

macro_rules! generation_checked {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        ///
        /// The generation tells a handle from a later one in the same slot: a stale handle is an error, never an
        /// access.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name {
            slot: u32,
            generation: u32,
        }

        impl $name {
            /// The handle of `slot` in its `generation`.
            #[must_use]
            pub const fn new(slot: u32, generation: u32) -> Self {
                Self { slot, generation }
            }

            /// The slot that the handle names.
            #[must_use]
            pub const fn slot(self) -> u32 {
                self.slot
            }

            /// How many times the slot had been given out before.
            #[must_use]
            pub const fn generation(self) -> u32 {
                self.generation
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.generation {
                    0 => write!(f, "{}", self.slot),
                    generation => write!(f, "{} in generation {generation}", self.slot),
                }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({}v{})"), self.slot, self.generation)
            }
        }
    };
}

generation_checked! {
    /// A region registered with a backend or a port on this side.
    RegionId
}
generation_checked! {
    /// A peer's region, as imported from its key blob.
    RemoteRegionId
}
generation_checked! {
    /// A connected peer.
    PeerId
}

/// A posted transfer. Chosen by whoever posts it, unique among those not yet settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
