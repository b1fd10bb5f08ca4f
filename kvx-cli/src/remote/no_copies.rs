//! No copies past the backend: the crate that makes them is not built in.

use kvx_core::memory::Region;
use kvx_core::{Error, Result};

use super::message::Copies;

/// Nothing.
#[derive(Debug, Default)]
pub(super) struct Prepared {}

impl Prepared {
    #[expect(
        clippy::unused_self,
        clippy::needless_pass_by_ref_mut,
        reason = "as where there are copies"
    )]
    pub(super) fn add(&mut self, _: &[Region], _: Copies) -> Result<()> {
        Err(refused())
    }

    #[expect(
        clippy::unused_self,
        clippy::needless_pass_by_ref_mut,
        reason = "as where there are copies"
    )]
    pub(super) fn run(&mut self) -> Result<u64> {
        Err(refused())
    }

    #[expect(clippy::unused_self, reason = "as where there are copies")]
    pub(super) const fn spent(&self) -> u64 {
        0
    }
}

fn refused() -> Error {
    Error::unsupported("remote", "the kernel's copies are not built in")
        .with_remedy("build with the feature shm, on Linux")
}
