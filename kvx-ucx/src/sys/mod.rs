//! UCX, as far as it is used, made safe: one type per native handle, parents held by `Arc`.
//!
//! A worker and all that belongs to it (endpoints, remote keys, operations) are used by one thread at a time: whoever holds
//! the lock around them. Callbacks come only from within calls of that thread. They never unwind: what they do is count, and
//! put what happened into a queue.

mod batch;
mod bindings;
mod catch;
mod context;
mod elf;
mod endpoint;
mod exit;
mod inbox;
mod key;
mod library;
mod log;
mod memory;
mod worker;

pub(crate) use batch::{Batch, Part};
pub(crate) use context::{Context, Failure};
pub(crate) use endpoint::Endpoint;
pub(crate) use exit::before_destructors;
pub(crate) use inbox::{Fact, HEADER, MOST_PAYLOAD};
pub(crate) use key::Key;
pub(crate) use library::{Library, Missing, load};
pub(crate) use memory::Memory;
pub(crate) use worker::Worker;

/// A status of UCX that says that something failed. Always negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) i8);

impl Status {
    pub(crate) const UNREACHABLE: Self = Self(bindings::types::UCS_ERR_UNREACHABLE);
    pub(crate) const NO_MEMORY: Self = Self(bindings::types::UCS_ERR_NO_MEMORY);
    pub(crate) const NO_RESOURCE: Self = Self(bindings::types::UCS_ERR_NO_RESOURCE);
    pub(crate) const INVALID_PARAM: Self = Self(bindings::types::UCS_ERR_INVALID_PARAM);
    pub(crate) const BUSY: Self = Self(bindings::types::UCS_ERR_BUSY);
    pub(crate) const OUT_OF_RANGE: Self = Self(bindings::types::UCS_ERR_OUT_OF_RANGE);

    fn check(status: i8) -> Result<(), Self> {
        if status < 0 { Err(Self(status)) } else { Ok(()) }
    }

    /// Whether it says that the peer is gone, rather than that the fabric failed.
    pub(crate) fn is_peers(self) -> bool {
        use bindings::types as ucx;
        matches!(
            self.0,
            ucx::UCS_ERR_UNREACHABLE
                | ucx::UCS_ERR_REJECTED
                | ucx::UCS_ERR_NOT_CONNECTED
                | ucx::UCS_ERR_CONNECTION_RESET
                | ucx::UCS_ERR_CANCELED
                | ucx::UCS_ERR_TIMED_OUT
        ) || (ucx::UCS_ERR_LAST_ENDPOINT_FAILURE..=ucx::UCS_ERR_FIRST_ENDPOINT_FAILURE).contains(&self.0)
    }
}

/// What a call that begins something gave: `UCS_PTR_STATUS` and its like are macros in C.
enum Begun {
    /// It is over already, and no callback comes.
    Over(Result<(), Status>),
    /// A callback comes.
    Pending,
}

impl Begun {
    fn of(pointer: *mut std::ffi::c_void) -> Self {
        let value = pointer.addr().cast_signed();
        if value == 0 {
            return Self::Over(Ok(()));
        }
        match i8::try_from(value) {
            Ok(status) if (bindings::types::UCS_ERR_LAST..0).contains(&status) => {
                Self::Over(Err(Status(status)))
            }
            _ => Self::Pending,
        }
    }
}
